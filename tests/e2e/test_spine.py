"""From the training process to the tracker and back, with the real parts: torch, gloo, SIGKILL, MLflow, SQLite, DuckDB.

What must be in MLflow is worked out here from the files of the log with pyarrow, and compared with MLflow's database
through sqlite3: none of our own readers, nor MLflow's, has a say in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrack import query
from llmtrack.examples.launch import SegmentTail, Training

_RUN_ID = "spine"
_SMALL = (
    *("--context", "32", "--width", "32", "--layers", "2", "--heads", "2", "--micro-batch", "2"),
    *("--batch-start", "4", "--batch-size", "8", "--ramp-tokens", "20000", "--max-tokens", "60000"),
    *("--log-every", "1", "--checkpoint-every", "40", "--eval-sequences", "8"),
)

Point = tuple[str, int, int, float]  # name, tokens, time in ms since the epoch, value


@dataclass(frozen=True)
class Row:
    """One point of the log, as it stands in the files."""

    segment: int
    seq: int
    step: int
    point: Point


def test_mlflow_holds_exactly_the_settled_points_and_beside_them_the_superseded_ones(tmp_path: Path) -> None:
    """Two ranks are killed at a random moment, resume and finish; MLflow gets every point once, where it belongs."""
    root, database = tmp_path / "runs", tmp_path / "mlflow.db"
    _train_kill_and_resume(root, tmp_path / "checkpoints")

    start = _segment_start(root, 2)
    assert (start["from_run"], start["from_segment"]) == (_RUN_ID, 1)
    rows = _rows_of_the_log(root)
    settled = [row for row in rows if (row.point[1] <= start["tokens"]) == (row.segment == 1)]
    superseded = [row for row in rows if row.segment == 1 and row.point[1] > start["tokens"]]
    assert len(settled) + len(superseded) == len(rows)  # the example logs nothing at the very place where it resumes
    assert {row.segment for row in settled} == {1, 2}

    assert _sync(root, tmp_path) == [("finished", len(settled), len(superseded))]
    runs = _mlflow_runs(database)
    assert runs["canonical"] == _with_steps(settled)
    assert runs.get("superseded", []) == _with_steps(superseded)
    assert set(runs) <= {"canonical", "superseded"}

    assert _sync(root, tmp_path) == [("finished", 0, 0)]
    assert _mlflow_runs(database) == runs

    with contextlib.closing(query.connect(root)) as log:
        points = "SELECT name, tokens, epoch_ms(time), value FROM {} ORDER BY ALL"
        assert log.sql(points.format("live WHERE settled")).fetchall() == _points(settled)
        assert log.sql(points.format("metrics WHERE superseded_by = 2")).fetchall() == _points(superseded)
        assert log.sql("SELECT status, segments FROM runs").fetchall() == [("finished", 2)]


def test_the_example_names_its_batches_and_keeps_what_detectors_learned(tmp_path: Path) -> None:
    """What people copy has it: a loss that becomes NaN is an alert with the bytes that every rank was trained on."""
    torch = pytest.importorskip("torch")
    # Long enough for the other rank's ids to arrive: an alert is raised when its row is written, after half a second.
    arguments = [*_SMALL, "--max-tokens", "120000", "--checkpoint-every", "1000", "--learning-rate", "1e30"]
    arguments += ["--root", str(tmp_path / "runs"), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    with Training(arguments) as training:
        output = list(training.lines())
        assert training.wait() == 0, "\n".join(output)
    (saved,) = (tmp_path / "checkpoints").glob("*.pt")
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["llmtrack_state"]
    json.dumps(checkpoint["llmtrack_state"])
    with contextlib.closing(query.connect(tmp_path / "runs")) as log:
        ids = log.sql(
            "SELECT DISTINCT unnest(b.batch_ids) FROM alerts a JOIN batches b USING (run_id, segment, step)"
            " WHERE a.rule = 'nonfinite' AND a.metric = 'train/loss' AND a.phase = 'raised'"
        ).fetchall()
    assert len(ids) >= 4, "the first steps have four sequences, two on each rank"
    assert all(batch_id.startswith("bytes ") for (batch_id,) in ids)


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_eight_processes_that_open_a_run_are_one_run_with_one_segment(tmp_path: Path, variable: str) -> None:
    """Only rank 0 writes; the others get a run with the same methods, and create nothing."""
    program = (
        "import sys, llmtrack\n"
        "with llmtrack.open_run(sys.argv[1], run_id='one') as run:\n"
        "    run.log({'train/loss': 2.5}, step=1, tokens=100)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env={**_environment(), variable: str(rank)})
        for rank in range(8)
    ]
    assert [process.wait() for process in processes] == [0] * 8
    assert [folder.name for folder in tmp_path.iterdir()] == ["run_id=one"]
    assert [folder.name for folder in (tmp_path / "run_id=one").iterdir()] == ["segment=00001"]
    with contextlib.closing(query.connect(tmp_path)) as log:
        assert log.sql("SELECT segment, name, value FROM live").fetchall() == [(1, "train/loss", 2.5)]


# --- what happens -------------------------------------------------------------------------------------------------


def _train_kill_and_resume(root: Path, checkpoints: Path) -> None:
    """Kill everything at a random line of output after the first checkpoint is on disk, and start again."""
    seed = random.SystemRandom().randrange(1_000_000)
    lines_left = random.Random(seed).randrange(100)
    print(f"killed {lines_left} lines of output after the first checkpoint was seen")  # noqa: T201 - shown on failure
    arguments = [*_SMALL, "--root", str(root), "--checkpoint-dir", str(checkpoints)]
    tail = SegmentTail(root / f"run_id={_RUN_ID}" / "segment=00001")
    output = []
    with Training(arguments, env={"LLMTRACK_RUN_ID": _RUN_ID}) as training:
        for line in training.lines():
            output.append(line)
            tail.look()
            lines_left -= bool(tail.checkpoint_steps)
            if lines_left < 0:
                training.kill()
        assert training.wait() < 0, "\n".join(output)
    with Training(arguments) as training:
        output = list(training.lines())
        assert training.wait() == 0, "\n".join(output)


def _sync(root: Path, folder: Path) -> list[tuple[str, int, int]]:
    """Run llmtrack-sync, and return status, settled and superseded points sent of each run."""
    command = [
        sys.executable,
        "-c",
        "from llmtrack.sync.cli import main; main()",
        str(root),
        "--to",
        "mlflow",
        "--json",
    ]
    place = ["--tracking-uri", f"sqlite:///{folder / 'mlflow.db'}", "--state", str(folder / "state")]
    done = subprocess.run([*command, *place], env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(row["status"], row["settled_sent"], row["superseded_sent"]) for row in json.loads(done.stdout)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# --- the log, with pyarrow alone ----------------------------------------------------------------------------------


def _rows_of_the_log(root: Path) -> list[Row]:
    rows = {}
    for part in sorted(root.glob("run_id=*/segment=*/metrics-*")):
        segment = int(part.parent.name.removeprefix("segment="))
        for row in _read(part):
            time_ms = int(row["time"].timestamp() * 1000 + 0.5)
            point = (row["name"], row["tokens"], time_ms, row["value"])
            rows[segment, row["seq"], row["name"]] = Row(segment, row["seq"], row["step"], point)
    return list(rows.values())


def _segment_start(root: Path, segment: int) -> dict[str, Any]:
    (start,) = [
        row
        for part in root.glob(f"run_id=*/segment={segment:05d}/segments-*")
        for row in _read(part)
        if row["phase"] == "start"
    ]
    return start


def _read(part: Path) -> list[dict[str, Any]]:
    """Return the rows of a part; of one whose writer was killed, those of its whole batches."""
    if part.suffix == ".parquet":
        return list(pq.read_table(part, partitioning=None).to_pylist())
    rows: list[dict[str, Any]] = []
    with pa.OSFile(str(part)) as file, contextlib.suppress(pa.ArrowInvalid, OSError):
        for batch in pa.ipc.open_stream(file):
            rows += batch.to_pylist()
    return rows


def _points(rows: list[Row]) -> list[Point]:
    return sorted(row.point for row in rows)


def _with_steps(rows: list[Row]) -> list[Point]:
    """Return the points as MLflow has them: the step is a metric there, once per tokens count of a segment."""
    first = {(row.segment, row.point[1], row.step): row for row in sorted(rows, key=lambda row: -row.seq)}
    return sorted([*_points(rows), *(("step", row.point[1], row.point[2], float(row.step)) for row in first.values())])


# --- MLflow's database, with sqlite3 alone ------------------------------------------------------------------------


def _mlflow_runs(database: Path) -> dict[str, list[Point]]:
    """Return the points of each run in MLflow but for its alerts, by its kind; there is one run of each kind."""
    with contextlib.closing(sqlite3.connect(database)) as con:
        kinds = con.execute("SELECT run_uuid, value FROM tags WHERE key = 'llmtrack.kind'").fetchall()
        assert len({kind for _, kind in kinds}) == len(kinds) == con.execute("SELECT count(*) FROM runs").fetchone()[0]
        points = (
            "SELECT key, step, timestamp, value FROM metrics "
            "WHERE run_uuid = ? AND NOT is_nan AND key NOT LIKE 'alert/%'"
        )
        return {kind: sorted(con.execute(points, [run]).fetchall()) for run, kind in kinds}
