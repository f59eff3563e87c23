"""Where KV beyond the device joins the engine: the one object that the table of features names.

Promises: what does the work is imported only when it is asked for; what cannot be is said in one sentence that
names the option.
Does not know: how any of it works.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from octavo.base.errors import ConfigError
from octavo.config.schema import EngineConfig
from octavo.features.transfer.options import FIELD, TransferOptions
from octavo.plugins.features import ControlContext, DataContext, Feature
from octavo.plugins.registry import load_target

if TYPE_CHECKING:
    from octavo.base.kvspec import KVLayout
    from octavo.base.outputs import OutputPart
    from octavo.base.requests import RequestPart

CONTROL: Final = "octavo.features.transfer.control.parts:make"
RESERVE: Final = "octavo.features.transfer.control.parts:host_bytes"
NOTES: Final = "octavo.features.transfer.control.parts:describe"
DATA: Final = "octavo.features.transfer.data.agent:make"
REQUEST: Final = "octavo.features.transfer.wishes:request_part"
RESPONSE: Final = "octavo.features.transfer.disagg:offered"
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

    def request(self, value: Any, options: TransferOptions | None, num_answers: int) -> "RequestPart | None":
        """`kv_transfer_params`: keep KV, take it from somebody, or which tiers to use. What cannot be done here is a
        `ClientError` before anything runs (PDX-2, PDX-12)."""
        on = options if options is not None and self.is_on(options) else None
        part: RequestPart | None = load_target(REQUEST)(value, on, num_answers)
        return part

    def response(self, parts: "Sequence[OutputPart]") -> Mapping[str, Any] | None:
        """Where KV waits that a request asked to be kept: of its first answer that has any."""
        found: Mapping[str, Any] | None = load_target(RESPONSE)(parts)
        return found

    def notes(self, options: TransferOptions, layout: "KVLayout", measured: Mapping[str, float]) -> tuple[str, ...]:
        """A line for each tier, and one for the role."""
        lines: tuple[str, ...] = load_target(NOTES)(options, layout, measured)
        return lines


FEATURE: Final = TransferFeature()
