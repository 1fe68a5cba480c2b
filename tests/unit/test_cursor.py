"""What is remembered of a run in a tracker, and what happens when that memory is damaged or shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrack.sync.replay.cursor import Cursor, Held, Mark, cursor_path, default_state, load, lock
from llmtrack.writer.errors import UsageError


def example(path: Path) -> Cursor:
    """Return a cursor with everything that one can have."""
    marks = {1: Mark(8, 4000, 20, 90), 2: Mark(-1, -1, 0, 0)}
    whole = Held("canonical", None, marks, marks, "digest", marks, {"train/loss": 20})
    runs = {"ab": whole, "cd": Held("superseded", 1, {}, marks, None)}
    return Cursor(path, runs)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """A cursor comes back as it was."""
    cursor = example(tmp_path / "run.json")
    cursor.save()
    assert load(cursor.path) == cursor
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_missing_cursor_is_an_empty_one(tmp_path: Path) -> None:
    """There is no difference between a run that was never synced and one whose cursor is gone."""
    assert load(tmp_path / "run.json").runs == {}


def test_a_cursor_cut_anywhere_counts_as_none(tmp_path: Path) -> None:
    """No prefix of a file is taken for a cursor that says less."""
    cursor = example(tmp_path / "run.json")
    cursor.save()
    content = cursor.path.read_bytes()
    for end in range(len(content)):
        cursor.path.write_bytes(content[:end])
        assert load(cursor.path).runs == {}


def _one(**changed: object) -> str:
    held = {"kind": "canonical", "segment": 1, "marks": {}, "goal": {}, "newest": None, "compared": {}, "counts": {}}
    return json.dumps({"format": 1, "runs": {"a": held | changed}})


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        '{"format": 2, "runs": {}}',
        '{"format": 1, "runs": []}',
        _one(marks={"x": {}}),
        _one(marks={"1": {"seq": "8", "tokens": 1, "points": 1, "seq_sum": 1}}),
        _one(goal=None),
        _one(compared=7),
        _one(counts={"a": "many"}),
        _one(segment="1"),
        _one(newest=7),
    ],
)
def test_a_cursor_of_another_shape_counts_as_none(tmp_path: Path, content: str) -> None:
    """JSON that is no cursor of this format is not guessed at."""
    path = tmp_path / "run.json"
    path.write_text(content)
    assert load(path).runs == {}


def test_each_tracker_and_each_run_has_a_cursor_of_its_own(tmp_path: Path) -> None:
    """Neither another address nor another run shares a file."""
    places = [
        ("mlflow", "http://a", "r"),
        ("mlflow", "http://b", "r"),
        ("wandb", "http://a", "r"),
        ("mlflow", "http://a", "s"),
    ]
    assert len({cursor_path(tmp_path, *place) for place in places}) == 4


def test_only_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    """A second sync of the same run into the same tracker is told so, and gets it once the first is gone."""
    path = tmp_path / "mlflow-1" / "run.json"
    code = (
        "import sys; from pathlib import Path; from llmtrack.sync.replay.cursor import lock\n"
        "with lock(Path(sys.argv[1])) as ours: print(ours)"
    )
    with lock(path) as ours:
        other = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    after = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    assert (ours, other.stdout.strip(), after.stdout.strip()) == (True, "False", "True")


def test_what_a_kill_left_behind_is_cleared_away(tmp_path: Path) -> None:
    """Files that were never renamed do not pile up."""
    path = tmp_path / "run.json"
    (tmp_path / ".run.json.123.tmp").write_text("half")
    with lock(path):
        assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_a_state_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """The message names the folder and the option."""
    (tmp_path / "state").write_text("")
    with (
        pytest.raises(UsageError, match=r"state folder .*state.* cannot be used(.|\n)*--state DIR"),
        lock(tmp_path / "state" / "mlflow-1" / "run.json"),
    ):
        raise AssertionError
    with pytest.raises(UsageError, match="cannot be used"):
        example(tmp_path / "state" / "run.json").save()


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_STATE_HOME, or ~/.local/state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state() == tmp_path / "llmtrack"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state() == tmp_path / ".local" / "state" / "llmtrack"


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    """A person can read it."""
    cursor = example(tmp_path / "run.json")
    cursor.save()
    assert json.loads(cursor.path.read_text())["runs"]["ab"]["marks"]["1"]["points"] == 20
