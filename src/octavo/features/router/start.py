"""The router behind `octavo route`: its life from the first look at its servers to the last answer.

Promises: it starts whether or not its servers are there yet, and says which are; SIGTERM and Ctrl-C drain running
requests within the limit and exit with 0.
Does not know: routes (see `features.router.server`).
"""

import asyncio
import sys

from octavo.base.loops import new_event_loop
from octavo.config.schema import ServerConfig
from octavo.engine.dump import HangDump
from octavo.features.router.addresses import InstanceAddress
from octavo.features.router.options import RouterOptions
from octavo.features.router.server import Router
from octavo.http.edge import random_id
from octavo.http.life import Life
from octavo.http.opening import ServerOpening


def run(
    addresses: tuple[InstanceAddress, ...], config: RouterOptions, server: ServerConfig, opening: ServerOpening
) -> int:
    """Route on the open port; the exit code."""
    HangDump("router").describe = lambda: [f"routes to {len(addresses)} servers"]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_route(addresses, config, server, opening))


async def _route(
    addresses: tuple[InstanceAddress, ...], config: RouterOptions, server: ServerConfig, opening: ServerOpening
) -> int:
    router = Router(addresses, config, server, new_id=random_id)
    life = Life(router.app, router.gate, server)
    try:
        opening.phases.enter("looking at the servers behind the router")
        await router.start()
        for member in router.fleet.members:
            roles = " and ".join(sorted(member.roles))
            why = f" ({member.health.why})" if member.health.why else ""
            sys.stderr.write(f"octavo: {member.name} for {roles}: {member.health.state}{why}\n")
        opening.starting.hand_over()
        await life.serve(opening.listener, f"(router of {len(addresses)})")
    finally:
        await router.stop()
    return 0
