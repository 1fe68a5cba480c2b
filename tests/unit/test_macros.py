"""The macros: each gives what a few lines of plain Python give for the same points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import resources

import duckdb
import hypothesis
import pytest
from hypothesis import strategies as st

from llmtrack.query import connect
from tests.handmade import write_segment
from tests.oracle import Point, Segment

_LOSS = "train/loss"
# A run that lost a stretch, and another metric beside; uneven steps, a spike, and a NaN.
_FIRST = [(10, 5.0), (20, 4.0), (25, math.nan), (40, 3.5), (50, 90.0), (60, 9.0)]
_SECOND = [(55, 3.25), (10_000, 3.0), (10_001, 2.5)]
_CURVE = [*_FIRST[:5], *_SECOND]


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """Return a root of three runs: one that was resumed, a fork of it, and one that came less far."""
    root = tmp_path_factory.mktemp("runs")
    others = [Point(tokens, "train/lr", tokens / 1000) for tokens in (20, 40, 55)]
    first = [Point(tokens, _LOSS, value) for tokens, value in _FIRST]
    write_segment(root, Segment("a", 1, points=[*first, *others[:2]], checkpoints=[50]), sealed=True)
    second = [Point(tokens, _LOSS, value) for tokens, value in _SECOND]
    write_segment(root, Segment("a", 2, 50, ("a", 1), points=[*second, *others[2:]]))
    write_segment(root, Segment("b", 1, 40, ("a", 1), points=[Point(70, _LOSS, 1.0)]), fork_reason="recipe")
    write_segment(root, Segment("c", 1, points=[Point(5, _LOSS, 6.0), Point(5, "train/lr", 0.5)]))
    with connect(root) as connection:
        yield connection


def smoothed(points: list[tuple[int, float]], half_life: float) -> list[float]:
    """Return the mean up to each point, in which a point weighs 2 ** -(its age / half_life); NaN before the first."""
    result: list[float] = []
    for index, (now, _) in enumerate(points):
        past = [(value, 2.0 ** -((now - tokens) / half_life)) for tokens, value in points[: index + 1]]
        past = [(value, weight) for value, weight in past if math.isfinite(value)]
        weights = sum(weight for _, weight in past)
        before = result[-1] if result else math.nan
        has_value = math.isfinite(points[index][1])
        result.append(sum(value * weight for value, weight in past) / weights if has_value else before)
    return result


def _bare_history() -> duckdb.DuckDBPyConnection:
    """Return the macros over an empty table instead of the view."""
    con = duckdb.connect()
    con.execute(
        "CREATE TABLE history (run_id VARCHAR, source_run VARCHAR, segment BIGINT, seq BIGINT, time TIMESTAMPTZ,"
        " step BIGINT, tokens BIGINT, name VARCHAR, value DOUBLE, settled BOOLEAN)"
    )
    con.execute(resources.files("llmtrack.query.sql").joinpath("macros.sql").read_text(encoding="utf-8"))
    return con


def test_series_is_the_curve(con: duckdb.DuckDBPyConnection) -> None:
    """What was left behind is not on it."""
    found = con.sql(f"SELECT tokens, value FROM series('a', '{_LOSS}')").fetchall()
    assert [str(row) for row in found] == [str(row) for row in _CURVE]


@pytest.mark.parametrize("half_life", [0.5, 7, 1000, 10**9])
def test_smooth_weighs_points_by_their_age_in_tokens(con: duckdb.DuckDBPyConnection, half_life: float) -> None:
    """A far jump forgets what was before it, and a NaN changes nothing."""
    found = con.execute(f"SELECT tokens, smooth FROM smooth('a', '{_LOSS}', {half_life})").fetchall()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in _CURVE]
    assert [value for _, value in found] == pytest.approx(smoothed(_CURVE, half_life), rel=1e-12)


@hypothesis.given(
    st.lists(
        st.tuples(st.integers(0, 400), st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf])),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([0.25, 1.0, 3.0, 50.0]),
)
@hypothesis.settings(max_examples=15)
def test_smooth_is_what_the_formula_says(steps: list[tuple[int, float]], half_life: float) -> None:
    """Whatever the distances are: many in one block of half-lives, or none in many."""
    points, tokens = [], 10**15
    for step, value in steps:
        tokens += step
        points.append((tokens, value))
    with _bare_history() as con:
        columns = [[seq for seq, _ in enumerate(points)], *map(list, zip(*points, strict=True))]
        con.execute(
            "INSERT INTO history SELECT 'a', 'a', 1, unnest(?), NULL, 0, unnest(?), 'x', unnest(?), true", columns
        )
        found = con.execute(f"SELECT smooth FROM smooth('a', 'x', {half_life})").fetchall()
    values = [math.nan if row[0] is None else row[0] for row in found]
    assert values == pytest.approx(smoothed(points, half_life), rel=1e-9, abs=1e-9, nan_ok=True)


def test_bucket_keeps_every_spike(con: duckdb.DuckDBPyConnection) -> None:
    """Pieces of equal width in tokens; none of the points is in two, and none in none."""
    columns = "bucket, first_tokens, last_tokens, points, min, max, mean, last, nonfinite"
    found = con.sql(f"SELECT {columns} FROM bucket('a', '{_LOSS}', 3)").fetchall()
    assert found == [
        (0, 10, 55, 6, 3.25, 90.0, pytest.approx((5 + 4 + 3.5 + 90 + 3.25) / 5), 3.25, 1),
        (2, 10_000, 10_001, 2, 2.5, 3.0, 2.75, 2.5, 0),
    ]
    for pieces in (1, 2, 7, 10_000):
        rows = con.sql(f"FROM bucket('a', '{_LOSS}', {pieces})").fetchall()
        assert sum(row[3] for row in rows) == len(_CURVE)
        assert max(row[5] for row in rows if row[5] is not None) == 90.0  # none where all is NaN
        assert len(rows) <= pieces


@pytest.mark.parametrize("call", ["bucket('a', 'train/loss', 0)", "smooth('a', 'train/loss', 0)"])
def test_what_a_macro_cannot_take_is_said(con: duckdb.DuckDBPyConnection, call: str) -> None:
    """No empty answer, and no division by zero."""
    with pytest.raises(duckdb.InvalidInputException, match="must be"):
        con.sql(f"FROM {call}").fetchall()


def test_at_tokens_compares_runs_at_the_same_place(con: duckdb.DuckDBPyConnection) -> None:
    """Each with its last point at or below it, from its parent where it has none of its own yet."""
    columns = "run_id, tokens, value, source_run, segment"
    assert con.sql(f"SELECT {columns} FROM at_tokens('{_LOSS}', 54)").fetchall() == [
        ("a", 50, 90.0, "a", 1),
        ("b", 40, 3.5, "a", 1),
        ("c", 5, 6.0, "c", 1),
    ]
    assert [row[2] for row in con.sql(f"SELECT {columns} FROM at_tokens('{_LOSS}', 10000)").fetchall()] == [3, 1, 6]
    assert con.sql(f"FROM at_tokens('{_LOSS}', 4)").fetchall() == []


def test_wide_has_all_metrics_of_a_place_in_one_row(con: duckdb.DuckDBPyConnection) -> None:
    """As a map; a PIVOT, which no macro can hold, makes columns of them."""
    found = con.sql("SELECT metrics FROM wide('a') WHERE tokens = 40").fetchall()
    assert [row[0] for row in found] == [{_LOSS: 3.5, "train/lr": 0.04}]
    assert con.sql("SELECT count(*) FROM wide('a')").fetchall() == [(len(_CURVE),)]
    pivot = con.sql(
        "PIVOT (SELECT tokens, step, name, value FROM history WHERE run_id = 'a')"
        " ON name USING max(value) GROUP BY tokens, step ORDER BY tokens"
    )
    assert pivot.columns == ["tokens", "step", _LOSS, "train/lr"]
    assert pivot.fetchall()[3] == (40, 4, 3.5, 0.04)
