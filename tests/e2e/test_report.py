"""The report in a real browser: what is drawn, what is said under the pointer, and that it asks for nothing outside."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmtrack import open_run, query
from llmtrack.query import report
from llmtrack.query.report import Written, write_report
from tests import browser as browsers
from tests.browser import Browser
from tests.pictures import BEGIN, HOSTILE, SPIKE, TOKENS_PER_STEP, hostile_root, large_root, odd_root

_DRAWN = "document.body.dataset.ready && document.querySelectorAll('canvas').length > 0"
_CHART = "report.panels[0].chart"

Open = Callable[..., Browser]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start the browser that all tests here use."""
    program = browsers.find()
    if program is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with browsers.browser(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the root with every kind of oddity."""
    return odd_root(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def opened(browser: Browser) -> Open:
    """Return a way to write a report, once for all tests, and to open it."""

    def call(root: Path, *runs: str, **more: Any) -> Browser:
        path = root / f"{'-'.join(runs)}.html"
        if not path.exists():
            write(root, runs, path)
        browser.open(path, ready=_DRAWN, **more)
        return browser

    return call


def write(root: Path, runs: Sequence[str], path: Path, **more: Any) -> Written:
    """Write a report as the command does."""
    with query.connect(root, runs=list(runs)) as con, query.connect(root, points=False) as all_runs:
        return write_report(con, all_runs, list(runs), path, root=root, **more)


def ask(root: Path, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query over the log."""
    with query.connect(root) as con:
        return con.execute(statement).fetchall()


def place(browser: Browser, x: float, y: float | None = None, panel: int = 0) -> tuple[float, float]:
    """Return where on the screen a place of a chart is."""
    up = "over.clientHeight / 2" if y is None else f"valToPos({y}, 'y')"
    left, top = browser.run(
        f"(() => {{ const chart = report.panels[{panel}].chart; const box = chart.over.getBoundingClientRect(); "
        f"return [box.left + chart.valToPos({x}, 'x'), box.top + chart.{up}]; }})()"
    )
    return left, top


def tip(browser: Browser, x: float, y: float, panel: int = 0) -> str:
    """Point at a place, and return what is said there."""
    browser.mouse("mouseMoved", *place(browser, x, y, panel))
    browser.wait(f"!report.panels[{panel}].tip.hidden")
    return str(browser.run(f"report.panels[{panel}].tip.innerText"))


def test_it_opens_without_an_error_and_without_a_request(opened: Open, odd: Path) -> None:
    """Every curve is drawn; the only thing that was asked for is the file itself."""
    browser = opened(odd, "pretrain-7b")
    assert browser.errors == []
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.run("document.getElementById('told').hidden")
    lines = ask(
        odd,
        "SELECT count(DISTINCT (segment, superseded_by)) FILTER (superseded_by IS NOT NULL) + 1 FROM metrics"
        " WHERE run_id = 'pretrain-7b' AND name = 'train/loss'",
    )
    assert browser.run("document.getElementById('panel-0').dataset.curves") == str(lines[0][0])
    assert browser.run("document.querySelector('h1').innerText").split() == ["pretrain-7b", "finished"]


def test_a_page_that_wants_out_is_kept_in(opened: Open, odd: Path) -> None:
    """The policy in the file forbids requests, whoever makes them."""
    browser = opened(odd, "pretrain-7b")
    image = "const i = new Image(); i.onerror = () => done('refused'); i.src = 'https://example.org/x.png';"
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
    assert browser.run("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    assert browser.run(f"new Promise(done => {{ {image} }})") == "refused"
    browser.run(f"(() => {{ {script} }})()")
    assert browser.run("window.ran") is None
    assert sum("Content Security Policy" in error for error in browser.errors) >= 3


def test_every_point_in_the_page_is_the_logs(opened: Open, odd: Path) -> None:
    """Tokens, step, time and value of each, and whether it was left behind; NaN and the infinities too."""
    browser = opened(odd, "pretrain-7b")
    browser.run("report.panels.forEach(panel => panel.build())")
    point = "[panel.spec.name, line.tokens[i], line.step[i], line.time[i], String(value), line.by]"
    lines = f"panel.lines.map(line => line.value.map((value, i) => {point}))"
    found = browser.run(
        f"JSON.stringify(report.panels.filter(panel => panel.spec.kind === 'metric').map(panel => {lines}))"
    )
    points = [tuple(point) for panel in json.loads(found) for line in panel for point in line]
    expected = ask(
        odd,
        "SELECT name, tokens, step, epoch_ms(time), value, superseded_by FROM metrics WHERE run_id = 'pretrain-7b'",
    )
    values = {(name, tokens, step, ms, by): text for name, tokens, step, ms, text, by in points}
    assert len(values) == len(expected)
    for *place_, value, by in expected:
        text = values[*place_, by].replace("Infinity", "inf")
        assert float(text) == value or (math.isnan(value) and text == "NaN")


def test_what_is_said_under_the_pointer_is_what_sql_says(opened: Open, odd: Path) -> None:
    """Value, tokens, step, time and segment; a spike is found although it is as thin as a line."""
    browser = opened(odd, "pretrain-7b")
    tokens = 300 * TOKENS_PER_STEP
    ((value, step, moment),) = ask(
        odd,
        f"SELECT value, step, strftime(time, '%Y-%m-%d %H:%M:%S') FROM live WHERE run_id = 'pretrain-7b'"
        f" AND name = 'train/loss' AND tokens = {tokens}",
    )
    said = tip(browser, tokens, value)
    shown = re.search(r"^[0-9.]+$", said, re.MULTILINE)
    assert shown is not None
    assert float(shown[0]) == value
    for text in (f"{tokens:,} tokens", f"step {step}", f"{moment} UTC", "segment 1"):
        assert text in said
    spike = tip(browser, 800 * TOKENS_PER_STEP, SPIKE)
    assert f"{SPIKE}" in spike
    assert "step 800" in spike
    assert "loss 9.25, usually 3.1 · batches web-000812, code-000093" in spike, "the alert, and its batches"


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(opened: Open, odd: Path) -> None:
    """By tokens in all of them; upwards only in the one."""
    browser = opened(odd, "pretrain-7b")
    ends = "[report.panels[0], report.panels[1]].map(panel => [panel.chart.scales.x.min, panel.chart.scales.x.max])"
    before = browser.run(ends)
    first, last = 500 * TOKENS_PER_STEP, 900 * TOKENS_PER_STEP
    (x0, y0), (x1, _) = place(browser, first), place(browser, last)
    browser.drag(x0, y0, x1, y0 + 3)
    browser.wait("document.body.classList.contains('zoomed')")
    pixel = (before[0][1] - before[0][0]) / browser.run(f"{_CHART}.over.clientWidth")
    for low, high in browser.run(ends):
        assert low == pytest.approx(first, abs=2 * pixel)
        assert high == pytest.approx(last, abs=2 * pixel)
    for count in (1, 2):
        browser.mouse("mousePressed", x0, y0, button="left", buttons=1, clickCount=count)
        browser.mouse("mouseReleased", x0, y0, button="left", clickCount=count)
    browser.wait("!document.body.classList.contains('zoomed')")
    assert browser.run(ends) == before
    assert browser.errors == []


def test_the_keyboard_moves_along_a_curve_and_says_its_points(opened: Open, odd: Path) -> None:
    """For those who see no pointer: the last point is read out with all its digits."""
    browser = opened(odd, "pretrain-7b")
    browser.run("document.querySelector('#panel-0 .frame').focus()")
    browser.key("End")
    ((value, tokens),) = ask(
        odd, "SELECT arg_max(value, tokens), max(tokens) FROM live WHERE run_id = 'pretrain-7b' AND name = 'train/loss'"
    )
    said = browser.run("document.getElementById('said').textContent")
    assert said.startswith(f"{value!r}, {tokens:,} tokens")
    browser.key("ArrowLeft")
    assert "step 1,999" in browser.run("document.getElementById('said').textContent")
    browser.key("+", text="+")
    browser.wait("document.body.classList.contains('zoomed')")
    browser.key("Escape")
    browser.wait("!document.body.classList.contains('zoomed')")


def test_labels_are_told_apart_however_far_the_run_is(opened: Open, tmp_path: Path) -> None:
    """At 10^15 tokens, on values that are all but the same, and on a loss that overflows."""
    run = open_run(tmp_path, run_id="far")
    for step in range(200):
        values = {"train/loss": 2.0 + 1e-7 * step, "b/large": 3e38 if step == 100 else 2.0, "c/small": 1e-12 * step}
        run.log(values, step=step, tokens=10**15 + step * 4_000_000)
    run.finish()
    browser = opened(tmp_path, "far")
    for axis in (0, 1):
        labels = browser.run(f"{_CHART}.axes[{axis}]._values.filter(label => label)")
        assert len(set(labels)) == len(labels) > 2
    for panel in (1, 2):
        browser.run(f"report.panels[{panel}].build()")
        browser.wait(f"report.panels[{panel}].chart.axes[1]._values?.length > 2")
    assert browser.errors == []


def test_what_is_shown_can_be_chosen(opened: Open, odd: Path) -> None:
    """Superseded stretches, marks, axes, logarithms: each changes what is drawn, and none fails."""
    browser = opened(odd, "pretrain-7b")
    panel = "report.panels[0]"
    assert browser.run(f"{panel}.entries.length") == 3
    browser.run("document.querySelector('[name=superseded]').click()")
    assert browser.run(f"{panel}.entries.length") == 1
    browser.run("document.querySelector('[name=superseded]').click()")
    marks = {"segments": "borders", "alerts": "alerts", "checkpoints": "checkpoints"}
    for name, kind in marks.items():
        assert browser.run(f"{panel}.marks().{kind}.length") > 0
        browser.run(f"document.querySelector('[name={name}]').click()")
        assert browser.run(f"{panel}.marks().{kind}.length") == 0
        browser.run(f"document.querySelector('[name={name}]').click()")
    ends = {"step": (1, 2000), "time": (BEGIN.timestamp() * 1000 + 4000, (BEGIN.timestamp() + 6 * 3600) * 1000)}
    for axis, (low, high) in ends.items():
        browser.run(f"document.querySelector('[value={axis}]').click()")
        assert browser.run(f"[{_CHART}.data[0][0], {_CHART}.data[0].at(-1)]") == [low, high]
    browser.run("document.querySelector('[value=elapsed]').click()")
    browser.run("document.querySelector('[name=logx]').click(); document.querySelector('[name=logy]').click()")
    browser.run("document.querySelector('[name=clip]').click()")
    assert browser.run(f"[{_CHART}.scales.x.distr, {_CHART}.scales.y.distr]") == [3, 3]
    assert browser.run(f"{_CHART}.scales.y.max") < SPIKE
    assert browser.errors == []


def test_smoothing_is_the_average_by_tokens_of_what_was_logged(opened: Open, odd: Path) -> None:
    """Weights halve every so many tokens, and a beginning is not pulled towards zero."""
    browser = opened(odd, "pretrain-7b-recipe-1")
    slide = "const s = document.querySelector('[name=smoothing]'); s.value = 50;"
    browser.run(f"(() => {{ {slide} s.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")
    half_life = browser.run("report.state.smoothing * report.tokensSpan()")
    smoothed = browser.run("report.panels[0].entries.find(entry => !entry.isRaw).ys")
    points = ask(odd, "SELECT tokens, value FROM series('pretrain-7b-recipe-1', 'train/loss') WHERE isfinite(value)")
    for index in (0, 1, 10, len(points) - 1):
        at = points[index][0]
        weights = [2 ** ((tokens - at) / half_life) for tokens, _ in points[: index + 1]]
        mean = sum(weight * value for weight, (_, value) in zip(weights, points, strict=False)) / sum(weights)
        assert smoothed[index] == pytest.approx(mean, rel=1e-9)


def test_several_runs_share_a_chart_and_each_can_be_left_out(opened: Open, odd: Path) -> None:
    """What a fork has from its parent is drawn once."""
    browser = opened(odd, "pretrain-7b", "pretrain-7b-recipe-1")
    child = "report.panels[0].entries.find(entry => entry.line.run === 1)"
    forked = 1000 * TOKENS_PER_STEP
    assert browser.run(f"{child}.xs[0]") == forked
    assert f"{ask(odd, 'SELECT count(*) FROM runs')[0][0]} runs" == browser.run(
        "document.querySelector('h1').innerText"
    )
    browser.run("document.querySelector('[data-run=\"0\"]').click()")
    assert browser.run("report.panels[0].entries.every(entry => entry.line.run === 1)")
    assert browser.run(f"{child}.xs[0]") == TOKENS_PER_STEP, "alone, its curve begins where its parent's does"
    assert browser.errors == []


def test_a_break_is_a_break_whatever_other_runs_have_there(opened: Open, odd: Path) -> None:
    """By time a curve ends where its segment ended, although another run went on."""
    browser = opened(odd, "pretrain-7b", "pretrain-7b-recipe-1")
    browser.run("document.querySelector('[value=time]').click()")
    child = "report.panels[0].entries.findIndex(entry => entry.line.run === 1) + 1"
    column = browser.run(f"[...{_CHART}.data[{child}]].map(y => y === undefined ? 'none' : y)")
    xs = browser.run(f"{_CHART}.data[0]")
    ((end, begin),) = ask(
        odd,
        "SELECT epoch_ms(max(time) FILTER (source_run <> run_id)), epoch_ms(min(time) FILTER (source_run = run_id))"
        " FROM history WHERE run_id = 'pretrain-7b-recipe-1'",
    )
    between = [y for x, y in zip(xs, column, strict=True) if end < x < begin]
    assert len(between) > 900
    assert set(between) == {None}


def test_damage_and_gaps_are_seen(opened: Open, odd: Path) -> None:
    """In the first screen in words, in the charts as bands, and the line breaks where rows are missing."""
    browser = opened(odd, "pretrain-7b")
    words = browser.run("document.querySelector('.warnings').innerText")
    assert "1 stretch of bytes in 1 file cannot be read" in words
    assert "could not keep 100 points" in words
    bands = browser.run("report.panels[0].marked.bands.map(band => [band.first, band.last, band.isDamage])")
    ((first, last),) = ask(odd, "SELECT first_tokens, last_tokens FROM gaps")
    assert [first, last, False] in bands
    ((low, high),) = [band[:2] for band in bands if band[2]]
    missing = ask(
        odd,
        f"SELECT max(tokens) FILTER (tokens <= {low}), min(tokens) FILTER (tokens >= {high}),"
        f" count(*) FILTER (tokens > {low} AND tokens < {high}) FROM live WHERE run_id = 'pretrain-7b' AND segment = 3",
    )
    assert missing == [(low, high, 0)]
    drawn = browser.run("(() => { const e = report.panels[0].entries.at(-1); return [e.drawn.xs, e.drawn.ys]; })()")
    assert [x for x, y in zip(*drawn, strict=True) if y is None and low < x < high] == [(low + high) / 2]


@pytest.mark.parametrize("dark", [False, True])
def test_it_has_a_light_and_a_dark_theme_and_fits_a_phone(opened: Open, odd: Path, *, dark: bool) -> None:
    """As the reader's system has it; nothing sticks out of a narrow window, and paper is white."""
    browser = opened(odd, "pretrain-7b", "pretrain-7b-recipe-1", dark=dark, width=375, height=800)
    light = "getComputedStyle(document.body).backgroundColor"
    assert browser.run(light) == ("rgb(17, 20, 24)" if dark else "rgb(255, 255, 255)")
    assert browser.run("document.documentElement.scrollWidth") == 375
    assert browser.run(f"{_CHART}.width") <= 375
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(light) == "rgb(255, 255, 255)"
    assert browser.run("report.panels.every(panel => panel.chart !== null)"), "paper has all charts"
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.errors == []


def test_everything_is_drawn_by_the_time_the_page_has_loaded(opened: Open, browser: Browser, odd: Path) -> None:
    """Whoever takes a picture or a print then, of the whole page too, has all curves in it."""
    seen = "[...document.querySelectorAll('canvas')].map(one => new Uint32Array("
    seen += "one.getContext('2d').getImageData(0, 0, one.width, one.height).data.buffer).filter(pixel => pixel).length)"
    listen = f"addEventListener('load', () => {{ window.atLoad = {seen}; }});"
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=listen)
    try:
        opened(odd, "pretrain-7b")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    coloured = browser.run("atLoad")
    assert len(coloured) == browser.run("report.panels.length") == 7
    assert min(coloured) > 1000
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        browser.run("window.dispatchEvent(new Event('beforeprint'))")
        assert min(browser.run(seen)) > 1000
        browser.run("window.dispatchEvent(new Event('afterprint'))")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("kind", ["nothing", "one", "same", "noise", "numbers"])
def test_what_was_packed_is_unpacked(browser: Browser, tmp_path: Path, kind: str, level: int) -> None:
    """Blocks that are stored, with the fixed code and with their own; damage is an error, and no endless loop."""
    chance = random.Random(5)
    content = {
        "nothing": b"",
        "one": b"x",
        "same": b"-" * 70_000,
        "noise": chance.randbytes(70_000),
        "numbers": json.dumps([chance.gauss(0, 1) for _ in range(10_000)]).encode(),
    }[kind]
    script = (Path(report.__file__).parent / "gunzip.js").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(f"<script>{script}; window.gunzip = gunzip;</script>", encoding="utf-8")
    browser.open(page)
    packed = gzip.compress(content, level, mtime=0)

    def unpacked(data: bytes) -> bytes:
        bytes_ = f"Uint8Array.from(atob('{base64.b64encode(data).decode()}'), one => one.charCodeAt(0))"
        text = f"Array.from(gunzip({bytes_}), one => String.fromCharCode(one)).join('')"
        return base64.b64decode(browser.run(f"(() => {{ try {{ return btoa({text}); }} catch {{ return ''; }} }})()"))

    assert unpacked(packed) == content
    assert unpacked(packed[:-4] + (len(content) + 1).to_bytes(4, "little")) == b"", "another length than there is"
    assert unpacked(packed[: len(packed) // 2]) == b""


def test_a_fork_is_marked_with_what_its_parent_had_on_the_stretch(opened: Open, odd: Path) -> None:
    """Alerts, checkpoints and evaluations stand where the curve does: once, whichever of the two runs is shown."""
    browser = opened(odd, "pretrain-7b-recipe-1")
    forked = 1000 * TOKENS_PER_STEP
    alerts = "report.panels[0].marks().alerts.map(alert => alert.x)"
    assert browser.run(alerts) == [800 * TOKENS_PER_STEP, 900 * TOKENS_PER_STEP]
    saved = browser.run("report.panels[0].marks().checkpoints.map(saved => saved.x)")
    assert [x // (100 * TOKENS_PER_STEP) for x in saved] == list(range(1, 15))
    evaluated = "report.panels.find(panel => panel.spec.name === 'hellaswag/acc').entries[0].xs"
    assert browser.run(evaluated) == [600 * TOKENS_PER_STEP, forked]
    both = opened(odd, "pretrain-7b", "pretrain-7b-recipe-1")
    assert both.run(alerts) == [800 * TOKENS_PER_STEP, 900 * TOKENS_PER_STEP]
    both.run("document.querySelector('[data-run=\"0\"]').click()")
    assert both.run(alerts) == [800 * TOKENS_PER_STEP, 900 * TOKENS_PER_STEP], "the child's, when it is alone"
    assert both.errors == []


def test_a_value_comes_before_what_is_marked_there(opened: Open, tmp_path: Path) -> None:
    """However many alerts there are at one place: they are counted, and do not hide the curve."""
    with open_run(tmp_path, run_id="a", alerts=None) as run:
        for step in range(1, 100):
            run.log({"train/loss": 2.0, "train/grad_norm": 1.0}, step=step, tokens=step)
        for number in range(9):
            metric = "train/loss" if number == 8 else "train/grad_norm"
            run.alert(f"rule{number}", "a long story " * 20, step=50, tokens=50, metric=metric)
    browser = opened(tmp_path, "a")
    first, *marks = tip(browser, 50, 2.0).split("warn: ")
    assert first.startswith("2\n50 tokens")
    assert [mark.partition(":")[0] for mark in marks] == ["rule8", "rule0", "rule1", "rule2"], "its own metric's first"
    assert "5 more marks" in marks[-1]
    height = "report.panels[0].tip.offsetHeight"
    assert browser.run(height) < browser.run(f"{_CHART}.over.clientHeight")


def test_words_in_tables_are_whole_in_a_narrow_window(opened: Open, odd: Path) -> None:
    """A table that is too wide scrolls; a name that is cut into letters cannot be read or copied."""
    browser = opened(odd, "pretrain-7b", "pretrain-7b-recipe-1", width=375, height=800)
    heights = browser.run(
        "['web-000901', 'spike', 'pretrain-7b-3-1500'].map(name => [...document.querySelectorAll('td .name-of')]"
        ".find(one => one.textContent === name).getBoundingClientRect().height)"
    )
    spans = "[...document.querySelectorAll('td')].filter(cell => /^[0-9]+ (h [0-9]+ )?min$/.test(cell.textContent))"
    heights += browser.run(f"{spans}.map(cell => cell.clientHeight - 8)")
    assert len(heights) > 4
    assert max(heights) < 24, "one line"
    assert browser.run("document.documentElement.scrollWidth") == 375


def test_a_finger_points(opened: Open, odd: Path) -> None:
    """A tap shows what is there."""
    browser = opened(odd, "pretrain-7b", width=375, height=800)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        browser.run("document.getElementById('panel-0').scrollIntoView({block: 'center', behavior: 'instant'})")
        x, y = place(browser, 1500 * TOKENS_PER_STEP)
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        browser.wait("!report.panels[0].tip.hidden")
        assert "tokens" in browser.run("report.panels[0].tip.innerText")
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


def test_an_alert_in_the_table_leads_to_its_place(opened: Open, odd: Path) -> None:
    """A click zooms to where it was raised."""
    browser = opened(odd, "pretrain-7b")
    browser.run("document.querySelector('button[data-tokens]').click()")
    low, high = browser.run("report.state.zoom")
    assert low < 800 * TOKENS_PER_STEP < high
    assert browser.run("document.querySelector('button[data-tokens] span').title") == f"{800 * TOKENS_PER_STEP:,}"


def test_texts_of_the_log_stay_texts(opened: Open, tmp_path: Path) -> None:
    """Names, messages, batch ids, configuration: whatever is in them, nothing of it runs, and all of it is readable."""
    browser = opened(hostile_root(tmp_path / "runs"), "hostile")
    browser.run("report.panels.forEach(panel => panel.build())")
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    tip(browser, 20, 3.0)
    assert browser.run("window.hacked") is None
    assert browser.errors == []
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert (
        browser.run("document.querySelectorAll('img, svg, [onmouseover], [onfocus], main b:not([class])').length") == 0
    )
    names = browser.run("[...document.querySelectorAll('.panel .name')].map(name => name.textContent)")
    assert HOSTILE[0] in names
    assert HOSTILE[9] in names, "what looks like an escape is shown as it is"
    assert any("␀␇␛[31mred␡" in name for name in names), "control characters are seen"
    assert browser.run("document.documentElement.scrollWidth") == 1280
    messages = browser.run("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert HOSTILE[1] in messages
    assert "and 28 more" in " ".join(messages), "forty batch ids are not all listed"


@pytest.mark.soak
def test_a_million_points_make_a_small_file(browser: Browser, tmp_path: Path) -> None:
    """Below 10 MB; the spike of one step is drawn."""
    root = large_root(tmp_path / "runs", 50_000, 20)
    written = write(root, ["large"], tmp_path / "large.html")
    assert written.points == 1_250_000
    assert written.bytes < 10_000_000
    browser.open(tmp_path / "large.html", ready=_DRAWN)
    highest = "Math.max(...report.panels[0].entries.flatMap(entry => entry.ys.filter(y => y !== null)))"
    assert browser.run(highest) == SPIKE
    # What is smoothed are all points, and not the extremes that are kept.
    browser.run("report.state.smoothing = 0.05; report.rebuild()")
    half_life = browser.run("report.state.smoothing * report.tokensSpan()")
    smoothed = browser.run("report.panels[0].entries.find(entry => !entry.isRaw && entry.line.by === null).ys.at(-1)")
    points = ask(root, "SELECT tokens, value FROM series('large', 'train/loss')")
    weights = [2 ** ((tokens - points[-1][0]) / half_life) for tokens, _ in points]
    mean = sum(weight * value for weight, (_, value) in zip(weights, points, strict=True)) / sum(weights)
    assert smoothed == pytest.approx(mean, rel=1e-3)
    assert browser.errors == []
