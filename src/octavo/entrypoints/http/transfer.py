"""`kv_transfer_params` of a request: asking that its KV is kept for another engine, or saying where it waits.

Promises: what this server cannot do with them is a `ClientError` before anything runs; what they mean is the feature's
matter, and a router passes them on as they are (PDX-2, PDX-12).
Does not know: leases or engines.
"""

from collections.abc import Sequence
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.base.outputs import RequestOutput, TransferOffer
from octavo.base.requests import TransferHint
from octavo.entrypoints.http.schemas import GenerateRequest
from octavo.plugins.registry import load_feature
from octavo.serving.info import EngineInfo

FIELD: Final = "kv_transfer_params"
CHECK: Final = "octavo.features.transfer.wishes:check_params"  # by name: the server works without it


def transfer_hint(req: GenerateRequest, info: EngineInfo, num_answers: int) -> TransferHint | None:
    """What the engine gets. Raises `ClientError`."""
    params = {name: value for name, value in (req.kv_transfer_params or {}).items() if value is not None}
    if not params:
        return None
    if not info.moves_kv:
        if all(value is False for value in params.values()):  # nothing is asked for
            return None
        raise ClientError(
            f"{FIELD}: this server moves no KV; start it with --kv-role, --kv-tier or --kv-connector", param=FIELD
        )
    load_feature(CHECK, FIELD)(
        params, role=info.kv_role, tiers=info.kv_tiers, has_connector=info.has_kv_connector, num_answers=num_answers
    )
    return TransferHint(params)


def transfer_offer(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Where the KV of a request waits, once it ended."""
    offers = [part for out in outputs for part in out.parts if isinstance(part, TransferOffer)]
    return offers[0].data if offers else None
