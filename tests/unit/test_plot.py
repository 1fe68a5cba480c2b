"""The terminal plot of runs with much in them, and where its numbers come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrack import __main__ as program
from llmtrack import query
from llmtrack.query.draw import plot
from tests.handmade import write_part, write_segment
from tests.oracle import Point, Segment
from tests.pictures import SPIKE, large_root, odd_root


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the root with every kind of oddity."""
    return odd_root(tmp_path_factory.mktemp("odd"))


def test_alerts_evaluations_forks_gaps_and_damage_are_marked(odd: Path) -> None:
    """Below the axis, and counted in the legend."""
    with query.connect(odd, runs=["pretrain-7b"]) as con, query.connect(odd, points=False) as all_runs:
        (curve,) = plot.read_curves(con, "pretrain-7b", ["train/loss"], all_runs=all_runs)
    for axis in ("tokens", "step", "time"):
        lines = plot.draw(curve, axis=axis, width=120).splitlines()
        marks, legend = lines[-3], lines[-1]
        for character in "▲◆░▚":
            assert character in marks
        for text in (
            "▲ alert (2)",
            "◆ evaluated (4)",
            "Y fork (1)",
            "░ gap: points lost (1)",
            "▚ damaged: rows unreadable (1)",
        ):
            assert text in legend
        assert max(map(len, lines[:-2])) <= 120


def test_a_long_curve_is_thinned_out_and_counted_as_it_is(tmp_path: Path) -> None:
    """The spike is drawn, and the legend has the numbers of the log."""
    large_root(tmp_path, 30_000, 1)
    with query.connect(tmp_path) as con:
        (curve,) = plot.read_curves(con, "large", ["train/loss"], points=500)
        counts = con.execute("SELECT count(*), count(superseded_by) FROM metrics").fetchone()
    assert len(curve.points) < 600
    assert curve.counts()[:2] == counts
    picture = plot.draw(curve, width=100)
    assert f"superseded ({curve.counts()[1]:,} points)" in picture
    assert picture.splitlines()[2].strip().startswith(f"{SPIKE}┤")


def test_json_has_every_point(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None is thinned out."""
    with pytest.raises(SystemExit):
        program.main(["plot", "pretrain-7b", "train/loss", "train/lr", "--json", "--root", str(odd)])
    rows = json.loads(capsys.readouterr().out)
    with query.connect(odd) as con:
        expected = con.execute(
            "SELECT count(*) FROM metrics WHERE run_id = 'pretrain-7b' AND name IN ('train/loss', 'train/lr')"
        ).fetchone()
    assert (len(rows),) == expected
    assert len({(row["name"], row["segment"], row["seq"]) for row in rows}) == len(rows)


def test_a_fork_shows_its_parents_marks_each_in_a_place_of_its_own(odd: Path) -> None:
    """The checkpoint that it was forked from was evaluated: neither mark hides the other."""
    with query.connect(odd) as con:
        (curve,) = plot.read_curves(con, "pretrain-7b-recipe-1", ["train/loss"])
        lines = plot.draw(curve, width=100).splitlines()
    (marks,) = [line.split() for line in lines if set("".join(line.split())) == set("◆▲Y")]
    assert "".join(marks) == "◆▲▲Y◆"
    assert "◆ evaluated (2)" in lines[-1]
    assert "▲ alert (2)" in lines[-1]


def test_a_fork_shows_what_is_missing_in_its_parents_part(tmp_path: Path) -> None:
    """And does not take its parent's segment 1 for its own."""
    parent = [Point(tokens, "loss", 1.0) for tokens in range(10, 201, 10)]
    folder = write_segment(tmp_path, Segment("a", 1, points=parent))
    gap = {"seq": 50, "tokens": 90, "first_tokens": 60, "last_tokens": 80, "points": 3, "reason": "queue_full"}
    write_part(folder, "gaps", [gap])
    own = [Point(tokens, "loss", 2.0) for tokens in range(110, 301, 10)]
    write_segment(tmp_path, Segment("b", 1, 100, ("a", 1), points=own))
    with query.connect(tmp_path, runs=["b"]) as con:
        (curve,) = plot.read_curves(con, "b", ["loss"])
    assert [(gap["run_id"], gap["first_tokens"]) for gap in curve.marks.gaps] == [("a", 60)]
    for axis in ("tokens", "step"):
        marks = plot.draw(curve, axis=axis, width=100).splitlines()[-3]
        first, last = marks.index("░"), marks.rindex("░")
        width = 100 - 8
        assert first / width == pytest.approx(50 / 290, abs=0.1)
        assert last / width == pytest.approx(70 / 290, abs=0.1)


def test_values_near_the_ends_of_the_numbers_have_labels(tmp_path: Path) -> None:
    """On both kinds of axes."""
    write_segment(
        tmp_path,
        Segment("a", 1, points=[Point(t, n, v) for t in (1, 2) for n, v in (("huge", 1.7e308), ("tiny", 5e-324))]),
    )
    with query.connect(tmp_path) as con:
        huge, tiny = plot.read_curves(con, "a", ["huge", "tiny"])
    assert "e+308┤" in plot.draw(huge, log_y=True)
    assert "e-324┤" in plot.draw(tiny, log_y=True)
    assert "inf" not in plot.draw(huge)
    assert "nan" not in plot.draw(huge)


def test_places_are_told_apart_however_far_the_run_is(tmp_path: Path) -> None:
    """At 10^15 tokens four digits are the same everywhere."""
    points = [Point(10**15 + t * 4_000_000, "loss", 1.0) for t in range(100)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    with query.connect(tmp_path) as con:
        (curve,) = plot.read_curves(con, "a", ["loss"])
    labels = plot.draw(curve).splitlines()[-2].split()[:-1]
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)


def test_a_name_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    """It stays on its line, uncoloured, and from left to right."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(1, "a\n\x1b[31m\u202eb", 1.0)]))
    with query.connect(tmp_path) as con:
        (curve,) = plot.read_curves(con, "a", ["*"])
    assert plot.draw(curve).splitlines()[0] == "a �[31m�b  a"
