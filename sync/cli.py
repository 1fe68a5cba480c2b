"""The command ``llmtrack-sync``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from llmtrack.writer.errors import NotInstalledError, RetryableSinkError, UsageError

try:
    import click
except ModuleNotFoundError:  # the base install is for trainers, and has no commands
    _EXTRA = "wandb" if {"wandb", "--to=wandb"} & set(sys.argv) else "mlflow"
    raise SystemExit(f"error: {NotInstalledError('click', extra=_EXTRA)}") from None

from llmtrack.query.text.console import EXIT_DAMAGED, EXIT_OK, EXIT_USAGE, run, say, to_json

from .config import Watching, configurable
from .replay import cursor
from .wandb.options import WandbOptions, with_wandb_options
from .watch import notify

if TYPE_CHECKING:
    import duckdb

    from . import once

EXIT_INCOMPLETE: Final = 2
EXIT_UNREACHABLE: Final = 3

_VERIFIED: Final = {
    "full": "every point read back and compared",
    "fast": "the newest value of every metric compared",
    "off": "not verified (--verify off)",
}


@configurable
@with_wandb_options
@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  llmtrack-sync runs --to mlflow\n  llmtrack-sync runs --to mlflow --watch\n"
    "  llmtrack-sync runs --to mlflow --tracking-uri http://mlflow.example.org:5000 --run 'pretrain-*'\n"
    "  llmtrack-sync runs --to wandb --wandb-offline /scratch/wandb    # then, elsewhere, wandb sync\n"
    "  llmtrack-sync status runs    # how far it is; llmtrack-sync status --help\n\n"
    "\b\nExit status: 0 everything sent and verified; 1 usage or authentication; 2 some runs incomplete;\n"
    "3 tracker not reachable; 4 damaged data found, intact data sent; 130 interrupted.",
)
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--to", "tracker", required=True, metavar="TRACKER", help="The tracker: mlflow or wandb.")
@click.option(
    "--tracking-uri",
    metavar="URI",
    help="Its address. MLflow: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db. W&B: WANDB_BASE_URL, or its cloud.",
)
@click.option("--run", "pattern", metavar="GLOB", help="Only runs whose id matches.")
@click.option(
    "--tail",
    type=click.Choice(["side", "hold"]),
    default="side",
    show_default=True,
    help="Points beyond the newest checkpoint: into a side run, or not at all until they are settled.",
)
@click.option(
    "--superseded",
    type=click.Choice(["side", "drop"]),
    default="side",
    show_default=True,
    help="Points that a restart left behind: into a side run, or not at all.",
)
@click.option(
    "--verify",
    type=click.Choice(["full", "fast", "off"]),
    default="full",
    show_default=True,
    help="Read back every point that was sent to a run, or the newest of each metric, or nothing.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Replay so many runs at once: parents before children, live runs before others.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Give up when the tracker has taken nothing for so many seconds; with --watch, try again.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="~/.local/state/llmtrack",
    help="Where cursors are kept. They may be lost: then what the tracker holds is read back once.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be sent, from the log and the cursors alone.")
@click.option("--json", "as_json", is_flag=True, help="Print an array with one row per run.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Print every run as it is done, and every wait.")
def command(**options: Any) -> int:
    """Replay the runs in ROOT into a tracker: each point once, at its time, read back and compared.

    Settled points go into one run per training run. What a restart left behind, and what lies beyond the newest
    checkpoint, goes into side runs of their own.
    """
    return _sync(**options)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; every error is one line, its remedy and an exit status.

    Args:
        args: Instead of those of the process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["status"]:  # a folder of this name is ./status
        from .watch.status import command as status

        run(status, words[1:], prog_name="llmtrack-sync status")
    run(command, words, prog_name="llmtrack-sync")


def _sync(
    *,
    root: Path,
    tracker: str,
    tracking_uri: str | None,
    pattern: str | None,
    tail: Literal["side", "hold"],
    superseded: Literal["side", "drop"],
    verify: Literal["full", "fast", "off"],
    jobs: int,
    timeout_s: float,
    state: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    watching: Watching,
    wandb: WandbOptions,
) -> int:
    began = time.monotonic()
    receivers = notify.receivers(watching.notify, watching.on_alert)
    sink = wandb.sink(tracker, tracking_uri, timeout_s)
    tail = wandb.tail(tail)
    if watching.on and not dry_run:
        from .replay.replay import Options
        from .watch.service import Settings, watch

        _check_root(root)
        settings = Settings(
            root,
            pattern,
            state or cursor.default_state(),
            Options(tail, superseded, verify),
            timeout_s,
            jobs,
            watching.poll_s,
            watching.stalled_s,
            watching.lost_s,
            watching.min_level,
        )
        return watch(settings, sink, receivers, as_json=as_json, quiet=quiet, verbose=verbose)
    log = _open_log(root, pattern, watching)

    from . import once, show
    from .replay.intact import unread
    from .replay.replay import Options
    from .watch import single

    options = Options(tail, superseded, verify)
    job = once.Job(root, log, sink, state or cursor.default_state(), options, timeout_s, jobs)
    try:
        runs, known = once.select(job, pattern)
        damaged = [file for file in unread(log) if not file.is_newer]
        for file in damaged:
            say(f"damaged: {file.path}: bytes {file.first_byte} to {file.end_byte}: {file.reason}")
        if dry_run:
            outcome = once.plan(job, runs)
        else:
            tells = {"quiet": quiet, "verbose": verbose, "tell_errors": quiet or as_json}
            with show.Console(**tells, tracker=sink.tracker, runs=len(runs)) as console:
                outcome = single.replay(job, runs, known, console)
            single.tell(job, runs, receivers, watching.min_level, say)
    except KeyboardInterrupt:
        say("what the tracker accepted is remembered: the next sync goes on there")
        raise
    finally:
        sink.close()
        log.close()
    if not runs and not (as_json or quiet):
        click.echo(f"there are no runs in {root.resolve()}")
    elif as_json:
        click.echo(to_json(show.rows(outcome)))
    elif not quiet:
        seconds = time.monotonic() - began
        click.echo(show.summary(outcome, seconds, sink.look, would=dry_run, verified=_VERIFIED[verify]))
    if outcome.held and not quiet:
        say(outcome.held)
    return _status(outcome, is_damaged=bool(damaged))


def _status(outcome: once.Outcome, *, is_damaged: bool) -> int:
    """Say what ended the sync, and return the exit status."""
    if outcome.stopped_by is not None:
        say(f"error: {outcome.stopped_by}")
        return EXIT_UNREACHABLE if isinstance(outcome.stopped_by, RetryableSinkError) else EXIT_USAGE
    if any(report.error for report in outcome.reports):
        return EXIT_INCOMPLETE
    return EXIT_DAMAGED if is_damaged else EXIT_OK


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}", hint="llmtrack-sync ROOT, the folder of the run_id=... folders")


def _open_log(root: Path, pattern: str | None, watching: Watching) -> duckdb.DuckDBPyConnection:
    _check_root(root)
    try:
        from llmtrack.query import connect
        from llmtrack.query.read.log import Log
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint="pip install 'llmtrack-log[mlflow]'") from error
    stalled_s, lost_s = watching.stalled_s, watching.lost_s
    if pattern is None:
        return connect(root, stalled_after_s=stalled_s, lost_after_s=lost_s)
    matching = [run_id for run_id in Log(root).run_ids() if fnmatchcase(run_id, pattern)]
    if not matching:
        raise UsageError(f"no run in {root} matches {pattern!r}", hint="llmtrack ls shows the runs of a root")
    return connect(root, runs=matching, stalled_after_s=stalled_s, lost_after_s=lost_s)
