"""`octavo route`: open the port, look at the servers behind it, route until told to stop.

Promises: wrong addresses and a port in use are said in one sentence before anything is asked.
Does not know: the router (see `router`), which is a feature: the other commands work without it.
"""

import contextlib

from octavo.base.errors import ConfigError
from octavo.base.phases import Phases, process_began_s
from octavo.config.args import router_config, server_config
from octavo.entrypoints.commands.arguments import Call, UsageError
from octavo.entrypoints.commands.serve import ServerOpening, bind
from octavo.entrypoints.http.starting import StartingPort
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
    phases = Phases("starting Python", process_began_s())
    phases.enter("importing")
    config, server = router_config(call.given), server_config(call.given)
    try:
        addresses = load_target(ADDRESSES)(config.prefill, config.decode, config.plain)
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    configure_logging(server.log_level)
    with (
        contextlib.closing(bind(server.host, server.port)) as listener,
        StartingPort(listener, phases.now) as starting,
    ):
        try:
            route = load_target(ROUTER)
        except ModuleNotFoundError as error:
            raise _missing(error) from None
        code: int = route(addresses, config, server, ServerOpening(listener, starting, phases))
    return code


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"octavo route needs a part of Octavo that is not installed: {error}")
