"""What is logged is read back, bit for bit and in order, through any storage that comes back, and up to any kill."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmtrack
from llmtrack.writer.log.seal import seal_segment
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings
from tests.faults import failing_storage
from tests.reading import Segment, bits, find_segment, read_segment
from tests.strategies import doubles, names, numbers

Logged = tuple[int, int, Mapping[str, Any]]  # step, tokens, metrics

values = st.one_of(numbers, st.floats(width=32).map(torch.tensor), st.integers(-1000, 1000).map(torch.tensor))


@st.composite
def logged_rows(draw: st.DrawFn, value: st.SearchStrategy[Any], max_rows: int = 30) -> list[Logged]:
    """Rows with names that come and go, and tokens up to where no training gets."""
    known = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    tokens = draw(st.sampled_from([0, 10**9, 10**15, 10**18]))
    rows: list[Logged] = []
    for step in range(draw(st.integers(1, max_rows))):
        if draw(st.integers(0, 9)) == 0:
            known.append(draw(names))  # a metric that appears late
        some = draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
        tokens += draw(st.integers(0, 1 << 32))
        rows.append((step, tokens, {name: draw(value) for name in some}))
    return rows


small_settings = st.fixed_dictionaries(
    {
        "flush_interval_s": st.just(0.002),
        "fsync_interval_s": st.sampled_from([0.001, 0.01, 60.0]),
        "fsync_bytes": st.sampled_from([1, 1 << 24]),
        "unsynced_bytes": st.sampled_from([1, 1 << 24]),
        "batch_points": st.integers(1, 50),
        "part_bytes": st.sampled_from([1, 5_000, 1 << 24]),
        "part_batches": st.integers(1, 5),
    }
)


def read(segment: Segment) -> list[tuple[int, int, dict[str, int]]]:
    """Return the rows that were read, comparable."""
    return [(row.step, row.tokens, row.bits) for row in segment.rows()]


def expected(rows: Sequence[Logged]) -> list[tuple[int, int, dict[str, int]]]:
    """Return the rows that were logged, comparable."""
    return [(step, tokens, {name: bits(float(value)) for name, value in row.items()}) for step, tokens, row in rows]


@given(logged_rows(values), small_settings)
@settings(max_examples=40)
def test_what_is_logged_is_read_back_bit_for_bit(rows: list[Logged], limits: dict[str, Any]) -> None:
    """Whatever numbers are, whatever they are called, and however the log is cut into batches and parts."""
    with tempfile.TemporaryDirectory() as root:
        with llmtrack.open_run(root, run_id="run", settings=Settings(**limits)) as run:
            assert isinstance(run, RecordingRun)
            for step, tokens, row in rows:
                metrics = dict(row)
                run.log(metrics, step, tokens)
                metrics.clear()
        segment = read_segment(run.folder)
        assert read(segment) == expected(rows)
        assert (segment.end["exit"], segment.end["dropped"], segment["gaps"]) == ("finished", 0, [])
        assert not list(run.folder.glob("metrics-*.arrows"))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=4), names, st.lists(doubles, min_size=1, max_size=30))
@settings(max_examples=8)
def test_rows_of_thousands_of_metrics_are_read_back(counts: list[int], prefix: str, some: list[float]) -> None:
    """A probe of every layer."""
    rows = [{f"{prefix}/{index}": some[index % len(some)] for index in range(count)} for count in counts]
    with tempfile.TemporaryDirectory() as root:
        limits = Settings(flush_interval_s=0.002, batch_points=1500)
        with llmtrack.open_run(root, run_id="run", settings=limits) as run:
            assert isinstance(run, RecordingRun)
            for step, row in enumerate(rows):
                run.log(row, step, step)
        assert read(read_segment(run.folder)) == expected([(step, step, row) for step, row in enumerate(rows)])


@dataclass(frozen=True)
class Log:
    """Rows are logged."""

    rows: list[Logged]


@dataclass(frozen=True)
class Flush:
    """Somebody waits until they are durable, for a moment."""


@dataclass(frozen=True)
class Fail:
    """The storage does as these rules say."""

    rules: list[str]


rule = st.builds(
    "{} {} {} {} {}".format,
    st.sampled_from(["write", "fsync", "open", "close", "rename", "unlink", "any"]),
    st.just("error"),
    st.sampled_from([5, 28, 116, 122]),  # EIO, ENOSPC, ESTALE, EDQUOT
    st.integers(1, 3),
    st.integers(0, 5),
) | st.builds("write short {} {} {}".format, st.integers(0, 300), st.integers(1, 5), st.integers(0, 5))

Step = Log | Flush | Fail


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """What a trainer and its storage do, one after the other."""
    rows = draw(logged_rows(numbers, max_rows=40))
    steps: list[Step] = []
    while rows:
        count = draw(st.integers(1, 10))
        steps.append(Log(rows[:count]))
        rows = rows[count:]
        match draw(st.integers(0, 3)):
            case 0:
                steps.append(Flush())
            case 1:
                steps.append(Fail(draw(st.lists(rule, max_size=3))))
    return steps


def live(program: list[Step], limits: dict[str, Any], end: str) -> tuple[Segment, list[Logged], int]:
    """Run a program, and return what can be read, what was logged, and how many rows were said to be durable."""
    logged: list[Logged] = []
    durable = 0
    with failing_storage() as (storage, start):
        trainer = start()
        trainer.open(str(storage.root), limits, run_id="run")
        for step in program:
            match step:
                case Log(rows):
                    trainer.log_rows(rows)
                    logged += rows
                case Flush():
                    durable = len(logged) if trainer.call("flush", 0.05) else durable
                case Fail(rules):
                    storage.fail(*rules)
        if end == "kill":
            trainer.end()
            storage.heal()
        else:
            storage.heal()
            trainer.call("finish") if end == "finish" else trainer.leave()
        folder = find_segment(storage.root)
        segment = read_segment(folder)
        seal_segment(folder)
        assert read(read_segment(folder)) == read(segment)
        assert not list(folder.glob("metrics-*.arrows"))
        return segment, logged, durable


def check_that_nothing_is_lost(program: list[Step], limits: dict[str, Any], end: str) -> None:
    """Run a program with room for every row in memory."""
    segment, logged, durable = live(program, limits, end)
    rows = read(segment)
    assert rows == expected(logged)[: len(rows)]
    if end == "kill":
        assert len(rows) >= durable
    else:
        assert len(rows) == len(logged)
        assert segment.end["exit"] == ("finished" if end == "finish" else "failed")
        assert (segment.end["dropped"], segment["gaps"]) == (0, [])


@given(programs(), small_settings, st.sampled_from(["finish", "leave", "kill"]))
@settings(max_examples=25)
def test_a_storage_that_fails_and_comes_back_loses_nothing(
    program: list[Step], limits: dict[str, Any], end: str
) -> None:
    """After a clean end every row is there; after a kill every row up to some moment, not before the last flush."""
    check_that_nothing_is_lost(program, limits, end)


@pytest.mark.soak
@given(programs(), small_settings, st.sampled_from(["finish", "leave", "kill"]))
@settings(max_examples=1000)
def test_a_storage_that_fails_and_comes_back_loses_nothing_a_thousand_times(
    program: list[Step], limits: dict[str, Any], end: str
) -> None:
    """As above, for as long as somebody has the patience."""
    check_that_nothing_is_lost(program, limits, end)


@given(programs(), small_settings, st.integers(0, 40))
@settings(max_examples=15)
def test_what_does_not_fit_in_memory_is_counted(program: list[Step], limits: dict[str, Any], queue_points: int) -> None:
    """Rows and gaps together are what was logged, and each gap has the tokens of the rows that it stands for."""
    segment, logged, _ = live(program, {**limits, "queue_points": queue_points}, "finish")
    rows = expected(logged)
    kept = {row[0]: row for row in read(segment)}
    assert list(kept.values()) == [row for row in rows if row[0] in kept]
    missing = [row for row in rows if row[0] not in kept]
    gaps = segment["gaps"]
    assert sum(gap["points"] for gap in gaps) == sum(len(row[2]) for row in missing) == segment.end["dropped"]
    for _, tokens, _ in missing:
        assert any(gap["first_tokens"] <= tokens <= gap["last_tokens"] for gap in gaps)
