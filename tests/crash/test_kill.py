"""A kill at any moment, of the trainer or of whoever seals: what was written is read, and can be sealed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from llmtrack.writer.log.seal import seal_segment
from llmtrack.writer.log.stream import read_part, read_raw_part
from llmtrack.writer.settings import Settings
from llmtrack.writer.upkeep.verify import verify
from tests.crash.trainer import row_of, tokens_of
from tests.faults import TINY, Storage, Trainer, TrainerDiedError, failing_storage
from tests.reading import Segment, bits, find_segment, read_segment

Start = Callable[..., Trainer]


@pytest.fixture
def failing() -> Iterator[tuple[Storage, Start]]:
    """Yield storage that works so far, and what starts a training process on it."""
    with failing_storage() as (storage, start):
        yield storage, start


def check_rows(segment: Segment) -> list[int]:
    """Check that every row that is there is as it was logged, that none is missing between, and return the steps."""
    rows = segment.rows()
    for row in rows:
        assert row.tokens == tokens_of(row.step)
        assert row.bits == {name: bits(value) for name, value in row_of(row.step).items()}
    steps = [row.step for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    return steps


def points_by_plain_sql(root: Path) -> int:
    """Return how many points the sealed parts of a root have, by one line of SQL."""
    if not list(root.glob("*/*/metrics-*.parquet")):
        return 0
    with duckdb.connect() as connection:
        sql = f"SELECT count(*) FROM read_parquet('{root}/*/*/metrics-*.parquet', hive_partitioning=true)"
        ((count,),) = connection.execute(sql).fetchall()
    return int(count)


def leave_open_parts(storage: Storage, start: Start) -> Path:
    """Have a trainer die with a part that was given up, and one that is torn and has rows of that one too."""
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(20)
    assert trainer.call("flush", 30.0)
    storage.fail("fsync error 5 1 0 metrics")
    trainer.log(20)
    assert trainer.call("flush", 30.0)
    storage.fail("write tear 50 1 0 metrics")
    trainer.log(20)
    assert trainer.wait() == -signal.SIGKILL
    storage.heal()
    return find_segment(storage.root)


def test_sealing_that_is_killed_at_any_operation_leaves_a_whole_log(
    failing: tuple[Storage, Start], tmp_path: Path
) -> None:
    """Readers see each row once, plain SQL no row twice and no broken file, and the next one who seals finishes it."""
    storage, start = failing
    folder = leave_open_parts(storage, start)
    shutil.copytree(folder, tmp_path / "as-it-was")
    points = sorted_points(folder)
    assert check_rows(read_segment(folder)) == list(range(1, 41))
    operations = 0
    is_killed = True
    while is_killed:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "as-it-was", folder)
        storage.fail(f"any kill 0 0 {operations}")
        trainer = start()
        trainer.send("seal", str(folder))
        try:
            trainer.answer()
            is_killed = False
        except TrainerDiedError:
            assert trainer.status == -signal.SIGKILL
        assert sorted_points(folder) == points
        assert points_by_plain_sql(storage.root) <= len(points)
        seal_segment(folder)
        assert sorted_points(folder) == points
        assert not list(folder.glob("metrics-*.arrows"))
        trainer.end()
        operations += 1
    assert operations > 20
    assert points_by_plain_sql(storage.root) == len(points)


def sorted_points(folder: Path) -> list[tuple[Any, ...]]:
    """Return every point of a segment in an order that does not depend on how it is stored."""
    return sorted(tuple(point.values()) for point in read_segment(folder)["metrics"])


def train(trainer: Trainer, root: Path, durable: list[int]) -> None:
    """Train for a while, and note the last step that was said to be durable."""
    trainer.open(str(root), {**TINY, "part_batches": 2}, run_id="run")
    model = root / "model.pt"
    for last in (10, 20, 30):
        trainer.log(10)
        if last == 20:
            trainer.call("checkpoint", str(model), last, tokens_of(last))
            trainer.call("alert", "data", "look", last, tokens_of(last))
        if trainer.call("flush", 30.0):
            durable.append(last)
    trainer.call("finish")


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_a_trainer_that_is_killed_at_any_operation_leaves_what_was_durable(
    failing: tuple[Storage, Start], stride: int
) -> None:
    """Rows up to some step, no fewer than flush promised; the log is intact, can be sealed, and can be continued."""
    storage, start = failing
    operations = 0
    is_killed = True
    while is_killed:
        shutil.rmtree(storage.root)
        storage.root.mkdir()
        (storage.root / "model.pt").write_bytes(b"weights")
        storage.fail(f"any kill 0 0 {operations}")
        trainer = start()
        durable = [0]
        try:
            train(trainer, storage.root, durable)
            is_killed = False
        except TrainerDiedError:
            assert trainer.status == -signal.SIGKILL
        trainer.end()
        storage.heal()
        assert verify(storage.root).is_intact
        for folder in storage.root.glob("run_id=*/segment=*"):
            steps = check_rows(read_segment(folder))
            assert max([0, *steps]) >= durable[-1]
            assert len(read_segment(folder)["checkpoints"]) >= (durable[-1] >= 20)
            seal_segment(folder)
            assert check_rows(read_segment(folder)) == steps
        again = start()
        again.open(str(storage.root), TINY, run_id="run")
        again.call("finish")
        again.end()
        assert verify(storage.root, deep=True).is_intact
        operations += stride
    assert operations > 50


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("fault", ["", "fsync error 5 2 3 metrics"], ids=["a good disk", "a bad disk"])
def test_a_loss_of_power_at_any_operation_leaves_what_was_durable(
    failing: tuple[Storage, Start], fault: str, stride: int
) -> None:
    """With all that was not fsynced, flush has kept its word, and a checkpoint has everything before it on disk."""
    storage, start = failing
    operations = 0
    is_killed = True
    segments: list[Segment] = []
    steps: list[int] = []
    while is_killed:
        shutil.rmtree(storage.root)
        storage.root.mkdir()
        (storage.root / "model.pt").write_bytes(b"weights")
        storage.forget()
        storage.fail(f"any kill 0 0 {operations}", *filter(None, [fault]))
        trainer = start()
        durable = [0]
        try:
            train(trainer, storage.root, durable)
            is_killed = False
        except TrainerDiedError:
            assert trainer.status == -signal.SIGKILL
        trainer.end()
        storage.heal()
        storage.lose_power()
        assert verify(storage.root, deep=True).is_intact
        segments = [read_segment(folder) for folder in storage.root.glob("run_id=*/segment=*")]
        steps = [step for segment in segments for step in check_rows(segment)]
        assert max([0, *steps]) >= durable[-1]
        for segment in segments:
            assert all(max(steps) * 4096 >= checkpoint["tokens"] for checkpoint in segment["checkpoints"])
            assert len(segment["checkpoints"]) >= (durable[-1] >= 20)
        operations += stride
    assert operations > 50
    assert segments[0].end["exit"] == "finished"
    assert len(steps) == 30


def test_a_kill_at_any_moment_loses_what_came_since_the_last_write(failing: tuple[Storage, Start]) -> None:
    """By default writes are half a second apart; how much that loses is measured by benchmarks/bench_log.py."""
    storage, start = failing
    assert Settings().flush_interval_s <= 0.5
    for kill in range(2):
        trainer = start()
        opened = trainer.open(str(storage.root), {}, run_id=f"run{kill}")
        trainer.send("log", 1_000_000, 3, 0.001)
        # Nobody asks for these writes: time alone brings them.
        storage.wait_for("write", path=f"run{kill}/segment=00001/metrics", times=random.randint(2, 4))
        time.sleep(random.uniform(0.0, 0.5))  # the moment of the kill, no wait for anything
        trainer.end()
        writes = storage.operations("write", path=f"run{kill}/segment=00001/metrics")
        content = read_raw_part(Path(opened["folder"]) / "metrics-00001.arrows", live=False)
        assert content.damages == ()
        assert len(content.messages) in {len(writes), len(writes) + 1}  # a write may end with the process
        assert check_rows(read_segment(Path(opened["folder"])))


def test_a_kill_tears_the_last_batch_at_most(failing: tuple[Storage, Start]) -> None:
    """The system call that was being made is the only one that is not whole."""
    storage, start = failing
    trainer = start()
    opened = trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(100)
    assert trainer.call("flush", 30.0)
    storage.fail("write tear 333 1 0 metrics")
    trainer.log(100)
    assert trainer.wait() == -signal.SIGKILL
    content = read_part(Path(opened["folder"]) / "metrics-00001.arrows", live=False)
    assert content.torn_bytes == 333
    assert content.damages == ()
    assert check_rows(read_segment(Path(opened["folder"]))) == list(range(1, 101))
