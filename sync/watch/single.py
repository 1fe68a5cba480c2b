"""What a sync that ends by itself does beside replaying: it respects a watch, remembers, and relays what is new."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from llmtrack.query.sql.views import LOST_AFTER_S, STALLED_AFTER_S
from llmtrack.sync import once
from llmtrack.sync.replay.classify import LoggedRun
from llmtrack.sync.replay.cursor import cursor_path

from . import record
from .ledger import Ledger, of_verdict
from .lock import SyncLock
from .notify import Happening, Receiver, Relay
from .stalls import Status, Verdict

_DELIVER_S: Final = 20.0  # what is not delivered by then waits for the next sync


def state_folder(job: once.Job) -> Path:
    """Return the folder of one tracker in the state folder."""
    return cursor_path(job.state, job.sink.name, job.sink.tracker, "any").parent


def replay(job: once.Job, runs: list[LoggedRun], known: dict[str, LoggedRun], listener: once.Listener) -> once.Outcome:
    """Replay runs while no watch is at work on the same root and tracker, and remember what came of it.

    Raises:
        BusyError: A watch is at work; says which.
        UsageError: The state folder cannot be used.
    """
    folder = state_folder(job)
    began_s = time.monotonic()
    # Where there is no folder there is no watch, and one that fails must not leave one behind.
    with SyncLock(folder, job.root, "once") if folder.is_dir() else nullcontext():
        outcome = once.replay_all(job, runs, known, listener)
    if folder.is_dir() and outcome.reports:
        _remember(job, folder, outcome, time.monotonic() - began_s)
    return outcome


def tell(
    job: once.Job,
    runs: list[LoggedRun],
    receivers: Sequence[Receiver],
    min_level: str,
    say: Callable[[str], None],
) -> None:
    """Relay what happened to runs and was not relayed yet, whether the tracker could be reached or not."""
    if not receivers:
        return
    folder = state_folder(job)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(job.root)
    happened = ledger.refresh()
    happened += _silences(job, ledger)
    chosen = {run.run_id for run in runs}
    relay = Relay(record.record_path(folder, job.root).with_suffix(".relay"), receivers, min_level, say)
    relay.offer([one for one in happened if one.run_id in chosen], chosen)
    relay.stop(_DELIVER_S)


def _silences(job: once.Job, ledger: Ledger) -> Iterator[Happening]:
    """Yield what the views call stalled and lost; a sync that ends has not watched anything."""
    bounds_s: dict[str, tuple[Status, float]] = {
        "stalled": ("stalled", STALLED_AFTER_S),
        "lost": ("lost", LOST_AFTER_S),
    }
    for run_id, status in job.con.execute("SELECT run_id, status FROM runs").fetchall():
        run = ledger.runs.get(run_id)
        if status in bounds_s and run is not None and run.is_open:
            sign = ledger.sign(run_id)
            word, bound_s = bounds_s[status]
            if sign.time is not None:
                silent_s = (dt.datetime.now(dt.UTC) - sign.time).total_seconds()
                since = sign.time + dt.timedelta(seconds=min(bound_s, silent_s))
                seq = max(sign.place.seq, ledger.newest_seq(run_id, run.head))
                yield of_verdict(
                    run, Verdict(word, "running", silent_s, since, is_alive=False, place=sign.place, seq=seq)
                )


def _remember(job: once.Job, folder: Path, outcome: once.Outcome, took_s: float) -> None:
    path = record.record_path(folder, job.root)
    there = record.RootRecord(str(job.root), job.sink.name, job.sink.tracker, asdict(job.options))
    earlier = record.load(path)
    if earlier is not None:
        there.runs = earlier.runs
    for report in outcome.reports:
        run = there.of_run(report.run_id)
        run.complete = ""  # a watch looks again: what was read is not known by its files
        points = sum(report.sent.values())
        run.points_sent += points
        if report.error:
            run.last_error, run.error_time = report.error.partition("\n")[0], record.now()
        else:
            run.last_success, run.last_error, run.url = record.now(), "", report.url
            run.points_per_s = points / max(took_s, 1e-3) if points else run.points_per_s
    with suppress(OSError):  # nothing depends on it
        there.save(path)
