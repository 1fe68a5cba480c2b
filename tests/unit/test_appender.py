"""One table on storage that fails: parts are given up and followed by others, and no message is lost by that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrack.writer.appender import Appender, SyncMark
from llmtrack.writer.rows import RowEncoder
from llmtrack.writer.stream import encode_batch
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
def appender(tmp_path: Path) -> Appender:
    """Return an appender for metrics."""
    return Appender(tmp_path / "segment=00001", "metrics")


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
    assert not appender.folder.exists()


def test_a_name_that_is_taken_is_passed_over(appender: Appender) -> None:
    """No part of somebody else is appended to."""
    appender.folder.mkdir()
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
    appender.sync_failed(mark)
    appender.append(message(2))
    appender.sync_failed(marked(appender))
    appender.flush()
    path = appender.end_part()
    assert path is not None
    assert seqs(path)[-1] == 2
