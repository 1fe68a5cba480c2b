"""A saved catalog: DuckDB alone gives what we give."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from llmtrack import __main__ as program
from llmtrack.query import connect, save_catalog
from llmtrack.writer.checkpoints.evals import log_eval
from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.seal import seal_part, seal_segment
from tests.handmade import DAY, write_part, write_segment
from tests.oracle import Point, Segment

_VIEWS = (
    *("runs", "segments", "metrics", "live", "history", "checkpoints", "alerts", "batches", "evals", "gaps"),
    *("goodput", "damages"),
)
_MACROS = (
    "series('a', 'loss')",
    "smooth('a', 'loss', 15)",
    "bucket('b', 'loss', 2)",
    "at_tokens('loss', 30)",
    "wide('a')",
)
# In a process that has nothing of ours: -I keeps the current folder and PYTHONPATH off its path.
_PLAIN = """
import json, sys
import duckdb
con = duckdb.connect(sys.argv[1], read_only=True)
con.execute("SET TimeZone = 'UTC'")
rows = {name: con.execute(f"FROM {name}").fetchall() for name in json.loads(sys.argv[2])}
print(json.dumps({name: list(map(str, found)) for name, found in rows.items()}))
assert not any(name.partition(".")[0] == "llmtrack" for name in sys.modules)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a run that was resumed, sealed in part, and a fork of it that is open."""
    root = tmp_path / "it's a root"
    points = [Point(tokens, "loss", float(tokens)) for tokens in (10, 20, 30)]
    write_segment(root, Segment("a", 1, points=[*points, Point(30, "lr", math.nan)], checkpoints=[20]), sealed=True)
    write_segment(root, Segment("a", 2, 20, ("a", 1), points=[Point(25, "loss", 7.0)]), project="p")
    folder = write_segment(root, Segment("b", 1, 20, ("a", 1), points=[Point(30, "loss", 8.0)]), fork_reason="recipe")
    write_part(
        folder, "gaps", [{"tokens": 30, "first_tokens": 21, "last_tokens": 29, "points": 3, "reason": "io_error"}]
    )
    log_eval(root, "a-1@20", "task", {"acc": 0.5})
    return root


def plain(path: Path, *names: str) -> dict[str, list[str]]:
    """Return rows of a catalog from DuckDB alone."""
    command = [sys.executable, "-I", "-c", _PLAIN, str(path), json.dumps(names)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=path.parent, timeout=60)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def ours(root: Path, *names: str) -> dict[str, list[str]]:
    """Return the same from a connection of ours."""
    with connect(root) as con:
        return {name: [str(row) for row in con.execute(f"FROM {name}").fetchall()] for name in names}


def test_a_catalog_gives_in_duckdb_alone_what_connect_gives(root: Path, tmp_path: Path) -> None:
    """Every view and macro, open and sealed parts, without llmtrack."""
    path = tmp_path / "catalog.duckdb"
    assert save_catalog(root, path) == []
    found, expected = plain(path, *_VIEWS, *_MACROS), ours(root, *_VIEWS, *_MACROS)
    for name in (*_VIEWS, *_MACROS):
        assert sorted(found[name]) == sorted(expected[name]), name
    assert found["live"]
    assert found["evals"]
    assert found["gaps"]


def test_a_catalog_is_of_its_moment_and_saved_again_of_the_next(root: Path, tmp_path: Path) -> None:
    """What was open then stays in it, even when that is sealed; a new one takes its place whole."""
    path = tmp_path / "catalog.duckdb"
    save_catalog(root, path)
    before = ours(root, "live")
    folder = write_segment(root, Segment("a", 3, 25, ("a", 2), points=[Point(26, "loss", 1.0)]))
    seal_segment(folder.parent / "segment=00002")
    assert sorted(plain(path, "live")["live"]) == sorted(before["live"])
    with duckdb.connect(str(path), read_only=True) as reading:
        save_catalog(root, path)  # whoever reads the old one is not disturbed
        assert len(reading.execute("FROM live").fetchall()) == len(before["live"])
    assert sorted(plain(path, "live")["live"]) == sorted(ours(root, "live")["live"]) != sorted(before["live"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["catalog.duckdb", "it's a root"]


@pytest.mark.skipif(
    duckdb.__version__.startswith("1.1."), reason="there views name no other view of their own database"
)
def test_a_catalog_can_be_attached(root: Path, tmp_path: Path) -> None:
    """Under any name, beside tables of one's own; the macros want USE."""
    save_catalog(root, tmp_path / "c.duckdb", runs=["a"])
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{tmp_path}/c.duckdb' AS runs_of_ours (READ_ONLY)")
        assert con.execute("SELECT DISTINCT run_id FROM runs_of_ours.live").fetchall() == [("a",)]
        con.execute("USE runs_of_ours")
        assert len(con.execute("FROM series('a', 'loss')").fetchall()) == 3


def test_a_catalog_of_odd_names_values_and_damage_is_the_same_elsewhere(tmp_path: Path) -> None:
    """Quotes, newlines and nothing at all in names; NaN, infinities, -0; empty runs; damage in an open part."""
    root = tmp_path / "ünï 'root'\nx [1]*?"
    names = ["it's", 'a "b"', "é/😀", "new\nline", "semi;--", "%_like", "", " ", "NULL", "A", "a"]
    values = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1.0, 2.0, 3.0, 4.0, 5.0]
    rows = [
        {"seq": seq, "tokens": seq, "time": DAY, "name": name, "value": value}
        for seq in range(1, 11)
        for name, value in zip(names, values, strict=True)
    ]
    sealed, _, part = (
        write_part(write_segment(root, Segment(run_id, 1)), "metrics", rows, batch=11) for run_id in ("007", "a", "A")
    )
    seal_part(sealed)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (root / "run_id=empty").mkdir()
    (root / "run_id=no-start" / "segment=00001").mkdir(parents=True)
    log_eval(root, "nobody@7", "t'ask", {"ac'c\n": math.nan}, harness="h'")
    path = tmp_path / "cata'log.duckdb"
    assert [str(row[1]) for row in save_catalog(root, path)] == [str(part)]
    asked: tuple[str, ...] = (*_VIEWS, "wide('007')", "wide('empty')")
    asked += tuple(f"series('a', '{name.replace(chr(39), chr(39) * 2)}')" for name in names)
    found, expected = plain(path, *asked), ours(root, *asked)
    assert {name: sorted(rows) for name, rows in found.items()} == {
        name: sorted(rows) for name, rows in expected.items()
    }
    assert [len(found[name]) for name in ("metrics", "damages", "evals", "wide('007')")] == [319, 1, 1, 10]
    assert [len(found[name]) for name in asked if name.startswith("series")] == [10] * len(names)


def test_the_command_saves_and_says_what_is_damaged(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 4, and the catalog is there all the same."""
    sealed = next(root.rglob("*.parquet"))
    content = bytearray(sealed.read_bytes())
    content[20] ^= 1
    sealed.write_bytes(content)
    path = tmp_path / "c.duckdb"
    with pytest.raises(SystemExit) as ended:
        program.main(["sql", "--save", str(path), "--root", str(root)])
    assert ended.value.code == 4
    assert str(sealed) in capsys.readouterr().err
    assert len(plain(path, "live")["live"]) == 2


@pytest.mark.parametrize("args", [[], ["FROM runs", "--save", "x.duckdb"]])
def test_a_query_or_a_catalog_and_not_both(root: Path, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line and a remedy."""
    with pytest.raises(SystemExit) as ended:
        program.main(["sql", *args, "--root", str(root)])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: give a query, or --save FILE\n  try: ")


def test_a_catalog_takes_no_other_files_place(root: Path, tmp_path: Path) -> None:
    """Nor a place that is not there."""
    path = tmp_path / "notes.txt"
    path.write_text("mine, and longer than a magic number", encoding="utf-8")
    with pytest.raises(UsageError, match="no DuckDB database"):
        save_catalog(root, path)
    assert path.read_text(encoding="utf-8").startswith("mine")
    with pytest.raises(UsageError, match="cannot write"):
        save_catalog(root, tmp_path / "nowhere" / "c.duckdb")


def test_the_sealed_parquet_alone_is_all_points_that_were_sealed(root: Path) -> None:
    """For people who have DuckDB and nothing else: superseded ones included, open ones not."""
    query = (
        "SELECT run_id, segment::BIGINT, tokens, value FROM"
        f" read_parquet('{str(root).replace(chr(39), chr(39) * 2)}/*/*/metrics-*.parquet', hive_partitioning = true)"
        " WHERE name = 'loss' ORDER BY tokens"
    )
    with duckdb.connect() as con:
        rows = con.execute(query).fetchall()
    assert rows == [("a", 1, 10, 10.0), ("a", 1, 20, 20.0), ("a", 1, 30, 30.0)]
