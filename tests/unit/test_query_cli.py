"""The commands that look at a root: what they print, where, and how they end."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrack import __main__ as program
from llmtrack import open_run
from llmtrack.query import connect
from llmtrack.query.draw import canvas
from llmtrack.query.runs import latest
from llmtrack.query.runs.select import select_run, select_runs
from llmtrack.query.text import console, layout
from llmtrack.writer.errors import CorruptSegmentError, UsageError
from llmtrack.writer.format import SCHEMAS, part_name
from llmtrack.writer.log.seal import seal_part, seal_segment
from llmtrack.writer.log.stream import encode_head
from tests import faults
from tests.handmade import DAY, write_heartbeat, write_part, write_segment
from tests.oracle import Point, Segment


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return what `--json` printed, read by a strict parser."""

        def refuse(constant: str) -> float:
            raise ValueError(constant)

        rows: list[dict[str, Any]] = json.loads(self.out, parse_constant=refuse)
        return rows


Command = Callable[..., Result]


@pytest.fixture
def llmtrack(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return the command line, in this process."""

    def call(*args: str | Path) -> Result:
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a run that lost a stretch, was forked with another recipe, and has a gap."""
    root = tmp_path / "runs"
    loss = [Point(tokens, "train/loss", 5.0 - tokens / 100) for tokens in range(10, 201, 10)]
    first = Segment("pretrain-7b", 1, points=loss, checkpoints=[50, 100])
    write_segment(root, first, project="p", run_name="seven", host="n1", recipe_hash="r1")
    again = [Point(tokens, "train/loss", 4.5 - tokens / 100) for tokens in range(110, 301, 10)]
    second = Segment("pretrain-7b", 2, 100, ("pretrain-7b", 1), points=again, checkpoints=[200], exit="finished")
    folder = write_segment(root, second, project="p", run_name="seven")
    gap = {"tokens": 250, "first_tokens": 210, "last_tokens": 230, "points": 12, "reason": "io_error", "errno": 28}
    write_part(folder, "gaps", [gap])
    child = Segment("pretrain-7b-recipe-1", 1, 200, ("pretrain-7b", 2), points=[Point(210, "train/loss", float("nan"))])
    diff = json.dumps({"lr": [0.0003, 0.0001]})
    folder = write_segment(root, child, fork_reason="recipe", recipe_diff=diff)
    write_heartbeat(folder, dt.datetime.now(dt.UTC), tokens=210)
    return root


@pytest.fixture
def damaged(root: Path) -> Path:
    """Flip a bit in the first batch of the root's first part of metrics."""
    path = root / "run_id=pretrain-7b" / "segment=00001" / part_name("metrics", 1)
    content = bytearray(path.read_bytes())
    content[len(encode_head("metrics")) + 700] ^= 1
    path.write_bytes(content)
    return path


# ls


def test_ls_lists_runs_the_latest_first(llmtrack: Command, root: Path) -> None:
    """With status, tokens, where they were forked from, and what was lost."""
    result = llmtrack("ls", "--root", root)
    assert result.status == 0
    head, _, child, parent = (line.split() for line in result.out.splitlines())
    assert head[:8] == ["RUN", "STATUS", "TOKENS", "STEP", "LOSS", "TOKENS/S", "RESTARTS", "SIZE"]
    assert child[:3] == ["pretrain-7b-recipe-1", "running", "210"]
    assert "pretrain-7b at 200 (recipe)" in result.out
    assert parent[:7] == ["pretrain-7b", "finished", "300", "30", "1.5", "0", "1"]
    assert parent[-1] == "12"
    assert result.err == ""


def test_ls_prints_the_view_as_json(llmtrack: Command, root: Path) -> None:
    """An array of rows with the columns of `runs`, and counts."""
    child, parent = llmtrack("ls", "--root", root, "--json").rows
    assert (parent["run_id"], parent["status"], parent["tokens"], parent["segments"]) == (
        "pretrain-7b",
        "finished",
        300,
        2,
    )
    assert (parent["points_lost"], parent["damages"], parent["alerts"]) == (12, 0, 0)
    assert parent["first_time"] == "2025-03-01T01:00:00.000Z"
    assert (child["parent_run"], child["fork_reason"], child["fork_tokens"]) == ("pretrain-7b", "recipe", 200)


def test_ls_takes_names_and_globs(llmtrack: Command, root: Path) -> None:
    """Only the runs that were meant."""
    assert [row["run_id"] for row in llmtrack("ls", "*recipe*", "--root", root, "--json").rows] == [
        "pretrain-7b-recipe-1"
    ]
    assert len(llmtrack("ls", "pretrain*", "--root", root, "--json").rows) == 2


def test_the_root_is_the_option_the_variable_or_the_current_folder(
    llmtrack: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order."""
    monkeypatch.chdir(root)
    assert len(llmtrack("ls", "--json").rows) == 2
    monkeypatch.chdir("/")
    monkeypatch.setenv("LLMTRACK_DIR", str(root))
    assert len(llmtrack("ls", "--json").rows) == 2
    monkeypatch.setenv("LLMTRACK_DIR", "/nowhere")
    assert len(llmtrack("ls", "--json", "--root", root).rows) == 2


def test_an_empty_root_is_no_error(llmtrack: Command, tmp_path: Path) -> None:
    """Nothing on stdout, one line for the person on stderr, an empty array as JSON."""
    assert llmtrack("ls", "--root", tmp_path) == Result(0, "", f"there are no runs in {tmp_path}\n")
    assert llmtrack("ls", "--root", tmp_path, "--json") == Result(0, "[]\n", "")


def test_the_numbers_of_ls_are_those_of_the_raw_log(llmtrack: Command, root: Path) -> None:
    """Loss, speed, restarts, alerts, what was lost and the size: each computed again, from all points and files."""
    parent = root / "run_id=pretrain-7b"
    write_part(parent / "segment=00002", "alerts", [{"tokens": 290, "alert_id": "x", "phase": "raised"}])
    seal_segment(parent / "segment=00002")
    write_segment(root, Segment("resumed", 1, points=[Point(tokens, "train/loss", 3.0) for tokens in (10, 30)]))
    write_segment(root, Segment("resumed", 2, 20, ("resumed", 1), points=[Point(30, "train/lr", 1.0)]), sealed=True)
    write_segment(root, Segment("silent", 1))
    with connect(root) as con:
        expected = con.sql("""
            SELECT r.run_id, p.loss, p.loss_tokens, r.restarts, coalesce(a.alerts, 0), coalesce(g.points, 0), t.speed
            FROM (SELECT run_id, count(*) - 1 AS restarts FROM segments GROUP BY run_id) r
            LEFT JOIN (
                SELECT run_id, arg_max(value, tokens) AS loss, max(tokens) AS loss_tokens
                FROM history WHERE name = 'train/loss' GROUP BY run_id
            ) p USING (run_id)
            LEFT JOIN (SELECT run_id, count(*) AS alerts FROM alerts WHERE phase = 'raised' GROUP BY 1) a USING (run_id)
            LEFT JOIN (SELECT run_id, sum(points)::BIGINT AS points FROM gaps GROUP BY 1) g USING (run_id)
            JOIN (
                SELECT run_id, (last_tokens - start_tokens) / nullif(epoch(last_time) - epoch(start_time), 0) AS speed
                FROM segments QUALIFY segment = max(segment) OVER (PARTITION BY run_id)
            ) t USING (run_id)
            ORDER BY r.run_id
        """).fetchall()
    rows = sorted(llmtrack("ls", "--root", root, "--json").rows, key=lambda row: row["run_id"])
    columns = ("run_id", "loss", "loss_tokens", "restarts", "alerts", "points_lost", "tokens_per_s")
    found = [tuple(row[column] for column in columns) for row in rows]
    assert [row[0] for row in found] == ["pretrain-7b", "pretrain-7b-recipe-1", "resumed", "silent"]
    for one, other in zip(found, expected, strict=True):
        assert one[:1] + one[2:6] == other[:1] + other[2:6]
        assert one[1] == ("NaN" if other[1] is not None and math.isnan(other[1]) else other[1])
        assert one[6] == pytest.approx(other[6])
    sizes = {row["run_id"]: row["size_bytes"] for row in rows}
    files = [path for path in parent.rglob("*") if path.is_file()]
    assert sizes["pretrain-7b"] == sum(path.stat().st_size for path in files)


def test_the_last_loss_of_a_long_open_part_is_found_at_its_end(llmtrack: Command, tmp_path: Path) -> None:
    """Its beginning is not read, and where the end has none, all of it is."""
    noise = [{"tokens": tokens, "name": "x", "value": tokens / 7} for tokens in range(100, 60_000)]
    first = [{"tokens": 50, "name": "train/loss", "value": 9.0}]
    last = [{"tokens": 60_000, "name": "train/loss", "value": 2.0}]
    for run_id, rows in (("end", [*first, *noise, *last]), ("beginning", [*first, *noise])):
        folder = write_segment(tmp_path, Segment(run_id, 1))
        path = write_part(folder, "metrics", rows, batch=200)
        assert path.stat().st_size > 2 * latest._TAIL_BYTES
    rows = llmtrack("ls", "--root", tmp_path, "--json").rows
    assert {row["run_id"]: (row["loss"], row["loss_tokens"]) for row in rows} == {
        "end": (2.0, 60_000),
        "beginning": (9.0, 50),
    }


def test_parts_that_say_that_they_lack_the_loss_are_passed_over(llmtrack: Command, tmp_path: Path) -> None:
    """However many there are: the last loss lies before them."""
    folder = write_segment(tmp_path, Segment("a", 1))
    for part in range(1, 10):
        name = "train/loss" if part == 1 else "eval/loss"
        rows = [{"seq": part, "tokens": part, "name": name, "value": part / 4}]
        seal_part(write_part(folder, "metrics", rows, part=part))
    (row,) = llmtrack("ls", "--root", tmp_path, "--json").rows
    assert (row["loss"], row["loss_tokens"], row["tokens"]) == (0.25, 1, 9)


# show


def test_show_says_what_became_of_each_segment(llmtrack: Command, root: Path) -> None:
    """From and to, the end, what superseded what, the gap, the fork with its changed keys."""
    result = llmtrack("show", "pretrain-7b", "--root", root)
    assert result.status == 0
    for line in (
        "pretrain-7b  finished  300 tokens, step 30  2 segments  p  seven",
        "segment 1  0 to 200 tokens  no end: killed, or lost  2025-03-01 01:00, 2 min  n1, 8 ranks",
        "2 checkpoints up to 100",
        "100 to 200 superseded by segment 2",
        "segment 2  100 to 300 tokens  finished",
        "gap at 210 to 230: 12 points lost (io_error, No space left on device)",
        "forked into pretrain-7b-recipe-1 at 200 (recipe)",
        "lr: 0.0003 -> 0.0001",
    ):
        assert line in result.out
    child = llmtrack("show", "pretrain-7b-r", "--root", root)
    assert "forked from pretrain-7b at 200 (recipe)" in child.out
    assert "from pretrain-7b, segment 2 at 200" in child.out


def test_show_prints_segments_as_json(llmtrack: Command, root: Path) -> None:
    """The columns of `segments` and `goodput`, and lists of what happened."""
    first, second = llmtrack("show", "pretrain-7b", "--root", root, "--json").rows
    assert (first["segment"], first["last_tokens"], first["tokens_kept"], first["checkpoints"]) == (1, 200, 100, 2)
    assert first["superseded"] == [{"from_tokens": 100, "to_tokens": 200, "superseded_by": 2}]
    assert second["gaps"][0]["points"] == 12
    assert second["children"][0]["run_id"] == "pretrain-7b-recipe-1"


def test_show_says_when_two_wrote_at_once(llmtrack: Command, tmp_path: Path) -> None:
    """The old rank 0 was not dead: its heartbeat goes on after the next segment began."""
    first = write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    write_segment(tmp_path, Segment("a", 2, 10, ("a", 1)))
    write_heartbeat(first, DAY + dt.timedelta(hours=2, minutes=1), tokens=30)
    assert "went on while segment 2 was running: two writers at once" in llmtrack("show", "a", "--root", tmp_path).out


def test_show_shows_a_segment_that_never_started(llmtrack: Command, tmp_path: Path) -> None:
    """Its folder is there, its record is not."""
    write_segment(tmp_path, Segment("a", 1))
    write_segment(tmp_path, Segment("a", 2, started=False))
    assert "segment 2  its start was not written, or cannot be read" in llmtrack("show", "a", "--root", tmp_path).out


# Damage


@pytest.mark.parametrize(
    "command", [["show", "pretrain-7b"], ["sql", "FROM runs"], ["plot", "pretrain-7b", "train/loss"]]
)
def test_damage_is_said_and_is_status_4(llmtrack: Command, root: Path, damaged: Path, command: list[str]) -> None:
    """The path and the bytes on stderr; the answer from what is intact on stdout."""
    result = llmtrack(*command, "--root", root)
    assert result.status == 4
    assert f"damaged: {damaged}: bytes " in result.err
    assert result.out


def test_ls_is_never_behind_the_loss_that_it_shows(llmtrack: Command, tmp_path: Path) -> None:
    """The heartbeat of a run that was killed, or still runs, is up to half a minute older than its last row."""
    points = [Point(step * 100, "train/loss", 1.0 / step) for step in range(1, 161)]
    folder = write_segment(tmp_path, Segment("killed", 1, points=points))
    write_heartbeat(folder, DAY, tokens=2000)
    (row,) = llmtrack("ls", "--root", tmp_path, "--json").rows
    assert (row["tokens"], row["loss_tokens"]) == (16000, 16000)
    with connect(tmp_path) as con:
        steps = con.execute("SELECT max(step) FROM metrics").fetchone()
    assert (row["step"],) == steps


def test_ls_sees_damage_in_records_and_ends_of_parts(llmtrack: Command, root: Path) -> None:
    """It counts it beside the run."""
    sealed = root / "run_id=pretrain-7b" / "segment=00002" / part_name("metrics", 7, ".parquet")
    sealed.write_bytes(b"PAR1 and no footer")
    result = llmtrack("ls", "--root", root)
    assert result.status == 4
    assert "DAMAGED" in result.out
    assert str(sealed) in result.err
    assert llmtrack("ls", "pretrain-7b-recipe-1", "--root", root).status == 0, "another run's damage is not this one's"


def test_much_damage_is_counted_not_listed(llmtrack: Command, root: Path) -> None:
    """Ten lines, and how many more."""
    for part in range(20, 35):
        (root / "run_id=pretrain-7b" / "segment=00002" / part_name("metrics", part, ".parquet")).write_bytes(b"")
    result = llmtrack("ls", "--root", root)
    assert len(result.err.splitlines()) == 11
    assert "damaged: 5 more; llmtrack verify lists all" in result.err


def test_a_part_that_turns_out_unreadable_is_set_aside(llmtrack: Command, root: Path) -> None:
    """Parquet that carries no checksum of ours and cannot be decoded: the rest answers, and the status says so."""
    path = root / "run_id=pretrain-7b" / "segment=00002" / part_name("metrics", 2, ".parquet")
    row = {"seq": 900, "time": DAY, "step": 1, "tokens": 299, "name": "train/loss", "value": 1.0}
    pq.write_table(pa.Table.from_pylist([row] * 5000, schema=SCHEMAS["metrics"]), path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    result = llmtrack("sql", "SELECT count(*) AS n FROM metrics WHERE seq >= 0", "--root", root, "--json")
    assert result.status == 4
    assert result.rows == [{"n": 41}]
    assert str(path) in result.err


# sql


def test_sql_prints_what_was_asked_for(llmtrack: Command, root: Path) -> None:
    """Aligned columns by default; csv, JSON and Markdown on request."""
    query = "SELECT run_id, count(*) AS points FROM live GROUP BY ALL ORDER BY run_id"
    table = llmtrack("sql", query, "--root", root)
    assert [line.split() for line in table.out.splitlines()][::2] == [["run_id", "points"], ["pretrain-7b", "30"]]
    assert list(csv.reader(io.StringIO(llmtrack("sql", query, "--root", root, "--format", "csv").out))) == [
        ["run_id", "points"],
        ["pretrain-7b", "30"],
        ["pretrain-7b-recipe-1", "1"],
    ]
    expected = [{"run_id": "pretrain-7b", "points": 30}, {"run_id": "pretrain-7b-recipe-1", "points": 1}]
    assert llmtrack("sql", query, "--root", root, "--format", "json").rows == expected
    assert llmtrack("sql", query, "--root", root, "--json").rows == expected
    markdown = llmtrack("sql", query, "--root", root, "--format", "markdown").out
    assert markdown.splitlines()[:3] == ["| run_id | points |", "| --- | --- |", "| pretrain-7b | 30 |"]


def test_nothing_is_lost_on_the_way_to_json(llmtrack: Command, root: Path) -> None:
    """NaN and the infinities by name, times in UTC, large integers in full, lists as lists."""
    query = (
        "SELECT 'nan'::DOUBLE AS a, '-inf'::DOUBLE AS b, 9007199254740993 AS c, [1, 2] AS d, NULL AS e,"
        " TIMESTAMPTZ '2025-01-01 00:00:00.123+01' AS f, 1.5::DECIMAL(4, 2) AS g, {'x': 'inf'::DOUBLE} AS h, true AS i,"
        " DATE '2025-01-01' AS j, INTERVAL 90 SECOND AS k, '\\xFF'::BLOB AS l"
    )
    (row,) = llmtrack("sql", query, "--root", root, "--json").rows
    assert list(row.values()) == [
        *("NaN", "-Infinity", 9007199254740993, [1, 2], None, "2024-12-31T23:00:00.123Z"),
        *(1.5, {"x": "Infinity"}, True, "2025-01-01", 90.0, "ff"),
    ]


def test_csv_and_markdown_have_what_would_break_them(llmtrack: Command, root: Path) -> None:
    """Commas, quotes, bars and line ends inside values."""
    query = """SELECT 'a,"b"' AS x, 'c|d' || chr(10) || 'e' AS y, 'nan'::DOUBLE AS z, [1, 2] AS l"""
    line = list(csv.reader(io.StringIO(llmtrack("sql", query, "--root", root, "--format", "csv").out)))[1]
    assert line == ['a,"b"', "c|d\ne", "nan", "[1, 2]"]
    assert '| a,"b" | c\\|d e | nan | [1, 2] |' in llmtrack("sql", query, "--root", root, "--format", "markdown").out


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json"])
def test_sql_writes_files(llmtrack: Command, root: Path, tmp_path: Path, suffix: str) -> None:
    """Nothing is printed; the suffix says the format."""
    path = tmp_path / f"x{suffix}"
    query = "SELECT tokens, value FROM series('pretrain-7b', 'train/loss') WHERE tokens <= 20"
    assert llmtrack("sql", query, "--root", root, "-o", path) == Result(0, "", "")
    if suffix == ".parquet":
        assert pq.read_table(path).to_pylist() == [{"tokens": 10, "value": 4.9}, {"tokens": 20, "value": 4.8}]
    elif suffix == ".csv":
        assert path.read_text() == "tokens,value\n10,4.9\n20,4.8\n"
    else:
        assert json.loads(path.read_text()) == [{"tokens": 10, "value": 4.9}, {"tokens": 20, "value": 4.8}]


def test_sql_refuses_what_it_cannot_do(llmtrack: Command, root: Path, tmp_path: Path) -> None:
    """A wrong statement, a suffix that says nothing, a folder that is not there: one line and a remedy, status 1."""
    wrong = llmtrack("sql", "SELECT losss FROM live", "--root", root)
    assert (wrong.status, wrong.out) == (1, "")
    assert wrong.err.startswith("error: Binder Error")
    assert wrong.err.splitlines()[-1].startswith("  try: ")
    assert "Traceback" not in wrong.err
    assert llmtrack("sql", "FROM runs", "--root", root, "-o", tmp_path / "x.xlsx").err == (
        f"error: cannot tell the format of {tmp_path}/x.xlsx\n  try: end its name with .parquet, .csv, .json\n"
    )
    for suffix in ("csv", "json", "parquet"):
        missing = llmtrack("sql", "FROM runs", "--root", root, "-o", tmp_path / "no" / f"x.{suffix}")
        assert missing.status == 1
        assert f"cannot write {tmp_path}/no/x.{suffix}" in missing.err


@pytest.mark.parametrize(
    "statement",
    [
        *("COPY (SELECT 1) TO '{file}'", "COPY (PIVOT runs ON status USING count(*)) TO '{file}'", "ATTACH '{file}'"),
        *("EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}'", "EXPORT DATABASE '{file}'", "CREATE TABLE t AS SELECT 1"),
        *("INSERT INTO log.gaps SELECT * FROM gaps", "WITH x AS (DELETE FROM log.gaps RETURNING 1) FROM x"),
        *("DROP VIEW live", "SET threads = 1", "INSTALL httpfs", "CALL pragma_version()", "PRAGMA database_list"),
    ],
)
def test_sql_only_reads(llmtrack: Command, root: Path, tmp_path: Path, statement: str) -> None:
    """What would write, or change the connection, is refused; nothing appears on disk."""
    before = sorted(tmp_path.rglob("*"))
    for output in ([], ["-o", tmp_path / "x.csv"]):
        result = llmtrack("sql", statement.format(file=tmp_path / "file"), "--root", root, *output)
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert "\n  try: " in result.err
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.suffix != ".csv"] == []


@pytest.mark.parametrize(
    "statement",
    ["PIVOT runs ON status USING count(*) GROUP BY run_id;", "EXPLAIN FROM runs", "DESCRIBE live", "SHOW TABLES"],
)
def test_sql_takes_all_that_reads(llmtrack: Command, root: Path, tmp_path: Path, statement: str) -> None:
    """Also what DuckDB takes for several statements; to the screen and into a file."""
    assert llmtrack("sql", statement, "--root", root, "--json").rows
    if statement.startswith("PIVOT"):
        assert llmtrack("sql", statement, "--root", root, "-o", tmp_path / "x.parquet").status == 0
        assert pq.read_table(tmp_path / "x.parquet").num_rows == 2


@pytest.mark.parametrize("statement", ["", "  ", "-- nothing", ";", "FROM runs; FROM live"])
def test_sql_takes_one_statement(llmtrack: Command, root: Path, statement: str) -> None:
    """None, or several of which only the last would be seen, are wrong usage."""
    result = llmtrack("sql", statement, "--root", root)
    assert (result.status, result.out) == (1, "")
    assert "try: " in result.err


def test_a_misspelt_view_is_no_variable_of_ours(llmtrack: Command, root: Path) -> None:
    """DuckDB would look for one in the Python that calls it."""
    assert "does not exist" in llmtrack("sql", "FROM statement", "--root", root).err


def test_an_error_shows_no_number_of_a_thousand_digits(llmtrack: Command, root: Path) -> None:
    """Its beginning, and how long it is."""
    result = llmtrack("show", "7" * 1000, "--root", root)
    assert result.status == 1
    assert "77777777777777777777… (1,000 characters)" in result.err
    assert len(result.err) < 500


def test_sql_reads_only_the_runs_named(llmtrack: Command, root: Path) -> None:
    """And those they were forked from."""
    write_segment(root, Segment("other", 1))
    query = "SELECT run_id FROM runs ORDER BY 1"
    found = llmtrack("sql", query, "--root", root, "--run", "*recipe*", "--json").rows
    assert [row["run_id"] for row in found] == ["pretrain-7b", "pretrain-7b-recipe-1"]


def test_a_table_in_a_pipe_is_not_cut(llmtrack: Command, root: Path) -> None:
    """There is no width there, and no colour."""
    out = llmtrack("sql", "SELECT repeat('x', 500) AS x, 'y' AS y", "--root", root).out
    assert "x" * 500 in out
    assert "\x1b" not in out


# plot


def test_plot_sets_what_was_superseded_apart(llmtrack: Command, root: Path) -> None:
    """Dots for the stretch that was left behind, a line for the curve, a border where segment 2 starts."""
    result = llmtrack("plot", "pretrain-7b", "train/loss", "--root", root, "--width", "80", "--height", "20")
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[0] == "train/loss  pretrain-7b"
    assert lines[1].split() == ["2"]
    assert any("⠀" < character <= "⣿" for character in result.out)
    assert sum(line.count("·") for line in lines[:-1]) >= 5
    assert "superseded (10 points)" in lines[-1]
    assert "┊ start of a segment" in lines[-1]
    assert max(map(len, lines[:-3])) <= 80
    assert "\x1b" not in result.out


def test_plot_draws_a_childs_curve_with_its_parents(llmtrack: Command, root: Path) -> None:
    """And says what is not finite, and where."""
    result = llmtrack("plot", "pretrain-7b-recipe-1", "train/loss", "--root", root)
    assert "✗ not finite (1, the first at 210)" in result.out
    rows = llmtrack("plot", "pretrain-7b-recipe-1", "train/loss", "--root", root, "--json").rows
    assert len(rows) == 21
    assert rows[-1] | {"time": None} == {
        "run_id": "pretrain-7b-recipe-1",
        "source_run": "pretrain-7b-recipe-1",
        "segment": 1,
        "seq": 2,
        "time": None,
        "step": 21,
        "tokens": 210,
        "name": "train/loss",
        "value": "NaN",
        "superseded_by": None,
        "settled": False,
    }


@pytest.mark.parametrize(
    "options", [["--x", "step"], ["--x", "time"], ["--log-y"], ["--width", "40", "--height", "10"]]
)
def test_plot_has_other_axes(llmtrack: Command, root: Path, options: list[str]) -> None:
    """Step, time in UTC, a logarithm, a small picture."""
    result = llmtrack("plot", "pretrain-7b", "train/*", "--root", root, *options)
    assert (result.status, result.err) == (0, "")


def test_plot_of_nothing_to_draw_says_so(llmtrack: Command, tmp_path: Path) -> None:
    """Only NaN, one point, or the same value everywhere."""
    points = [Point(1, "nan", float("nan")), Point(1, "one", 0.0), Point(1, "big", -1e308), Point(2, "big", 1e308)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    assert "none that can be drawn" in llmtrack("plot", "a", "nan", "--root", tmp_path).out
    assert "━━ current" in llmtrack("plot", "a", "one", "--root", tmp_path).out
    assert "1e+308" in llmtrack("plot", "a", "big", "--root", tmp_path).out
    assert "none that can be drawn" in llmtrack("plot", "a", "one", "--log-y", "--root", tmp_path).out


def test_plot_suggests_metrics(llmtrack: Command, root: Path) -> None:
    """A typo is no empty picture."""
    assert llmtrack("plot", "pretrain-7b", "train/lose", "--root", root).err == (
        "error: run pretrain-7b has no metric 'train/lose'\n  try: one of train/loss\n"
    )


def test_a_canvas_draws_lines_over_characters() -> None:
    """Eight dots a character; what is outside is left out."""
    board = canvas.Canvas(4, 2, {"line": "36"})
    board.character(0, 0, "·", "pale")
    board.character(2, 0, "·", "pale")
    board.line(0, 0, 1, 0)
    board.dot(99, 99)
    board.dot(0, 7)
    assert board.rows() == ["\x1b[36m⠉\x1b[0m·", "\x1b[36m⡀\x1b[0m"]


# How commands end


@pytest.mark.parametrize(
    ("args", "message", "remedy"),
    [
        (["lss"], "there is no command 'lss'; did you mean ls?", "llmtrack --help"),
        (["ls", "--jsn"], "No such option", "llmtrack ls --help"),
        (["show"], "Missing argument 'RUN'", "llmtrack show --help"),
        (["plot", "x", "y", "--width", "3"], "Invalid value for '--width'", "llmtrack plot --help"),
        (["ls", "--root", "/nowhere"], "there is no folder /nowhere", "--root DIR or LLMTRACK_DIR"),
    ],
)
def test_wrong_usage_is_one_line_a_remedy_and_status_1(
    llmtrack: Command, args: list[str], message: str, remedy: str
) -> None:
    """On stderr; stdout stays empty."""
    result = llmtrack(*args)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(f"error: {message}")
    assert remedy in result.err.splitlines()[-1]
    assert result.err.splitlines()[-1].startswith("  try: ")


def test_a_typo_in_a_run_gets_a_suggestion(llmtrack: Command, root: Path) -> None:
    """And the beginning of several is refused with their names."""
    assert "did you mean pretrain-7b" in llmtrack("show", "pretrian-7b", "--root", root).err
    assert "is the beginning of 2 runs" in llmtrack("show", "pre", "--root", root).err
    assert llmtrack("show", "pretrain-7b", "--root", root).status == 0, "an id that others begin with is itself"


def test_runs_are_selected_by_id_beginning_or_glob() -> None:
    """Each once, in the order in which they were named."""
    known = ["a-1", "a-2", "b", "b-2"]
    assert select_runs(known, ["b", "a-*", "a-1"]) == ["b", "a-1", "a-2"]
    assert select_run(known, "b-") == "b-2"
    for wrong, message in (("a", "beginning of 2"), ("c*", "no run matches"), ("zzz", "there is no run")):
        with pytest.raises(UsageError, match=message):
            select_runs(known, [wrong])
    with pytest.raises(UsageError, match="means 2 runs"):
        select_run(known, "a-*")
    with pytest.raises(UsageError, match="there are no runs here"):
        select_run([], "a")


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (CorruptSegmentError(Path("x"), "is torn"), 4),
        (UsageError("no", hint="yes"), 1),
        (click.ClickException("no"), 1),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (ModuleNotFoundError("No module named 'mlflow'", name="mlflow.tracking"), 1),
        (SystemExit(7), 7),
    ],
)
def test_every_end_has_its_status(raised: BaseException, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And no traceback."""

    @click.command()
    def command() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        console.run(command, [])
    assert ended.value.code == status
    if isinstance(raised, ModuleNotFoundError):
        assert capsys.readouterr().err == (
            "error: mlflow is not installed\n"
            "  try: pip install 'llmtrack-log[mlflow]', or in a checkout: pip install -e '.[mlflow]'\n"
        )


def test_every_command_has_help_with_an_example_and_says_the_same_in_the_list(llmtrack: Command) -> None:
    """The list is written by hand, so that it loads nothing: it must not drift from the commands."""
    listed = llmtrack("--help").out
    assert llmtrack().out == listed
    for name in ("ls", "show", "sql", "plot", "verify", "seal", "id", "ckpt-id", "eval", "demo"):
        context = click.Context(program.cli, info_name="llmtrack")
        command = program.cli.get_command(context, name)
        assert command is not None
        assert command.help
        assert "Example" in (command.epilog or "")
        short = listed.partition(f"\n  {name} ")[2].splitlines()[0].strip().rstrip(".")
        assert " ".join(command.help.split()).startswith(short.partition(",")[0])
    assert llmtrack("--version").out.startswith("llmtrack ")


def test_help_loads_neither_duckdb_nor_arrow() -> None:
    """It is there before one can wonder."""
    code = "import sys; from llmtrack.__main__ import cli; cli(['--help'], standalone_mode=False); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"duckdb", "pyarrow", "rich", "torch"} & set(ran.stdout.splitlines()[-1].split())


def test_a_reader_that_has_seen_enough_is_no_error(root: Path) -> None:
    """`llmtrack … | head -1` ends quietly."""
    query = "SELECT range AS n, repeat('x', 100) AS x FROM range(100000)"
    command = [sys.executable, "-m", "llmtrack", "sql", query, "--format", "csv", "--root", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "n,x\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_a_run_that_is_not_ours_to_read_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    """In a root that many share: it is named with the reason, with status 4, and the rest is as it is."""
    for run_id in ("mine", "parts", "theirs"):
        with open_run(tmp_path, run_id=run_id) as run:
            run.log({"train/loss": 1.5}, step=1, tokens=10)
    evals = tmp_path / "run_id=mine" / "evals"
    evals.mkdir()
    closed = [tmp_path / "run_id=theirs", tmp_path / "run_id=parts" / "segment=00001", evals]
    commands = [
        *(["ls", "--json"], ["show", "mine"], ["tail", "mine"], ["alerts"], ["verify"], ["seal", "--silence-s", "0"]),
        ["eval", "add", "--ckpt", "quick-" + "0" * 32, "--task", "t", "--metric", "m", "--value", "1"],
    ]
    code = """
import contextlib, io, json, sys
from llmtrack import __main__ as program
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program.main(command)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
    arguments = json.dumps([[*command, "--root", str(tmp_path)] for command in commands])
    try:
        for folder in closed:
            folder.chmod(0)
        ran = subprocess.run(
            faults.unprivileged(sys.executable, "-c", code, arguments), check=True, capture_output=True, text=True
        )
    finally:
        for folder in closed:
            folder.chmod(0o755)
    listed, shown, tailed, alerts, verified, sealed, added = map(json.loads, ran.stdout.splitlines())
    assert listed[0] == 4
    assert [row["run_id"] for row in json.loads(listed[1]) if row["tokens"] == 10] == ["mine"]
    for folder in closed:
        assert f"{folder}: bytes 0 to 0: Permission denied" in listed[2]
        assert f"{folder}: cannot be listed: Permission denied" in verified[1]
    assert "segment 1" in shown[1]
    assert "train/loss=1.5" in tailed[1]
    assert (alerts[0], verified[0]) == (4, 4)
    assert sealed[0] == 4
    assert f"{closed[0]}: Permission denied" in sealed[1]
    assert added[0] == 0, added


@pytest.mark.parametrize(("arguments", "extra"), [([], "query"), (["ls"], "query"), (["demo", "--keep"], "demo")])
def test_without_click_one_line_says_what_to_install(arguments: list[str], extra: str) -> None:
    """The base install is for trainers; what a command needs is named at once, and not one library after the other."""
    code = "import sys; sys.modules['click'] = None; import llmtrack.__main__"
    ran = subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: click is not installed\n  try: pip install 'llmtrack-log[{extra}]', or ")


# Numbers for people


def test_numbers_are_short_and_keep_their_meaning() -> None:
    """Tokens in four digits, times in UTC, lengths of time in two units."""
    assert [layout.tokens(n) for n in (None, 0, 999, 1000, 1_234_567, 10**15 + 1)] == [
        *("", "0", "999", "1k", "1.235M", "1P")
    ]
    assert [layout.span(s) for s in (None, 12.3, 90, 3700, 200_000)] == ["", "12 s", "2 min", "1 h 1 min", "2 d 7 h"]
    time_there = dt.datetime(2025, 7, 1, 1, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    assert (layout.moment(time_there), layout.moment(None)) == ("2025-06-30 23:30", "")
