"""What docs/SQL.md shows can be asked, and is answered."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from llmtrack.query import connect
from llmtrack.query.sql.ask import check_reads
from llmtrack.writer.checkpoints.evals import log_eval
from tests.handmade import write_heartbeat, write_part, write_segment
from tests.oracle import Point, Segment

_PAGE = Path(__file__).parents[2] / "docs" / "SQL.md"

pytestmark = pytest.mark.skipif(not _PAGE.is_file(), reason="the documents stand in the checkout alone")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a root in which every question has an answer."""
    root = tmp_path_factory.mktemp("runs")
    loss = [Point(tokens, "train/loss", 5.0 - tokens / 100) for tokens in range(10, 101, 10)]
    first = Segment("pretrain-7b", 1, points=loss, exit="failed")
    folder = write_segment(root, first, sealed=True, config='{"optimizer": {"lr": 0.1}}', scheduler='{"job_id": "7"}')
    write_part(folder, "checkpoints", [{"tokens": 50, "ckpt_id": "c-50", "path": "/checkpoints/50"}])
    raised = {"tokens": 90, "rule": "loss_spike", "metric": "train/loss", "phase": "raised", "alert_id": "x"}
    write_part(folder, "alerts", [raised])
    write_part(folder, "batches", [{"tokens": 90, "batch_hash": "h", "batch_ids": ["1", "2"], "position": 9}])
    write_part(
        folder, "gaps", [{"tokens": 90, "first_tokens": 81, "last_tokens": 89, "points": 3, "reason": "io_error"}]
    )
    again = [Point(tokens, "train/loss", 4.5 - tokens / 100) for tokens in (60, 70)]
    folder = write_segment(root, Segment("pretrain-7b", 2, 50, ("pretrain-7b", 1), points=again))
    write_heartbeat(folder, dt.datetime.now(dt.UTC), tokens=70)
    fork = Segment("fork", 1, 50, ("pretrain-7b", 1), points=[Point(60, "train/loss", 1.0)])
    write_segment(root, fork, fork_reason="recipe", recipe_diff='{"lr": [1, 2]}')
    log_eval(root, "c-50", "hellaswag", {"acc": 0.5})
    return root


@pytest.fixture(scope="module")
def con(root: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Return a connection to it."""
    with connect(root) as connection:
        yield connection


def statements(root: Path) -> list[str]:
    """Return each statement of the page, word for word, over this root in place of the example's."""
    text = _PAGE.read_text(encoding="utf-8").replace("/shared/runs", str(root))
    blocks = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r'llmtrack sql "(.*?)"', text)
    blocks += re.findall(r'con\.sql\("(.*?)"\)', text)
    return [one.strip() for block in blocks for one in re.sub(r"--.*", "", block).split(";") if one.strip()]


def test_every_query_of_the_page_has_an_answer(con: duckdb.DuckDBPyConnection, root: Path) -> None:
    """The twenty questions and those of the beginning, each as `llmtrack sql` takes it."""
    asked = statements(root)
    assert len(asked) >= 20
    for statement in asked:
        check_reads(con, statement)
        assert con.sql(statement).fetchall(), statement


def test_the_questions_are_numbered_to_twenty() -> None:
    """None was lost on the way."""
    numbers = [int(number) for number in re.findall(r"^-- (\d+)\. ", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)]
    assert numbers == list(range(1, 21))


def test_pandas_polars_and_arrow_come_out(con: duckdb.DuckDBPyConnection) -> None:
    """By the page's own lines; each gives the same curve."""
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
        if ".pl()" in block
    )
    pytest.importorskip("pandas", reason="pandas comes along with MLflow")
    scope: dict[str, Any] = {"con": con}
    lines = code.splitlines()
    exec("\n".join(line for line in lines if ".pl()" not in line), scope)  # noqa: S102  # it is ours
    expected = con.sql("SELECT tokens, value FROM series('pretrain-7b', 'train/loss')").fetchall()
    assert list(scope["frame"].itertuples(index=False, name=None)) == expected
    assert [tuple(row.values()) for row in scope["table"].to_pylist()] == expected
    pytest.importorskip("polars", reason="Polars is for developers")
    exec("\n".join(line for line in lines if ".pl()" in line or "curve =" in line), scope)  # noqa: S102  # it is ours
    assert scope["polars_frame"].rows() == expected


def test_the_page_names_every_view_and_its_columns(con: duckdb.DuckDBPyConnection) -> None:
    """A reader need not look into views.sql."""
    text = _PAGE.read_text(encoding="utf-8")
    for (view,) in con.execute(
        "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal"
    ).fetchall():
        assert f"| `{view}` |" in text, view
        for column in con.sql(f"FROM {view} LIMIT 0").columns:
            assert f"`{column}`" in text, (view, column)
    for (macro,) in con.execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE NOT internal AND schema_name = 'main'"
    ).fetchall():
        assert f"| `{macro}(" in text, macro
