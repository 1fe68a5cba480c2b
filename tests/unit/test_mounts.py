"""Which file systems are polled, from tables of mounts as clusters have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrack.sync.watch.mounts import mount_of, read_mounts, why_no_events

_HEAD = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


def _table(folder: Path, *lines: str) -> Path:
    table = folder / "mountinfo"
    table.write_text(_HEAD + "".join(f"{line}\n" for line in lines))
    return table


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nfs", "NFS"),
        ("nfs4", "NFS"),
        ("lustre", "Lustre"),
        ("gpfs", "GPFS"),
        ("beegfs", "BeeGFS"),
        ("wekafs", "WekaFS"),
        ("ceph", "CephFS"),
        ("fuse.sshfs", "FUSE"),
        ("fuse.ceph", "FUSE"),
        ("fuseblk", "FUSE"),
        ("9p", "9p"),
        ("something-new", "something-new"),
    ],
)
def test_network_and_unknown_file_systems_are_polled(tmp_path: Path, kind: str, name: str) -> None:
    """Their watches are accepted, and what other hosts write is never told."""
    table = _table(tmp_path, f"40 22 0:50 / {tmp_path} rw master:2 shared:9 - {kind} server:/x rw,vers=4.2")
    assert why_no_events(tmp_path, table=table) == f"it is on {name}"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay"])
def test_events_come_on_local_file_systems(tmp_path: Path, kind: str) -> None:
    """An overlay is what a container has on a local disk."""
    table = _table(tmp_path, f"40 22 0:50 / {tmp_path} rw - {kind} none rw")
    assert why_no_events(tmp_path, table=table) == ""


def test_the_innermost_and_last_mount_counts(tmp_path: Path) -> None:
    """A path below a mount belongs to it; a name that only begins alike does not."""
    mounts = read_mounts(
        _table(
            tmp_path,
            "40 22 0:50 / /data rw - nfs server:/x rw",
            "41 40 0:51 / /data/scratch rw - xfs /dev/sdb rw",
            "42 41 0:52 / /data/scratch rw - lustre mds:/y rw",
        )
    )
    kinds = {
        path: mount.kind
        for path in ("/", "/data", "/data/a", "/database", "/data/scratch/b")
        if (mount := mount_of(path, mounts))
    }
    assert kinds == {"/": "ext4", "/data": "nfs", "/data/a": "nfs", "/database": "ext4", "/data/scratch/b": "lustre"}


def test_a_name_with_a_blank_is_found(tmp_path: Path) -> None:
    """The table writes it as an octal number."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    table = _table(tmp_path, f"40 22 0:50 / {str(folder).replace(' ', chr(92) + '040')} rw - nfs server:/x rw")
    assert why_no_events(folder, table=table) == "it is on NFS"


def test_a_remote_mount_or_a_link_below_a_local_root_makes_it_polled(tmp_path: Path) -> None:
    """One project's folder is on the archive, another is a link to somewhere."""
    root = tmp_path / "root"
    (root / "run_id=a").mkdir(parents=True)
    table = _table(tmp_path, f"40 22 0:50 / {root}/run_id=a rw - nfs archive:/x rw")
    assert why_no_events(root, table=table) == f"{root}/run_id=a is on NFS"
    assert why_no_events(root, table=_table(tmp_path)) == ""
    (root / "run_id=b").symlink_to(tmp_path)
    assert why_no_events(root, table=_table(tmp_path)) == "run_id=b is a link, whose target tells nothing"


def test_a_root_that_is_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """People link their runs into their home."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    table = _table(tmp_path, f"40 22 0:50 / {real} rw - lustre mds:/x rw")
    assert why_no_events(link, table=table) == "it is on Lustre"


def test_without_a_table_it_is_polled(tmp_path: Path) -> None:
    """Other systems than Linux have none."""
    assert "does not say" in why_no_events(tmp_path, table=tmp_path / "none")
