"""The router, as the table of features knows it: a command of its own, and nothing in an engine.

Promises: importing this imports its options and no more.
Does not know: how it routes.
"""

from octavo.config.schema import ServerConfig
from octavo.features.router.options import SECTION, RouterOptions
from octavo.plugins.features import Feature, FeatureCommand


class RouterFeature(Feature):
    """Owns: nothing."""

    name = SECTION
    command = FeatureCommand(
        run="octavo.features.router.command:run",
        sections={SECTION: RouterOptions, "server": ServerConfig},
        common=(
            "plain", "prefill", "decode", "host", "port", "api_key", "min_prefill_tokens", "health_interval_s",
            "first_byte_timeout_s", "log_level",
        ),
    )  # fmt: skip


FEATURE = RouterFeature()
