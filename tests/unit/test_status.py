"""What ``llmtrack-sync status`` says, from the log, the cursors and what syncs remember."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrack.sync.cli import main
from llmtrack.sync.replay.cursor import Cursor, Held, Mark, cursor_path
from llmtrack.sync.watch import record
from llmtrack.sync.watch.lock import SyncLock
from tests.handmade import write_part, write_segment
from tests.oracle import Point, Segment

_TRACKER = "http://mlflow.example.org:5000"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with ten points, of which six are settled, a gap, and a part that is none."""
    root = tmp_path / "root"
    points = [Point(n * 10, "loss", float(n)) for n in range(1, 11)]
    folder = write_segment(root, Segment("run", 1, points=points, checkpoints=[60]), project="p")
    write_part(folder, "gaps", [{"first_tokens": 1, "last_tokens": 2, "points": 7, "reason": "queue_full"}])
    (folder / "metrics-00007.parquet").write_bytes(b"not a part")
    return root


def _status(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(["status", str(root), "--state", str(root.parent / "state"), *options, "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return list(json.loads(out))


def _words(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["status", str(root), "--state", str(root.parent / "state"), *options])
    assert ended.value.code == 0
    return capsys.readouterr().out


def _remember(root: Path, **run: Any) -> Path:
    """Write what a sync remembers that had four settled points accepted."""
    state = root.parent / "state"
    path = cursor_path(state, "mlflow", _TRACKER, "run")
    path.parent.mkdir(parents=True, exist_ok=True)
    Cursor(path, {"ref": Held("canonical", None, {1: Mark(5, 40, 4, 14)})}).save()
    there = record.RootRecord(str(root), "mlflow", _TRACKER, {"tail": "side", "superseded": "side"})
    there.runs["run"] = record.RunRecord(**run)
    there.save(record.record_path(path.parent, root))
    return path.parent


def test_before_any_sync_all_of_it_waits(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the log's own troubles show."""
    (row,) = _status(capsys, root)
    assert (row["run_id"], row["tracker"], row["points"], row["sent"], row["waiting"]) == ("run", None, 10, 0, 10)
    assert (row["provisional"], row["superseded"], row["gaps"], row["points_dropped"]) == (4, 0, 1, 7)
    assert row["damaged"] == 1
    assert "no sync has been here" in _words(capsys, root)


def test_what_was_accepted_and_what_went_wrong_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time to go at the rate of before."""
    _remember(root, points_per_s=2.0, last_success="2026-01-01T00:00:00Z", last_error="413", error_time=record.now())
    (row,) = _status(capsys, root)
    assert (row["tracker"], row["sent"], row["waiting"], row["to_go_s"]) == (_TRACKER, 4, 6, 3.0)
    assert (row["last_success"], row["last_error"], row["watched_by"]) == ("2026-01-01T00:00:00Z", "413", None)
    words = _words(capsys, root)
    for told in ("4 of 10 points sent, 6 waiting (about 3 s", "7 points were dropped", "damaged: 1", " s ago: 413"):
        assert told in words


def test_who_is_at_work_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nobody starts a second one."""
    folder = _remember(root)
    with SyncLock(folder, root, "watch"):
        (row,) = _status(capsys, root)
        assert row["watched_by"].startswith("watched by process ")
    assert _status(capsys, root)[0]["watched_by"] is None


def test_only_what_was_asked_for_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By tracker and by run."""
    _remember(root)
    assert len(_status(capsys, root, "--to", "mlflow")) == 1
    assert _status(capsys, root, "--to", "wandb")[0]["tracker"] is None
    assert _status(capsys, root, "--run", "zz*") == []
    assert "no run in" in _words(capsys, root, "--run", "zz*")


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As with the sync itself."""
    with pytest.raises(SystemExit) as ended:
        main(["status", str(tmp_path / "nowhere")])
    assert ended.value.code == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", '{"format": 9}', '{"format": 1, "runs": {"a": {"b": 1}}}'])
def test_a_record_that_is_damaged_counts_as_none(root: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    """It may be lost at any time."""
    folder = _remember(root)
    record.record_path(folder, root).write_text(content)
    assert _status(capsys, root)[0]["tracker"] is None
