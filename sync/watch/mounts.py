"""Which file system a folder is on, from the table of mounts: whether its changes are known to come as events.

`inotify` tells what this host did. On a network file system the watch is accepted, and what other hosts write is never
told, so everything that is not known to be local counts as remote.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLE: Final = Path("/proc/self/mountinfo")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # how the table writes blanks and the like in names

# Only one host writes to these, so its kernel tells all. An overlay is what a container has on such a disk.
_LOCAL: Final = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "nilfs2", "reiserfs", "bcachefs"),
        *("tmpfs", "ramfs", "overlay", "vfat", "exfat", "ntfs3", "ufs"),
    }
)
_NAMES: Final = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "lustre": "Lustre",
    "gpfs": "GPFS",
    "beegfs": "BeeGFS",
    "wekafs": "WekaFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "smb3": "SMB",
}


@dataclass(frozen=True)
class Mount:
    """One line of the table of mounts.

    Attributes:
        point: The folder that it is mounted on.
        kind: The type of the file system, as the kernel calls it.
    """

    point: str
    kind: str

    @property
    def is_local(self) -> bool:
        """Whether every change is made by this host, and so comes as an event."""
        return self.kind in _LOCAL

    @property
    def name(self) -> str:
        """What people call the file system."""
        return _NAMES.get(self.kind, "FUSE" if self.kind.startswith("fuse") else self.kind)


def why_no_events(folder: Path, *, table: Path = _TABLE) -> str:
    """Return why changes in a folder may come without an event; nothing when they are known to come.

    Args:
        folder: It, what is mounted below it, and the links in it are looked at.
        table: In the format of ``/proc/self/mountinfo``.
    """
    mounts = read_mounts(table)
    place = os.path.realpath(folder)
    mount = mount_of(place, mounts)
    if mount is None:
        return "the table of mounts does not say what file system it is on"
    if not mount.is_local:
        return f"it is on {mount.name}"
    below = place.rstrip("/") + "/"
    for other in mounts:
        if other.point.startswith(below) and not other.is_local:
            return f"{other.point} is on {other.name}"
    with os.scandir(place) as entries:
        link = next((entry.name for entry in entries if entry.is_symlink()), None)
    return f"{link} is a link, whose target tells nothing" if link else ""


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return what a path without links is on: the innermost mount, the last one where several lie on each other."""
    found: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def read_mounts(table: Path = _TABLE) -> list[Mount]:
    """Return the table of mounts in its order; empty where there is none, as on systems other than Linux."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        if len(fields) > 4 and kind:  # noqa: PLR2004 - the fifth field is the folder
            mounts.append(Mount(_unescape(fields[4]), kind))
    return mounts


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
