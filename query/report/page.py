"""A report as one HTML file: tables that need nothing, charts drawn by a script inside, and no way out to a network."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from importlib import metadata
from typing import Final

from .charts import charts
from .data import ReportData
from .head import head, warnings
from .html import Html, attribute, join, own, text
from .pack import pack
from .tables import alerts, between_runs, changes, evaluations, lost, segments, settings

_SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "gunzip.js", "series.js", "panel.js", "page.js")
_STYLES: Final = ("uplot/uPlot.min.css", "style.css")


def page(report: ReportData, *, axis: str = "tokens", now: dt.datetime | None = None) -> str:
    """Return the file.

    Args:
        report: From `read_report`.
        axis: The one to begin with.
        now: When it was written.
    """
    script = "\n".join(["'use strict';", *map(own, _SCRIPTS)])
    style = "\n".join(map(own, _STYLES))
    script = f"(() => {{\n{script}\n}})();"
    # Nothing may be fetched, sent or embedded, and no script runs but this very one, whatever a log has in it.
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = report.runs[0].run_id if len(report.runs) == 1 else f"{len(report.runs)} runs"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="llmtrack {attribute(metadata.version("llmtrack-log"))}">
<title>{text(title)} - llmtrack</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{_body(report, now or dt.datetime.now(dt.UTC))}
<script type="text/plain" id="data">{pack(report, axis=axis)}</script>
<script>{script}</script>
</body>
</html>
"""


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _body(report: ReportData, now: dt.datetime) -> Html:
    return join(
        [
            head(report, now),
            warnings(report),
            "<main>",
            charts(report),
            segments(report),
            alerts(report),
            evaluations(report),
            changes(report),
            between_runs(report),
            lost(report),
            settings(report),
            "</main>",
            _foot(report),
        ]
    )


def _foot(report: ReportData) -> Html:
    drawn = sum(len(line.rows) for run in report.runs for line in run.lines)
    thinned = f"All {report.points:,} points are in this file."
    if drawn < report.points:
        thinned = (
            f"{drawn:,} of {report.points:,} points are in this file. Long curves are thinned out: of each stretch the "
            "first, last, lowest and highest point stay, so no spike is lost; each point shown stands in the log."
        )
    made = f"llmtrack {text(metadata.version('llmtrack-log'))}."
    licence = "Times are UTC. Charts: uPlot by Leon Sorokin, MIT licence."
    return Html(f"<footer><p>{made} {thinned} {licence}</p></footer>")
