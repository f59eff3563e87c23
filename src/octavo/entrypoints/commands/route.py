"""`octavo route`: bind the port, look at the servers behind it, route until told to stop.

Promises: wrong addresses and a port in use are said in one sentence before anything is asked.
Does not know: the router (see `router`), which is a feature: the other commands work without it.
"""

import contextlib

from octavo.base.errors import ConfigError
from octavo.config.args import router_config, server_config
from octavo.entrypoints.commands.arguments import Call, UsageError
from octavo.entrypoints.commands.serve import bind
from octavo.observe.log import configure_logging
from octavo.plugins.registry import load_target

ADDRESSES = "octavo.features.router.addresses:read_addresses"
ROUTER = "octavo.entrypoints.commands.router:run"
OF_SERVERS = ("trust_request_chat_template", "stats_interval_s")  # options of a server that say nothing to a router


def run(call: Call) -> int:
    """Route until a signal."""
    for name in OF_SERVERS:
        if call.given.sources.get(name) == "flag":
            raise UsageError(f"--{name.replace('_', '-')} is for the servers behind the router: give it to them.")
    config, server = router_config(call.given), server_config(call.given)
    try:
        addresses = load_target(ADDRESSES)(config.prefill, config.decode, config.plain)
        route = load_target(ROUTER)
    except ModuleNotFoundError as error:
        raise ConfigError(f"octavo route needs a part of Octavo that is not installed: {error}") from None
    configure_logging(server.log_level)
    with contextlib.closing(bind(server.host, server.port)) as listener:
        code: int = route(addresses, config, server, listener)
    return code
