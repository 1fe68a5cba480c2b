"""A run is joined to the place it really started from by a record that is added."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmtrack import UsageError, open_run
from llmtrack.query import connect
from llmtrack.writer.cli import adopt_run
from llmtrack.writer.upkeep.adopt import adopt
from llmtrack.writer.upkeep.verify import verify


def _train(root: Path, run_id: str, first: int, last: int, loss: float) -> None:
    with open_run(root, run_id=run_id) as run:
        for step in range(first, last + 1):
            run.log({"loss": loss}, step=step, tokens=step * 100)


def _history(root: Path, run_id: str) -> list[tuple[int, float]]:
    with connect(root) as con:
        rows: list[tuple[int, float]] = con.execute(
            "SELECT tokens, value FROM history WHERE run_id = ? ORDER BY tokens", [run_id]
        ).fetchall()
    return rows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run, and another that went on from its step 6 without saying so."""
    _train(tmp_path, "first", 1, 8, 1.0)
    _train(tmp_path, "second", 5, 10, 2.0)
    return tmp_path


def test_the_path_resolves_the_overlap(root: Path) -> None:
    """Up to the place the curve is the other run's, beyond it the adopted one's."""
    adopt(root, "second", from_run="first", tokens=600)
    expected = [(step * 100, 1.0 if step <= 6 else 2.0) for step in range(1, 11)]
    assert _history(root, "second") == expected
    assert _history(root, "first") == [(step * 100, 1.0) for step in range(1, 9)]


def test_an_adopted_run_is_a_child(root: Path) -> None:
    """The runs view has its parent and the place, and the adoption is no lifetime of a process."""
    adopt(root, "second", from_run="first", tokens=600)
    with connect(root) as con:
        query = "SELECT parent_run, fork_reason, fork_tokens, segments FROM runs WHERE run_id = 'second'"
        row = con.execute(query).fetchone()
        assert con.execute("SELECT count(*) FROM segments").fetchone() == (2,)
    assert row == ("first", "adopted", 600, 1)


def test_no_file_is_edited(root: Path) -> None:
    """Every file that was there has the bytes it had, and the root is intact."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    adopt(root, "second", from_run="first", tokens=600)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert verify(root, deep=True).findings == []


def test_the_last_adoption_counts(root: Path) -> None:
    """A place that was wrong is replaced by adopting again."""
    adopt(root, "second", from_run="first", tokens=800)
    adopt(root, "second", from_run="first", tokens=500)
    assert [loss for _, loss in _history(root, "second")] == [1.0] * 5 + [2.0] * 5


def test_an_adopted_run_goes_on_as_itself(root: Path) -> None:
    """The next process that resumes it is its next segment."""
    adopt(root, "second", from_run="first", tokens=600)
    meta = {"run_id": "second", "segment": 1, "recipe_hash": None, "step": 10, "tokens": 1000}
    with open_run(root, checkpoint=meta) as run:
        run.log({"loss": 3.0}, step=11, tokens=1100)
    assert (run.run_id, run.segment) == ("second", 2)
    assert _history(root, "second")[-2:] == [(1000, 2.0), (1100, 3.0)]


@pytest.mark.parametrize(
    ("run_id", "from_run", "tokens", "says"),
    [
        ("nobody", "first", 600, "no run nobody"),
        ("second", "nobody", 600, "no run nobody"),
        ("second", "second", 600, "cannot start from itself"),
        ("../x", "first", 600, "not valid"),
    ],
)
def test_a_wrong_place_is_refused(root: Path, run_id: str, from_run: str, tokens: int, says: str) -> None:
    """One clear error, and nothing is written."""
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match=says):
        adopt(root, run_id, from_run=from_run, tokens=tokens)
    assert sorted(root.rglob("*")) == before


def test_two_runs_cannot_start_from_each_other(root: Path) -> None:
    """The second of two adoptions that would make a circle is refused."""
    adopt(root, "second", from_run="first", tokens=600)
    with pytest.raises(UsageError, match="itself goes on from segment 1 of first"):
        adopt(root, "first", from_run="second", tokens=900)


def test_the_command_says_what_it_did(root: Path) -> None:
    """One line on stdout, or a row."""
    arguments = ["second", "--from", "first", "--tokens", "600", "--root", str(root)]
    done = CliRunner().invoke(adopt_run, arguments)
    assert done.output == "segment 1 of second starts from segment 1 of first at 600 tokens\n"


def test_a_place_that_was_never_reached_is_refused(root: Path) -> None:
    """All of the adopted run would be before it, and none of its curve left."""
    with open_run(root, run_id="running") as run:
        run.log({"loss": 1.0}, step=8, tokens=800)
        assert run.flush(60)
        for other in ("first", "running"):  # sealed, and open
            with pytest.raises(UsageError, match="came to 800 tokens, and never to 801"):
                adopt(root, "second", from_run=other, tokens=801)
    assert not list(root.glob("run_id=second/adoption=*"))


def test_a_place_at_a_checkpoint_beyond_the_last_point_is_taken(tmp_path: Path) -> None:
    """A run that logs now and then is saved in between."""
    with open_run(tmp_path, run_id="first") as run:
        run.log({"loss": 1.0}, step=8, tokens=800)
        (tmp_path / "model").write_bytes(b"weights")
        run.checkpoint(tmp_path / "model", step=9, tokens=900)
    _train(tmp_path, "second", 10, 12, 2.0)
    assert adopt(tmp_path, "second", from_run="first", tokens=900).tokens == 900
