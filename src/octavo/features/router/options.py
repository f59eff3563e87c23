"""The router's options: which servers stand behind it, and how one of them is chosen.

Promises: a number out of range is said in one sentence.
Does not know: the router.
"""

from dataclasses import dataclass
from typing import Final

from octavo.base.errors import ConfigError
from octavo.config.args import MAX_WAIT_S, MIN_KEEP_ALIVE_S, Given
from octavo.config.schema import option

SECTION: Final = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The router (octavo route): which servers stand behind it, and how one of them is chosen."""

    prefill: tuple[str, ...] | None = option(
        None, "Address of a server that computes prompts (its --kv-role is producer or both), such as http://10.0.0.1:8000; may be repeated.",
        kind="list", several=True, value="ADDRESS"
    )  # fmt: skip
    decode: tuple[str, ...] | None = option(
        None, "Address of a server that takes over after the prompt (its --kv-role is consumer or both); may be repeated.",
        kind="list", several=True, value="ADDRESS"
    )  # fmt: skip
    plain: tuple[str, ...] | None = option(
        None,
        "Address of a server that answers whole requests; may be repeated.",
        kind="list",
        several=True,
        value="ADDRESS",
    )
    min_prefill_tokens: int = option(64, "Shorter prompts, by an estimate, are not worth a hand-over and go whole to one server.", unit="tokens")  # fmt: skip
    load_weight: int = option(256, "How many prompt tokens found in a server's cache outweigh one more request under way there.", unit="tokens")  # fmt: skip
    health_interval_s: float = option(1.0, "Time between two checks of a server.", unit="seconds")
    health_timeout_s: float = option(2.0, "How long a check waits for its answer.", unit="seconds")
    health_failures: int = option(2, "Checks in a row that fail until a server's running answers are given up.", unit="checks")  # fmt: skip
    connect_timeout_s: float = option(2.0, "How long a connection to a server may take.", unit="seconds")
    first_byte_timeout_s: float = option(600.0, "How long a server may take until its answer begins; then another is asked.", unit="seconds")  # fmt: skip


def router_options(given: Given) -> RouterOptions:
    """The router's part of what was given; raises `ConfigError` for a number out of range."""
    config: RouterOptions = given.features.get(SECTION, RouterOptions())
    for name in ("min_prefill_tokens", "load_weight"):
        if getattr(config, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(config, name)}.")
    if config.health_failures < 1:
        raise ConfigError(f"--health-failures must be at least 1, got {config.health_failures}.")
    for name in ("health_interval_s", "health_timeout_s", "connect_timeout_s", "first_byte_timeout_s"):
        if not MIN_KEEP_ALIVE_S <= getattr(config, name) <= MAX_WAIT_S:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be in {MIN_KEEP_ALIVE_S:g}..{MAX_WAIT_S:.0f} seconds, "
                f"got {getattr(config, name):g}."
            )
    return config
