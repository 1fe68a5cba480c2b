"""A whole file appears in a root, or none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from llmtrack.writer.log.publish import publish, sync_folder


def test_a_published_file_is_whole_and_alone(tmp_path: Path) -> None:
    """The bytes are all there, and no temporary file stays beside them."""
    data = os.urandom(3_000_001)
    publish(tmp_path / "metrics-00001.parquet", data)
    assert (tmp_path / "metrics-00001.parquet").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["metrics-00001.parquet"]


def test_a_published_file_replaces_one_of_the_same_name(tmp_path: Path) -> None:
    """Publishing again under a name leaves the newer content."""
    for data in (b"old", b""):
        publish(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == b""


def test_others_can_read_what_was_published(tmp_path: Path) -> None:
    """Permissions are those of any new file, not those of a private temporary one."""
    before = os.umask(0o022)
    try:
        publish(tmp_path / "x", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_a_refused_rename_leaves_nothing_behind(tmp_path: Path) -> None:
    """When the name is taken by a folder, the error is raised and the temporary file is gone."""
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        publish(tmp_path / "x", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """Nothing is created where no folder is."""
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "gone" / "x", b"1")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_synced_because_it_is_missing_is_an_error(tmp_path: Path) -> None:
    """Only a file system without fsync for folders is forgiven."""
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")


def test_a_file_system_without_fsync_for_folders_is_forgiven() -> None:
    """That of /proc answers EINVAL, as some network file systems do."""
    folder = Path("/proc")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(folder)


def test_a_file_that_fails_its_check_does_not_appear(tmp_path: Path) -> None:
    """The check sees the whole file under its temporary name; what it raises comes through."""

    def refuse(temporary: Path) -> None:
        assert temporary.read_bytes() == b"1"
        raise RuntimeError("does not read back")

    with pytest.raises(RuntimeError, match="does not read back"):
        publish(tmp_path / "x", b"1", check=refuse)
    assert list(tmp_path.iterdir()) == []
