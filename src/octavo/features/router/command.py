"""`octavo route`: open the port, look at the servers behind it, route until told to stop.

Promises: wrong addresses and a port in use are said in one sentence before anything is asked.
Does not know: the router (see `start`), which is imported once somebody is answered at the port.
"""

import contextlib
from typing import Final

from octavo.base.errors import UsageError
from octavo.base.phases import Phases, process_began_s
from octavo.config.args import Given, server_config
from octavo.features.router.addresses import read_addresses
from octavo.features.router.options import router_options
from octavo.http.opening import ServerOpening, bind
from octavo.http.starting import StartingPort
from octavo.observe.log import configure_logging
from octavo.plugins.registry import load_target

START: Final = "octavo.features.router.start:run"
OF_SERVERS: Final = ("trust_request_chat_template", "stats_interval_s")  # options that say nothing to a router


def run(given: Given) -> int:
    """Route until a signal."""
    for name in OF_SERVERS:
        if given.sources.get(name) == "flag":
            raise UsageError(f"--{name.replace('_', '-')} is for the servers behind the router: give it to them.")
    phases = Phases("starting Python", process_began_s())
    phases.enter("importing")
    config, server = router_options(given), server_config(given)
    addresses = read_addresses(config.prefill, config.decode, config.plain)
    configure_logging(server.log_level)
    with (
        contextlib.closing(bind(server.host, server.port)) as listener,
        StartingPort(listener, phases.now) as starting,
    ):
        code: int = load_target(START)(addresses, config, server, ServerOpening(listener, starting, phases))
    return code
