"""Pictures as files: what is on them, told from the SVG, whose words are text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrack import __main__ as program
from llmtrack import query
from llmtrack.query.draw import picture, plot
from llmtrack.writer.errors import UsageError
from tests.handmade import write_segment
from tests.oracle import Point, Segment
from tests.pictures import HOSTILE, SPIKE, hostile_root, odd_root

matplotlib = pytest.importorskip("matplotlib", reason="pictures need the extra plot")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the root with every kind of oddity."""
    return odd_root(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def llmtrack(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the command line, in this process."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def draw(root: Path, run_id: str, names: list[str], **more: Any) -> ET.Element:
    """Return the SVG of some curves, its words as text."""
    with query.connect(root, runs=[run_id]) as con, query.connect(root, points=False) as all_runs:
        curves = plot.read_curves(con, run_id, names, all_runs=all_runs)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = picture.draw_curves(curves, "svg", **more)
    return ET.fromstring(drawn)  # noqa: S314 - our own picture


def words(svg: ET.Element) -> list[str]:
    """Return the texts on a picture."""
    return ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]


def test_everything_that_the_terminal_marks_is_on_the_picture(odd: Path) -> None:
    """And in its legend: superseded, segments, alerts, evaluations, forks, gaps, damage, what is no number."""
    found = words(draw(odd, "pretrain-7b", ["train/loss"]))
    for text in (
        *("superseded", "current", "NaN or infinite", "a segment starts", "gap: points lost"),
        *("damaged: unreadable", "evaluated", "forked into", "alert"),
        "train/loss   pretrain-7b",
        "200 points superseded, 1 not finite",
    ):
        assert text in [word.strip() for word in found]
    fork = [word.strip() for word in words(draw(odd, "pretrain-7b-recipe-1", ["train/loss"]))]
    assert "fork, 1" in fork


@pytest.mark.parametrize(
    "options", [{"axis": "step"}, {"axis": "time"}, {"log_y": True}, {"axis": "time", "log_y": True}]
)
def test_it_has_the_axes_of_the_terminal(odd: Path, options: dict[str, object]) -> None:
    """Step, time in UTC, a logarithm."""
    svg = draw(odd, "pretrain-7b", ["train/*"], **options)
    assert {"time": "time (UTC)", "step": "step"}.get(str(options.get("axis")), "tokens") in words(svg)


def test_the_same_runs_give_the_same_file(odd: Path) -> None:
    """No date and no random names in it: it can be kept in a repository."""
    with query.connect(odd, runs=["pretrain-7b"]) as con:
        curves = plot.read_curves(con, "pretrain-7b", ["train/loss"])
    for kind in ("svg", "png"):
        assert picture.draw_curves(curves, kind) == picture.draw_curves(curves, kind)


def test_a_spike_and_the_largest_numbers_are_drawn(tmp_path: Path, odd: Path) -> None:
    """The axis reaches the spike; values at the end of the numbers are no error."""
    with query.connect(odd, runs=["pretrain-7b"]) as con:
        (curve,) = plot.read_curves(con, "pretrain-7b", ["train/loss"], points=100)
    assert max(row["value"] for row in curve.rows()) == SPIKE
    points = [Point(1, "nan", float("nan")), Point(1, "one", 0.0), Point(1, "big", -1e308), Point(2, "big", 1e308)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    for log_y in (False, True):
        assert "one   a" in words(draw(tmp_path, "a", ["*"], log_y=log_y))


def test_names_of_the_log_are_no_formulas_and_no_markup(tmp_path: Path) -> None:
    """Dollars, angles, control characters and very long names stay what they are, or are cut."""
    found = words(draw(hostile_root(tmp_path), "hostile", ["*"]))
    assert any(HOSTILE[0] in word for word in found)
    assert any("$\\frac{1}{2}$" in word for word in found)
    assert max(map(len, found)) < 130
    assert not re.search(r"[\x00-\x1f\u202e]", "".join(found))


def test_too_many_metrics_for_one_picture_are_refused(tmp_path: Path) -> None:
    """Before a file is made that nothing opens."""
    points = [Point(1, f"m{index}", 1.0) for index in range(picture.MOST_CURVES + 1)]
    write_segment(tmp_path, Segment("a", 1, points=points))
    with pytest.raises(UsageError, match="41 metrics are too many"):
        draw(tmp_path, "a", ["*"])


def test_plot_writes_png_and_svg(odd: Path, tmp_path: Path, llmtrack: Call) -> None:
    """By its suffix; an earlier file is replaced, and nothing else is left in the folder."""
    target = tmp_path / "x.png"
    target.write_bytes(b"old")
    status, out, err = llmtrack("plot", "pretrain-7b", "train/loss", "--root", odd, "-o", target)
    assert (status, out) == (4, ""), "damage is said"
    assert "kB" in err
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert llmtrack("plot", "pretrain-7b", "train/loss", "--root", odd, "-o", tmp_path / "x.SVG")[0] == 4
    assert (tmp_path / "x.SVG").read_bytes().startswith(b"<?xml")
    target.unlink()
    _, out, _ = llmtrack("plot", "pretrain-7b", "train/loss", "--root", odd, "-o", target, "--json")
    assert out.startswith("[\n")
    assert target.exists(), "rows and a picture"


def test_plot_refuses_places_and_formats_before_it_reads(odd: Path, tmp_path: Path, llmtrack: Call) -> None:
    """One line and a remedy."""
    assert llmtrack("plot", "a", "b", "--root", odd, "-o", tmp_path / "x.pdf")[2] == (
        f"error: cannot tell the format of {tmp_path}/x.pdf\n  try: end its name with .png or .svg\n"
    )
    assert "there is no such folder" in llmtrack("plot", "a", "b", "--root", odd, "-o", tmp_path / "no" / "x.png")[2]
