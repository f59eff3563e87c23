"""Which servers there are, and what each is for.

Promises: a wrong address ends the start with a sentence; a server that is named for two purposes is one server.
Does not know: whether anybody is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from octavo.base.errors import ConfigError


class InstanceRole(StrEnum):
    """What a server is there for."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """One server. `name` is its host and port; `url` has no slash at the end and no /v1."""

    name: str
    url: str
    roles: frozenset[InstanceRole]


def read_addresses(
    prefill: Sequence[str] | None, decode: Sequence[str] | None, plain: Sequence[str] | None
) -> tuple[InstanceAddress, ...]:
    """The servers behind the router, in the order given; raises `ConfigError`."""
    roles: dict[str, set[InstanceRole]] = {}
    for role, urls in ((InstanceRole.PREFILL, prefill), (InstanceRole.DECODE, decode), (InstanceRole.PLAIN, plain)):
        for text in urls or ():
            roles.setdefault(_clean(text, f"--{role}"), set()).add(role)
    if not roles:
        raise ConfigError("there is no server to route to; name some with --plain, or with --prefill and --decode.")
    if bool(prefill) != bool(decode):
        given, absent = ("--prefill", "--decode") if prefill else ("--decode", "--prefill")
        raise ConfigError(f"{given} needs {absent}: one computes prompts for the other; or use --plain.")
    return tuple(InstanceAddress(url.split("://", 1)[1], url, frozenset(found)) for url, found in roles.items())


def _clean(text: str, flag: str) -> str:
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(f"{flag} must be an address such as http://10.0.0.1:8000, got {text!r:.80}.")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{flag} must be an address and nothing else, without a name, a query or a fragment.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
