"""Limits that Linux control groups set on this process.

Promises: the tightest limit of the process's own group and of all groups above it counts, in versions 1 and 2, also
inside containers that see only a part of the tree; what cannot be read is no limit.
Does not know: the machine's own size.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_NO_LIMIT: Final = 1 << 60  # bytes; version 1 writes about 2**63 for 'unlimited'


@dataclass(frozen=True, slots=True)
class _Folder:
    """One group's folder and the version of its interface."""

    path: Path
    version: int


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Folders of the groups that limit the process, by controller, from its own group upwards."""

    memory_folders: tuple[_Folder, ...] = ()
    cpu_folders: tuple[_Folder, ...] = ()

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> "ControlGroups":
        """From /proc/self/cgroup and /proc/self/mountinfo; `root` stands for / in tests."""
        memberships = _memberships(_read(root / "proc/self/cgroup") or "")
        mounts = _mounts(_read(root / "proc/self/mountinfo") or "")
        folders: dict[str, list[_Folder]] = {"memory": [], "cpu": []}
        for controller, group in memberships.items():
            for mount_controllers, mount_root, mount_point, version in mounts:
                wanted: tuple[str, ...]
                if version == 2 and controller == "":
                    wanted = ("memory", "cpu")
                elif version == 1 and controller in folders and controller in mount_controllers:
                    wanted = (controller,)
                else:
                    continue
                place = root / mount_point.lstrip("/")
                for name in wanted:
                    folders[name] += [_Folder(path, version) for path in _upwards(place, mount_root, group)]
        return cls(tuple(folders["memory"]), tuple(folders["cpu"]))

    def memory(self) -> tuple[int | None, int | None]:
        """(limit, room) in bytes: the tightest limit, and the least that may still be taken below one.

        File pages count as room, since the kernel gives them up first. None: no limit.
        """
        limits, rooms = [], []
        for folder in self.memory_folders:
            names = ("memory.max", "memory.current") if folder.version == 2 else _V1_MEMORY
            limit = _number(folder.path / names[0])
            if limit is None or limit >= _NO_LIMIT:
                continue
            limits.append(limit)
            used = _number(folder.path / names[1])
            if used is not None:
                rooms.append(limit - max(0, used - _file_pages(folder)))
        return min(limits, default=None), min(rooms, default=None)

    def cores(self) -> float | None:
        """The tightest quota, in cores; None: no limit."""
        quotas = [q for folder in self.cpu_folders if (q := _quota(folder)) is not None]
        return min(quotas, default=None)


_V1_MEMORY: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _memberships(text: str) -> dict[str, str]:
    """Controller -> the process's group; version 2 is the controller ""."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _mounts(text: str) -> list[tuple[frozenset[str], str, str, int]]:
    """(controllers, root of the mount in its hierarchy, mount point, version) of every control group mount."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and kind and kind[0] in ("cgroup", "cgroup2"):
            options = frozenset(kind[-1].split(",")) if kind[0] == "cgroup" else frozenset()
            found.append((options, fields[3], fields[4], 1 if kind[0] == "cgroup" else 2))
    return found


def _upwards(place: Path, mount_root: str, group: str) -> list[Path]:
    """The folders of `group` and of all groups above it that this mount shows."""
    try:
        below = PurePosixPath(group).relative_to(mount_root)
    except ValueError:  # the process's group is outside of what is mounted, as in some containers
        below = PurePosixPath(".")
    if ".." in below.parts:
        below = PurePosixPath(".")
    return [place / part for part in (below, *below.parents)]


def _file_pages(folder: _Folder) -> int:
    """Bytes of cached files, which can be given up."""
    prefix = "" if folder.version == 2 else "total_"
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    total = 0
    for line in (_read(folder.path / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in wanted and value.isdigit():
            total += int(value)
    return total


def _quota(folder: _Folder) -> float | None:
    if folder.version == 2:
        quota, _, period = (_read(folder.path / "cpu.max") or "max").partition(" ")
    else:
        quota = _read(folder.path / "cpu.cfs_quota_us") or "-1"
        period = _read(folder.path / "cpu.cfs_period_us") or ""
    quota, period = quota.strip(), period.strip() or "100000"
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max", -1
    return int(quota) / int(period)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
