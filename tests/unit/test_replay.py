"""What is replayed and in which order, against a tracker in memory that can fail at any call.

The log is a DuckDB with the columns that `llmtrack.query` gives; which point is settled or superseded is the test's.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import duckdb
import pytest

from llmtrack.sync import once
from llmtrack.sync.mlflow.encode import MlflowEncoder, told_records
from llmtrack.sync.once import Outcome
from llmtrack.sync.replay import classify, cursor
from llmtrack.sync.replay.figures import Figures
from llmtrack.sync.replay.replay import Options, Report
from llmtrack.sync.sink import Encoder, MovedError, Record, RunSpec, TrackerRun
from llmtrack.sync.story import Story, StoryPoint
from llmtrack.writer.errors import RejectedError, RetryableSinkError

Kind = Literal["settled", "provisional", "superseded"]
Place = tuple[str, int, float]  # name, tokens, value

_STEPS: Final = 5  # of the story
_TABLES: Final = """
CREATE TABLE metrics (run_id VARCHAR, segment BIGINT, seq BIGINT, time TIMESTAMPTZ, step BIGINT, tokens BIGINT,
    name VARCHAR, value DOUBLE, superseded_by BIGINT, settled BOOLEAN);
CREATE TABLE runs (run_id VARCHAR, project VARCHAR, run_name VARCHAR, parent_run VARCHAR, fork_reason VARCHAR,
    status VARCHAR, first_time TIMESTAMPTZ, last_time TIMESTAMPTZ);
CREATE TABLE segments (run_id VARCHAR, segment BIGINT, start_tokens BIGINT, start_step BIGINT,
    start_time TIMESTAMPTZ, end_time TIMESTAMPTZ, last_tokens BIGINT, last_step BIGINT, last_time TIMESTAMPTZ,
    exit VARCHAR, detail VARCHAR, dropped BIGINT, host VARCHAR, world_size BIGINT, nodes VARCHAR[], from_run VARCHAR,
    from_segment BIGINT, from_ckpt VARCHAR, fork_reason VARCHAR, recipe_diff VARCHAR, git_commit VARCHAR,
    git_dirty BOOLEAN, image_digest VARCHAR, scheduler VARCHAR, versions VARCHAR, config VARCHAR, recipe VARCHAR,
    started BOOLEAN DEFAULT true);
CREATE TABLE checkpoints (run_id VARCHAR, segment BIGINT, time TIMESTAMPTZ, tokens BIGINT, ckpt_id VARCHAR,
    path VARCHAR, bytes BIGINT, superseded_by BIGINT, settled BOOLEAN);
CREATE TABLE alerts (run_id VARCHAR, segment BIGINT, seq BIGINT, time TIMESTAMPTZ, step BIGINT, tokens BIGINT,
    alert_id VARCHAR, rule VARCHAR, level VARCHAR, metric VARCHAR, value DOUBLE, baseline DOUBLE, score DOUBLE,
    message VARCHAR, phase VARCHAR, batch_hash VARCHAR, batch_ids VARCHAR[], superseded_by BIGINT, settled BOOLEAN);
CREATE TABLE evals (run_id VARCHAR, segment BIGINT, time TIMESTAMPTZ, step BIGINT, tokens BIGINT, ckpt_id VARCHAR,
    task VARCHAR, metric VARCHAR, value DOUBLE, stderr DOUBLE, harness VARCHAR, harness_version VARCHAR,
    prompt_hash VARCHAR, details VARCHAR, superseded_by BIGINT, matched BOOLEAN);
CREATE TABLE damages (run_id VARCHAR, segment BIGINT, path VARCHAR, first_byte BIGINT, end_byte BIGINT, reason VARCHAR);
"""


class Log:
    """One run, whose points are put where the test wants them."""

    def __init__(self) -> None:
        self.con = duckdb.connect()
        self.con.execute(_TABLES)
        self.con.execute(
            "INSERT INTO runs VALUES ('run', 'p', NULL, NULL, NULL, 'running',"
            " TIMESTAMPTZ '2026-01-01 00:00:00+00', TIMESTAMPTZ '2026-01-01 01:00:00+00')"
        )

    def add(self, segment: int, rows: Iterable[int], kind: Kind, by: int | None = None) -> None:
        """Add rows of two metrics: one per tokens count, whose `seq` is its tokens."""
        self.con.execute(
            "INSERT INTO segments (run_id, segment, start_tokens, start_time) SELECT 'run', $s, 0, now()"
            " WHERE NOT EXISTS (SELECT 1 FROM segments WHERE segment = $s)",
            {"s": segment},
        )
        self.con.execute(
            "INSERT INTO metrics SELECT 'run', $s, t, TIMESTAMPTZ '2026-01-01 00:00:00+00' + to_milliseconds(t), t, t,"
            " name, t * $s + len(name), $by, $settled"
            " FROM (SELECT unnest($rows) AS t), (VALUES ('loss'), ('lr')) n (name)",
            {"s": segment, "rows": list(rows), "by": by, "settled": kind == "settled"},
        )

    def move(self, segment: int, first: int, last: int, kind: Kind, by: int | None = None) -> None:
        """Put rows of a segment somewhere else, as a checkpoint or a restart does."""
        self.con.execute(
            "UPDATE metrics SET superseded_by = $by, settled = $settled"
            " WHERE segment = $s AND tokens BETWEEN $first AND $last",
            {"s": segment, "first": first, "last": last, "by": by, "settled": kind == "settled"},
        )

    def places(self, kind: Kind, segment: int | None = None) -> Counter[Place]:
        """Return what belongs into a run of the tracker."""
        where = {"settled": "settled", "superseded": "superseded_by IS NOT NULL"}
        condition = where.get(kind, "NOT settled AND superseded_by IS NULL")
        rows = self.con.execute(
            f"SELECT name, tokens, value FROM metrics WHERE {condition} AND ($s IS NULL OR segment = $s)",
            {"s": segment},
        ).fetchall()
        return Counter(rows)


@dataclass
class _Run:
    spec: RunSpec
    records: list[Record]
    deleted: bool = False
    told: str = ""


class Killed(BaseException):
    """What a SIGKILL is to the code under test: no handler of `Exception` sees it."""


class MemorySink:
    """A tracker in memory. `fail_at` counts calls that change something; the failing one has or has not worked."""

    name = "memory"
    tracker = "memory://"
    look = "nowhere"
    repeats = True

    def __init__(self, uri: str | None = None, *, timeout_s: float = 1.0) -> None:
        assert (uri, timeout_s) == (None, 1.0)
        self.lanes = 1
        self.batch_records = 14
        self.runs: dict[str, _Run] = {}
        self.calls: list[str] = []
        self.fail_at = -1
        self.works_first = False
        self.error: BaseException = Killed()
        self.meanwhile: dict[int, Callable[[], object]] = {}  # what somebody else does before a call, by its number
        self.forgets = 0
        self.read_back = self.lists = 0

    def open(self) -> None:
        """Contact the tracker."""

    def close(self) -> None:
        """Let go of connections and files."""

    def list_runs(self, project: str, run_ids: Sequence[str]) -> list[TrackerRun]:
        """Return every run that is not deleted."""
        self.lists += 1
        return [
            self._tracker_run(ref)
            for ref, run in self.runs.items()
            if not run.deleted and run.spec.project == project and run.spec.run_id in run_ids
        ]

    def create(self, spec: RunSpec) -> TrackerRun:
        """Make a run."""
        with self._failing(f"create {spec.kind}"):
            ref = f"r{len(self.runs)}"
            self.runs[ref] = _Run(spec, [])
        return self._tracker_run(ref)

    def update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        """Make a run what the spec says."""
        old = self.runs[run.ref].spec
        if replace(spec, config=old.config, recipe=old.recipe, note=old.note) == old:
            return run
        with self._failing(f"update {old.kind} {spec.kind}", run.ref):
            self.runs[run.ref].spec = spec
        return self._tracker_run(run.ref)

    def prepare(self, run: TrackerRun, names: Iterable[str]) -> dict[str, str]:
        """Get ready."""
        assert run.ref in self.runs
        assert list(names)
        return {}

    def encoder(self, segment: int) -> Encoder:
        """Return an encoder."""
        assert segment > 0
        return MlflowEncoder()

    def append(self, run: TrackerRun, records: Sequence[Record]) -> None:
        """Add records; equal ones are one, as in MLflow."""
        assert 0 < len(records) <= self.batch_records
        with self._failing(f"append {self.runs[run.ref].spec.kind}", run.ref):
            held = self.runs[run.ref].records
            kept = records[1:] if self.forgets else records
            self.forgets = max(0, self.forgets - 1)
            there = {record[:4] for record in held}
            held += [record for record in kept if record[:4] not in there]

    def flush(self, run: TrackerRun, figures: Callable[[], list[Figures]]) -> None:
        """See that there is something to say of what was appended."""
        assert run.ref in self.runs
        assert figures()

    def tell(self, run: TrackerRun, story: Story) -> list[str]:
        """Keep the digest of the story, and its points."""
        held = self.runs[run.ref]
        if held.told == story.digest:
            return []
        with self._failing(f"tell {story.kind}", run.ref):
            held.told = story.digest
            there = {record[:4] for record in held.records}
            held.records += [record for record in self.told(story.points()) if record[:4] not in there]
        return []

    def told(self, points: Iterable[StoryPoint]) -> list[Record]:
        """Return the records of a story's points."""
        return told_records(points)

    def keys(self, run: TrackerRun) -> list[str]:
        """Return every key."""
        return sorted({record.key for record in self.runs[run.ref].records})

    def read(self, run: TrackerRun, key: str, *, skip: int = 0) -> Iterator[Record]:
        """Read back one key, in the order of time as MLflow does."""
        held = sorted(
            (Record(*record[:4]) for record in self.runs[run.ref].records if record.key == key),
            key=lambda record: (record.time_ms, record.tokens, record.value),
        )
        self.read_back += len(held) - skip
        return iter(held[skip:])

    def delete(self, run: TrackerRun) -> None:
        """Delete a run."""
        with self._failing(f"delete {self.runs[run.ref].spec.kind}"):
            self.runs[run.ref].deleted = True

    def places(self, kind: str, segment: int | None = None) -> Counter[Place]:
        """Return what the runs of a kind hold together, less the optimiser step."""
        return Counter(
            (record.key, record.tokens, record.value)
            for run in self.runs.values()
            if not run.deleted and run.spec.kind == kind and segment in {None, run.spec.segment}
            for record in run.records
            if record.key != "step"
        )

    def kinds(self) -> list[str]:
        """Return the kinds of all runs that are not deleted."""
        return sorted(run.spec.kind for run in self.runs.values() if not run.deleted)

    def _tracker_run(self, ref: str) -> TrackerRun:
        run = self.runs[ref]
        newest: dict[str, Record] = {}
        for record in run.records:
            newest[record.key] = max(Record(*record[:4]), newest.get(record.key, Record(*record[:4])))
        spec = run.spec
        return TrackerRun(ref, spec.run_id, spec.kind, spec.segment, spec.generation, newest, "")

    def _failing(self, call: str, ref: str | None = None) -> _Failing:
        return _Failing(self, call, ref)


class _Failing:
    """Fails before or after the body when it is the call whose turn it is."""

    def __init__(self, sink: MemorySink, call: str, ref: str | None) -> None:
        self._sink = sink
        self._ref = ref
        self._is_turn = len(sink.calls) == sink.fail_at
        sink.calls.append(call)

    def __enter__(self) -> None:
        if self._is_turn and not self._sink.works_first:
            raise self._sink.error
        act = self._sink.meanwhile.pop(len(self._sink.calls) - 1, None)
        if act is not None:
            act()
        if self._ref is not None and self._sink.runs[self._ref].deleted:
            raise MovedError(f"{self._ref} is deleted", sink=self._sink.name)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_turn and self._sink.works_first:
            raise self._sink.error


class Ear:
    """Hears everything and does nothing."""

    def __init__(self) -> None:
        self.waits = 0

    def started(self, run: classify.LoggedRun, points: int) -> Ear:  # noqa: ARG002 - a listener
        """Hear that a run is next."""
        return self

    def ended(self, report: Report) -> None:
        """Hear what was done for it."""

    def sent(self, points: int) -> None:
        """Hear of points."""

    def read(self, records: int) -> None:
        """Hear of records."""

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear of a wait."""
        assert pause_s <= 60.0, error
        self.waits += 1


def sync(
    log: Log,
    sink: MemorySink,
    state: Path,
    *,
    options: Options | None = None,
    timeout_s: float = 0.0,
    ear: Ear | None = None,
) -> Outcome:
    """Replay the log into the sink, as the command does."""
    job = once.Job(state, log.con, sink, state, options or Options(), timeout_s)
    runs, known = once.select(job, None)
    return once.replay_all(job, runs, known, ear or Ear())


def check(log: Log, sink: MemorySink) -> None:
    """See that the tracker holds exactly what belongs there, each point once."""
    assert sink.places("canonical") == log.places("settled")
    for segment in (1, 2, 3):
        assert sink.places("superseded", segment) == log.places("superseded", segment)
        assert sink.places("provisional", segment) == log.places("provisional", segment)


def story() -> Iterator[Log]:
    """Yield a log as it is at five syncs: a tail, a checkpoint, a restart, another, and a forced rollback."""
    log = Log()  # the five yields are counted by _STEPS
    log.add(1, range(1, 13), "provisional")
    yield log
    log.move(1, 1, 8, "settled")
    log.add(1, range(13, 17), "provisional")
    yield log
    log.move(1, 9, 10, "settled")
    log.move(1, 11, 16, "superseded", by=2)
    log.add(2, range(11, 15), "provisional")
    yield log
    log.move(2, 11, 14, "superseded", by=3)
    log.add(3, range(11, 13), "settled")
    yield log
    log.move(1, 5, 10, "superseded", by=4)
    log.move(3, 11, 12, "superseded", by=4)
    log.add(4, range(5, 9), "settled")
    yield log


def log_at(step: int) -> Log:
    """Return the log as it is at one of the syncs of the story, in a database of its own."""
    return next(itertools.islice(story(), step, None))


def test_the_tracker_follows_the_log(tmp_path: Path) -> None:
    """After every sync each run there holds exactly its points, and a second sync sends and changes nothing."""
    sink = MemorySink()
    for log in story():
        assert not sync(log, sink, tmp_path).stopped_by
        check(log, sink)
        calls, lists, read_back = len(sink.calls), sink.lists, sink.read_back
        outcome = sync(log, sink, tmp_path)
        assert (len(sink.calls), sink.lists, sink.read_back) == (calls, lists + 1, read_back)
        assert all(not any(report.sent.values()) for report in outcome.reports)


def test_what_became_stale_is_marked_before_anything_is_sent(tmp_path: Path) -> None:
    """A person who looks while the replay runs sees no doomed stretch that claims to be the curve."""
    sink = MemorySink()
    for log in story():
        sink.calls.clear()
        sync(log, sink, tmp_path)
        marks = [
            n for n, call in enumerate(sink.calls) if call.startswith("update") and call.split()[1] != call.split()[2]
        ]
        sends = [n for n, call in enumerate(sink.calls) if call.startswith("append")]
        deletes = [n for n, call in enumerate(sink.calls) if call.startswith("delete")]
        assert max(marks, default=-1) < min(sends, default=999)
        assert max(sends, default=-1) < min(deletes, default=999)


@pytest.mark.parametrize("works_first", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("state", ["kept", "lost", "old"])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_at_any_call_the_next_sync_completes_it(
    tmp_path: Path, stride: int, state: str, *, works_first: bool
) -> None:
    """Before or after each change in the tracker; with the cursor, without, or with one that others left behind.

    The sync that follows sees the log as it is then, which may have moved on. With a stride of three each of the three
    is killed at other calls, and together at all.
    """
    first = {"kept": 0, "lost": 1, "old": 2}[state] % stride
    logs = [log_at(step) for step in range(_STEPS)]
    clean, folder = MemorySink(), tmp_path / "clean"
    killed = 0
    for step, log in enumerate(logs):
        calls = len(clean.calls)
        for number in itertools.count(calls + first, stride):
            sink = deepcopy(clean)
            sink.fail_at, sink.works_first = number, works_first
            at = tmp_path / f"{step}-{number}"
            if folder.exists():
                shutil.copytree(folder, at)
            try:
                sync(log, sink, at)
            except Killed:
                killed += 1
            else:
                break
            again = number // stride % 2  # the same log, or one that has gone on
            if state == "old" and step + again + 1 < _STEPS:
                sync(logs[step + again], sink, tmp_path / f"{step}-{number}-elsewhere")
                again += 1
            now = logs[min(step + again, _STEPS - 1)]
            sync(now, sink, at if state != "lost" else tmp_path / f"{step}-{number}-new")
            check(now, sink)
        sync(log, clean, folder)
    assert killed > 30 // stride


def test_a_lost_cursor_is_no_reason_to_send_anything(tmp_path: Path) -> None:
    """What the tracker holds is compared, and found complete."""
    sink = MemorySink()
    for number, log in enumerate(story()):
        sync(log, sink, tmp_path / f"{number}")
        sink.calls.clear()
        sync(log, sink, tmp_path / f"{number}-again")
        assert sink.calls == []


def test_only_what_is_lacking_is_sent_without_a_cursor(tmp_path: Path) -> None:
    """Points that the tracker holds are not sent a second time."""
    log = next(story())
    sink = MemorySink()
    sync(log, sink, tmp_path)
    (run,) = (run for run in sink.runs.values() if run.spec.kind == "provisional")
    del run.records[5::4]
    lacking = sum((log.places("provisional") - sink.places("provisional")).values())
    (report,) = sync(log, sink, tmp_path / "new").reports
    assert report.sent == {"provisional": lacking}
    check(log, sink)


def test_a_run_that_goes_on_is_read_back_from_where_it_was_compared(tmp_path: Path) -> None:
    """The effort of a sync grows with what is new, not with what is there; and what went missing is noticed still."""
    log = Log()
    sink = MemorySink()
    log.add(1, range(1, 1001), "settled")
    sync(log, sink, tmp_path)
    assert sink.read_back == 3000
    log.add(1, range(1001, 1011), "settled")
    sync(log, sink, tmp_path)
    assert sink.read_back == 3030
    (run,) = sink.runs.values()
    del run.records[500]
    log.add(1, range(1011, 1021), "settled")
    sync(log, sink, tmp_path)
    check(log, sink)


def test_times_that_go_back_are_no_reason_to_send_anything_twice(tmp_path: Path) -> None:
    """After a clock was set back new points are older than those there: all is compared, and all is found."""
    log = Log()
    sink = MemorySink()
    log.add(1, range(101, 201), "settled")
    sync(log, sink, tmp_path)
    log.add(1, range(201, 211), "settled")
    log.con.execute("UPDATE metrics SET time = time - INTERVAL 1 HOUR WHERE tokens > 200")
    (report,) = sync(log, sink, tmp_path).reports
    assert report.sent == {"canonical": 20}
    check(log, sink)


def test_records_that_were_accepted_and_not_kept_are_sent_again(tmp_path: Path) -> None:
    """Reading back finds them."""
    log = next(story())
    sink = MemorySink()
    sink.forgets = 2
    assert not sync(log, sink, tmp_path).reports[0].error
    check(log, sink)


def test_a_tracker_that_never_keeps_them_makes_the_run_incomplete(tmp_path: Path) -> None:
    """The report says how many are not there."""
    log = next(story())
    sink = MemorySink()
    sink.forgets = 999
    (report,) = sync(log, sink, tmp_path).reports
    assert "are not there" in report.error


@pytest.mark.parametrize("works_first", [False, True], ids=["before", "after"])
def test_an_outage_is_waited_out(tmp_path: Path, *, works_first: bool) -> None:
    """A call that fails for the moment is made again, and nothing is there twice, whether it had worked or not."""
    log = log_at(1)
    for number in itertools.count():
        sink = MemorySink()
        sink.fail_at, sink.works_first = number, works_first
        sink.error = RetryableSinkError("busy", sink="memory")
        ear = Ear()
        outcome = sync(log, sink, tmp_path / str(number), timeout_s=60.0, ear=ear)
        assert outcome.stopped_by is None
        check(log, sink)
        if not ear.waits:
            return


@pytest.mark.parametrize("case", [(2, False), (3, True)], ids=["new", "restart"])
def test_two_hosts_that_do_the_same_at_a_time_make_everything_once(tmp_path: Path, case: tuple[int, bool]) -> None:
    """Neither knows of the other; one does all of its work between any two calls of the other one."""
    step, is_known = case
    for number in itertools.count():
        sink, states = MemorySink(), [tmp_path / f"{number}-{host}" for host in "ab"]
        for state in states:
            if is_known:
                sync(log_at(step - 1), sink, state)
        log = log_at(step)
        sink.meanwhile[len(sink.calls) + number] = partial(sync, log_at(step), sink, states[1])
        (report,) = sync(log, sink, states[0]).reports
        assert report.error == ""
        if sink.meanwhile:
            return
        check(log, sink)
        there = [run.spec for run in sink.runs.values() if not run.deleted]
        assert max(Counter((spec.kind, spec.segment, spec.generation) for spec in there).values()) == 1
        sync(log, sink, states[1])
        assert not any(any(report.sent.values()) for state in states for report in sync(log, sink, state).reports)


def test_a_tracker_that_stays_away_ends_the_sync(tmp_path: Path) -> None:
    """What was accepted is remembered, and the next sync goes on there."""
    log = next(story())
    sink = MemorySink()
    sink.fail_at, sink.error = 4, RetryableSinkError("gone", sink="memory")
    outcome = sync(log, sink, tmp_path)
    assert isinstance(outcome.stopped_by, RetryableSinkError)
    assert sum(sink.places("provisional").values()) > 0
    assert sync(log, sink, tmp_path).stopped_by is None
    check(log, sink)


def test_a_fatal_answer_ends_the_run_or_all_of_it(tmp_path: Path) -> None:
    """A refused run is incomplete; refused credentials end the sync."""
    for run_id, stops in (("run", False), (None, True)):
        sink = MemorySink()
        sink.fail_at, sink.error = 2, RejectedError("no", sink="memory", run_id=run_id)
        outcome = sync(next(story()), sink, tmp_path / str(run_id))
        assert (outcome.stopped_by is not None) is stops
        assert "no" in outcome.reports[0].error


def test_a_row_is_never_half_behind_a_mark(tmp_path: Path) -> None:
    """However small the batches, points and marks agree with the log: the cursor counts whole rows."""
    log = Log()
    log.add(1, range(1, 3001), "settled")
    sink = MemorySink()
    sink.batch_records = 1000
    sink.fail_at = 5
    with pytest.raises(Killed):
        sync(log, sink, tmp_path)
    (held,) = cursor.load(next(tmp_path.glob("*/run.json"))).runs.values()
    mark = held.marks[1]
    assert mark.points == 2 * mark.seq
    assert mark.seq_sum == mark.seq * (mark.seq + 1)
    sync(log, sink, tmp_path)
    check(log, sink)


def test_lanes_change_nothing_but_the_order(tmp_path: Path) -> None:
    """With four lanes the same is there, and the records of one key are in order."""
    log = Log()
    log.add(1, range(1, 2001), "settled")
    sink = MemorySink()
    sink.lanes = 4
    sync(log, sink, tmp_path)
    check(log, sink)
    (run,) = sink.runs.values()
    for key in ("loss", "lr", "step"):
        tokens = [record.tokens for record in run.records if record.key == key]
        assert tokens == sorted(tokens)


def test_options_leave_side_runs_out(tmp_path: Path) -> None:
    """A tail that is held back and superseded points that are dropped are told in the report."""
    options = Options(tail="hold", superseded="drop")
    for number, log in enumerate(story()):
        sink = MemorySink()
        (report,) = sync(log, sink, tmp_path / str(number), options=options).reports
        assert sink.kinds() == ["canonical"]
        assert sink.places("canonical") == log.places("settled")
        left_out = {kind for kind in ("provisional", "superseded") if log.places(kind)}
        assert set(report.held) == left_out


def test_the_plan_says_what_a_sync_sends(tmp_path: Path) -> None:
    """A dry run counts from the log and the cursors what the sync then sends, where nothing was replaced."""
    sink = MemorySink()
    for number, log in enumerate(story()):
        job = once.Job(tmp_path, log.con, sink, tmp_path, Options(), 0.0)
        runs, _ = once.select(job, None)
        planned = once.plan(job, runs).reports[0].sent
        sent = sync(log, sink, tmp_path).reports[0].sent
        if number == 0:
            assert {kind: n for kind, n in planned.items() if n} == sent
        runs, _ = once.select(job, None)
        assert not any(once.plan(job, runs).reports[0].sent.values())
