"""Whether a run that has not ended still lives and gets on, judged by its own rhythm.

Two things can stop. Without a sign of life, neither a heartbeat nor a row, the process is dead or its storage hangs.
With heartbeats and no rows it hangs: the classic, for hours, while the scheduler calls the job running.

Silence is measured by our own clock, from when we saw the last change: clocks of hosts differ. Only what was silent
before we came has to be judged by the times in the log, and it is watched for a while before it is.

A silence is named by what it follows: the newest `seq` of its segment. That is in the files, the same for a watch that
is started again, and another after the first row more; a heartbeat may tell of a row half a minute late.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.writer.errors import FormatError
from llmtrack.writer.format import HEARTBEAT, OPEN_SUFFIX, PART_FILE, SCHEMAS, SEALED_SUFFIX, segment_folder
from llmtrack.writer.log.stream import read_raw_part

Status = Literal["running", "stalled", "lost"]

_HEARTBEAT_S: Final = 30.0
_RHYTHMS: Final = 3.0  # as many of its longest pauses so far a run may be silent
_SHORTEST_S: Final = 1.0  # rows are written twice a second at most
_LIVES_S: Final = 60.0  # since its heartbeat was seen to move: one may be missed
_WATCHED_S: Final = 120.0  # two heartbeats, and attributes that are a minute old
_TAIL_BYTES: Final = 256 << 10  # of an open part, in which its last batch usually is

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
        seq: The newest of its segment: what this silence follows, or ended with.
        beat_s: Seconds since its heartbeat was seen to move; None when it was not.
    """

    status: Status
    before: Status
    silent_s: float
    since: dt.datetime
    is_alive: bool
    place: Place
    seq: int
    beat_s: float | None = None


@dataclass(frozen=True)
class Silence:
    """What a watch remembers of a run that it found silent.

    Attributes:
        status: stalled or lost.
        segment: Its segment.
        seq: The newest of it.
        since: Since when it is silent.
    """

    status: Status
    segment: int
    seq: int
    since: dt.datetime

    @classmethod
    def of(cls, verdict: Verdict) -> Silence | None:
        """Return what is to be remembered of a verdict; None: the run is not silent any more."""
        if verdict.status == "running":
            return None
        since = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=verdict.silent_s)
        return cls(verdict.status, verdict.place.segment, verdict.seq, since)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Silence | None:
        """Return what `content` gave; None when it was something else."""
        with suppress(KeyError, TypeError, ValueError):
            since = dt.datetime.fromisoformat(content["since"])
            status: Status = "lost" if content["status"] == "lost" else "stalled"
            if since.tzinfo is not None:
                return cls(status, int(content["segment"]), int(content["seq"]), since)
        return None

    def content(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"status": self.status, "segment": self.segment, "seq": self.seq, "since": self.since.isoformat()}


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


class Stalls:
    """Keeps the time of each run's last sign of life and last progress.

    Args:
        stalled_s: Silence after which a run counts as stalled, or three times its own longest pause if that is more.
        lost_s: Time without a sign of life after which it counts as lost.
        longest_pause_s: Returns the longest pause between rows of a run's segment so far; asked before a run is called
            stalled, and once for each silence.
        newest_seq: Returns the newest `seq` of a run's segment; asked when a run becomes another than it was.
        clock: Seconds, never going backwards.
    """

    def __init__(
        self,
        stalled_s: float,
        lost_s: float,
        longest_pause_s: Callable[[str, int], float],
        newest_seq: Callable[[str, int], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stalled_s = stalled_s
        self._lost_s = max(lost_s, stalled_s)
        self._longest_pause_s = longest_pause_s
        self._newest_seq = newest_seq
        self._clock = clock
        self._runs: dict[str, _Watched] = {}
        self._written: dict[str, dict[str, tuple[int, int, int]]] = {}
        self._pauses: dict[str, tuple[Place, float]] = {}
        self._remembered: dict[str, Silence] = {}

    @property
    def interval_s(self) -> float:
        """How often runs should be looked at."""
        return min(15.0, max(0.2, self._stalled_s / 4))

    def remember(self, run_id: str, silence: Silence) -> None:
        """Hear of the silence in which an earlier watch left a run, before the first look at it."""
        self._remembered[run_id] = silence

    def status(self, run_id: str) -> Status:
        """Return what a run was at the last look."""
        watched, remembered = self._runs.get(run_id), self._remembered.get(run_id)
        if watched is not None:
            return watched.status
        return "running" if remembered is None else remembered.status

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
        self._remembered.pop(run_id, None)

    def look(self, run_id: str, sign: Sign) -> Verdict | None:
        """Take in what a run shows now, and return what it means; None when it is what it was.

        Args:
            run_id: A run whose newest segment has no end record.
            sign: As `read_sign` gives it.
        """
        now = self._clock()
        before = self.status(run_id)
        watched = self._runs.get(run_id)
        if watched is None or watched.sign.place.segment != sign.place.segment:
            if watched is not None:  # it has just started, whatever its clock says
                fresh = _Watched(sign, watched.since_s, now, now, watched.status)
            else:
                fresh = self._first(run_id, sign, now)
            watched = self._runs[run_id] = fresh
        else:
            _take(watched, sign, now)
        watched.judged_s = now
        watched.status = self._judge(run_id, watched, now)
        if watched.status == before:
            return None
        alive_s, beat_s = watched.alive_s, watched.beat_s
        is_alive = alive_s is not None and alive_s > watched.progress_s and now - alive_s <= _LIVES_S
        silent_s = now - watched.progress_s
        bound_s = {"running": silent_s, "stalled": self._stalled_s, "lost": self._lost_s}[watched.status]
        since = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=max(0.0, silent_s - bound_s))
        return Verdict(
            watched.status,
            before,
            silent_s,
            since,
            is_alive,
            watched.sign.place,
            self._seq(run_id, watched.sign.place),
            beat_s=None if beat_s is None else now - beat_s,
        )

    def _first(self, run_id: str, sign: Sign, now: float) -> _Watched:
        """Return what is known of a run at the first look at it."""
        silent_s = 0.0 if sign.time is None else max(0.0, _age_s(sign.time))
        watched = _Watched(sign, now, now - silent_s, now - silent_s)
        remembered = self._remembered.pop(run_id, None)
        if remembered is not None:
            newest = sign.place.segment, self._seq(run_id, sign.place)
            if newest <= (remembered.segment, remembered.seq):  # a heartbeat ends no silence
                watched.status = remembered.status
                watched.progress_s = now - max(0.0, _age_s(remembered.since))
        return watched

    def _seq(self, run_id: str, place: Place) -> int:
        return max(place.seq, self._newest_seq(run_id, place.segment))

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
    if sign != watched.sign:
        # At the last look the last row was there, and this heartbeat was not.
        if watched.judged_s >= watched.progress_s:
            watched.alive_s = now
        watched.life_s = watched.beat_s = now
    watched.sign = sign


def _age_s(time_: dt.datetime) -> float:
    return (dt.datetime.now(dt.UTC) - time_).total_seconds()


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
    for table, part, _ in _parts(folder):
        newest[table] = max(newest.get(table, 0), part)
    written = {}
    for table, part in newest.items():
        try:
            size = (folder / f"{table}-{part:05d}{OPEN_SUFFIX}").stat().st_size
        except OSError:  # it is sealed, which adds nothing
            size = 0
        written[table] = (segment, part, size)
    return written


def read_newest_seq(root: Path, run_id: str, segment: int) -> int:
    """Return the newest `seq` that a segment holds, from the end of the newest part of each table; 0 when it has none.

    Args:
        root: The folder of the runs.
        run_id: The run.
        segment: Its newest segment.
    """
    folder = segment_folder(root, run_id, segment)
    parts: dict[str, list[tuple[int, str]]] = {}
    for table, part, name in _parts(folder):
        if table in SCHEMAS:
            parts.setdefault(table, []).append((part, name))
    return max(
        (
            next((seq for _, name in sorted(names, reverse=True) if (seq := _last_seq(folder / name))), 0)
            for names in parts.values()
        ),
        default=0,
    )


def _parts(folder: Path) -> list[tuple[str, int, str]]:
    """Return table, number and file name of the parts in a segment's folder; none when it cannot be listed now."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - thousands of sealed parts: plain strings
    except OSError:
        return []
    return [(match[1], int(match[2]), name) for name in names if (match := PART_FILE.fullmatch(name))]


def _last_seq(part: Path) -> int:
    """Return the last `seq` in a part; 0 when it has none that can be read."""
    with suppress(FormatError, OSError, pa.ArrowException, ValueError):  # the one before it is nearly as good
        if part.suffix == SEALED_SUFFIX:
            return int((pq.read_metadata(part).metadata or {}).get(b"llmtrack.seq_last", 0))
        size = part.stat().st_size
        for offset in [size - _TAIL_BYTES, 0] if size > _TAIL_BYTES else [0]:
            if (last := read_raw_part(part, offset=offset).last_seq) is not None:
                return last
    return 0


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
