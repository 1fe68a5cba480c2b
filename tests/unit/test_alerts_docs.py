"""What docs/ALERTS.md shows can be done, and comes out as it says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from llmtrack.alerts import default
from tests.reading import read_segment

query = pytest.importorskip("llmtrack.query")

_PAGE = Path(__file__).parents[2] / "docs" / "ALERTS.md"

pytestmark = pytest.mark.skipif(not _PAGE.is_file(), reason="the documents stand in the checkout alone")


def blocks(language: str) -> list[str]:
    """Return the examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_of_the_page_raise_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The spike with its batches, the detector of one's own, and the SQL over both."""
    scope: dict[str, Any] = {"root": tmp_path}
    for example in blocks("python"):
        exec(example, scope)  # noqa: S102  # it is ours
    told = capsys.readouterr().out
    assert "train/loss is 9, 176.1 deviations above 2.055" in told
    (alert,) = [row for row in read_segment(scope["run"].folder)["alerts"] if row["phase"] == "raised"]
    assert (alert["rule"], alert["message"]) == ("empty_shards", "3 empty shards")
    (statement,) = blocks("sql")
    with contextlib.closing(query.connect(tmp_path)) as con:
        rows = con.sql(statement).fetchall()
    assert rows == [(250, "loss_spike", step, [f"shard-7/{step}"]) for step in (248, 249, 250)]


def test_the_page_has_every_rule_and_every_threshold() -> None:
    """By name."""
    text = _PAGE.read_text(encoding="utf-8")
    for detector in default(8):
        assert f"| `{detector.rule}` |" in text
        assert f"`{type(detector).__name__}`" in text
        for name in detector.thresholds():
            assert f"`{name}`" in text
