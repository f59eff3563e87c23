"""The Mooncake package by shape, for the process that speaks to a store: values are files, and it does as it is told.

Promises: `lay` writes a package `mooncake` into a folder, which is found before the real one when it is on PYTHONPATH.
Values outlive the process. Files `<method>.code`, `<method>.hangs` and `<method>.dies` beside them say what is to happen.
Does not know: who uses it.
"""

from pathlib import Path

STORE = """
import ctypes, os, time
from pathlib import Path

PLACE = Path(__file__).resolve().parents[1]
(PLACE / f"{os.getpid()}.pid").touch()


class MooncakeDistributedStore:
    def _told(self, method):
        if (PLACE / f"{method}.hangs").exists():
            time.sleep(600)
        if (PLACE / f"{method}.dies").exists():
            os._exit(3)
        code = PLACE / f"{method}.code"
        return int(code.read_text()) if code.exists() else 0

    def setup(self, *args):
        return self._told("setup")

    def register_buffer(self, place, size):
        return 0

    def unregister_buffer(self, place):
        return 0

    def batch_is_exist(self, names):
        told = self._told("exists")
        return [told or int((PLACE / name).exists()) for name in names]

    def get_into(self, name, place, size):
        if told := self._told("get"):
            return told
        if not (PLACE / name).exists():
            return -704
        data = (PLACE / name).read_bytes()
        if len(data) > size:
            return -600
        ctypes.memmove(place, data, len(data))
        return len(data)

    def put_from(self, name, place, size):
        if told := self._told("put"):
            return told
        if not (PLACE / name).exists():
            (PLACE / name).write_bytes(ctypes.string_at(place, size))
        return 0

    def remove(self, name, force):
        (PLACE / name).unlink(missing_ok=True)
        return 0
"""


def lay(folder: Path, store: str = STORE) -> Path:
    """The package, in a folder of its own; `store` is the text of its module."""
    package = folder / "mooncake"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "store.py").write_text(store)
    return folder
