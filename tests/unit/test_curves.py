"""Curves thinned out: what a picture needs of them, and nothing that the log does not have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llmtrack import query
from llmtrack.query.draw import curves
from llmtrack.writer.errors import UsageError
from tests.handmade import write_segment
from tests.oracle import Point, Segment
from tests.pictures import SPIKE, large_root


def test_a_spike_of_one_step_among_many_stays(tmp_path: Path) -> None:
    """The highest, the lowest, the first and the last point of every stretch are kept, each as the log has it."""
    large_root(tmp_path, 6000, 2)
    with query.connect(tmp_path) as con:
        lines = curves.count_lines(con, "large", ["train/loss"])
        curves.read_points(con, lines, at_most=100)
        kept = [(line.segment, *row[:-1]) for line in lines for row in line.rows]
        assert len(kept) < 150
        assert SPIKE in [point[-1] for point in kept]
        found = con.execute(
            "SELECT segment, seq, epoch_ms(time), step, tokens, value FROM metrics WHERE name = 'train/loss'"
        ).fetchall()
    assert set(kept) <= set(found)
    for line in lines:
        own = sorted(
            point for point in found if point[0] == line.segment and line.rows[0].seq <= point[1] <= line.rows[-1].seq
        )
        assert line.count == len(own)
        assert (line.rows[0].seq, line.rows[-1].seq) == (own[0][1], own[-1][1])
        values = [row.value for row in line.rows]
        assert (min(values), max(values)) == (min(point[-1] for point in own), max(point[-1] for point in own))


def test_stretches_have_the_mean_of_all_their_points(tmp_path: Path) -> None:
    """What is smoothed is what was logged, and not the extremes that are kept."""
    large_root(tmp_path, 4000, 1)
    with query.connect(tmp_path) as con:
        lines = curves.count_lines(con, "large", ["train/loss"])
        curves.read_points(con, lines, at_most=80)
        for line in lines:
            assert sum(stretch.kept for stretch in line.stretches) == len(line.rows)
            assert sum(stretch.numbers for stretch in line.stretches) == line.count
            mean = sum(stretch.numbers * (stretch.mean or 0) for stretch in line.stretches) / line.count
            (expected,) = con.execute(
                "SELECT avg(value) FROM metrics WHERE segment = ? AND superseded_by IS NOT DISTINCT FROM ?",
                [line.segment, line.superseded_by],
            ).fetchone() or (None,)
            assert mean == pytest.approx(expected, rel=1e-12)


def test_what_is_no_number_is_kept_apart_from_the_extremes(tmp_path: Path) -> None:
    """NaN and both infinities stay, in a curve that is thinned out a lot."""
    odd = {100: math.nan, 101: math.inf, 102: -math.inf}
    points = [Point(tokens, "loss", odd.get(tokens, float(tokens))) for tokens in range(1, 1001)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    with query.connect(tmp_path) as con:
        (line,) = curves.count_lines(con, "a", ["loss"])
        curves.read_points(con, [line], at_most=16)
    assert line.odd == 3
    assert [row.tokens for row in line.rows if not math.isfinite(row.value)] == [100, 101, 102]
    assert len(line.rows) <= 16 + 3
    assert [stretch.mean for stretch in line.stretches if stretch.numbers == 247] == [pytest.approx(125.2, abs=2)]


def test_short_curves_are_kept_whole(tmp_path: Path) -> None:
    """And have no stretches: every point stands for itself."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(tokens, "loss", 1.0) for tokens in range(1, 51)]))
    with query.connect(tmp_path) as con:
        (line,) = curves.count_lines(con, "a", ["loss"])
        curves.read_points(con, [line], at_most=50)
    assert (len(line.rows), line.stretches) == (50, [])


def test_points_at_the_same_tokens_are_thinned_out_too(tmp_path: Path) -> None:
    """Somebody who counts no tokens still has a curve by step."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(0, "loss", index / 7) for index in range(2000)]))
    with query.connect(tmp_path) as con:
        (line,) = curves.count_lines(con, "a", ["loss"])
        curves.read_points(con, [line], at_most=100)
    assert 50 <= len(line.rows) <= 100
    assert max(row.value for row in line.rows) == 1999 / 7


def test_a_budget_is_shared_so_that_short_curves_lose_nothing() -> None:
    """What they do not need goes to the long ones."""
    assert curves.share({"a": 10, "b": 1000, "c": 1000}, 210) == 100
    assert curves.share({"a": 10, "b": 20}, 1000) == 20
    assert curves.share(dict.fromkeys(range(100), 100), 10) == 8, "never so few that a spike has no place"
    assert curves.share({}, 10) == 0


def test_metrics_are_named_or_globbed_and_a_typo_is_told_what_there_is() -> None:
    """Each once, in the order in which they were named."""
    known = ["train/grad_norm", "train/loss", "train/lr"]
    assert curves.select_metrics(known, ["train/lr", "train/*"], "a") == ["train/lr", "train/grad_norm", "train/loss"]
    with pytest.raises(UsageError, match="run a has no metric 'train/los'") as error:
        curves.select_metrics(known, ["train/los"], "a")
    assert "train/loss" in error.value.hint
