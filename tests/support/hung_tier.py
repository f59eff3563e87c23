"""A kind of tier that has everything and hangs where it is told to, for tests that put it in the place of a real one."""

import threading


class HungTier:
    """Owns: how often it was asked for what."""

    def __init__(self, hangs):
        """`hangs`: names of the calls that do not return before `let_go` is set."""
        self.hangs = frozenset(hangs)
        self.let_go = threading.Event()
        self.asked = []

    def make(self, address, seal, health):
        """What stands in a table of kinds."""
        return self

    def _do(self, name, keys, answer):
        self.asked.append(name)
        if name in self.hangs:
            self.let_go.wait(120)
        return [answer] * len(keys)

    def find(self, keys):
        return self._do("find", keys, True)

    def read(self, keys, rows):
        return self._do("read", keys, False)

    def write(self, keys, rows):
        return self._do("write", keys, True)

    def close(self):
        return None
