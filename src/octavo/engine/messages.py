"""What an engine's process and its parent say to each other.

Promises: `Down` and `Up` are all there is.
Does not know: how messages travel (see `process` for the protocol).
"""

import msgspec

from octavo.base.outputs import EngineOutputs
from octavo.base.requests import Abort, Admin, AdminReply, Submit
from octavo.config.schema import EngineConfig
from octavo.engine.heartbeat import Heartbeat
from octavo.engine.startup import StartupReport


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child is started with."""

    config: EngineConfig
    folder: str  # where the socket files are
    sources: dict[str, str] = {}
    sample_vocab_size: int | None = None
    plugins: tuple[str, ...] | None = ()
    debug: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Parent to child: stop."""


class Log(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: a line of start-up progress."""

    line: str


class Entered(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: the next phase of the start began."""

    phase: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: serving from now on."""

    report: StartupReport
    pid: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: start-up failed, or the running engine did."""

    kind: str
    message: str


Down = Submit | Abort | Admin | Bye
Up = Log | Entered | Ready | Failed | Heartbeat | EngineOutputs | AdminReply
