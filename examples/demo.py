"""The command ``llmtrack demo``: train, kill, resume, sync, and show what was kept."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from llmtrack.writer.errors import LlmtrackError, UsageError, install_hint
from llmtrack.writer.format import run_folder, segment_folder

from .launch import SegmentTail, Training

if TYPE_CHECKING:
    import duckdb

_MARKER: Final = ".llmtrack-demo"  # says that the entries below are ours to delete
_ENTRIES: Final = ("runs", "checkpoints", "sync-state", "mlflow.db")
_PROGRESS: Final = re.compile(r"step +(\d+)  tokens")
_CHECKPOINT_EVERY_STEPS: Final = 120
_FURTHER_STEPS: Final = (40, 80)  # well past one checkpoint, and well before the next even where steps are fast
_PLAIN_EVERY_STEPS: Final = 25  # between two lines of progress where there is no terminal to draw on
_SYNC_TIMEOUT_S: Final = 120.0
_PICTURE_ROWS: Final = 17


@dataclass(frozen=True)
class Place:
    """The folder of the demo, and what lies in it."""

    folder: Path

    @property
    def root(self) -> Path:
        """The root that holds the run."""
        return self.folder / "runs"

    @property
    def state(self) -> Path:
        """Where the sync keeps its cursors."""
        return self.folder / "sync-state"

    @property
    def tracking_uri(self) -> str:
        """MLflow's database, as it is named on a command line in the current folder."""
        return f"sqlite:///{self.folder / 'mlflow.db'}"


@click.command(
    epilog="\b\nExample:\n  llmtrack demo --dir /tmp/demo --seed 7",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-run"),
    show_default=True,
    envvar="LLMTRACK_DEMO_DIR",
    show_envvar=True,
    help="Where everything goes. A folder that an earlier demo made is emptied first.",
)
@click.option("--keep", is_flag=True, help="Leave earlier runs in the folder, and add one more.")
@click.option("--seed", type=int, envvar="LLMTRACK_DEMO_SEED", show_envvar=True, help="Repeat a demo's choices.")
def demo(*, folder: Path, keep: bool, seed: int | None) -> None:
    """Train a small GPT on two ranks, kill it, resume it, sync it into MLflow, and show what was kept.

    Takes about a minute on two cores, and no network: text and database are local.

    Exit status: 0 done; 1 wrong usage, or something is not installed.
    """
    began = time.monotonic()
    if missing := [name for name in ("torch", "mlflow") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the demo needs {' and '.join(missing)}", hint=install_hint("demo"))
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    place = Place(_prepare(folder, keep=keep))
    run_id = _free_run_id(place.root)

    _title("1  Train a small GPT on two ranks, and kill it well past a checkpoint")
    _train_and_kill(place, run_id, seed)
    _title("2  Start the same command again")
    _resume(place, run_id)
    _title("3  Sync into MLflow, twice")
    _sync_twice(place)
    _title("4  What was kept")
    _show(place, run_id)
    _title("5  Look further")
    _say_commands(place, run_id)
    click.echo(f"\nDone in {time.monotonic() - began:.0f} s; llmtrack demo --seed {seed} makes the same choices again.")


# --- the folder ---------------------------------------------------------------------------------------------------


def _prepare(folder: Path, *, keep: bool) -> Path:
    """Return the folder, without what earlier demos left unless that is to be kept; nothing else is ever deleted."""
    marker = folder / _MARKER
    if not marker.exists() and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds something that no demo made", hint="--dir with a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    for name in () if keep else _ENTRIES:
        entry = folder / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    return folder


def _free_run_id(root: Path) -> str:
    number = 1
    while run_folder(root, f"demo-{number}").exists():
        number += 1
    return f"demo-{number}"


# --- training -----------------------------------------------------------------------------------------------------


def _arguments(place: Place, run_id: str) -> list[str]:
    folders = ["--root", str(place.root), "--checkpoint-dir", str(place.folder / "checkpoints" / run_id)]
    return [*folders, "--checkpoint-every", str(_CHECKPOINT_EVERY_STEPS)]


def _train_and_kill(place: Place, run_id: str, seed: int) -> None:
    """Train until a random number of steps beyond a random checkpoint is on disk, then kill all of it."""
    choose = random.Random(seed)  # noqa: S311 - a moment, not a secret
    after_checkpoint, further_steps = choose.randint(1, 2), choose.randint(*_FURTHER_STEPS)
    click.echo(
        f"To be killed {further_steps} steps after its checkpoint number {after_checkpoint} or later (seed {seed}).\n"
    )
    tail = SegmentTail(segment_folder(place.root, run_id, 1))
    killed = False
    # The id is chosen before the launch, as a job script would; the restart learns it from the checkpoint.
    with Training(_arguments(place, run_id), env={"LLMTRACK_RUN_ID": run_id}) as training:
        for _ in _shown(training):
            tail.look()
            saved = tail.checkpoint_steps
            if not killed and len(saved) >= after_checkpoint and tail.last_step >= saved[-1] + further_steps:
                training.kill()
                killed = True
                pids = ", ".join(map(str, training.rank_pids))
                _strong(f"\nSIGKILL to torchrun and its ranks (pids {training.process.pid}, {pids}).")
        status = training.wait()
    if not killed:
        raise LlmtrackError(f"the training ended by itself, with exit status {status}: see above")
    tail.look()
    click.echo(
        f"On disk are a checkpoint at step {tail.checkpoint_steps[-1]}, and points up to step {tail.last_step}: "
        "the steps between will be taken again."
    )


def _resume(place: Place, run_id: str) -> None:
    with Training(_arguments(place, run_id)) as training:
        for _ in _shown(training):
            pass
        status = training.wait()
    if status:
        raise LlmtrackError(f"the training failed with exit status {status}: see above")


def _shown(training: Training) -> Iterator[str]:
    """Yield what training prints, and print it: on a terminal, steps take each other's place."""
    on_terminal = sys.stdout.isatty()
    pending = False
    for line in training.lines():
        step = _PROGRESS.match(line)
        if step and on_terminal:
            click.echo(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}", nl=False)
        elif not step or int(step[1]) % _PLAIN_EVERY_STEPS == 0:
            click.echo(f"\r\x1b[2K{line}" if pending else line)
        pending = bool(step) and on_terminal
        yield line
    if pending:
        click.echo()


# --- what became of it --------------------------------------------------------------------------------------------


def _sync_twice(place: Place) -> None:
    """Sync, and sync again: the second one finds everything there.

    Raises:
        LlmtrackError: A run is incomplete in MLflow, or the second sync sent something.
    """
    click.echo("Importing MLflow, and making its database: some seconds.")
    if not _sync(place):
        raise LlmtrackError("the sync sent nothing")
    click.echo("\nOnce more:")
    if sent := _sync(place):
        raise LlmtrackError(f"the second sync sent {sent} points that were there already")


def _sync(place: Place) -> int:
    """Do what llmtrack-sync does, and return how many points were sent; each one was read back and compared."""
    from llmtrack import query
    from llmtrack.sync import once, show
    from llmtrack.sync.replay.replay import Options
    from llmtrack.sync.sink import sink_class

    began = time.monotonic()
    sink = sink_class("mlflow")(place.tracking_uri, timeout_s=_SYNC_TIMEOUT_S)
    log = query.connect(place.root)
    try:
        job = once.Job(place.root, log, sink, place.state, Options(), _SYNC_TIMEOUT_S)
        runs, known = once.select(job, None)
        with show.Console(quiet=False, verbose=False, tell_errors=False, tracker=sink.tracker) as console:
            outcome = once.replay_all(job, runs, known, console)
    finally:
        sink.close()
        log.close()
    for report in outcome.reports:
        click.echo(show.describe(report))
    if outcome.stopped_by is not None:
        raise outcome.stopped_by
    if any(report.error for report in outcome.reports):
        raise LlmtrackError("MLflow does not have everything: see above")
    sent = sum(sum(report.sent.values()) for report in outcome.reports)
    done = f"{sent} points sent, read back and compared" if sent else "nothing to send"
    click.echo(f"{done}, in {time.monotonic() - began:.1f} s")
    return sent


def _show(place: Place, run_id: str) -> None:
    """Print what `llmtrack show` and `llmtrack plot` do: the run as a tree, and its loss, by tokens and by time."""
    from llmtrack import query
    from llmtrack.query.draw import plot
    from llmtrack.query.runs.describe import describe_run
    from llmtrack.query.runs.tree import run_tree
    from llmtrack.query.text import layout

    with contextlib.closing(query.connect(place.root)) as log:
        layout.show(run_tree(describe_run(log, log, run_id)))
        (loss,) = plot.read_curves(log, run_id, ["train/loss"])
        columns, _ = layout.screen()
        for axis in ("tokens", "time"):
            click.echo()
            click.echo(
                plot.draw(loss, axis=axis, width=min(columns, 100), height=_PICTURE_ROWS, colours=_has_colours())
            )
        click.echo(f"\n{_repeated(log, run_id)}")


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _repeated(log: duckdb.DuckDBPyConnection, run_id: str) -> str:
    """Return in one sentence how the steps that were taken twice compare."""
    twice, equal, largest = log.execute(
        """
        SELECT count(*), count(*) FILTER (s.value = l.value), max(abs(s.value - l.value))
        FROM metrics s JOIN live l ON l.run_id = s.run_id AND l.name = s.name AND l.tokens = s.tokens
        WHERE s.run_id = ? AND s.superseded_by IS NOT NULL AND s.name LIKE 'train/%'
        """,
        [run_id],
    ).fetchone() or (0, 0, None)
    if twice == equal:
        return f"The steps that were taken twice gave {twice} values of train/* twice, equal to the last bit."
    return (
        f"Of {twice} values of train/* that were logged twice {equal} are equal; others differ by up to {largest:.3g}."
    )


def _say_commands(place: Place, run_id: str) -> None:
    """Say what to type next, so that it works where the user stands."""
    root = shlex.quote(str(place.root))
    uri = shlex.quote(place.tracking_uri)
    query = (
        "SELECT tokens, segment, superseded_by, value FROM metrics WHERE name = 'train/loss' ORDER BY tokens, segment"
    )
    click.echo(
        f"""  {_program("mlflow")} ui --backend-store-uri {uri}
  {_program("llmtrack")} show {run_id} --root {root}
  {_program("llmtrack")} plot {run_id} train/loss train/grad_norm --root {root}
  {_program("llmtrack")} report {run_id} --root {root} -o {shlex.quote(str(place.folder / "report.html"))}
  {_program("llmtrack")} sql --root {root} "{query}"
  {_program("llmtrack-sync")} {root} --to mlflow --tracking-uri {uri} --state {shlex.quote(str(place.state))}"""
    )


def _program(name: str) -> str:
    """Return how to call a program beside this Python: by name if the shell finds that very one, else by its path."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found is not None and Path(found).resolve() == beside.resolve():
        return name
    relative = os.path.relpath(beside)
    return shlex.quote(str(beside) if relative.startswith(os.pardir) else relative)


def _title(text: str) -> None:
    click.secho(f"\n{text}\n", bold=True)


def _strong(text: str) -> None:
    click.secho(text, fg="red", bold=True)
