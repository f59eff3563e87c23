"""Trees of /proc and /sys files like those of real machines."""

from pathlib import Path

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files under `root`; gives it back."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str = "/", mount_root: str = "/") -> dict[str, str]:
    """A process in `group` of a version 2 hierarchy that is mounted from `mount_root` on."""
    return {
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": f"30 23 0:28 {mount_root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
    }
