"""What a request may say of its KV, `kv_transfer_params`: keep it, take it from somebody, or which tiers to use.

Promises: everything in it is understood or refused by name, before anything runs; a connector of one's own may have
names of its own.
Does not know: HTTP, leases or tiers at work.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.features.transfer.address import CHUNK, HOST, REQUEST, parse_tiers
from octavo.features.transfer.disagg import ASK, TAKE, Hint, TransferHint, TransferRole, read_hint
from octavo.features.transfer.options import FIELD, TransferOptions

TIERS: Final = "tiers"
POLICY: Final = "tier_policy"
_HINT: Final = frozenset(Hint.__struct_fields__)
_KNOWN: Final = (ASK, TAKE, TIERS, POLICY)


def request_part(
    value: Mapping[str, Any] | None, options: TransferOptions | None, num_answers: int
) -> TransferHint | None:
    """What the engine is told of a request's parameters. `options` is None where no KV moves. Raises `ClientError`."""
    params = {name: wish for name, wish in (value or {}).items() if wish is not None}
    if not params:
        return None
    if options is None:
        if all(wish is False for wish in params.values()):  # nothing is asked for
            return None
        raise ClientError(
            f"{FIELD}: this server moves no KV; start it with --kv-role, --kv-tier or --kv-connector", param=FIELD
        )
    check_params(
        params,
        role=options.kv_role,
        tiers=options.tiers,
        has_connector=bool(options.kv_connector),
        num_answers=num_answers,
    )
    return TransferHint(params)


def check_params(
    params: Mapping[str, Any],
    *,
    role: str | None,
    tiers: tuple[str, ...] = (),
    has_connector: bool = False,
    num_answers: int = 1,
) -> None:
    """Whether an engine with this role and these tiers (their addresses) can do what a request's parameters ask.

    `has_connector`: a connector of the operator's reads them too, so unknown names may be its own.
    Raises `ClientError`.
    """
    _check_names(params, has_connector)
    _check_disagg(params, role, num_answers)
    asked = [name for name in (TIERS, POLICY) if name in params]
    if not tiers:
        if asked:
            raise _wrong(asked[0], "this server has no tiers; start it with --kv-tier")
        return
    parsed = parse_tiers(tiers)
    tier_wishes(params, frozenset({HOST}).union(*(tier.names for tier in parsed)))


def tier_wishes(params: Mapping[str, Any], names: Collection[str]) -> tuple[tuple[str, ...] | None, bool]:
    """The tiers that a request may use (None: all), and whether all of it goes to them.

    `names` are what a request may call the tiers by. Raises `ClientError`.
    """
    tiers, policy = params.get(TIERS), params.get(POLICY, CHUNK)
    known = ", ".join(sorted(names))
    if tiers is not None and not (isinstance(tiers, list | tuple) and all(isinstance(t, str) for t in tiers)):
        raise _wrong(TIERS, f"must be a list of tiers; there are {known}", "")
    if unknown := sorted(set(tiers or ()) - set(names)):
        raise _wrong(TIERS, f"there is no tier {unknown[0][:60]!r} here; there are {known}")
    if policy not in (CHUNK, REQUEST):
        raise _wrong(POLICY, f"must be {CHUNK} or {REQUEST}, got {policy!r:.60}", "")
    return None if tiers is None else tuple(tiers), policy == REQUEST


def _check_names(params: Mapping[str, Any], has_connector: bool) -> None:
    for name in (ASK, TAKE):
        if not isinstance(params.get(name, False), bool):
            raise _wrong(name, f"must be true or false, got {params[name]!r:.60}", "")
    for name in params:
        if name in _KNOWN or (name in _HINT and params.get(TAKE)):
            continue
        if name in _HINT:
            raise _wrong(name, f"says where KV waits, which goes with {TAKE}: true", "")
        if not has_connector:
            raise _wrong(name, f"there is no such parameter; there are {', '.join(_KNOWN)}")


def _check_disagg(params: Mapping[str, Any], role: str | None, num_answers: int) -> None:
    side = None if role is None else TransferRole(role)
    for name, able, other in (
        (ASK, side is not None and side.produces, TransferRole.PRODUCER),
        (TAKE, side is not None and side.consumes, TransferRole.CONSUMER),
    ):
        if not params.get(name):
            continue
        if not able:
            said = "without --kv-role" if role is None else f"with --kv-role {role}"
            raise _wrong(name, f"this server was started {said}; it takes {other} or both")
        if num_answers != 1:
            raise _wrong(name, "is for one prompt with one answer", "")
    read_hint(params)


def _wrong(name: str, why: str, colon: str = ":") -> ClientError:
    place = f"{FIELD}.{name[:60]}"
    return ClientError(f"{place}{colon} {why}", param=place)
