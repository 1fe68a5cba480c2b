"""Whether a run that has not ended still lives and gets on, judged by its own rhythm.

Two things can stop. Without a sign of life, neither a heartbeat nor a row, the process is dead or its storage hangs.
With heartbeats and no rows it hangs: the classic, for hours, while the scheduler calls the job running.

Silence is measured by our own clock, from when we saw the last change: clocks of hosts differ. Only what was silent
before we came has to be judged by the times in the log, and it is watched for a while before it is.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from llmtrack.writer.format import HEARTBEAT, OPEN_SUFFIX, PART_FILE, segment_folder

Status = Literal["running", "stalled", "lost"]

_HEARTBEAT_S: Final = 30.0
_RHYTHMS: Final = 3.0  # as many of its longest pauses so far a run may be silent
_SHORTEST_S: Final = 1.0  # rows are written twice a second at most
_LIVES_S: Final = 60.0  # since its heartbeat was seen to move: one may be missed
_WATCHED_S: Final = 120.0  # two heartbeats, and attributes that are a minute old


Written = Mapping[str, tuple[int, int, int]]  # by table: segment, newest part, its bytes while it is open


class Place(NamedTuple):
    """How far a run has come, by its heartbeat and records."""

    segment: int
    seq: int
    step: int
    tokens: int


@dataclass(frozen=True)
class Sign:
    """What a run shows of itself at one moment.

    Attributes:
        place: How far it has come.
        time: Of its newest heartbeat, row or record, by its own clock; None when there is none.
    """

    place: Place
    time: dt.datetime | None


@dataclass(frozen=True)
class Verdict:
    """What a run's silence means.

    Attributes:
        status: What it is from now on.
        before: What it was.
        silent_s: Seconds without progress.
        since: When the silence became what it is.
        is_alive: Whether its heartbeat was seen to move lately, and after its last row.
        place: How far it has come.
        beat_s: Seconds since its heartbeat was seen to move; None when it was not.
        again: How often it had gone on at this place before: rows come sooner than the heartbeat that tells of them.
    """

    status: Status
    before: Status
    silent_s: float
    since: dt.datetime
    is_alive: bool
    place: Place
    beat_s: float | None = None
    again: int = 0


@dataclass
class _Watched:
    sign: Sign
    since_s: float  # when we first saw the run
    progress_s: float  # when it last got on
    life_s: float  # when it last gave a sign of life
    status: Status = "running"
    judged_s: float = 0.0
    beat_s: float | None = None  # when its heartbeat was last seen to move
    alive_s: float | None = None  # likewise, and surely after its last row
    has_grown: bool = False  # since its heartbeat last told of rows
    again: int = 0


class Stalls:
    """Keeps the time of each run's last sign of life and last progress.

    Args:
        stalled_s: Silence after which a run counts as stalled, or three times its own longest pause if that is more.
        lost_s: Time without a sign of life after which it counts as lost.
        longest_pause_s: Returns the longest pause between rows of a run's segment so far; asked before a run is called
            stalled, and once for each silence.
        clock: Seconds, never going backwards.
    """

    def __init__(
        self,
        stalled_s: float,
        lost_s: float,
        longest_pause_s: Callable[[str, int], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stalled_s = stalled_s
        self._lost_s = max(lost_s, stalled_s)
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._runs: dict[str, _Watched] = {}
        self._written: dict[str, dict[str, tuple[int, int, int]]] = {}
        self._pauses: dict[str, tuple[Place, float]] = {}

    @property
    def interval_s(self) -> float:
        """How often runs should be looked at."""
        return min(15.0, max(0.2, self._stalled_s / 4))

    def status(self, run_id: str) -> Status:
        """Return what a run was at the last look."""
        watched = self._runs.get(run_id)
        return "running" if watched is None else watched.status

    def needs_look(self, run_id: str) -> bool:
        """Return whether a look can change anything: of one that is lost, something has to be written first."""
        watched = self._runs.get(run_id)
        return watched is None or watched.status != "lost" or watched.progress_s > watched.judged_s

    def written(self, run_id: str, written: Written) -> None:
        """Hear how much a run has written; only more than ever before is progress.

        Whoever tells of a change may be late, or mean what others did: seal a part, adopt, evaluate.

        Args:
            run_id: A run whose newest segment has no end record.
            written: As `read_written` gives it.
        """
        is_first = run_id not in self._written
        most = self._written.setdefault(run_id, {})
        more = {table: size for table, size in written.items() if table not in most or size > most[table]}
        most |= more
        watched = self._runs.get(run_id)
        if more and not is_first and watched is not None:
            watched.progress_s = watched.life_s = self._clock()
            watched.has_grown = True

    def forget(self, run_id: str) -> None:
        """Hear that a run has ended, or is gone."""
        self._runs.pop(run_id, None)
        self._written.pop(run_id, None)
        self._pauses.pop(run_id, None)

    def look(self, run_id: str, sign: Sign) -> Verdict | None:
        """Take in what a run shows now, and return what it means; None when it is what it was.

        Args:
            run_id: A run whose newest segment has no end record.
            sign: As `read_sign` gives it.
        """
        now = self._clock()
        watched = self._runs.get(run_id)
        if watched is None or watched.sign.place.segment != sign.place.segment:
            if watched is not None:  # it has just started, whatever its clock says
                fresh = _Watched(sign, watched.since_s, now, now, watched.status)
            else:
                silent_s = 0.0 if sign.time is None else (dt.datetime.now(dt.UTC) - sign.time).total_seconds()
                fresh = _Watched(sign, now, now - max(0.0, silent_s), now - max(0.0, silent_s))
            watched = self._runs[run_id] = fresh
        else:
            _take(watched, sign, now)
        watched.judged_s = now
        before, watched.status = watched.status, self._judge(run_id, watched, now)
        if watched.status == before:
            return None
        alive_s, beat_s = watched.alive_s, watched.beat_s
        is_alive = alive_s is not None and alive_s > watched.progress_s and now - alive_s <= _LIVES_S
        silent_s = now - watched.progress_s
        bound_s = {"running": silent_s, "stalled": self._stalled_s, "lost": self._lost_s}[watched.status]
        since = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=max(0.0, silent_s - bound_s))
        again = watched.again
        watched.again += watched.status == "running"
        return Verdict(
            watched.status,
            before,
            silent_s,
            since,
            is_alive,
            watched.sign.place,
            beat_s=None if beat_s is None else now - beat_s,
            again=again,
        )

    def _judge(self, run_id: str, watched: _Watched, now: float) -> Status:
        if now - watched.since_s < min(self._stalled_s, _WATCHED_S):
            return watched.status  # its next heartbeat will tell
        lifeless_s, silent_s = now - watched.life_s, now - watched.progress_s
        if silent_s <= self._stalled_s:
            return "running"
        if lifeless_s > self._lost_s:
            return "lost"
        pause_s = max(_SHORTEST_S, self._pause_s(run_id, watched.sign.place))
        if lifeless_s > max(self._stalled_s, _RHYTHMS * min(_HEARTBEAT_S, pause_s)):
            return "stalled"
        return "stalled" if silent_s > max(self._stalled_s, _RHYTHMS * pause_s) else "running"

    def _pause_s(self, run_id: str, place: Place) -> float:
        known = self._pauses.get(run_id)
        if known is None or known[0] != place:
            known = self._pauses[run_id] = (place, self._longest_pause_s(run_id, place.segment))
        return known[1]


def _take(watched: _Watched, sign: Sign, now: float) -> None:
    """Compare what a run shows with what it showed at the last look."""
    if _order(sign.place) < _order(watched.sign.place):  # its heartbeat could not be read just now
        return
    if sign.place != watched.sign.place:
        if not watched.has_grown:  # otherwise it tells late of rows that were seen
            watched.progress_s = now
        watched.has_grown = False
        watched.again = 0
    if sign != watched.sign:
        # At the last look the last row was there, and this heartbeat was not.
        if watched.judged_s >= watched.progress_s:
            watched.alive_s = now
        watched.life_s = watched.beat_s = now
    watched.sign = sign


def _order(place: Place) -> tuple[int, int, int, int]:
    return place.segment, place.tokens, place.step, place.seq


def read_written(root: Path, run_id: str, segment: int) -> Written:
    """Return how much a segment holds; nothing when it cannot be listed now.

    Args:
        root: The folder of the runs.
        run_id: The run.
        segment: Its newest segment.
    """
    folder = segment_folder(root, run_id, segment)
    newest: dict[str, int] = {}
    try:
        for name in os.listdir(folder):  # noqa: PTH208 - thousands of sealed parts: plain strings
            if match := PART_FILE.fullmatch(name):
                newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    except OSError:
        return {}
    written = {}
    for table, part in newest.items():
        try:
            size = (folder / f"{table}-{part:05d}{OPEN_SUFFIX}").stat().st_size
        except OSError:  # it is sealed, which adds nothing
            size = 0
        written[table] = (segment, part, size)
    return written


def read_sign(root: Path, run_id: str, segment: int, last: Sign) -> Sign:
    """Return what the heartbeat of a segment adds to what the log's records say.

    Args:
        root: The folder of the runs.
        run_id: The run.
        segment: Its newest segment.
        last: By the log, without the heartbeat.
    """
    try:
        beat = json.loads((segment_folder(root, run_id, segment) / HEARTBEAT).read_bytes())
        time_ = dt.datetime.fromisoformat(beat["time"])
        place = Place(segment, int(beat["seq"]), int(beat["step"]), int(beat["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or it is being rewritten
        return last
    if time_.tzinfo is None:
        return last
    place = max(place, last.place, key=_order)
    return Sign(place, time_ if last.time is None else max(time_, last.time))
