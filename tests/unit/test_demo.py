"""What the demo does to a folder and says to a person; that it trains and syncs is for tests/e2e and `make demo`."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
from pathlib import Path

import pytest

from llmtrack import UsageError

pytest.importorskip("click")

from llmtrack.examples import demo


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    """Nothing is deleted in a folder that holds somebody's files."""
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="no demo made"):
        demo._prepare(tmp_path, keep=False)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_a_second_demo_starts_afresh_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """What the first demo made goes; a file that somebody put beside it stays."""
    folder = demo._prepare(tmp_path / "new" / "demo", keep=False)
    (folder / "runs" / "run_id=demo-1").mkdir(parents=True)
    (folder / "mlflow.db").touch()
    (folder / "notes.txt").touch()
    demo._prepare(folder, keep=False)
    assert {entry.name for entry in folder.iterdir()} == {demo._MARKER, "notes.txt"}


def test_keep_adds_a_run_under_the_next_free_id(tmp_path: Path) -> None:
    """With --keep the runs stay, and the new one gets an id of its own."""
    folder = demo._prepare(tmp_path / "demo", keep=False)
    (folder / "runs" / "run_id=demo-1").mkdir(parents=True)
    place = demo.Place(demo._prepare(folder, keep=True))
    assert demo._free_run_id(place.root) == "demo-2"


@pytest.mark.parametrize("folder", ["demo-run", "my demo", "../demo"])
def test_commands_can_be_pasted_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """Every path in them leads to what the demo made, seen from the current folder, whatever its name."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    place = demo.Place(Path(folder))
    place.root.mkdir(parents=True)
    demo._say_commands(place, "demo-1")
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    roots = [words[words.index("--root") + 1] for words in commands if "--root" in words]
    assert len(roots) > 1
    assert all(Path(root).is_dir() for root in roots)
    uris = [word for words in commands for word in words if word.startswith("sqlite:///")]
    assert set(uris) == {f"sqlite:///{folder}/mlflow.db"}


def test_a_program_is_called_by_name_only_where_the_shell_finds_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an activated environment the name is enough; elsewhere it takes the path, in a form that can be pasted."""
    beside = Path(sys.executable).with_name("mlflow")
    other = tmp_path / "mlflow"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{beside.parent}{os.pathsep}{os.environ['PATH']}")
    if beside.exists():
        assert demo._program("mlflow") == "mlflow"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{beside.parent}")
    assert Path(shlex.split(demo._program("mlflow"))[0]).absolute() == beside.absolute()


def test_what_was_superseded_is_seen_in_the_picture_of_a_run_that_resumed_exactly() -> None:
    """The same values were logged again, so the curve covers them: the axis is shaded where they lie."""
    plot = pytest.importorskip("llmtrack.query.draw.plot")
    time = dt.datetime(2025, 1, 2, tzinfo=dt.UTC)
    points = [
        ("run", "run", segment, tokens, time, tokens, tokens, "train/loss", 1.0 / tokens, superseded_by, True)
        for segment, first, last, superseded_by in ((1, 1, 4, None), (1, 5, 7, 2), (2, 5, 10, None))
        for tokens in range(first, last + 1)
    ]
    curve = plot.Curve("run", "train/loss", points, [{"segment": 2, "tokens": 4, "step": 4, "time": time}])
    (axis,) = [line for line in plot.draw(curve, width=100).splitlines() if "└" in line]
    shaded = [index for index, character in enumerate(axis.partition("└")[2]) if character == "▒"]
    columns = len(axis.partition("└")[2])
    assert shaded == list(range(shaded[0], shaded[-1] + 1))
    assert shaded[0] == pytest.approx((5 - 1) / 9 * columns, abs=1)
    assert shaded[-1] == pytest.approx((7 - 1) / 9 * columns, abs=1)
