"""Where KV beyond the device joins the engine: the one object that the table of features names.

Promises: control and data halves are imported only when they are made; what cannot be is said in one sentence that
names the option.
Does not know: how any of it works.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from octavo.base.errors import ClientError, ConfigError
from octavo.base.kvspec import KVLayout
from octavo.base.outputs import OutputPart
from octavo.config.schema import EngineConfig
from octavo.features.transfer.disagg import FIELD, TransferHint, TransferOffer
from octavo.features.transfer.options import TransferOptions
from octavo.plugins.features import ControlContext, DataContext, Feature
from octavo.plugins.registry import load_target

CONTROL: Final = "octavo.features.transfer.control.parts:make"
RESERVE: Final = "octavo.features.transfer.control.parts:host_bytes"
NOTES: Final = "octavo.features.transfer.control.parts:describe"
DATA: Final = "octavo.features.transfer.data.agent:make"
REQUEST: Final = "octavo.features.transfer.wishes:check_params"
SPEEDS: Final = "transfer.speeds"  # the call that the worker's half answers
MAX_LEASE_S: Final = 86400  # consumers take no hint for longer
_OF_DISAGG: Final = ("kv_transport", "kv_by_layer", "kv_advertise", "kv_allow", "kv_lease_s", "kv_load_failure")


class TransferFeature(Feature):
    """Tiers, the hand-over of prompts, and connectors of somebody's own."""

    name = "transfer"
    options = TransferOptions
    request_field = FIELD
    request_help = "Passed on by routers between engines that hand over prompts."

    def check(self, options: TransferOptions, config: EngineConfig) -> None:
        """Raise `ConfigError` for options that cannot be, alone or beside the engine's own."""
        if not 0 < options.kv_lease_s <= MAX_LEASE_S:
            raise ConfigError(f"--kv-lease-s must be above 0 and at most {MAX_LEASE_S}, got {options.kv_lease_s:g}.")
        reached = options.kv_listen is not None or "://" in options.kv_transport
        if options.kv_role in ("producer", "both") and not reached:
            raise ConfigError(
                f"--kv-role {options.kv_role}: consumers must reach this engine; give --kv-listen host:port"
            )
        plain = TransferOptions()
        for name in _OF_DISAGG:
            if options.kv_role is None and getattr(options, name) != getattr(plain, name):
                raise ConfigError(f"--{name.replace('_', '-')} is for a hand-over of prompts; give --kv-role too.")

    def is_on(self, options: TransferOptions) -> bool:
        """Whether KV goes anywhere."""
        return options.asked_by is not None

    def reserve(self, options: TransferOptions, available_bytes: int) -> int:
        """Host memory that tiers take. Raises `ConfigError` when they leave nothing."""
        taken: int = load_target(RESERVE)(options, available_bytes)
        return taken

    def measure(
        self, options: TransferOptions, call: Callable[[str], Any], prompt_tokens_per_s: float
    ) -> Mapping[str, float]:
        """What says from the start whether loading pays (TIR-33); nothing where nothing is loaded."""
        if not options.tiers:
            return {}
        return {"prompt_tokens_per_s": prompt_tokens_per_s, **call(SPEEDS)}

    def control(self, options: TransferOptions, context: ControlContext) -> Sequence[Any]:
        """The scheduler's halves."""
        parts: Sequence[Any] = load_target(CONTROL)(options, context)
        return parts

    def data(self, options: TransferOptions, context: DataContext) -> Sequence[Any]:
        """The worker's halves."""
        parts: Sequence[Any] = load_target(DATA)(options, context.identity)
        return parts

    def request(self, value: Any, options: TransferOptions | None, num_answers: int) -> TransferHint | None:
        """`kv_transfer_params`: keep KV, take it from somebody, or which tiers to use. What cannot be done here is a
        `ClientError` before anything runs (PDX-2, PDX-12)."""
        params = {name: wish for name, wish in (value or {}).items() if wish is not None}
        if not params:
            return None
        if options is None or not self.is_on(options):
            if all(wish is False for wish in params.values()):  # nothing is asked for
                return None
            raise ClientError(
                f"{FIELD}: this server moves no KV; start it with --kv-role, --kv-tier or --kv-connector", param=FIELD
            )
        load_target(REQUEST)(
            params,
            role=options.kv_role,
            tiers=options.tiers,
            has_connector=bool(options.kv_connector),
            num_answers=num_answers,
        )
        return TransferHint(params)

    def response(self, parts: Sequence[OutputPart]) -> Mapping[str, Any] | None:
        """Where KV waits that a request asked to be kept: of its first answer that has any."""
        offers = [part for part in parts if isinstance(part, TransferOffer)]
        return offers[0].data if offers else None

    def notes(self, options: TransferOptions, layout: KVLayout, measured: Mapping[str, float]) -> tuple[str, ...]:
        """A line for each tier, and one for the role."""
        lines: tuple[str, ...] = load_target(NOTES)(options, layout, measured)
        return lines


FEATURE: Final = TransferFeature()
