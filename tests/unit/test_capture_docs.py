"""What docs/CAPTURE.md shows can be done, and comes out as it says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

import llmtrack
from llmtrack.writer.capture.cadence import Cadence
from llmtrack.writer.capture.flops import FORMULAS
from tests.reading import find_segment, read_segment

pytest.importorskip("torch")
query = pytest.importorskip("llmtrack.query")

_PAGE = Path(__file__).parents[2] / "docs" / "CAPTURE.md"

pytestmark = pytest.mark.skipif(not _PAGE.is_file(), reason="the documents stand in the checkout alone")


def blocks(language: str) -> list[str]:
    """Return the examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_loop_of_the_page_trains_and_its_sql_computes_old_rows_again(tmp_path: Path) -> None:
    """The page's own code, then its own query over what that has logged."""
    scope: dict[str, Any] = {"root": tmp_path}
    exec(blocks("python")[0], scope)  # noqa: S102  # it is ours
    log = read_segment(find_segment(tmp_path))
    assert log.steps() == [10, 14, 20]
    losses, speeds = log.series("train/loss"), log.series("throughput/tokens_per_s")
    assert len(losses) == len(speeds) == 3
    flops = scope["flops"]
    assert log.series("throughput/mfu") == [pytest.approx(flops.mfu(speed)) for speed in speeds]

    (statement,) = blocks("sql")
    with contextlib.closing(query.connect(tmp_path)) as con:
        rows = con.sql(statement).fetchall()
    again = [speed * 6 * 7e9 / 756e12 for speed in speeds]
    palm = [speed * (6 * 7e9 + 12 * 32 * 32 * 128 * 4096) / 989.4e12 for speed in speeds]
    assert [row[1] for row in rows] == pytest.approx(again)
    assert [row[2] for row in rows] == pytest.approx(palm)
    assert [row[0] for row in rows] == [80, 112, 160]


def test_the_table_of_the_page_is_one() -> None:
    """With the groups that the page speaks of."""
    (table,) = blocks("toml")
    assert Cadence.parse(table).group_of("layers/3/grad_norm") == "per_layer"


def test_the_page_has_every_formula() -> None:
    """By name and version."""
    for formula in FORMULAS.values():
        assert f"| `{formula.name}` | {formula.version} |" in _PAGE.read_text(encoding="utf-8")


def test_the_page_names_every_call_of_the_reducer() -> None:
    """None is left for a reader to find by himself."""
    text = _PAGE.read_text(encoding="utf-8")
    calls = [name for name in vars(llmtrack.Reducer) if not name.startswith("_")]
    assert calls
    assert [name for name in calls if not re.search(rf"\b{name}\b", text)] == []
