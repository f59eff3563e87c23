"""NIXL by shape, for memory of this process: it copies when it is asked how far it is, and does as it is told."""

import ctypes


class Agent:
    """Owns: what it was told to do, and did; transfers that are under way.

    `begins`, `state`: what starting a transfer and asking for it say; `refusals`: how often a handle is not taken back.
    `meanwhile` is called between the halves of each copy.
    """

    def __init__(self, *, state="DONE", begins="PROC", refusals=0, meanwhile=lambda: None):
        self.state, self.begins, self.refusals, self.meanwhile = state, begins, refusals, meanwhile
        self.tried, self.known, self.under_way = 0, [], []

    def get_agent_metadata(self):
        return b"me"

    def get_new_notifs(self):
        return {}

    def register_memory(self, extents, memory):
        return extents

    def add_remote_agent(self, metadata):
        self.known.append(metadata)
        return "them"

    def remove_remote_agent(self, name):
        self.known.clear()

    def get_xfer_descs(self, parts, memory):
        return parts

    def initialize_xfer(self, kind, mine, theirs, name):
        return list(zip(mine, theirs, strict=True))

    def transfer(self, handle):
        if isinstance(self.begins, Exception):
            raise self.begins
        self.under_way.append(handle)
        return self.begins

    def check_xfer_state(self, handle):
        if self.state == "DONE":
            self._copy(handle)
        return self.state

    def wake(self):
        """What is under way is done now, whether its handle was given back or not."""
        for handle in list(self.under_way):
            self._copy(handle)

    def _copy(self, handle):
        if handle not in self.under_way:
            return
        self.under_way.remove(handle)
        for (to, size, _), (of, _, _) in handle:
            half = size // 2
            ctypes.memmove(to, of, half)
            self.meanwhile()
            ctypes.memmove(to + half, of + half, size - half)

    def release_xfer_handle(self, handle):
        self.tried += 1
        if self.tried <= self.refusals:
            raise RuntimeError("the transfer is still under way")
