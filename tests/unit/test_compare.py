"""Runs compared at equal tokens: each number is what SQL over the raw points says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrack import __main__ as program
from llmtrack import open_run, query
from llmtrack.query.draw.compare import compare, read_picture
from llmtrack.writer.errors import UsageError
from tests.handmade import write_segment
from tests.oracle import Point, Segment
from tests.pictures import TOKENS_PER_STEP, odd_root

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def llmtrack(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the command line, in this process."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make three runs: one logs every 10 tokens, one every 7 and not as far, one something else."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(t, "loss", 1000.0 - t) for t in range(10, 201, 10)]))
    write_segment(tmp_path, Segment("b", 1, points=[Point(t, "loss", 900.0 - t) for t in range(7, 141, 7)]))
    write_segment(tmp_path, Segment("c", 1, points=[Point(1, "lr", 0.1)]))
    return tmp_path


def test_a_value_is_the_last_one_at_or_below_a_place(root: Path) -> None:
    """Nothing is interpolated, and beyond its last point a run has no value."""
    with query.connect(root) as con:
        found = compare(con, "loss", ["a", "b", "c"], at=[75, 140, 141, 5])
    assert (found.runs, found.without, found.grid) == (["a", "b"], ["c"], [5, 75, 140, 141])
    rows = {(row["tokens"], row["run_id"]): row for row in found.rows}
    assert [rows[75, run][name] for run in "ab" for name in ("value", "value_tokens")] == [930.0, 70, 830.0, 70]
    assert rows[140, "b"]["difference"] == 760.0 - 860.0
    assert rows[141, "b"]["value"] is None
    assert rows[141, "b"]["difference"] is None
    assert rows[5, "a"]["value"] is None


def test_places_are_even_from_where_all_have_begun_to_where_the_last_ends(root: Path) -> None:
    """Both ends are among them, and the last place that all have reached."""
    with query.connect(root) as con:
        assert compare(con, "loss", ["a", "b"], places=5).grid == [10, 57, 105, 140, 152, 200]
        assert compare(con, "loss", ["a"], places=2).grid == [10, 200]
        assert compare(con, "loss", ["a"], at=[3], places=5).grid == [3]


def test_means_over_a_stretch_leave_out_what_is_no_number(tmp_path: Path) -> None:
    """Of (tokens - stretch, tokens]; NaN and infinities count as no value."""
    values = [1.0, 2.0, math.nan, 4.0, math.inf, 6.0]
    points = [Point(10 * index, "loss", value) for index, value in enumerate(values, start=1)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    with query.connect(tmp_path) as con:
        (row,) = compare(con, "loss", ["a"], at=[60], mean_over=40).rows
        assert row["value"] == 5.0
        (row,) = compare(con, "loss", ["a"], at=[60]).rows
        assert row["value"] == 6.0
        (row,) = compare(con, "loss", ["a"], at=[50]).rows
        assert math.isinf(row["value"])


def test_a_fork_and_its_parent_are_equal_up_to_where_they_part(tmp_path: Path) -> None:
    """Superseded points have no say; every value is one that SQL finds on the curve."""
    odd_root(tmp_path)
    runs = ["pretrain-7b", "pretrain-7b-recipe-1"]
    with query.connect(tmp_path) as con:
        found = compare(con, "train/loss", runs, at=[place * 250 * TOKENS_PER_STEP for place in range(1, 9)])
        assert found.shared == {"pretrain-7b-recipe-1": 1000 * TOKENS_PER_STEP}
        assert compare(con, "train/loss", runs).grid[0] == 1000 * TOKENS_PER_STEP, "before there is nothing to compare"
        for row in found.rows:
            if row["value"] is None:
                assert row["tokens"] > 1400 * TOKENS_PER_STEP
                continue
            expected = con.execute(
                "SELECT value, tokens FROM series(?, 'train/loss') WHERE tokens <= ? ORDER BY tokens DESC LIMIT 1",
                [row["run_id"], row["tokens"]],
            ).fetchone()
            assert (row["value"], row["value_tokens"]) == expected
            if row["tokens"] <= 1000 * TOKENS_PER_STEP:
                assert row["difference"] == 0.0
        curves, differences = read_picture(con, found)
    assert len(curves["pretrain-7b-recipe-1"]) == 1400
    assert differences["pretrain-7b-recipe-1"][-1][0] <= 1400 * TOKENS_PER_STEP


def test_what_runs_have_in_common_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Children of one run, and a child of a child: each with the first that is named, and none with a stranger."""
    points = [Point(tokens, "loss", float(tokens)) for tokens in range(10, 101, 10)]
    write_segment(tmp_path, Segment("p", 1, points=points))
    for run_id, origin, start in (("c1", ("p", 1), 40), ("c2", ("p", 1), 60), ("c3", ("c1", 1), 70)):
        own = [Point(tokens, "loss", tokens + 0.5) for tokens in range(start + 10, 101, 10)]
        write_segment(tmp_path, Segment(run_id, 1, start, origin, points=own))
    write_segment(tmp_path, Segment("x", 1, points=points))
    with query.connect(tmp_path) as con:
        assert compare(con, "loss", ["c1", "c2", "c3", "p", "x"]).shared == {"c2": 40, "c3": 70, "p": 40}
        assert compare(con, "loss", ["c1", "c3", "p"]).grid[0] == 40
        assert compare(con, "loss", ["c1", "x"]).grid[0] == 10
    with pytest.raises(SystemExit):
        program.main(["compare", "loss", "c3", "c1", "--root", str(tmp_path)])
    assert "the same up to 70 tokens: c1 and c3 were one run until there" in capsys.readouterr().err


def test_a_metric_that_nobody_has_is_a_typo(root: Path) -> None:
    """With what may have been meant; one that is NaN everywhere is none."""
    write_segment(root, Segment("d", 1, points=[Point(1, "nan", math.nan)]))
    with query.connect(root) as con:
        with pytest.raises(UsageError, match="none of 2 runs has a metric 'los'") as error:
            compare(con, "los", ["a", "b"])
        assert error.value.hint == "one of loss"
        with pytest.raises(UsageError, match="nan is NaN everywhere"):
            compare(con, "nan", ["d"])


def test_the_command_prints_a_table_json_and_a_picture(root: Path, tmp_path: Path, llmtrack: Call) -> None:
    """Differences with their sign; runs without the metric are named; the numbers are those of the library."""
    picture = tmp_path / "x.svg"
    status, out, err = llmtrack("compare", "loss", "a", "b", "c", "--root", root, "--at", "70", "--at", "150")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["TOKENS", "a", "b", "-", "FIRST"]
    assert lines[2:] == [["70", "930", "830", "-100"], ["150", "850"]]
    assert "left out: c has no loss" in err
    status, out, err = llmtrack("compare", "loss", "[ab]", "--root", root, "--json", "-o", picture)
    assert status == 0
    rows: list[dict[str, Any]] = json.loads(out)
    with query.connect(root) as con:
        assert rows == compare(con, "loss", ["a", "b"]).rows
    assert picture.read_bytes().startswith(b"<?xml")
    status, _, err = llmtrack("compare", "loss", "a", "--root", root, "-o", tmp_path / "x.gif")
    assert (status, err.splitlines()[-1]) == (1, "  try: end its name with .png or .svg")


def test_places_are_told_apart_however_far_the_runs_are(tmp_path: Path, llmtrack: Call) -> None:
    """At 10^15 tokens four digits are the same everywhere."""
    points = [Point(10**15 + t * 4_000_000, "loss", 1.0) for t in range(100)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    status, out, _ = llmtrack("compare", "loss", "a", "--root", tmp_path)
    places = [line.split()[0] for line in out.splitlines()[2:]]
    assert status == 0
    assert len(places) == len(set(places)) == 12


@pytest.mark.parametrize(
    "command", [("plot", "a", "early"), ("compare", "early", "a"), ("report", "a", "--metric", "early")]
)
def test_a_metric_that_is_not_there_may_be_damaged(tmp_path: Path, llmtrack: Call, command: tuple[str, ...]) -> None:
    """The damage is told beside it: the only rows that had the metric may have been there."""
    run = open_run(tmp_path, run_id="a")
    for step, name in enumerate(("loss", "early", "loss"), 1):
        run.log({name: 1.0}, step=step, tokens=step * 10)
        assert run.flush(timeout=30)
    (part,) = tmp_path.glob("run_id=a/segment=00001/metrics-*.arrows")
    content = bytearray(part.read_bytes())
    content[content.index(b"early")] ^= 0xFF
    run.finish()
    for sealed in part.parent.glob("metrics-*"):
        sealed.unlink()
    part.write_bytes(content)
    status, _, err = llmtrack(*command, "--root", tmp_path)
    assert status == 1
    assert "'early'" in err
    assert "damaged: " in err
