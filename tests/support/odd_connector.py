"""A connector that misbehaves on demand, for tests of what stands around it.

Promises: what a request gets is decided by its first token; what steps and threads do by files in the folder that the
environment names: a step hangs while `hang` is there, spins while `spin` is and fails once `raise` is; the loop between
steps hangs while `hang-loop` is there and fails once `raise-loop` is; a thread fails once `fail` is there.
Does not know: who notices.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from octavo.base.outputs import OutputPart
from octavo.features.transfer.disagg import TransferOffer
from octavo.scheduler import seams as control
from octavo.worker import seams as data

FOLDER = "ODD_CONNECTOR_FOLDER"
PATH = f"{__name__}:Odd"
STRANGE, UNSENDABLE = 201, 202  # first tokens of prompts


class StrangePart(OutputPart, frozen=True):
    """Known to the engine's process, and not to the server's."""

    words: tuple[str, ...]


class OddControl(control.NullControlPart):
    """Gives requests odd parts at their end, and holds the loop up.

    Owns: the folder's name.
    """

    name = "odd"

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER, "/nonexistent"))

    def next_deadline(self) -> float | None:
        while (self._folder / "hang-loop").exists():
            time.sleep(0.02)
        if (self._folder / "raise-loop").exists():
            raise ZeroDivisionError("the loop of the odd connector")
        return None

    def on_finish(self, req: Any) -> control.FinishHold:
        first = req.tokens[0]
        if first == STRANGE:
            return control.FinishHold(parts=(StrangePart(("who", "reads", "this")),))
        if first == UNSENDABLE:
            return control.FinishHold(parts=(TransferOffer({"lock": threading.Lock()}),))
        return control.FinishHold()


class OddData(data.NullDataPart):
    """Holds steps up, and has a thread.

    Owns: the folder's name.
    """

    name = "odd"

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER, "/nonexistent"))
        threading.Thread(target=self._fail_on_demand, name="octavo-odd", daemon=True).start()

    def prepare(self, plan: Any, batch: Any) -> None:
        while (self._folder / "hang").exists():
            time.sleep(0.02)
        while (self._folder / "spin").exists():
            pass
        if (self._folder / "raise").exists():
            raise ZeroDivisionError("a step of the odd connector")

    def _fail_on_demand(self) -> None:
        while not (self._folder / "fail").exists():
            time.sleep(0.05)
        raise ZeroDivisionError("a thread of the odd connector")


class Odd:
    """The connector."""

    def control_part(self, context: Any) -> OddControl:
        return OddControl()

    def data_part(self, context: Any) -> OddData:
        return OddData()
