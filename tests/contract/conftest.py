"""Logs to replay, written with the writer's own stream so that times and values are the test's to choose."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrack.sync.cli import main
from llmtrack.writer.format import EVALS_FOLDER, HEARTBEAT, SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.stream import PartWriter
from tests.wandb_server import Run as WandbRun
from tests.wandb_server import WandbServer, serving

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

Metrics = tuple[int, Mapping[str, float]]  # tokens, metrics


class SegmentLog:
    """One segment of a run, open until `end` is called; a test that just stops leaves it as a kill would."""

    def __init__(self, root: Path, run_id: str, segment: int, start: Mapping[str, Any], began: dt.datetime) -> None:
        self.run_id = run_id
        self.segment = segment
        self.folder = segment_folder(root, run_id, segment)
        self.folder.mkdir(parents=True)
        self.time = began
        self.tokens = 0
        self._seq = 0
        self._parts: dict[str, int] = {}
        self._write(
            "segments", [{"tokens": start.get("tokens", 0), "step": start.get("step", 0), **start}], phase="start"
        )

    def log(self, rows: Sequence[Metrics], *, tokens_per_step: int = 10, ms: int = 7) -> SegmentLog:
        """Log rows, `ms` milliseconds apart, as one batch of a part of their own."""
        points = []
        for tokens, metrics in rows:
            self.tokens = max(self.tokens, tokens)
            self.time += dt.timedelta(milliseconds=ms)
            self._seq += 1
            points += [
                {"seq": self._seq, "tokens": tokens, "step": tokens // tokens_per_step, "name": name, "value": value}
                | {"time": self.time}
                for name, value in metrics.items()
            ]
        self._append("metrics", points)
        return self

    def train(
        self, first: int, last: int, every: int = 10, names: Sequence[str] = ("train/loss", "train/lr")
    ) -> SegmentLog:
        """Log values that depend on segment, name and tokens, for tokens first + every to last."""
        return self.log(
            [
                (tokens, {name: (self.segment + 0.1 * n) * 1000.0 / (tokens + 3) for n, name in enumerate(names)})
                for tokens in range(first + every, last + 1, every)
            ]
        )

    def checkpoint(self, tokens: int) -> SegmentLog:
        """Record a checkpoint."""
        self._write(
            "checkpoints", [{"tokens": tokens, "step": tokens // 10, "ckpt_id": f"ckpt-{self.segment}-{tokens}"}]
        )
        return self

    def alert(self, tokens: int, rule: str = "spike", **more: Any) -> SegmentLog:
        """Record an alert; `more` are further columns."""
        known = {"alert_id": f"{self.run_id}-{self.segment}-{self._seq}", "level": "warn", "phase": "raised"}
        self._write("alerts", [{"tokens": tokens, "step": tokens // 10, "rule": rule, **known, **more}])
        return self

    def end(self, how: str = "finished", tokens: int = 0) -> SegmentLog:
        """Write how the segment ended."""
        self._write("segments", [{"tokens": tokens, "step": tokens // 10, "exit": how, "dropped": 0}], phase="end")
        return self

    def alive(self) -> SegmentLog:
        """Write a heartbeat of this moment."""
        beat = {"time": dt.datetime.now(dt.UTC).isoformat(), "seq": self._seq, "step": 0, "tokens": 0, "dropped": 0}
        (self.folder / HEARTBEAT).write_text(json.dumps(beat | {"pid": 1, "host": "node"}))
        return self

    def _write(self, table: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        self._seq += 1
        self.time += dt.timedelta(milliseconds=1)
        self._append(table, [{"seq": self._seq, "time": self.time, **row, **more} for row in rows])

    def _append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        part = self._parts[table] = self._parts.get(table, 0) + 1
        writer = PartWriter(self.folder / part_name(table, part), table)
        batch = pa.RecordBatch.from_pylist(list(rows), schema=SCHEMAS[table])
        writer.append(batch, rows[0]["seq"], rows[-1]["seq"])
        writer.close()


class Log:
    """A root; its runs are of one project, so that tests can share a tracker."""

    def __init__(self, root: Path, project: str) -> None:
        self.root = root
        self.project = project
        self._segments: dict[str, int] = {}
        self._began = EPOCH

    def segment(
        self,
        run_id: str = "run",
        *,
        after: tuple[str, int, int] | None = None,
        config: Any = None,
        **start: Any,
    ) -> SegmentLog:
        """Start the next segment of a run.

        Args:
            run_id: The run.
            after: Run, segment and tokens of the place it starts from.
            config: Likewise.
            start: Further columns of the start record.
        """
        number = self._segments[run_id] = self._segments.get(run_id, 0) + 1
        self._began += dt.timedelta(hours=1)
        place = (
            {"from_run": after[0], "from_segment": after[1], "tokens": after[2], "step": after[2] // 10}
            if after
            else {}
        )
        record = (
            {"project": self.project, "config": json.dumps(config or {}), "recipe": "{}", "host": "node-1"}
            | place
            | start
        )
        return SegmentLog(self.root, run_id, number, record, self._began)


def evaluate(
    log: Log, ckpt_id: str, value: float, *, run_id: str | None = "run", ms: int = 0, **more: Any
) -> dt.datetime:
    """Write an evaluation of a checkpoint, `ms` milliseconds after a week, and return its time."""
    time = EPOCH + dt.timedelta(days=7, milliseconds=ms)
    row = {"seq": 1, "time": time, "tokens": 0, "step": 0, "ckpt_id": ckpt_id, "task": "mmlu", "metric": "acc"}
    folder = (log.root if run_id is None else log.root / f"run_id={run_id}") / EVALS_FOLDER
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist([{**row, "value": value, **more}], schema=SCHEMAS["evals"])
    pq.write_table(table, folder / f"evals-{next(_numbers):05d}.parquet")
    return time


Point = tuple[str, int, int, float]  # key, tokens, milliseconds, value
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """A point as an independent reader of the log finds it."""

    segment: int
    seq: int
    step: int
    tokens: int
    ms: int
    name: str
    value: float

    @property
    def point(self) -> Point:
        """What a tracker should hold of it, where nothing had to be said differently."""
        return self.name, self.tokens, self.ms, self.value


def read_log(root: Path, run_id: str = "run") -> list[Row]:
    """Read every point of a run with nothing but Arrow."""
    rows = []
    for part in sorted((root / f"run_id={run_id}").glob("segment=*/metrics-*.arrows")):
        segment = int(part.parent.name.removeprefix("segment="))
        with pa.ipc.open_stream(part.read_bytes()) as stream:
            table = stream.read_all()
        ms = table["time"].cast(pa.int64()).to_pylist()
        columns = (table[name].to_pylist() for name in ("seq", "step", "tokens", "name", "value"))
        rows += [
            Row(segment, seq, step, tokens, at, name, value)
            for (seq, step, tokens, name, value), at in zip(zip(*columns, strict=True), ms, strict=True)
        ]
    return rows


@dataclass(frozen=True)
class Stored:
    """A run as it lies in MLflow's database."""

    ref: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None
    artifact_uri: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Counter[Point]

    @property
    def points(self) -> Counter[Point]:
        """Its metrics without the optimiser step, each with the number of times it is there."""
        return Counter({point: count for point, count in self.metrics.items() if point[0] != "step"})

    @property
    def steps(self) -> set[tuple[int, int, float]]:
        """Tokens, milliseconds and value of the metric for the optimiser step."""
        return {point[1:] for point in self.metrics if point[0] == "step"}

    def tag(self, name: str) -> str | None:
        """One of our tags."""
        return self.tags.get(f"llmtrack.{name}")


_READY: Final = 2  # as MLflow's database says it


@dataclass(frozen=True)
class Model:
    """A logged model as it lies in MLflow's database; metrics are key, tokens, milliseconds, value and run."""

    ref: str
    name: str
    is_ready: bool
    source: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Counter[tuple[str, int, int, float, str]]
    outputs: Counter[tuple[str, int]]  # run and tokens

    def tag(self, name: str) -> str | None:
        """One of our tags."""
        return self.tags.get(f"llmtrack.{name}")


@dataclass(frozen=True)
class Tracker:
    """A real MLflow: its address, and the database behind it."""

    uri: str
    database: Path
    to: ClassVar[str] = "mlflow"

    def runs(self, project: str) -> list[Stored]:
        """Read the runs of an experiment that are not deleted, with nothing but SQLite."""
        with sqlite3.connect(f"file:{urllib.parse.quote(str(self.database))}?mode=ro", uri=True) as con:
            found = con.execute(
                "SELECT run_uuid, r.name, status, start_time, end_time, artifact_uri"
                " FROM runs r JOIN experiments e USING (experiment_id)"
                " WHERE e.name = ? AND r.lifecycle_stage = 'active' ORDER BY start_time, run_uuid",
                (project,),
            ).fetchall()
            stored = [
                Stored(
                    *(ref, name, status, start_ms, end_ms, uri),
                    dict(con.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [ref])),
                    dict(con.execute("SELECT key, value FROM params WHERE run_uuid = ?", [ref])),
                    Counter(con.execute("SELECT key, step, timestamp, value FROM metrics WHERE run_uuid = ?", [ref])),
                )
                for ref, name, status, start_ms, end_ms, uri in found
            ]
        con.close()
        return stored

    def models(self, project: str) -> list[Model]:
        """Read the logged models of an experiment that are not deleted, by their first creation."""
        tags = "SELECT tag_key, tag_value FROM logged_model_tags WHERE model_id = ?"
        params = "SELECT param_key, param_value FROM logged_model_params WHERE model_id = ?"
        metrics = "metric_name, metric_step, metric_timestamp_ms, metric_value, run_id"
        outputs = "SELECT source_id, step FROM inputs WHERE destination_id = ? AND source_type = 'RUN_OUTPUT'"
        return [
            Model(
                *(ref, name, status == _READY, source),
                dict(self.query(tags, ref)),
                dict(self.query(params, ref)),
                Counter(self.query(f"SELECT {metrics} FROM logged_model_metrics WHERE model_id = ?", ref)),
                Counter(self.query(outputs, ref)),
            )
            for ref, name, status, source in self.query(
                "SELECT model_id, m.name, status, source_run_id"
                " FROM logged_models m JOIN experiments e USING (experiment_id)"
                " WHERE e.name = ? AND m.lifecycle_stage = 'active' ORDER BY creation_timestamp_ms",
                project,
            )
        ]

    def query(self, statement: str, *values: object) -> list[Any]:
        """Ask the database behind MLflow."""
        with sqlite3.connect(f"file:{urllib.parse.quote(str(self.database))}?mode=ro", uri=True) as con:
            rows = con.execute(statement, values).fetchall()
        con.close()
        return rows

    def execute(self, statement: str, *values: object) -> None:
        """Change the database behind MLflow's back."""
        with sqlite3.connect(self.database) as con:
            con.execute(statement, values)
        con.close()


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """A W&B server on loopback, whose runs are shown as MLflow's are; `database` is none."""

    server: WandbServer
    to: ClassVar[str] = "wandb"

    def runs(self, project: str) -> list[Stored]:
        """Read the runs of a project out of the server's memory."""
        return [self._stored(run) for run in self.server.find(project)]

    def _stored(self, run: WandbRun) -> Stored:
        about = run.about
        tags = {f"llmtrack.{name}": str(value) for name, value in about.items()}
        tags |= {f"llmtrack.name.{key}": name for key, name in (about.get("names") or {}).items()}
        tags |= {"mlflow.parentRunId": str(about.get("parent_ref")), "mlflow.runColor": "#"}
        status = "KILLED" if about.get("status") == "killed" and run.state == "failed" else run.state.upper()
        points: Counter[Point] = Counter()
        for row in run.rows:
            place = (row["tokens_seen"], round(row["_timestamp"] * 1000))
            hidden = {"tokens_seen", "_timestamp", "_step", "_runtime", "segment", "checkpoint"}
            points.update((key, *place, float(value)) for key, value in row.items() if key not in hidden)
        return Stored(
            run.name,
            run.display_name,
            status,
            _ms(about["start_time"]),
            _ms(about["end_time"]) if "end_time" in about else None,
            "",
            tags,
            {key: str(value) for key, value in run.values.items()},
            points,
        )


def _ms(time: str) -> int:
    return round(dt.datetime.fromisoformat(time).timestamp() * 1000)


class Bench:
    """A log and a tracker, and the command that replays the one into the other."""

    def __init__(self, log: Log, tracker: Tracker, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.log = log
        self.tracker = tracker
        self.state = state
        self._capsys = capsys

    @property
    def arguments(self) -> list[str]:
        """What every call of the command gets."""
        place = ["--to", self.tracker.to, "--tracking-uri", self.tracker.uri, "--state", str(self.state)]
        return [str(self.log.root), *place, "--timeout", "60"]

    def sync(self, *options: str, expect: int = 0) -> list[dict[str, Any]]:
        """Run the command in this process, and return its rows."""
        with pytest.raises(SystemExit) as ended:
            main([*self.arguments, *options, "--json"])
        out, err = self._capsys.readouterr()
        assert ended.value.code == expect, f"{out}{err}"
        return list(json.loads(out)) if out else []

    def runs(self, kind: str, run_id: str = "run") -> list[Stored]:
        """Return what MLflow has of a kind, by segment."""
        runs = [run for run in self.tracker.runs(self.log.project) if run.tag("run_id") == run_id]
        return sorted((run for run in runs if run.tag("kind") == kind), key=lambda run: int(run.tag("segment") or 0))

    def only(self, kind: str, run_id: str = "run") -> Stored:
        """Return the one run of a kind."""
        (run,) = self.runs(kind, run_id)
        return run

    def rows(self, run_id: str = "run") -> list[Row]:
        """Return every point of a run in the log."""
        return read_log(self.log.root, run_id)


_SERVER: Final = ("-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making one takes seconds, copying it none."""
    database = tmp_path_factory.mktemp("mlflow") / "empty.db"
    code = f"from llmtrack.sync.mlflow.sink import MlflowSink; MlflowSink('sqlite:///{database}', timeout_s=60).open()"
    subprocess.run([sys.executable, "-c", code], check=True)
    return database


@pytest.fixture(scope="session")
def server(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    """A real MLflow server on loopback, one for all tests; each test has a project of its own."""
    folder = tmp_path_factory.mktemp("server")
    database = Path(shutil.copy(empty_database, folder / "server.db"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *_SERVER, "--port", str(port), "--backend-store-uri", f"sqlite:///{database}"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("wb") as messages:
        process = subprocess.Popen(
            command,
            stdout=messages,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
        )
    assert process.stderr is not None
    for line in process.stderr:
        if "startup complete" in line:
            break
    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # so that it never waits for us
    process.stderr.close()
    try:
        assert process.poll() is None, (folder / "server.log").read_text()
        yield Tracker(f"http://127.0.0.1:{port}", database)
    finally:
        os.killpg(process.pid, 15)
        process.wait()
        drain.wait()


@pytest.fixture
def embedded(empty_database: Path, tmp_path: Path) -> Tracker:
    """A database of the test's own, written by MLflow in the process of the sync."""
    database = Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))
    return Tracker(f"sqlite:///{database}", database)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """An empty root."""
    root = tmp_path / "root"
    root.mkdir()
    return Log(root, f"project-{next(_numbers)}")


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A W&B server on loopback, and an environment that has its key."""
    pytest.importorskip("wandb", reason="the W&B client is not installed")
    with serving() as server:
        monkeypatch.setenv("WANDB_API_KEY", server.key)
        yield server


@pytest.fixture
def wandb_tracker(wandb_server: WandbServer) -> WandbTracker:
    """The same as a tracker of the contract."""
    return WandbTracker(wandb_server.url, Path(), wandb_server)


@pytest.fixture(params=["embedded", "wandb_tracker"])
def each(request: pytest.FixtureRequest, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The log and one tracker of each kind."""
    return Bench(log, request.getfixturevalue(request.param), tmp_path / "state", capsys)


@pytest.fixture(params=["embedded", "server", "wandb_tracker"])
def bench(request: pytest.FixtureRequest, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The log and each tracker in turn."""
    return Bench(log, request.getfixturevalue(request.param), tmp_path / "state", capsys)


@pytest.fixture
def local(embedded: Tracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The log and a database of the test's own, where the way to MLflow does not matter."""
    return Bench(log, embedded, tmp_path / "state", capsys)
