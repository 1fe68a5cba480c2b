"""One table on storage that fails: parts are given up and followed by others, and no message is lost by that."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llmtrack.writer.log.appender import Appender, SyncMark
from llmtrack.writer.log.rows import RowEncoder
from llmtrack.writer.log.seal import seal_segment
from llmtrack.writer.log.stream import encode_batch
from tests.faults import file_size_limit, small_disk
from tests.reading import read_file


def message(seq: int, *, metrics: int = 1) -> bytes:
    """Return a message with one row."""
    row = (0, seq, seq, {f"m/{index}": float(seq) for index in range(metrics)})
    return encode_batch(RowEncoder().encode([row], seq), seq, seq)


def marked(appender: Appender) -> SyncMark:
    """Return a mark, with its descriptor closed."""
    mark = appender.mark()
    assert mark is not None
    os.close(mark.fd)
    return mark


def seqs(path: Path) -> list[int]:
    """Return the `seq` of every row in a part."""
    return [record["seq"] for record in read_file(path)]


@pytest.fixture
def appender(tmp_path: Path) -> Iterator[Appender]:
    """Yield an appender for metrics in an empty folder, and close what it leaves open."""
    folder = tmp_path / "segment=00001"
    folder.mkdir()
    appender = Appender(folder, "metrics")
    yield appender
    appender.give_up_part()


@contextmanager
def appender_on_a_small_disk(tmp_path: Path, spare_bytes: int) -> Iterator[tuple[Appender, Path]]:
    """Yield an appender and a file that takes all room but a little; without that file there is room."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        hog = disk / "hog"
        hog.write_bytes(bytes((1 << 20) - spare_bytes))
        appender = Appender(disk / "segment=00001", "metrics")
        yield appender, hog
        appender.give_up_part()


def append_until_refused(appender: Appender, seq: int) -> int:
    """Append large messages until the storage refuses one, and return its `seq`."""
    while True:
        try:
            appender.append(message(seq, metrics=400))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017  # the loop ends with it
            return seq
        seq += 1


def test_what_is_appended_is_read_back_in_order(appender: Appender) -> None:
    """Messages stand in the part as they came."""
    for seq in range(1, 6):
        appender.append(message(seq))
    path = appender.end_part()
    assert path is not None
    assert path.name == "metrics-00001.arrows"
    assert seqs(path) == [1, 2, 3, 4, 5]


def test_the_part_after_one_that_ended_has_the_next_number(appender: Appender) -> None:
    """A part that ended is never appended to."""
    for seq in (1, 2):
        appender.append(message(seq))
        path = appender.end_part()
        assert path is not None
        assert (path.name, seqs(path)) == (f"metrics-0000{seq}.arrows", [seq])


def test_nothing_is_ended_where_nothing_was_appended(appender: Appender) -> None:
    """No part, no path, and no file."""
    assert appender.end_part() is None
    assert list(appender.folder.iterdir()) == []


def test_a_name_that_is_taken_is_passed_over(appender: Appender) -> None:
    """No part of somebody else is appended to."""
    (appender.folder / "metrics-00001.arrows").write_bytes(b"theirs")
    appender.append(message(1))
    assert appender.end_part() == appender.folder / "metrics-00002.arrows"
    assert (appender.folder / "metrics-00001.arrows").read_bytes() == b"theirs"


def give_up(appender: Appender) -> None:
    """Do what a write that failed for good does."""
    appender.give_up_part()


@pytest.mark.parametrize("leave", [Appender.end_part, give_up])
def test_an_fsync_that_returns_late_concerns_only_its_own_part(
    appender: Appender, leave: Callable[[Appender], object]
) -> None:
    """When its part was ended or given up meanwhile, neither success nor failure changes what the next part holds."""
    appender.append(message(1))
    mark = marked(appender)
    leave(appender)
    appender.synced(mark)
    appender.sync_failed(mark, OSError(errno.EIO, "Input/output error"))
    appender.append(message(2))
    path = appender.end_part()
    assert path is not None
    assert seqs(path)[-1] == 2


def test_a_handle_that_died_is_replaced_at_once(appender: Appender) -> None:
    """What was not durable stands in the next part as a whole, and a reader finds every message once."""
    appender.append(message(1))
    appender.sync()
    durable_bytes = (appender.folder / "metrics-00001.arrows").stat().st_size
    with file_size_limit(durable_bytes + 100), pytest.raises(OSError, match="too large"):
        appender.append(message(2))
    appender.append(message(3))
    assert seqs(appender.folder / "metrics-00001.arrows") == [1]
    assert seqs(appender.folder / "metrics-00002.arrows") == [2, 3]


def test_a_part_that_never_took_a_byte_is_removed(appender: Appender) -> None:
    """A storage that takes names and no bytes is not littered, and the numbers of parts have no holes."""
    with file_size_limit(0), pytest.raises(OSError, match="too large"):
        appender.append(message(1))
    assert list(appender.folder.iterdir()) == []
    appender.flush()
    assert [path.name for path in appender.folder.iterdir()] == ["metrics-00001.arrows"]


def test_parts_of_which_nothing_becomes_durable_become_rare(appender: Appender) -> None:
    """However often it is tried in a moment, an fsync that always fails leaves two parts: the first, and one try."""
    for seq in range(1, 200):
        with suppress(OSError):
            appender.append(message(seq))
        if mark := appender.mark():
            os.close(mark.fd)
            appender.sync_failed(mark, OSError(errno.EIO, "Input/output error"))
    assert len(list(appender.folder.iterdir())) == 2


def test_while_no_part_is_opened_the_reason_is_that_of_the_last_failure(appender: Appender) -> None:
    """The gap that is recorded later names the error of the storage."""
    for seq in (1, 2):
        appender.append(message(seq))
        appender.sync_failed(marked(appender), OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(OSError, match="Stale file handle") as caught:
        appender.append(message(3))
    assert caught.value.errno == errno.ESTALE


def test_after_a_success_a_part_is_replaced_at_once_again(appender: Appender) -> None:
    """Two handles that die days apart are two accidents."""
    for seq in range(1, 5):
        appender.append(message(seq))
        appender.synced(marked(appender))
        appender.append(message(100 + seq))
        appender.sync_failed(marked(appender), OSError(errno.EIO, "Input/output error"))
    appender.flush()
    assert len(list(appender.folder.iterdir())) == 5


def test_a_removed_file_is_noticed_and_what_was_not_durable_written_again(appender: Appender) -> None:
    """Writes to a deleted file succeed and are lost: nothing is written to one."""
    for seq in (1, 2):
        appender.append(message(seq))
    appender.synced(marked(appender))
    appender.append(message(3))
    (appender.folder / "metrics-00001.arrows").unlink()
    appender.append(message(4))
    assert seqs(appender.folder / "metrics-00002.arrows") == [3, 4]
    assert not appender.made_folder


def test_what_was_sealed_under_a_silent_writer_is_not_written_again(appender: Appender) -> None:
    """`llmtrack seal` took a suspended job for dead: a row stands in the sealed part or in the next, not in both."""
    for seq in (1, 2):
        appender.append(message(seq))
    seal_segment(appender.folder)
    appender.append(message(3))
    assert seqs(appender.folder / "metrics-00002.arrows") == [3]


def test_what_reached_a_part_after_it_was_read_for_sealing_is_written_again(appender: Appender) -> None:
    """The sealed part says how far it goes."""
    appender.append(message(1))
    as_it_was = shutil.copytree(appender.folder, appender.folder.with_name("segment=00002"))
    appender.append(message(2))
    (sealed,) = seal_segment(as_it_was)
    sealed.rename(appender.folder / sealed.name)
    (appender.folder / "metrics-00001.arrows").unlink()
    appender.append(message(3))
    assert seqs(appender.folder / "metrics-00002.arrows") == [2, 3]


def test_a_removed_folder_is_made_again(appender: Appender) -> None:
    """It is said, so that the segment's start can be written again."""
    appender.append(message(1))
    shutil.rmtree(appender.folder)
    appender.append(message(2))
    assert appender.made_folder
    assert seqs(appender.folder / "metrics-00002.arrows") == [1, 2]


def test_a_full_disk_costs_no_part(tmp_path: Path) -> None:
    """When there is room again the same part goes on, after the byte at which the storage stopped."""
    with appender_on_a_small_disk(tmp_path, 64 << 10) as (appender, hog):
        refused = append_until_refused(appender, 1)
        assert append_until_refused(appender, refused + 1) == refused + 1
        hog.unlink()
        appender.flush()
        path = appender.end_part()
        assert path is not None
        assert sorted(set(seqs(path))) == list(range(1, refused + 2))
        assert [path.name for path in appender.folder.iterdir()] == ["metrics-00001.arrows"]


def test_a_part_that_could_not_be_ended_is_written_again(appender: Appender) -> None:
    """It is not known to be durable, and its file is closed, so everything in it waits for the next part."""
    appender.append(message(1))
    with (
        file_size_limit((appender.folder / "metrics-00001.arrows").stat().st_size),
        pytest.raises(OSError, match="large"),
    ):
        appender.end_part()
    assert appender.end_part() == appender.folder / "metrics-00002.arrows"
    assert seqs(appender.folder / "metrics-00002.arrows") == [1]


def test_a_mark_leaves_out_a_message_that_is_not_whole_yet(tmp_path: Path) -> None:
    """An fsync makes durable what was written, and not the message of which a piece waits for room."""
    with appender_on_a_small_disk(tmp_path, 64 << 10) as (appender, hog):
        refused = append_until_refused(appender, 1)
        mark = marked(appender)
        assert mark.messages == refused - 1
        appender.synced(mark)
        hog.unlink()
        appender.sync_failed(marked(appender), OSError(errno.EIO, "Input/output error"))
        appender.flush()
        assert set(seqs(appender.folder / "metrics-00001.arrows")) == set(range(1, refused))
        assert set(seqs(appender.folder / "metrics-00002.arrows")) == {refused}
