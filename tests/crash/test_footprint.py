"""What a run does to shared storage: which calls, which files, how many of either."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np
import pytest

from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.log.rows import RowEncoder
from llmtrack.writer.log.stream import encode_batch, encode_head
from llmtrack.writer.settings import Settings
from tests.crash.trainer import tokens_of
from tests.faults import TINY, Storage, Trainer, failing_storage, wait_until
from tests.reading import find_segment

Start = Callable[..., Trainer]


@pytest.fixture
def failing() -> Iterator[tuple[Storage, Start]]:
    """Yield storage that works, and what starts a training process on it."""
    with failing_storage() as (storage, start):
        yield storage, start


def live(storage: Storage, start: Start) -> None:
    """Live through everything that a run can: rows, a checkpoint, an alert, a gap, full parts, a bad disk, an end."""
    trainer = start()
    (storage.root / "model.pt").write_bytes(b"weights")
    trainer.open(str(storage.root), {**TINY, "part_batches": 3, "queue_points": 3000}, run_id="run")
    for last in range(100, 600, 100):
        trainer.log(100)
        assert trainer.call("flush", 30.0)
        if last == 300:
            trainer.call("checkpoint", str(storage.root / "model.pt"), last, tokens_of(last))
            trainer.call("alert", "data", "look", last, tokens_of(last))
    storage.fail("write error 28 5 0 metrics", "fsync error 5 2 0 metrics")
    trainer.log(5_000)
    storage.wait_for("fsync", path="metrics", failed=True)
    storage.heal()
    trainer.log(100)
    trainer.call("finish")
    assert trainer.leave() == 0


def test_a_run_uses_no_network_no_lock_and_no_mapped_file(failing: tuple[Storage, Start]) -> None:
    """Plain files, written and renamed: a map would kill the trainer with SIGBUS, and locks lie on shared storage."""
    storage, start = failing
    live(storage, start)
    done = storage.operations()
    assert {one.name for one in done} <= {"open", "write", "fsync", "close", "rename", "unlink", "mkdir"}
    # What is opened to be read is the checkpoint, and parts of its own; nothing is ever cut or overwritten.
    assert not [one for one in done if one.name in ("truncate", "lock", "mmap", "socket")]


def test_a_run_makes_only_files_that_the_format_names(failing: tuple[Storage, Start]) -> None:
    """And while one is being sealed a hidden one, which no glob for Parquet matches."""
    storage, start = failing
    live(storage, start)
    folder = re.escape(str(storage.root / "run_id=run" / "segment=00001"))
    tables = "|".join(table for table in SCHEMAS if table != "evals")
    known = re.compile(
        rf"{folder}(/(heartbeat\.json|({tables})-\d{{5}}\.arrows|metrics-\d{{5}}\.parquet"
        rf"|\.metrics-\d{{5}}\.parquet\.[0-9a-f]+\.tmp))?|{re.escape(str(storage.root))}(/run_id=run|/model\.pt)?"
    )
    paths = {one.path.removesuffix(" (deleted)") for one in storage.operations()}
    assert {path for path in paths if not known.fullmatch(path)} == set()
    left = Counter(path.suffix for path in find_segment(storage.root).iterdir())
    assert left.keys() == {".json", ".arrows", ".parquet"}
    assert left[".arrows"] == 4  # segments, checkpoints, alerts, gaps


def test_a_flush_is_one_write_and_an_fsync_few_calls(failing: tuple[Storage, Start]) -> None:
    """Metadata servers are shared: between two fsyncs a run makes one call a flush, and no other."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), {**TINY, "fsync_interval_s": 3600.0}, run_id="run")
    trainer.log(1)
    storage.wait_for("write", path="metrics")
    assert trainer.call("flush", 30.0)
    storage.forget()
    for flush in range(1, 11):
        trainer.log(5)
        storage.wait_for("write", path="metrics", times=flush)
    assert Counter(one.name for one in storage.operations()) == {"write": 10}
    storage.forget()
    trainer.log(1)
    assert trainer.call("flush", 30.0)
    counts = Counter(one.name for one in storage.operations())
    # The row and the heartbeat; the part's own fsync on a descriptor of its own. No look at a folder, no new name.
    assert counts == {"write": 2, "fsync": 1, "close": 2, "open": 1}


def test_an_idle_run_leaves_the_storage_alone(failing: tuple[Storage, Start]) -> None:
    """Between heartbeats nothing is asked of it."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), {"flush_interval_s": 0.005, "fsync_interval_s": 0.1}, run_id="run")
    storage.forget()
    wait_until(lambda: len(storage.operations("write", path="heartbeat")) >= 3, "three heartbeats")
    done = storage.operations()
    beats = len([one for one in done if one.name == "write"])
    assert {one.path.rsplit("/", 1)[1] for one in done} == {"heartbeat.json"}
    assert len(done) <= 3 * (beats + 1)  # open, write, close


def bytes_of_a_flush(metrics: int, rows: int) -> float:
    """Return how many bytes a flush of rows with random values takes in the open part."""
    rng = np.random.default_rng(1)
    made = [
        (
            1_700_000_000_000_000_000 + step * 500_000_000,
            step,
            step * 4_194_304,
            {f"train/layer_{index}/grad_norm": float(np.float32(rng.normal())) for index in range(metrics)},
        )
        for step in range(1_000, 1_000 + rows)
    ]
    return len(encode_batch(RowEncoder().encode(made, 1_000), 1_000, 999 + rows))


@pytest.mark.parametrize(
    "metrics, steps_per_s",
    [(5, 1 / 30), (20, 1.0), (500, 1.0), (200, 2.0), (50, 10.0)],
    ids=lambda value: f"{value:.3g}",
)
def test_a_run_of_30_days_stays_below_1000_files(metrics: int, steps_per_s: float) -> None:
    """With the settings that users have, 45 restarts, and every table in every segment.

    Assumed: pre-training with values that do not compress (random fp32), 500 points a second or fewer, all day long.
    """
    settings = Settings()
    days, segments = 30, 45
    seconds = days * 86_400
    flushes = seconds * min(steps_per_s, 1 / settings.flush_interval_s)
    flush_bytes = bytes_of_a_flush(metrics, max(1, round(steps_per_s * settings.flush_interval_s)))
    batches_in_a_part = min(settings.part_batches, (settings.part_bytes - len(encode_head("metrics"))) / flush_bytes)
    parts = flushes / batches_in_a_part + segments  # the last one of each segment is not full
    others = len(SCHEMAS.keys() - {"metrics", "evals"}) + 1  # and the heartbeat
    assert parts + segments * others < 1_000
    assert {field.name for field in fields(settings)} >= {"part_batches", "part_bytes", "flush_interval_s"}
