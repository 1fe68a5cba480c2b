"""What detectors find, turned into one alert for each event: raised, context, cleared."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from time import monotonic, time_ns
from typing import Any, Final

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.buffer import Record, Row
from llmtrack.writer.log.flag import Flag
from llmtrack.writer.log.ids import Mark, Pause

from .batches import BatchRing
from .detector import Detector, Finding
from .divergence import Divergence
from .gradient import GradientSpike
from .nonfinite import NonFinite
from .slow_rank import SlowRank
from .spike import LossSpike
from .throughput import ThroughputDrop
from .utilisation import ImpossibleMfu

_log = logging.getLogger("llmtrack")

HistoryRow = tuple[int, dict[str, float]]  # tokens, values

_CONTEXT_ROWS: Final = 8  # after an alert, at which its context is written
_MORE_RECORDS: Final = 8  # of one event that goes on and on
_SHOWN_METRICS: Final = ("train/loss", "train/grad_norm", "train/lr", "throughput/tokens_per_s")
_WAITING_ROWS: Final = 50_000  # while the history is read; beyond that nobody waits for it
_PATIENCE_S: Final = 60.0  # with reading the history
_LAST_PATIENCE_S: Final = 5.0  # when the run has ended
_STATE_VERSION: Final = 1
_TRIES: Final = 20  # to read the state between two turns of the thread that changes it


def default(ranks: int = 0) -> list[Detector]:
    """Return the detectors that a run has unless it is told otherwise.

    Args:
        ranks: How many train together; 0 when unknown.
    """
    return [
        NonFinite(),
        GradientSpike(),
        LossSpike(),
        Divergence(),
        ThroughputDrop(),
        SlowRank(ranks=ranks),
        SlowRank("throughput/data_wait_s", "throughput/step_time_s", ranks=ranks, gap=0.05),
        ImpossibleMfu(),
    ]


@dataclass
class _Event:
    """Something that is wrong, from its alert to the end of its cool-down."""

    alert_id: str
    rule: str
    worst: Finding
    worst_step: int
    rows: int = -1  # since that of the alert
    cooldown: int = 0  # rows in which what comes belongs to it still
    is_open: bool = True
    is_silent: bool = False  # it began in another process, which has said so
    has_context: bool = False
    records: int = 0
    rows_since: int = 0  # it was over
    end: Record | None = None  # to be written unless it comes back in the cool-down
    active: set[str] = field(default_factory=set)  # keys of the detectors that find something
    joined: set[str] = field(default_factory=set)  # and of those that ever did


class _Watched:
    """A detector with what is needed around it."""

    def __init__(self, detector: Detector, number: int) -> None:
        self.detector = detector
        self.key = f"{detector.rule}:{','.join(detector.metrics)}"
        self.event_key = detector.family or f"{number}:{self.key}"
        self.metrics = tuple(detector.metrics)
        self.quiet = 0
        self.is_broken = False

    def names(self, finding: Finding) -> dict[str, object]:
        """Return rule and level of what it found."""
        return {"rule": self.detector.rule, "level": finding.level or self.detector.level}


class Watch:
    """Looks at every row with all detectors, and says what is to be recorded; on the thread that writes the log.

    A detector that raises is left out from then on, and said once: the log goes on without it.

    Args:
        detectors: Each with the metrics that it looks at.
        next_id: Makes ids of alerts.
        on_raised: Told of every alert that is raised, as a row of the table `alerts`; returns at once.
        recipe_hash: What the detectors learn belongs to this recipe.
        ring: The batches of the last steps.

    Attributes:
        metrics: All that the detectors look at.
        past_metrics: Those of them that are worth reading of the past.
    """

    def __init__(
        self,
        detectors: Sequence[Detector],
        next_id: Callable[[], str],
        on_raised: Callable[[dict[str, object]], None],
        *,
        recipe_hash: str | None = None,
        ring: BatchRing | None = None,
    ) -> None:
        self._watched = [_Watched(detector, number) for number, detector in enumerate(detectors)]
        self._late_metrics = {name for one in self._watched if not one.detector.at_once for name in one.metrics}
        self.metrics = tuple(dict.fromkeys(name for one in self._watched for name in one.metrics))
        self.past_metrics = frozenset(name for one in self._watched if one.detector.carries for name in one.metrics)
        self._names = tuple(dict.fromkeys((*self.metrics, *(name for one in detectors for name in one.beside))))
        self._next_id = next_id
        self._on_raised = on_raised
        self._recipe_hash = recipe_hash
        self._ring = BatchRing() if ring is None else ring
        self._events: dict[str, _Event] = {}
        self._version = 0  # odd while a row is looked at: what the training thread then reads does not count
        self._step = self._tokens = 0
        self._history: list[HistoryRow] | None = None
        self._history_read: Flag | None = None  # while the history is being read
        self._give_up_at_s = 0.0
        self._waiting: deque[Row] = deque()
        self._state: Mapping[str, Any] | None = None  # one that is to be taken over
        self._loaded_tokens = -1  # up to which it has seen the run

    # The rows, in order.

    def look(self, items: Iterable[Row | Mark]) -> list[Record]:
        """Look at what was logged, and return what is to be recorded behind it."""
        records: list[Record] = []
        self._version += 1
        if self._state is not None:
            self._take_state()
        if self._history_read is not None and not self._warm_up():
            self._look_while_waiting(items, records)
        else:
            while self._waiting:
                self._look_at_row(self._waiting.popleft(), records, at_once=False)
            for item in items:
                if isinstance(item, tuple):
                    self._look_at_row(item, records)
                else:
                    self._take(item, records)
        self._version += 1
        return records

    def end(self) -> list[Record]:
        """Return what is still to be recorded when the run has ended; waits a little for a history that is read."""
        if self._history_read is not None:
            self._history_read.wait(_LAST_PATIENCE_S)
            self._give_up_at_s = 0.0
        records = self.look(())
        for key in [key for key, event in self._events.items() if not event.is_open]:
            self._forget(key, records)
        return records

    def note(self, record: Record) -> list[Record]:
        """Complete an alert of the caller's own with the batches, and return those that are to be recorded."""
        values = record.values
        if values.get("phase") != "raised" or "batch_ids" in values:
            return []
        step = int(str(values["step"]))
        values["batch_hash"], values["batch_ids"] = self._ring.around(step)
        self._ring.want(step)
        return list(self._ring.records(int(str(values["time"]))))

    def _look_while_waiting(self, items: Iterable[Row | Mark], records: list[Record]) -> None:
        """Keep the rows, and have only those look at them at once that need to know nothing of the past."""
        for item in items:
            if isinstance(item, tuple):
                self._look_at_row(item, records, at_once=True)
                if not self._late_metrics.isdisjoint(item[3]):
                    self._waiting.append(item)
            else:
                self._take(item, records)
        if len(self._waiting) > _WAITING_ROWS:
            self._give_up_at_s = 0.0

    def _take(self, item: Mark, records: list[Record]) -> None:
        if isinstance(item, Pause):
            for watched in self._watched:
                watched.detector.pause()
            return
        now_ms = time_ns() // 1_000_000
        if item.is_foreign:
            records.append(self._ring.foreign(item, now_ms))
            return
        self._ring.put(item)
        records.extend(self._ring.records(now_ms))

    def _look_at_row(self, row: Row, records: list[Record], *, at_once: bool | None = None) -> None:
        """Look at one row; `at_once` says which detectors do: those that need no history, the others, or (None) all."""
        row_ns, step, tokens, values = row
        if at_once is not False:
            self._ring.see_row(step, tokens)
        seen = self._values(values)
        if not seen:
            return
        self._step, self._tokens = step, tokens
        place = {"time": row_ns // 1_000_000, "step": step, "tokens": tokens}
        for watched in self._watched:
            if watched.is_broken or (at_once is not None and watched.detector.at_once is not at_once):
                continue
            for name in watched.metrics:
                if name in seen:
                    finding = self._update(watched, seen)
                    if finding is not None:
                        self._found(watched, finding, place, records)
                    elif self._events:
                        self._not_found(watched, place, values, records)
                    break
        if self._events:
            self._count_row(place, values, records)

    def _values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return what the detectors look at, as floats; what is no number is the encoder's business."""
        seen: dict[str, float] = {}
        for name in self._names:
            if name in values:
                value = values[name]
                if type(value) is float:
                    seen[name] = value
                else:
                    with suppress(Exception):  # whatever a strange object raises: it is no number
                        seen[name] = float(value)
        return seen

    def _update(self, watched: _Watched, values: Mapping[str, float]) -> Finding | None:
        try:
            finding = watched.detector.update(values)
            return None if finding is None else _checked(finding)
        except BaseException:  # noqa: BLE001  # it may be the caller's own, and exit: the others, and the log, go on
            watched.is_broken = True
            _log.exception("llmtrack: the detector %s failed, and looks at nothing from now on", watched.key)
        return None

    # Events.

    def _found(self, watched: _Watched, finding: Finding, place: dict[str, int], records: list[Record]) -> None:
        watched.quiet = 0
        event = self._events.get(watched.event_key)
        if event is None:
            event = self._raise(watched, finding, place, records)
        elif not event.is_open or watched.key not in event.joined:
            word = "also" if event.is_open else "again"
            event.is_open, event.end = True, None
            if not event.is_silent and event.records < _MORE_RECORDS:
                event.records += 1
                message = f"{word}: {finding.message}"
                records.append(_record(place, event, finding, "context", message, **watched.names(finding)))
        event.active.add(watched.key)
        event.joined.add(watched.key)
        event.cooldown = max(event.cooldown, watched.detector.cooldown)
        if finding.metric == event.worst.metric and (finding.score or 0.0) > (event.worst.score or 0.0):
            event.worst, event.worst_step = finding, place["step"]

    def _raise(self, watched: _Watched, finding: Finding, place: dict[str, int], records: list[Record]) -> _Event:
        event = _Event(self._next_id(), watched.detector.rule, finding, place["step"])
        self._events[watched.event_key] = event
        record = _record(place, event, finding, "raised", finding.message, **watched.names(finding))
        record.values["batch_hash"], record.values["batch_ids"] = self._ring.around(place["step"])
        records.append(record)
        self._ring.want(place["step"])
        records.extend(self._ring.records(place["time"]))
        self._on_raised(record.values)
        return event

    def _not_found(
        self, watched: _Watched, place: dict[str, int], values: Mapping[str, float], records: list[Record]
    ) -> None:
        event = self._events.get(watched.event_key)
        if event is None or not event.is_open:
            return
        watched.quiet += 1
        if watched.quiet < watched.detector.clear_after:
            return
        event.active.discard(watched.key)
        if event.active:
            return
        event.is_open, event.rows_since = False, 0
        if event.is_silent:
            del self._events[watched.event_key]
            return
        if not event.has_context:
            self._write_context(event, place, values, records)
        worst = event.worst
        word = "stays so, and is what is usual now," if watched.detector.stays else "over"
        message = f"{word} after {event.rows + 1} rows; at worst {_at_worst(event)}"
        event.end = _record(place, event, worst, "cleared", message)
        event.end.values.update(value=values.get(worst.metric), score=None)

    def _count_row(self, place: dict[str, int], values: Mapping[str, float], records: list[Record]) -> None:
        """Write what there is to say some rows after an alert, and forget events that are long over."""
        for key, event in list(self._events.items()):
            event.rows += 1
            if not event.has_context and event.rows >= _CONTEXT_ROWS:
                self._write_context(event, place, values, records)
            if not event.is_open:
                event.rows_since += 1
                if event.rows_since > event.cooldown:
                    self._forget(key, records)

    def _forget(self, key: str, records: list[Record]) -> None:
        """Say that an event is over, now that it can no longer come back."""
        event = self._events.pop(key)
        if event.end is not None:
            records.append(event.end)

    def _write_context(
        self, event: _Event, place: dict[str, int], values: Mapping[str, float], records: list[Record]
    ) -> None:
        event.has_context = True
        around = ", ".join(f"{name} {values[name]:.4g}" for name in _SHOWN_METRICS if name in values)
        message = f"{event.rows} rows later: at worst {_at_worst(event)}; now {around or 'nothing of it is logged'}"
        records.append(_record(place, event, event.worst, "context", message))

    # What was learned, and what the log has of it.

    def state_dict(self) -> dict[str, Any]:
        """Return what the detectors have learned, as plain JSON; on any thread, while rows are looked at.

        It never waits: what was logged in the last half second may not be in it, and is learned from the log.
        """
        state: dict[str, Any] = {}
        for _ in range(_TRIES):
            version = self._version
            with suppress(RuntimeError):  # what was copied changed its size meanwhile
                state = self._copy_state()
            if version % 2 == 0 and version == self._version:
                break
        return state

    def _copy_state(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "recipe_hash": self._recipe_hash,
            "step": self._step,
            "tokens": self._tokens,
            "detectors": {one.key: one.detector.state_dict() for one in self._watched if one.detector.carries},
            "open": sorted(one.key for one in self._watched if one.detector.carries and self._is_finding(one)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what detectors of the same names had learned; on any thread, before the next row is looked at.

        A state of another recipe, or of another version, is of no use and is left.

        Raises:
            UsageError: That is no state.
        """
        detectors = state.get("detectors") if isinstance(state, Mapping) else None
        if not isinstance(detectors, Mapping) or not isinstance(state.get("tokens"), int):
            raise UsageError(f"{state!r:.80} is no state of a run", hint="load what run.state_dict() returned")
        was_open = state.get("open", ())
        if not isinstance(was_open, list | tuple) or not all(isinstance(key, str) for key in was_open):
            raise UsageError(f"open is {was_open!r:.80}", hint="load what run.state_dict() returned")
        if state.get("version") != _STATE_VERSION or state.get("recipe_hash") != self._recipe_hash:
            return
        for one in self._watched:
            if one.detector.carries and one.key in detectors:
                copy(one.detector).load_state_dict(detectors[one.key])  # raises here, for the caller to see
        self._state = state

    def _take_state(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        for one in self._watched:
            if one.detector.carries and one.key in state["detectors"]:
                one.detector.load_state_dict(state["detectors"][one.key])
                if one.key in state.get("open", ()):
                    self._go_on_silently(one)
        self._loaded_tokens = state["tokens"]

    def wait_for_history(self) -> Callable[[list[HistoryRow]], None]:
        """Keep what comes until the history was read; call what is returned with it, on any thread."""
        read = self._history_read = Flag()
        self._give_up_at_s = monotonic() + _PATIENCE_S

        def take(rows: list[HistoryRow]) -> None:
            self._history = rows
            read.set()

        return take

    def _warm_up(self) -> bool:
        """Learn from the history if it is there, and return whether nothing more is waited for."""
        read = self._history_read
        if read is None or not (read.is_set() or monotonic() >= self._give_up_at_s):
            return False
        self._history_read = None
        rows, self._history = self._history or [], None
        for tokens, values in rows:
            if tokens > self._loaded_tokens:
                self._learn(values)
        return True

    def _learn(self, values: Mapping[str, float]) -> None:
        for watched in self._watched:
            if watched.detector.carries and not watched.is_broken and any(name in values for name in watched.metrics):
                if self._update(watched, values) is not None:
                    self._go_on_silently(watched)
                elif (event := self._events.get(watched.event_key)) is not None:
                    event.active.discard(watched.key)
                    if not event.active:
                        del self._events[watched.event_key]

    def _go_on_silently(self, watched: _Watched) -> None:
        """Take an event over that began in another process."""
        event = self._events.get(watched.event_key)
        if event is None:
            nothing = Finding("", 0.0, None, None, "")
            event = self._events[watched.event_key] = _Event("", watched.detector.rule, nothing, 0, is_silent=True)
            event.has_context = True
        event.active.add(watched.key)
        event.joined.add(watched.key)

    def _is_finding(self, watched: _Watched) -> bool:
        event = self._events.get(watched.event_key)
        return event is not None and event.is_open and watched.key in event.active

    def describe(self) -> str:
        """Return the detectors with their thresholds as JSON, for the start record."""
        return json.dumps(
            [
                {
                    "rule": one.detector.rule,
                    "metrics": list(one.metrics),
                    "level": one.detector.level,
                    "thresholds": one.detector.thresholds(),
                    "clear_after": one.detector.clear_after,
                    "cooldown": one.detector.cooldown,
                }
                for one in self._watched
            ],
            default=str,
        )


def check_detectors(given: object, ranks: int) -> list[Detector]:
    """Return the detectors that `open_run(alerts=...)` asks for.

    Raises:
        UsageError: It is neither a flag nor a list of detectors.
    """
    if given is None or given is True:
        return default(ranks)
    if given is False:
        return []
    if isinstance(given, list | tuple) and all(map(_is_detector, given)):
        return list(given)
    raise UsageError(
        f"alerts={given!r}",
        hint="give True, False, or a list of detectors such as llmtrack.alerts.default()",
    )


def _is_detector(one: object) -> bool:
    """Return whether it is one, and looks at metrics by their names."""
    return (
        isinstance(one, Detector)
        and bool(one.metrics)
        and all(isinstance(names, tuple | list) for names in (one.metrics, one.beside))
        and all(isinstance(name, str) for name in (*one.metrics, *one.beside))
    )


def _checked(finding: Finding) -> Finding:
    """Return a finding whose numbers are floats, whatever a detector of the caller's own gave.

    Raises:
        TypeError, ValueError: It is no finding, or they are no numbers.
    """
    numbers = (finding.value, finding.baseline, finding.score)
    if all(number is None or type(number) is float for number in numbers[1:]) and type(finding.value) is float:
        return finding
    baseline, score = (None if number is None else float(number) for number in numbers[1:])
    return replace(finding, value=float(finding.value), baseline=baseline, score=score)


def _at_worst(event: _Event) -> str:
    return f"{event.worst.metric} was {event.worst.value:.4g} at step {event.worst_step}"


def _record(place: dict[str, int], event: _Event, finding: Finding, phase: str, message: str, **more: object) -> Record:
    return Record(
        "alerts",
        {
            **place,
            "alert_id": event.alert_id,
            "rule": event.rule,
            "level": "info",
            "metric": finding.metric,
            "value": finding.value,
            "baseline": finding.baseline,
            "score": finding.score,
            "message": message,
            "phase": phase,
            **more,
        },
    )
