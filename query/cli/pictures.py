"""Commands that draw and follow: ``llmtrack plot``, ``compare``, ``report`` and ``tail``."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import duckdb

from llmtrack.query.runs.select import select_run, select_runs
from llmtrack.query.text import layout
from llmtrack.query.text.console import plain, say, to_json
from llmtrack.writer.errors import UsageError

from .options import example, json_option, report_damages, root_option

_CHARACTERS_OF_A_VALUE: Final = 24  # about, with its name
_PREFIX: Final = 46  # characters in front of them

axis_option: Final = click.option(
    "--x", "axis", type=click.Choice(("tokens", "step", "time")), default="tokens", show_default=True, help="Axis."
)
log_y_option: Final = click.option("--log-y", is_flag=True, help="A logarithmic axis for the values.")
picture_option: Final = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture: x.png or x.svg."
)


@click.command(
    "plot",
    epilog=example(
        "llmtrack plot pretrain-7b train/loss",
        "llmtrack plot pretrain-7b train/loss train/lr --x step",
        "llmtrack plot pretrain-7b 'train/*' -o loss.svg",
    ),
)
@click.argument("name", metavar="RUN")
@click.argument("metrics", nargs=-1, required=True, metavar="METRIC...")
@root_option
@axis_option
@log_y_option
@click.option("--width", type=click.IntRange(40), metavar="COLUMNS", help="Of the picture; as the terminal has.")
@click.option("--height", type=click.IntRange(10), metavar="ROWS", help="Of each picture.")
@picture_option
@json_option
def plot(
    *,
    name: str,
    metrics: Sequence[str],
    root: Path,
    axis: str,
    log_y: bool,
    width: int | None,
    height: int | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Draw metrics of one run in the terminal, or as PNG or SVG, with what restarts left behind.

    The run's curve is drawn with those of the runs it was forked from; what was superseded is pale, and marked in the
    legend. Vertical lines show where segments start; alerts, evaluations, forks, gaps and damage have marks of their
    own. Long curves are thinned out so that no spike is lost; --json has every point. METRIC is a name or a glob.

    Exit status: 0 done; 1 wrong usage, or no such metric; 4 something of the run, or of one that it was forked from,
    cannot be read.
    """
    from llmtrack.query.draw import picture
    from llmtrack.query.draw import plot as terminal
    from llmtrack.query.read.log import Log
    from llmtrack.query.sql.views import connect

    if output is not None:
        _check_picture(output)
    run_id = select_run(Log(root).run_ids(), name)
    with connect(root, runs=[run_id]) as con, _told_what_is_unreadable(con):
        if as_json:
            click.echo(to_json(terminal.read_rows(con, run_id, metrics)))
            if output is None:
                return report_damages(con)
        with connect(root, points=False) as all_runs:
            curves = terminal.read_curves(con, run_id, metrics, all_runs=all_runs)
        if output is not None:
            _write(output, picture.draw_curves(curves, _kind(output), axis=axis, log_y=log_y))
        if not (as_json or output):
            columns, lines = layout.screen()
            size = {"width": width or columns, "height": height or max(12, min(lines - 4, 30))}
            for curve in curves:
                click.echo(terminal.draw(curve, axis=axis, log_y=log_y, colours=layout.has_colours(), **size))
        return report_damages(con)


@click.command(
    "compare",
    epilog=example(
        "llmtrack compare train/loss pretrain-7b pretrain-7b-recipe-1",
        "llmtrack compare train/loss 'sweep-*' --at 10000000000 --mean-over 100000000",
        "llmtrack compare train/loss 'sweep-*' -o compare.png",
    ),
)
@click.argument("metric", metavar="METRIC")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@root_option
@click.option(
    "--at", type=click.IntRange(0), multiple=True, metavar="TOKENS", help="A place to compare at; may repeat."
)
@click.option(
    "--places", type=click.IntRange(2, 10_000), default=12, show_default=True, help="How many places, evenly spaced."
)
@click.option(
    "--mean-over", type=click.IntRange(0), default=0, metavar="TOKENS", help="Compare means over so many tokens."
)
@log_y_option
@picture_option
@json_option
def compare(
    *,
    metric: str,
    names: Sequence[str],
    root: Path,
    at: Sequence[int],
    places: int,
    mean_over: int,
    log_y: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Compare one metric of several runs at equal tokens, and say how far each is from the first.

    Nothing is interpolated: a value at some tokens is the last one that was logged at or below them, on the run's own
    curve with that of the runs it was forked from. Beyond a run's last point it has none. RUN is an id, the beginning
    of one, or a glob.

    Exit status: 0 done; 1 wrong usage, or no such metric; 4 something of these runs cannot be read.
    """
    from llmtrack.query.draw import compare as comparing
    from llmtrack.query.draw import picture
    from llmtrack.query.read.log import Log
    from llmtrack.query.sql.views import connect

    if output is not None:
        _check_picture(output)
    runs = select_runs(Log(root).run_ids(), names)
    with connect(root, runs=runs) as con, _told_what_is_unreadable(con):
        found = comparing.compare(con, metric, runs, at=at, places=places, mean_over=mean_over)
        for run_id in found.without:
            say(f"left out: {run_id} has no {metric}")
        for run_id, tokens in found.shared.items():
            say(f"the same up to {layout.tokens(tokens)} tokens: {run_id} and {found.runs[0]} were one run until there")
        if as_json:
            click.echo(to_json(found.rows))
        else:
            _print_comparison(found)
        if output is not None:
            points, differences = comparing.read_picture(con, found, mean_over=mean_over)
            drawn = picture.draw_comparison(metric, points, differences, found.runs[0], _kind(output), log_y=log_y)
            _write(output, drawn)
        return report_damages(con)


@click.command(
    "report",
    epilog=example(
        "llmtrack report pretrain-7b -o report.html",
        "llmtrack report 'pretrain-7b*' --metric 'train/*' --metric 'eval/*' -o report.html",
    ),
)
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@root_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="report.html", show_default=True, metavar="FILE",
    help="The file to write.",
)  # fmt: skip
@click.option("--metric", "metrics", multiple=True, metavar="METRIC", help="Only these; a name or a glob; may repeat.")
@click.option(
    "--x", "axis", type=click.Choice(("tokens", "step", "time", "elapsed")), default="tokens", show_default=True,
    help="Axis to begin with.",
)  # fmt: skip
@json_option
def report(*, names: Sequence[str], root: Path, output: Path, metrics: Sequence[str], axis: str, as_json: bool) -> int:
    """Write runs as one HTML file that opens anywhere, without network.

    Curves with zoom and smoothing, what restarts left behind, segments, forks, alerts with their batches, evaluations
    with the best checkpoint, goodput, and what changed from segment to segment and from run to run. The file stays
    below 10 MB: long curves are thinned out so that no spike is lost. RUN is an id, the beginning of one, or a glob.

    Exit status: 0 done; 1 wrong usage, or the file cannot be written; 4 something of these runs cannot be read, and the
    report says what.
    """
    from llmtrack.query.read.log import Log
    from llmtrack.query.report import check_place, write_report
    from llmtrack.query.sql.views import connect

    check_place(output)
    runs = select_runs(Log(root).run_ids(), names)
    with (
        connect(root, runs=runs) as con,
        connect(root, points=False) as all_runs,
        _told_what_is_unreadable(con),
    ):
        written = write_report(con, all_runs, runs, output, root=root, metrics=metrics, axis=axis)
        if as_json:
            click.echo(to_json([{**vars(written), "path": str(written.path)}]))
        else:
            share = f"{written.points_drawn:,} of {written.points:,} points"
            size = f"{written.bytes / 1e6:.2f} MB"
            click.echo(f"{written.path}: {size}, {written.runs} runs, {written.metrics} metrics, {share}")
        return report_damages(con)


@click.command(
    "tail",
    epilog=example(
        "llmtrack tail -f pretrain-7b",
        "llmtrack tail pretrain-7b --lines 50 --metric train/loss",
        "llmtrack tail -f pretrain-7b --json | jq -r 'select(.kind == \"alert\") | .message'",
    ),
)
@click.argument("name", metavar="RUN")
@root_option
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Go on until the run has finished.")
@click.option("-n", "--lines", type=click.IntRange(0), default=10, show_default=True, help="How many rows come first.")
@click.option("--metric", "metrics", multiple=True, metavar="METRIC", help="Only these; a name or a glob; may repeat.")
@click.option(
    "--poll", "poll_s", type=click.FloatRange(0.05), default=1.0, show_default=True, metavar="SECONDS",
    help="How often is looked for something new.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print an array; with -f an object a line.")
def tail(
    *, name: str, root: Path, is_followed: bool, lines: int, metrics: Sequence[str], poll_s: float, as_json: bool
) -> int:
    """Show the last rows of a run, and with -f follow it while it is written.

    A line for each row of metrics, and lines beginning with --- for restarts, alerts, checkpoints, gaps, damage and the
    end. Following reads only what is new, and ends when the run has finished; a run that failed or was preempted may be
    started again, so it is waited for until Ctrl-C.

    Exit status: 0 done; 1 wrong usage; 4 something of the run could not be read; 130 interrupted.
    """
    from llmtrack.query.draw import curves
    from llmtrack.query.read.log import Log
    from llmtrack.query.runs import tail as following
    from llmtrack.query.sql.views import connect

    run_id = select_run(Log(root).run_ids(), name)
    with connect(root, runs=[run_id]) as con, _told_what_is_unreadable(con):
        if metrics and not is_followed:  # what is not there yet may come
            curves.select_metrics(curves.metric_names(con, run_id), metrics, run_id)
        follower = following.Follower(con, run_id, metrics)
        shown = _values_on_a_line()

        def put(event: dict[str, Any]) -> None:
            if as_json:
                click.echo(json.dumps({key: plain(value) for key, value in event.items()}, ensure_ascii=False))
            else:
                click.echo(following.line(event, shown=shown))
            sys.stdout.flush()

        if is_followed:
            for event in following.follow(follower, lines=lines, wait=lambda: time.sleep(poll_s)):
                put(event)
        elif as_json:
            click.echo(to_json(follower.last(lines)))
        else:
            for event in follower.last(lines):
                put(event)
        return report_damages(con)


COMMANDS: Final[tuple[click.Command, ...]] = (plot, compare, report, tail)


@contextmanager
def _told_what_is_unreadable(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Say of a metric that is not there that it may be among what is damaged."""
    try:
        yield
    except UsageError:
        report_damages(con)
        raise


def _values_on_a_line() -> int | None:
    """Return how many values of a row fit the terminal; None where there is none."""
    if not sys.stdout.isatty():
        return None
    return max(1, (shutil.get_terminal_size((100, 30)).columns - _PREFIX) // _CHARACTERS_OF_A_VALUE)


def _check_picture(path: Path) -> None:
    from llmtrack.query.draw.picture import check_suffix
    from llmtrack.query.report import check_place

    check_suffix(path)
    check_place(path)


def _kind(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")


def _write(path: Path, content: bytes) -> None:
    from llmtrack.query.report import write_whole

    write_whole(path, content)
    say(f"{path}: {len(content) / 1e3:,.0f} kB")


def _print_comparison(found: Any) -> None:
    number: Callable[[float | None], str] = lambda value: "" if value is None else f"{value:.6g}"  # noqa: E731
    by_place: dict[int, list[dict[str, Any]]] = {place: [] for place in found.grid}
    for row in found.rows:
        by_place[row["tokens"]].append(row)
    lines = []
    for place, (first, *others) in zip(layout.tokens_apart(found.grid), by_place.values(), strict=True):
        lines.append([place, number(first["value"])])
        for row in others:
            difference = "" if row["difference"] is None else f"{row['difference']:+.4g}"
            lines[-1] += [number(row["value"]), difference]
    heads = [head for run_id in found.runs[1:] for head in (run_id, "- FIRST")]
    layout.print_table(["TOKENS", found.runs[0], *heads], lines)
