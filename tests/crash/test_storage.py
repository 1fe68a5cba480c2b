"""Storage that hangs, is full, or loses its mind: the loop goes on, and the log says what it could not keep."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrack.writer.errors import LlmtrackError
from tests.crash.trainer import row_of, tokens_of
from tests.faults import TINY, Storage, Trainer, errno_of, failing_storage, small_disk, wait_until
from tests.reading import bits, find_segment, read_file, read_segment

Start = Callable[..., Trainer]


@pytest.fixture
def failing() -> Iterator[tuple[Storage, Start]]:
    """Yield storage that works so far, and what starts a training process on it."""
    with failing_storage() as (storage, start):
        yield storage, start


def begin(failing: tuple[Storage, Start], **settings: Any) -> tuple[Storage, Trainer]:
    """Start a trainer whose run is open."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), {**TINY, **settings}, run_id="run")
    return storage, trainer


def check_that_every_point_is_there_or_counted(root: Path, logged: int, metrics: int) -> int:
    """Compare the rows that can be read and the gaps with what was logged, and return how many rows were dropped."""
    segment = read_segment(find_segment(root))
    kept = segment.rows()
    assert [row.step for row in kept] == sorted({row.step for row in kept})
    for row in kept:
        assert row.tokens == tokens_of(row.step)
        assert row.bits == {name: bits(value) for name, value in row_of(row.step, metrics).items()}
    missing = sorted(set(range(1, logged + 1)) - {row.step for row in kept})
    gaps = segment["gaps"]
    in_gaps = [step for gap in gaps for step in range(gap["first_tokens"] // 4096, gap["last_tokens"] // 4096 + 1)]
    assert in_gaps == missing
    assert sum(gap["points"] for gap in gaps) == len(missing) * metrics
    totals = [float(sum(gap["points"] for gap in gaps[: count + 1])) for count in range(len(gaps))]
    assert segment.series("tracker/dropped") == totals
    assert segment.end["dropped"] == len(missing) * metrics
    return len(missing)


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_loop_goes_on_while_the_storage_hangs(failing: tuple[Storage, Start], operation: str) -> None:
    """Rows are logged while a system call has not returned; what does not fit in memory is counted."""
    storage, trainer = begin(failing, queue_points=3_000, unsynced_bytes=1 << 16)
    trainer.log(100)
    storage.fail(f"{operation} hang 600000 0 0 metrics")
    trainer.log(10)
    storage.wait_for("hanging")
    trainer.log(20_000)
    held_bytes = trainer.resident_bytes()
    trainer.log(20_000)
    assert trainer.resident_bytes() < held_bytes + (1 << 20)
    trainer.call("alert", "data", "seen while it hung", 40_110, tokens_of(40_110))
    assert not trainer.call("flush", 0.05)
    assert len(storage.operations("hanging")) == 1
    storage.heal()
    assert trainer.call("flush", 30.0)
    trainer.log(100)
    trainer.call("finish")
    dropped = check_that_every_point_is_there_or_counted(storage.root, 40_210, 3)
    assert dropped > 30_000
    segment = read_segment(find_segment(storage.root))
    assert {gap["reason"] for gap in segment["gaps"]} == {"queue_full"}
    assert [alert["message"] for alert in segment["alerts"]] == ["seen while it hung"]
    assert trainer.warnings() == []


def test_several_threads_lose_no_point_from_the_count(failing: tuple[Storage, Start]) -> None:
    """However they come in between each other, what is kept and what is counted is what they logged."""
    storage, trainer = begin(failing, queue_points=500, batch_points=100, flush_interval_s=0.001)
    trainer.log_in_threads(8, 3_000)
    trainer.call("finish")
    segment = read_segment(find_segment(storage.root))
    kept = {thread: segment.series(f"thread/{thread}") for thread in range(8)}
    assert all(values == sorted(set(values)) for values in kept.values())
    dropped = sum(gap["points"] for gap in segment["gaps"])
    assert sum(map(len, kept.values())) + dropped == 24_000
    assert segment.end["dropped"] == dropped > 0


def test_a_flood_of_rows_keeps_nothing_from_becoming_durable(failing: tuple[Storage, Start]) -> None:
    """While rows come faster than they are written, checkpoints, alerts and flushes get their turn."""
    storage, trainer = begin(failing, queue_points=40_000, batch_points=4_000)
    trainer.flood()
    storage.wait_for("write", path="metrics")
    assert trainer.call("flush", 30.0)
    rows = trainer.end_flood()
    trainer.call("finish")
    check_that_every_point_is_there_or_counted(storage.root, rows, 100)


@pytest.mark.parametrize(
    "operation, error",
    [
        *itertools.product(["write", "fsync", "open"], ["ENOSPC", "EIO"]),
        ("write", "EDQUOT"),
        ("write", "ESTALE"),
        ("fsync", "ESTALE"),
        ("open", "EROFS"),
        ("write", "ENOTCONN"),
    ],
)
def test_an_error_of_the_storage_loses_nothing_that_fits_in_memory(
    failing: tuple[Storage, Start], operation: str, error: str
) -> None:
    """Whatever the storage says, and however often: once it works again every row is there, and once."""
    storage, trainer = begin(failing)
    trainer.log(50)
    storage.wait_for("write", path="metrics")
    storage.fail(f"{operation} error {errno_of(error)} 0 0 segment=00001/")
    trainer.log(50, 3, 0.001)
    trainer.call("alert", "data", "seen while it failed", 100, tokens_of(100))
    storage.wait_for(operation, failed=True)
    storage.heal()
    assert trainer.call("flush", 30.0)
    trainer.log(50)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 150, 3) == 0
    segment = read_segment(find_segment(storage.root))
    assert [alert["message"] for alert in segment["alerts"]] == ["seen while it failed"]
    warnings = trainer.warnings()
    assert len(warnings) == 1
    assert os.strerror(errno_of(error)) in warnings[0]


def test_what_does_not_fit_while_the_storage_refuses_is_a_gap_with_its_error(failing: tuple[Storage, Start]) -> None:
    """The gap names the system's error, and rare records are in the log all the same."""
    storage, trainer = begin(failing, queue_points=300)
    storage.fail(f"write error {errno.EDQUOT} 0 0 segment=00001/")
    trainer.log(1)
    storage.wait_for("write", failed=True)
    trainer.log(2_000)
    trainer.call("alert", "data", "behind the gap", 2_001, tokens_of(2_001))
    storage.heal()
    assert trainer.call("flush", 30.0)
    trainer.log(10)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 2_011, 3) > 1_000
    segment = read_segment(find_segment(storage.root))
    assert {(gap["reason"], gap["errno"]) for gap in segment["gaps"]} == {("io_error", errno.EDQUOT)}
    assert [alert["message"] for alert in segment["alerts"]] == ["behind the gap"]


def test_a_sign_of_life_that_cannot_be_written_holds_nothing_up(failing: tuple[Storage, Start]) -> None:
    """The heartbeat is no data: without it a run is durable, and ends."""
    storage, trainer = begin(failing)
    storage.fail("open error 13 0 0 heartbeat.json")
    trainer.log(10)
    assert trainer.call("flush", 30.0)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 10, 3) == 0
    assert len(trainer.warnings()) == 1


@pytest.mark.parametrize("taken_bytes", [0, 1, 7, 300])
def test_a_write_that_takes_only_a_piece_goes_on_behind_it(failing: tuple[Storage, Start], taken_bytes: int) -> None:
    """Short writes cost system calls, and nothing else."""
    storage, trainer = begin(failing)
    storage.fail(f"write short {taken_bytes} 20 0 segment=00001/")
    for _ in range(5):
        trainer.log(20)
        assert trainer.call("flush", 30.0)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 100, 3) == 0
    assert len(list(find_segment(storage.root).glob("metrics-*"))) == 1


def test_a_sealed_part_appears_only_if_it_reads_back(failing: tuple[Storage, Start]) -> None:
    """Where the storage changes a byte on the way, the open part stays, and nothing takes its place."""
    storage, trainer = begin(failing)
    trainer.log(100)
    storage.fail("write flip 99 0 0 .tmp$")
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 100, 3) == 0
    assert {path.name for path in find_segment(storage.root).iterdir()} == {
        "heartbeat.json",
        "metrics-00001.arrows",
        "segments-00001.arrows",
    }
    assert "stay open" in trainer.warnings()[0]


def test_nothing_is_durable_before_the_names_of_its_files_are(failing: tuple[Storage, Start]) -> None:
    """An fsync of the folder that failed is done again before anybody is told that data is durable."""
    storage, trainer = begin(failing)
    storage.fail("fsync error 5 1 0 segment=00001$")
    trainer.log(1)
    assert trainer.call("flush", 30.0)
    folder = str(find_segment(storage.root))
    results = [done.result for done in storage.operations("fsync") if done.path == folder]
    assert results[-2:] == [-errno.EIO, 0]


def test_a_close_that_fails_is_a_fsync_that_failed(failing: tuple[Storage, Start]) -> None:
    """NFS says at close what it could not write: everything that was not durable is written again."""
    storage, trainer = begin(failing)
    storage.fail("close error 5 1 0 metrics")
    trainer.log(100)
    assert trainer.call("flush", 30.0)
    trainer.log(100)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 200, 3) == 0
    assert len(list(find_segment(storage.root).glob("metrics-*"))) == 2


def test_a_part_is_not_ended_while_an_fsync_of_it_may_fail(failing: tuple[Storage, Start]) -> None:
    """Linux tells an error to one fsync: were the part ended by the next one, what was lost would count as durable."""
    storage, trainer = begin(failing, part_batches=2, fsync_bytes=1)
    storage.fail("fsync hang 600000 1 0 metrics")
    trainer.log(100)
    storage.wait_for("hanging")
    trainer.log(100)
    storage.wait_for("write", path="metrics", times=2)
    storage.fail("fsync error 5 1 0 metrics")
    assert trainer.call("flush", 30.0)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 200, 3) == 0
    assert read_file(find_segment(storage.root) / "metrics-00001.parquet") == []


def test_a_process_without_descriptors_loses_nothing(failing: tuple[Storage, Start]) -> None:
    """When the trainer has opened too many files nothing of ours adds to that, and later all of it becomes durable."""
    storage, trainer = begin(failing)
    trainer.log(100)
    assert trainer.call("flush", 30.0)
    held = trainer.open_files()
    trainer.run_out_of_files()
    trainer.log(100)
    assert not trainer.call("flush", 0.3)
    assert "Too many open files" in trainer.warnings()[0]
    trainer.may_open_files()
    assert trainer.call("flush", 30.0)
    assert trainer.open_files() == held
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 200, 3) == 0


def test_a_storage_that_never_comes_back_leaves_what_it_had(failing: tuple[Storage, Start]) -> None:
    """The trainer is told at the end, no file stays open in it, and what had been durable is read."""
    storage, trainer = begin(failing, queue_points=3_000)
    trainer.log(100)
    assert trainer.call("flush", 30.0)
    held = trainer.open_files()
    storage.fail("write error 5 0 0 segment=00001/", "open error 5 0 0 segment=00001/")
    for _ in range(10):
        trainer.log(1_000)
    trainer.call("alert", "data", "never written", 10_100, tokens_of(10_100))
    trainer.call("finish", timeout=0.3)
    wait_until(lambda: trainer.open_files() < held, "the parts are closed")
    assert any("did not take everything" in line for line in trainer.warnings())
    assert read_segment(find_segment(storage.root)).steps() == list(range(1, 101))


def test_a_failing_storage_is_not_asked_at_every_step(failing: tuple[Storage, Start]) -> None:
    """Neither a call nor a file for each call of log, although each of them wakes the drain."""
    storage, trainer = begin(failing, queue_points=300, flush_interval_s=0.3)
    trainer.log(1)
    assert trainer.call("flush", 30.0)
    storage.forget()
    storage.fail("write error 5 0 0 metrics")
    trainer.log(300, 3, 0.001)
    storage.wait_for("write", path="metrics", failed=True)
    assert len(storage.operations("write", path="metrics")) < 30
    assert len(list(find_segment(storage.root).glob("metrics-*"))) <= 2


def test_a_folder_that_was_removed_is_made_again_with_its_start(failing: tuple[Storage, Start]) -> None:
    """What was in it is gone; what was not durable and what comes later is there, and readers can place it."""
    storage, trainer = begin(failing, fsync_interval_s=3600.0)
    trainer.log(50)
    assert trainer.call("flush", 30.0)
    trainer.log(50)
    storage.wait_for("write", path="metrics", times=2)
    folder = find_segment(storage.root)
    shutil.rmtree(folder)
    trainer.log(50)
    assert trainer.call("flush", 30.0)
    trainer.call("finish")
    segment = read_segment(folder)
    assert segment.steps() == list(range(51, 151))
    assert [record["phase"] for record in segment["segments"]] == ["start", "end"]
    assert [line for line in trainer.warnings() if "was removed while it was written to" in line]


@pytest.mark.parametrize("when", ["idle", "ending"])
def test_a_folder_that_was_removed_does_not_hold_up_the_end(failing: tuple[Storage, Start], when: str) -> None:
    """A person who cleans up too early gets a folder with an end, and the trainer ends."""
    storage, trainer = begin(failing)
    trainer.log(50)
    assert trainer.call("flush", 30.0)
    folder = find_segment(storage.root)
    if when == "idle":
        shutil.rmtree(folder)
        assert trainer.call("flush", 30.0)
        trainer.call("finish")
    else:
        storage.fail("fsync hang 600000 0 0 segments")
        trainer.send("call", "finish")
        storage.wait_for("hanging")
        shutil.rmtree(folder)
        storage.heal()
        trainer.answer()
    segment = read_segment(folder)
    assert segment.end["exit"] == "finished"
    assert not any("did not take everything" in line for line in trainer.warnings())


def test_a_disk_that_fills_up_and_is_freed_again(failing: tuple[Storage, Start]) -> None:
    """A real one: nothing of what was written is hurt, and what did not fit is counted."""
    storage, start = failing
    with small_disk(storage.root / "disk", 1 << 20) as disk:
        trainer = start()
        opened = trainer.open(str(disk), {**TINY, "queue_points": 20_000}, run_id="run")
        trainer.log(500, 20)
        assert trainer.call("flush", 30.0)
        hog = disk / "hog"
        with pytest.raises(OSError, match="No space left"):
            hog.write_bytes(bytes(1 << 20))
        trainer.log(4_000, 20)
        wait_until(trainer.warnings, "a warning of the full disk")
        trainer.log(4_000, 20)
        trainer.call("alert", "data", "seen while it was full", 8_500, tokens_of(8_500))
        hog.unlink()
        assert trainer.call("flush", 30.0)
        trainer.log(500, 20)
        trainer.call("finish")
        assert trainer.leave() == 0
        assert check_that_every_point_is_there_or_counted(disk, 9_000, 20) > 0
        segment = read_segment(Path(opened["folder"]))
        assert [alert["message"] for alert in segment["alerts"]] == ["seen while it was full"]
        assert ["No space left" in line for line in trainer.warnings()] == [True]


def test_a_disk_without_room_for_a_sealed_part_keeps_the_open_one(failing: tuple[Storage, Start]) -> None:
    """Sealing is a convenience: without room for it the end is durable all the same, and later it can be done."""
    storage, trainer = begin(failing)
    trainer.log(500)
    storage.fail("write error 28 0 0 .tmp$")
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 500, 3) == 0
    folder = find_segment(storage.root)
    assert {path.suffix for path in folder.iterdir()} == {".arrows", ".json"}
    storage.heal()
    assert trainer.seal(str(folder)) == ["metrics-00001.parquet"]
    assert check_that_every_point_is_there_or_counted(storage.root, 500, 3) == 0


def test_a_checkpoint_that_is_in_the_log_has_everything_before_it_on_disk(failing: tuple[Storage, Start]) -> None:
    """Its record is written only when an fsync has returned for what was logged before, not when one was asked for."""
    storage, trainer = begin(failing, fsync_interval_s=3600.0)
    model = storage.root / "model.pt"
    model.write_bytes(b"weights")
    storage.fail("fsync hang 600000 0 0 metrics")
    trainer.log(100)
    trainer.call("checkpoint", str(model), 100, tokens_of(100))
    storage.wait_for("hanging")
    trainer.log(100)
    trainer.call("alert", "data", "needs no fsync", 200, tokens_of(200))
    storage.wait_for("write", path="alerts")
    assert not storage.operations("open", path="checkpoints")
    storage.fail("fsync error 5 1 0 metrics")
    assert trainer.call("flush", 30.0)
    done = storage.operations()
    written = next(at for at, one in enumerate(done) if one.name == "write" and "checkpoints" in one.path)
    before = [one for one in done[:written] if "metrics" in one.path and one.name in ("write", "fsync")]
    assert [one.name for one in before if one.result >= 0][-1] == "fsync"
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(storage.root, 200, 3) == 0
    (record,) = read_segment(find_segment(storage.root))["checkpoints"]
    assert record["tokens"] == tokens_of(100)


def test_a_file_system_that_is_not_mounted_for_a_while_is_waited_for(failing: tuple[Storage, Start]) -> None:
    """Nothing is written to the mount point in its place, and all of it is there when it is back."""
    storage, start = failing
    mounted, away = storage.root / "mounted", storage.root / "away"
    trainer = start()
    trainer.open(str(mounted), {**TINY, "part_batches": 1}, run_id="run")
    trainer.log(10)
    assert trainer.call("flush", 30.0)
    mounted.rename(away)
    trainer.log(50, 3, 0.001)
    wait_until(trainer.warnings, "a warning that it is gone")
    assert not mounted.exists()
    away.rename(mounted)
    trainer.log(10)
    assert trainer.call("flush", 30.0)
    trainer.call("finish")
    assert check_that_every_point_is_there_or_counted(mounted, 70, 3) == 0


def test_a_run_that_cannot_be_opened_leaves_no_file_open(failing: tuple[Storage, Start]) -> None:
    """The trainer may try another root; the error says which one, and what to look at."""
    storage, start = failing
    trainer = start()
    held = trainer.open_files()
    storage.fail("fsync error 5 0 0 segments")
    with pytest.raises(LlmtrackError, match=r"cannot start a segment in .*Input/output error"):
        trainer.open(str(storage.root), TINY, run_id="run")
    assert trainer.open_files() == held
    storage.heal()
    assert trainer.open(str(storage.root), TINY, run_id="run")["segment"] == 2
