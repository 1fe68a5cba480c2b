"""The report as a file: what stands in it, what does not, and how it gets there."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrack import __main__ as program
from llmtrack import log_eval, open_run, query
from llmtrack.query import report
from llmtrack.query.report import data, differences, pack, parts, write_report
from llmtrack.query.report import html as made
from llmtrack.query.report import page as pages
from llmtrack.writer.errors import UsageError
from tests.handmade import write_segment
from tests.oracle import Point, Segment
from tests.pictures import HOSTILE, SPIKE, TOKENS_PER_STEP, hostile_root, large_root, odd_root

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the root with every kind of oddity."""
    return odd_root(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def page(odd: Path) -> str:
    """Write the report of two runs, and return it."""
    path = odd / "report.html"
    write(odd, ["pretrain-7b", "pretrain-7b-recipe-1"], path)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def llmtrack(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the command line, in this process."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def write(root: Path, runs: list[str], path: Path, **more: Any) -> report.Written:
    """Write a report as the command does."""
    with query.connect(root, runs=runs) as con, query.connect(root, points=False) as all_runs:
        return write_report(con, all_runs, runs, path, root=root, **more)


def content(page: str) -> dict[str, Any]:
    """Return what the charts are made of."""
    packed = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert packed is not None
    unpacked: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return unpacked


class Tables(html.parser.HTMLParser):
    """The cells of all tables of a page, row by row, and the tags that it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self._is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        """Note its end."""
        if tag in {"td", "th"}:
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        """Take a text that is in a cell."""
        if self._is_cell:
            self.rows[-1][-1] += data


def test_nothing_in_it_leads_out(page: str) -> None:
    """No address, and a policy that forbids everything but its own script and style."""
    without_licence_line = page.replace("https://github.com/leeoniya/uPlot", "")
    assert re.findall(r"(?:https?:)?//[a-z]+\.[a-z.]+/", without_licence_line) == []
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, found in (("script", scripts), ("style", styles)):
        (text,) = found
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert not re.search(r'<[a-z]+[^>]* style="', page.replace(scripts[0], ""))


def test_the_library_inside_is_the_published_one() -> None:
    """UPlot as npm has it, with its licence; where it comes from is written beside it."""
    folder = Path(report.__file__).parent / "uplot"
    told = (folder / "README.md").read_text(encoding="utf-8")
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in told
    assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_tables_say_what_the_log_says(odd: Path, page: str) -> None:
    """Segments with what they kept, alerts with their batches, the best checkpoint, what changed, what is missing."""
    rows = Tables(page).rows
    with query.connect(odd) as con:
        for run, segment, kept, lost in con.execute(
            "SELECT run_id, segment, tokens_kept, gpu_hours_lost FROM goodput WHERE run_id = 'pretrain-7b'"
        ).fetchall():
            (row,) = [row for row in rows if row[:2] == [run, str(segment)] and len(row) == 15]
            assert row[11] == f"{kept / 1e9:.4g}B"
            assert row[14] == (f"{lost:.4g}" if lost else "")
    alert = next(row for row in rows if "loss 9.25, usually 3.1" in row)
    assert "web-000812, code-000093" in alert
    assert f'title="{800 * TOKENS_PER_STEP:,}"' in page
    best = next(row for row in rows if row and row[0] == "hellaswag/acc")
    assert best[1:4] == ["0.53", "0.01", "pretrain-7b"]
    assert best[7] == "/checkpoints/pretrain-7b/step-1500"
    assert next(row for row in rows if row and row[0] == "wikitext/word_perplexity")[1] == "20", "lower is better"
    assert ["pretrain-7b", "segment 2 → segment 3", "config.data.workers", "4", "8"] in rows
    assert ["pretrain-7b-recipe-1", "pretrain-7b, segment 2 → segment 1", "recipe.lr", "0.0003", "0.0001"] in rows
    assert ["config.nodes", "16", "8"] in rows, "what differs between the runs"
    assert ["pretrain-7b", "3", "6.291B", "6.375B", "100", "io_error", "No space left on device"] in rows
    damaged = [row for row in rows if row and row[-1] == "fails its checksum"]
    assert len(damaged) == 1


def test_a_fork_has_what_its_parent_had_on_the_stretch(odd: Path, page: str, tmp_path: Path) -> None:
    """Its alerts and evaluations are listed with the run that has them; where that one is in the report, only there."""
    write(odd, ["pretrain-7b-recipe-1"], tmp_path / "fork.html")
    alone = (tmp_path / "fork.html").read_text(encoding="utf-8")
    rows = Tables(alone).rows
    spike = next(row for row in rows if "loss 9.25, usually 3.1" in row)
    assert spike[:4] == ["3.355B", "800", "2026-03-01 10:13", "pretrain-7b, 2"]
    evaluated = [(row[3], row[5]) for row in rows if len(row) == 10 and row[0] == "hellaswag/acc"]
    assert evaluated == [("pretrain-7b", "600"), ("pretrain-7b", "1,000")], "and not those beyond the fork"
    best = next(row for row in rows if row and row[0] == "hellaswag/acc")
    assert best[1] == "0.47"
    assert "<dt>Alerts</dt><dd>0<small>and 2 before the fork</small>" in alone
    found = content(alone)
    assert [alert["tokens"] // TOKENS_PER_STEP for alert in found["runs"][0]["alerts"]] == [800, 900]
    assert sum("loss 9.25, usually 3.1" in row for row in Tables(page).rows) == 1


def test_evaluations_of_unknown_checkpoints_are_listed_and_not_drawn(tmp_path: Path) -> None:
    """Those of the run, and those that name none; what a run beside it has recorded is not unknown."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    with open_run(tmp_path, run_id="b") as run:
        run.log({"loss": 1.0}, step=1, tokens=10)
        (tmp_path / "model.pt").write_bytes(b"weights")
        run.checkpoint(tmp_path / "model.pt", step=1, tokens=10)
    with query.connect(tmp_path, points=False) as con:
        ((known,),) = con.execute("SELECT ckpt_id FROM checkpoints").fetchall()
    for ckpt_id, value, run_id in (("quick-a", 0.5, "a"), ("quick-none", 0.6, None), (known, 0.7, None)):
        log_eval(tmp_path, ckpt_id, "hellaswag", {"acc": value}, run_id=run_id)
    write(tmp_path, ["a"], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Of checkpoints that no run has recorded" in page
    rows = [row for row in Tables(page).rows if row and row[0] == "hellaswag/acc"]
    assert [(row[1], row[3], row[6]) for row in rows] == [("0.5", "a", "quick-a"), ("0.6", "", "quick-none")]
    assert [panel["kind"] for panel in content(page)["panels"]] == ["metric"]
    write(tmp_path, ["b"], tmp_path / "b.html")
    rows = [row for row in Tables((tmp_path / "b.html").read_text(encoding="utf-8")).rows if "quick-none" in row]
    assert [row[1] for row in rows] == ["0.6"]


def test_the_head_has_the_numbers_of_sql(odd: Path, page: str) -> None:
    """Status, tokens, the last loss, GPU hours and the share that was lost, for each run."""
    (row,) = [row for row in Tables(page).rows if row and row[0] == "pretrain-7b" and row[1] == "finished"]
    with query.connect(odd) as con:
        ((loss, hours, lost),) = con.execute(
            "SELECT (SELECT arg_max(value, tokens) FROM live WHERE run_id = 'pretrain-7b' AND name = 'train/loss'),"
            " sum(gpu_hours), sum(gpu_hours_lost) FROM goodput WHERE run_id = 'pretrain-7b'"
        ).fetchall()
    assert row[2:5] == ["8.389B", "2,000", f"{loss:.6g}"]
    assert row[7:9] == [f"{hours:.4g}", f"{lost / hours:.1%}"]
    assert f'<span title="{loss!r}">' in page


def test_texts_of_the_log_make_no_elements(tmp_path: Path) -> None:
    """Whatever they hold, the page has the tags and attributes of any other page."""
    write(hostile_root(tmp_path), ["hostile"], tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    parsed = Tables(page)
    assert not parsed.tags & {"img", "svg", "iframe", "object", "embed", "form action"}
    assert not {name for name in parsed.attributes if name.startswith("on")}
    assert page.count("<script") == 2, "the data, and ours"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    assert len(page) < 2_000_000, "long texts are cut"
    found = content(page)
    assert max(len(panel["name"]) for panel in found["panels"]) < 400
    assert [panel["name"] for panel in found["panels"] if panel["kind"] == "metric"].count(HOSTILE[0]) == 1


def test_a_text_becomes_html() -> None:
    """Escaped; its direction its own affair; control characters are pictures of themselves; a long one is cut."""
    assert made.text('<a href="x">&\'') == "&lt;a href=&quot;x&quot;&gt;&amp;&#x27;"
    assert made.text("\u202eabc") == "<bdi>\u202eabc</bdi>"
    assert made.text("a\x00b\x1b\x7f\x9b") == "<bdi>a␀b␛␡\ufffd</bdi>"
    assert made.text("x" * 10_000).endswith("… (10,000 characters)</bdi>")
    assert made.text(None) == ""
    assert made.table(["A"], [["<b>"], [made.Html("<i>ours</i>")]]).count("<i>") == 1


def test_settings_are_compared_key_by_key() -> None:
    """Nested keys by their path, lists as a whole, 1 and 1.0 are the same and true is not 1."""
    before = differences.flatten('{"a": {"b": 1, "c": [1, 2]}, "d": true, "gone": null, "e": {}}')
    after = differences.flatten('{"a": {"b": 1.0, "c": [1, 3]}, "d": 1, "new": "x", "e": {}}')
    assert differences.changes(before, after) == [
        ("a.c", "[1, 2]", "[1, 3]"),
        ("d", "true", "1"),
        ("gone", "null", "(absent)"),
        ("new", "(absent)", "x"),
    ]
    assert differences.flatten("{no json") == {"(not JSON)": "{no json"}
    assert differences.flatten(None) == {}
    assert differences.differing([{"a": 1, "b": 2}, {"a": 1}]) == [("b", ["2", "(absent)"])]


def test_curves_are_packed_without_loss(odd: Path, page: str) -> None:
    """Differences add up to tokens, steps and times; whole numbers and fractions are what they were."""
    found = content(page)
    panel = next(panel for panel in found["panels"] if panel["name"] == "train/loss")
    line = next(line for line in panel["lines"] if line["run"] == 0 and line["by"] is None)
    with query.connect(odd) as con:
        expected = con.execute(
            "SELECT tokens, step, epoch_ms(time), value, settled FROM history"
            " WHERE run_id = 'pretrain-7b' AND name = 'train/loss' ORDER BY tokens, seq"
        ).fetchall()
    for index, name in enumerate(("tokens", "step", "time")):
        total = 0
        places = [total := total + difference for difference in line[name]]
        assert places == [row[index] for row in expected]
    assert [str(row[3]) for row in expected] == [str(value) for value in line["value"]]
    assert line["settled"] == sum(row[4] for row in expected)
    assert sum(count for count, _, _ in line["pieces"]) == len(expected)


def test_a_report_of_many_points_is_bounded(tmp_path: Path) -> None:
    """However many there are, so many are drawn; the spike is one of them, and the page says so."""
    large_root(tmp_path, 6000, 4)
    with query.connect(tmp_path) as con:
        read = data.read_report(con, con, ["large"], root=tmp_path, points=2000)
    drawn = [row for run in read.runs for line in run.lines for row in line.rows]
    assert read.points == 30_000
    assert len(drawn) < 2200
    assert SPIKE in [row.value for row in drawn]
    assert len(pack.pack(read, axis="tokens")) < 2200 * 15 + 2000


def test_what_is_too_much_for_one_page_is_counted(tmp_path: Path) -> None:
    """Metrics times runs are bounded, and the page says how many are left out and how to choose."""
    for run_id in ("a", "b"):
        points = [Point(tokens, f"m{index}", 1.0) for index in range(7) for tokens in (1, 2)]
        write_segment(tmp_path, Segment(run_id, 1, points=points))
    with query.connect(tmp_path) as con:
        read = data.read_report(con, con, ["a", "b"], root=tmp_path, panels=6)
    assert (read.metrics, read.left_out) == (["m0", "m1", "m2"], 4)
    assert "<strong>4 more metrics</strong> are not in this file: llmtrack report --metric GLOB" in pages.page(read)
    rows = [["x"]] * 3
    assert "and 7 more, which the log has" in parts.listed(["A"], rows, count=10)


def test_metrics_can_be_chosen(odd: Path, tmp_path: Path, llmtrack: Call) -> None:
    """By name or glob; a typo is told what there is."""
    path = tmp_path / "x.html"
    status, out, _ = llmtrack(
        "report", "pretrain-7b-r", "--root", odd, "-o", path, "--metric", "train/*", "--x", "step", "--json"
    )
    assert status == 4, "its parent's damage is its own curve's"
    (row,) = json.loads(out)
    assert (row["metrics"], row["runs"], row["bytes"]) == (3, 1, path.stat().st_size)
    found = content(path.read_text(encoding="utf-8"))
    assert found["axis"] == "step"
    chosen = [panel["name"] for panel in found["panels"] if panel["kind"] == "metric"]
    assert chosen == ["train/loss", "train/grad_norm", "train/lr"]
    status, _, err = llmtrack("report", "pretrain-7b", "--root", odd, "-o", path, "--metric", "los")
    assert (status, "has no metric 'los'" in err) == (1, True)


def test_it_appears_whole_or_not_at_all(odd: Path, tmp_path: Path, llmtrack: Call) -> None:
    """By another name and a rename; where it cannot be written is said before anything is read."""
    target = tmp_path / "report.html"
    target.write_text("old", encoding="utf-8")
    status, out, _ = llmtrack("report", "pretrain-7b*", "--root", odd, "-o", target)
    assert status == 4
    assert out.startswith(f"{target}: 0.")
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    for place, why in ((tmp_path / "no" / "x.html", "no such folder"), (tmp_path, "it is a folder")):
        status, _, err = llmtrack("report", "nobody", "--root", odd, "-o", place)
        assert status == 1
        assert why in err
    with pytest.raises(UsageError, match="cannot write"):
        report.write_whole(Path("/proc/report.html"), b"x")


def test_runs_that_are_silent_or_broken_say_so_first(tmp_path: Path) -> None:
    """Lost, a start that cannot be read, two writers at once, nothing logged yet."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    write_segment(tmp_path, Segment("a", 2, started=False))
    write_segment(tmp_path, Segment("empty", 1))
    write(tmp_path, ["a", "empty"], tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<strong>Lost:</strong> no sign of life from a since 2025-03-01 01:01 UTC." in page
    assert "<strong>Segment 2</strong> of a has no readable start" in page
    write(tmp_path, ["empty"], tmp_path / "empty.html")
    assert "No points were logged yet." in (tmp_path / "empty.html").read_text(encoding="utf-8")
