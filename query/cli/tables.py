"""Commands to look at a root: ``llmtrack ls``, ``show``, ``sql`` and ``best``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from llmtrack.query.runs.select import select_run, select_runs
from llmtrack.query.text import layout
from llmtrack.query.text.console import say, to_json
from llmtrack.writer.errors import UsageError

from .options import example, json_option, report_damages, root_option, say_damages

_SHOWN_HASH: Final = 14  # characters: enough to tell two apart
_STATUS_STYLES: Final = {
    "running": "32",
    "stalled": "33",
    "lost": "31",
    "failed": "31",
    "preempted": "33",
}


@click.command("ls", epilog=example("llmtrack ls --root /shared/runs", "llmtrack ls 'pretrain-7b-*' --json"))
@click.argument("names", nargs=-1, metavar="[RUN]...")
@root_option
@json_option
def ls(*, names: Sequence[str], root: Path, as_json: bool) -> int:
    """List the runs of a root, the latest first.

    RUN is an id, the beginning of one, or a glob. LOSS is the last train/loss of the run's curve, TOKENS/S the mean of
    the newest segment, SIZE that of all its files; alerts, points lost and damage have a column when there are any. Of
    points it reads only the newest parts of each run: `llmtrack verify` checks every byte.

    Exit status: 0 done; 1 wrong usage; 4 a record, or the end of a sealed part, cannot be read.
    """
    from llmtrack.query.runs.describe import list_runs
    from llmtrack.query.sql.views import connect

    with connect(root, points=False) as con:
        rows = list_runs(con, root, names)
        wanted = [row["run_id"] for row in rows] if names else None
        if as_json:
            click.echo(to_json(rows))
        elif not rows:
            say(f"there are no runs in {root.resolve()}")
        else:
            _print_runs(rows)
        return report_damages(con, wanted)


@click.command("show", epilog=example("llmtrack show pretrain-7b", "llmtrack show pretrain-7b --json"))
@click.argument("name", metavar="RUN")
@root_option
@json_option
def show(*, name: str, root: Path, as_json: bool) -> int:
    """Show one run as a tree: its segments, what they left behind, forks, gaps and damage.

    RUN is an id or the beginning of one. --json prints its segments.

    Exit status: 0 done; 1 wrong usage; 4 something of the run cannot be read.
    """
    from llmtrack.query.read.log import Log
    from llmtrack.query.runs.describe import describe_run
    from llmtrack.query.runs.tree import run_tree
    from llmtrack.query.sql.views import connect

    run_id = select_run(Log(root).run_ids(), name)
    with connect(root, runs=[run_id]) as con, connect(root, points=False) as all_runs:
        run = describe_run(con, all_runs, run_id)
        if as_json:
            click.echo(to_json(run.segments))
        else:
            layout.show(run_tree(run))
        return report_damages(con, [run_id])


@click.command(
    "sql",
    epilog=example(
        "llmtrack sql \"FROM live WHERE name = 'train/loss' ORDER BY tokens DESC LIMIT 1\"",
        "llmtrack sql \"FROM series('pretrain-7b', 'train/loss')\" -o loss.parquet",
        "llmtrack sql - --format csv < query.sql",
        "llmtrack sql --save catalog.duckdb --root /shared/runs    # then: duckdb catalog.duckdb",
    ),
)
@click.argument("query", required=False)
@root_option
@click.option("--run", "names", multiple=True, metavar="RUN", help="Read only these runs, and those they came from.")
@click.option(
    "--format", "kind", type=click.Choice(layout.FORMATS), default="table", show_default=True, help="To print."
)
@click.option("--json", "as_json", is_flag=True, help="As --format json.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="x.parquet, x.csv or x.json.")
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE", help="Write the views as a database for DuckDB alone."
)
def sql(
    *,
    query: str | None,
    root: Path,
    names: Sequence[str],
    kind: str,
    as_json: bool,
    output: Path | None,
    save: Path | None,
) -> int:
    """Run one SQL statement over the views of a root, and print its rows.

    The views: runs, segments, metrics, live, history, checkpoints, alerts, batches, evals, gaps, goodput, damages; and
    the macros series(run, metric), smooth(run, metric, half_life_tokens), bucket(run, metric, n),
    at_tokens(metric, tokens), wide(run). QUERY may be `-`, for the standard input. It only reads: -o writes its rows to
    a file.

    --save writes a database that DuckDB opens without llmtrack: what is in open parts now, and where the sealed parts
    are. What is written later it does not see; save it again.

    Exit status: 0 done; 1 wrong usage, or SQL that DuckDB refuses; 4 something in the root
    cannot be read: the answer is then without it.
    """
    from llmtrack.query.read.log import Log
    from llmtrack.query.sql.ask import Answer, write_answer
    from llmtrack.query.sql.views import connect, save_catalog

    if (query is None) is (save is None):
        raise UsageError("give a query, or --save FILE", hint="llmtrack sql 'SHOW TABLES', or llmtrack sql --help")
    text = sys.stdin.read() if query == "-" else query or ""
    runs = select_runs(Log(root).run_ids(), names) if names else None
    if save is not None:
        return say_damages(save_catalog(root, save, runs=runs))
    with connect(root, runs=runs) as con:
        if output is not None:
            write_answer(con, text, output)
        else:
            answer = Answer(con, text)
            if answer.columns:
                layout.print_rows(answer.columns, answer.rows(), "json" if as_json else kind)
        return report_damages(con)


@click.command(
    "best",
    epilog=example(
        "llmtrack best hellaswag/acc", "llmtrack best wikitext/word_perplexity --lower-is-better 'pretrain-7b*'"
    ),
)
@click.argument("metric", metavar="TASK/METRIC")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@root_option
@click.option("--lower-is-better", is_flag=True, help="For perplexities and losses.")
@click.option("--superseded", is_flag=True, help="Rank superseded checkpoints too.")
@json_option
def best(
    *, metric: str, names: Sequence[str], root: Path, lower_is_better: bool, superseded: bool, as_json: bool
) -> int:
    """Rank checkpoints by one evaluated metric, the best first.

    RUN is an id, the beginning of one, or a glob; without any, all runs are ranked, and behind them checkpoints that no
    run has recorded. Warns when the values were measured by different harnesses or with different prompts.

    Exit status: 0 done; 1 wrong usage; 4 something of these runs cannot be read.
    """
    from llmtrack.query.read.log import Log
    from llmtrack.query.runs.best import best as rank
    from llmtrack.query.sql.views import connect

    runs = select_runs(Log(root).run_ids(), names) if names else None
    with connect(root, runs=runs, points=False) as con:
        ranking = rank(con, metric, runs=runs or (), lower_is_better=lower_is_better, superseded=superseded)
        if as_json:
            click.echo(to_json(ranking.rows))
        elif ranking.rows:
            _print_ranking(ranking.rows)
        for warning in ranking.warnings:
            say(f"warning: {warning}")
        if ranking.superseded:
            say(f"left out: {ranking.superseded} of superseded checkpoints; --superseded ranks them too")
        return report_damages(con, runs)


COMMANDS: Final[tuple[click.Command, ...]] = (ls, show, sql, best)


def _print_runs(rows: Sequence[dict[str, Any]]) -> None:
    optional: dict[str, Callable[[dict[str, Any]], str]] = {
        "NAME": lambda row: row["run_name"] or "",
        "PROJECT": lambda row: row["project"] or "",
        "FORKED FROM": lambda row: (
            f"{row['parent_run']} at {layout.tokens(row['fork_tokens'])}"
            + (f" ({row['fork_reason']})" if row["fork_reason"] else "")
            if row["parent_run"]
            else ""
        ),
        "ALERTS": lambda row: str(row["alerts"] or ""),
        "POINTS LOST": lambda row: str(row["points_lost"] or ""),
        "DAMAGED": lambda row: str(row["damages"] or ""),
    }
    extra = {name: text for name, text in optional.items() if any(text(row) for row in rows)}
    layout.print_table(
        ["RUN", "STATUS", "TOKENS", "STEP", "LOSS", "TOKENS/S", "RESTARTS", "SIZE", "LAST (UTC)", *extra],
        [
            [
                row["run_id"],
                row["status"],
                layout.tokens(row["tokens"]),
                layout.cell(row["step"]),
                "" if row["loss"] is None else f"{row['loss']:.4g}",
                layout.tokens(None if row["tokens_per_s"] is None else round(row["tokens_per_s"])),
                str(row["restarts"]),
                layout.size(row["size_bytes"]),
                layout.moment(row["last_time"]),
                *(text(row) for text in extra.values()),
            ]
            for row in rows
        ],
        styles=_STATUS_STYLES,
    )


def _print_ranking(rows: Sequence[dict[str, Any]]) -> None:
    optional: dict[str, Callable[[dict[str, Any]], str]] = {
        "STDERR": lambda row: "" if row["stderr"] is None else f"{row['stderr']:.2g}",
        "HARNESS": lambda row: " ".join(filter(None, (row["harness"], row["harness_version"]))),
        "PROMPTS": lambda row: (row["prompt_hash"] or "")[:_SHOWN_HASH],
        "SUPERSEDED BY": lambda row: layout.cell(row["superseded_by"]),
        "PATH": lambda row: row["path"] or "",
    }
    extra = {name: text for name, text in optional.items() if any(text(row) for row in rows)}
    layout.print_table(
        ["VALUE", "RUN", "TOKENS", "STEP", "CHECKPOINT", *extra],
        [
            [
                f"{row['value']:.6g}",
                row["run_id"] if row["matched"] else f"{row['run_id'] or ''} (not recorded)".lstrip(),
                layout.tokens(row["tokens"]),
                layout.cell(row["step"]),
                row["ckpt_id"],
                *(text(row) for text in extra.values()),
            ]
            for row in rows
        ],
    )
