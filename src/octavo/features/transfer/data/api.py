"""What a secondary tier is, by shape.

Promises: a tier is called by one thread, one call at a time; two of one address may be at work at once.
Does not know: any tier; they are found by the kind in their address.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """Somewhere chunks can be kept. What it raises fails the call as a whole: every key is bad then."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys are there."""

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Fill each row with its key's chunk, whole or not at all good. False: not there, or not to be trusted."""

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Keep each row under its key. One that is there already is good."""

    def close(self) -> None:
        """No call comes after this."""
