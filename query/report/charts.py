"""Where the charts go: one figure for each metric, what they can be asked for, and what the marks mean."""

from __future__ import annotations

from typing import Final

from .data import ReportData
from .html import Html, attribute, join, own, text
from .pack import eval_names

_OPEN_PANELS: Final = 60  # more charts than these begin folded up
_ONE_GRID: Final = 16  # metrics that need no headings between them


def charts(report: ReportData) -> Html:
    """Return the controls, a figure for each metric, and the legend."""
    names = [*report.metrics, *("/".join(key) for key in eval_names(report))]
    if not names:
        return Html("<p>No points were logged yet.</p>")
    kinds = ["metric"] * len(report.metrics) + ["eval"] * (len(names) - len(report.metrics))
    groups: dict[str, list[int]] = {}
    is_much = len(report.metrics) > _ONE_GRID
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if index or kind == "eval":
            group = (
                "Evaluations" if kind == "eval" else name.partition("/")[0] if "/" in name and is_much else "Metrics"
            )
            groups.setdefault(group, []).append(index)
    noscript = "<noscript><p>The charts need JavaScript; all tables below do without.</p></noscript>"
    parts = [
        '<p id="told" role="status">Unpacking the charts …</p>',
        noscript,
        '<p id="said" class="unseen" aria-live="polite"></p>',
        own("controls.html"),
    ]
    if kinds[0] == "metric":
        parts.append(_figure(0, names[0], "metric", wide=True))
    parts += [_legend(report), Html(own("help.html"))]
    if len(names) > 8:  # noqa: PLR2004 - fewer are seen at a glance
        parts.append('<label class="filter">Find a metric <input type="search" id="filter" autocomplete="off"></label>')
    shown = 0
    for group in sorted(groups, key=lambda group: (group != "Evaluations", group)):
        figures = [_figure(index, names[index], kinds[index], wide=False) for index in groups[group]]
        is_open = " open" if shown < _OPEN_PANELS else ""
        shown += len(figures)
        summary = f"<summary>{text(group, long=80)} <small>{len(figures)}</small></summary>"
        parts.append(f'<details class="group"{is_open}>{summary}<div class="grid">{join(figures)}</div></details>')
    return join(['<section aria-label="Charts">', *parts, "</section>"])


def _figure(index: int, name: str, kind: str, *, wide: bool) -> Html:
    what = "evaluations" if kind == "eval" else "curves"
    label = f"{attribute(name, long=200)}: {what}"
    return Html(
        f'<figure id="panel-{index}" data-panel="{index}" class="panel{" wide" if wide else ""}">'
        f'<figcaption><span class="name">{text(name, long=200)}</span>{own("buttons.html")}</figcaption>'
        f'<div class="frame" tabindex="0" role="group" aria-roledescription="chart" aria-label="{label}"></div>'
        '<p class="note"></p></figure>'
    )


def _legend(report: ReportData) -> Html:
    has_superseded = any(line.superseded_by is not None for run in report.runs for line in run.lines)
    keys = ['<span><i class="key line"></i>current</span>'] if len(report.runs) == 1 else []
    if has_superseded:
        keys.append('<span><i class="key pale"></i><i class="key left"></i>superseded by a restart</span>')
    keys.append('<span><i class="key border"></i>a segment starts</span>')
    if any(run.checkpoints for run in report.runs):
        keys.append('<span><i class="key tick"></i>checkpoint</span>')
    if any(run.alerts for run in report.runs):
        keys.append('<span><i class="key alert"></i>alert</span>')
    if any(line.odd for run in report.runs for line in run.lines):
        keys.append('<span><b class="odd">✗</b>NaN or infinite</span>')
    if any(run.gaps for run in report.runs):
        keys.append('<span><i class="key gap"></i>gap: points were lost</span>')
    if any(run.holes for run in report.runs):
        keys.append('<span><i class="key damage"></i>damaged bytes</span>')
    if eval_names(report):
        keys.append('<span><b class="best">★</b>best evaluation</span>')
    return Html(f'<p class="legend">{"".join(keys)}</p>')
