"""Replays one run of the log into a tracker: classify, mark what became stale, send, read back, move the cursor.

The log and what the tracker holds decide; the cursor only saves looking. Whatever is killed, and whenever, the next
replay finds the runs in the tracker by their tags, sees what each of them lacks, and sends that and nothing else.

A run in the tracker only ever gets points. When one holds a point that does not belong into it any more, it is
replaced: marked as such, and made anew. Side runs that nothing belongs into, or that were replaced, are deleted once
all else is verified; a canonical run never is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from llmtrack.sync.kinds import CANONICAL, PROVISIONAL, REPLACED, SUPERSEDED
from llmtrack.sync.sink import MovedError, Record, RunSpec, Sink, TrackerRun
from llmtrack.sync.story import Story
from llmtrack.writer.errors import RejectedError, RetryableSinkError

from . import describe
from .classify import LoggedRun
from .compare import Comparison, Difference, Digests, compare_beyond, newest_digest
from .cursor import Cursor, Held, Mark
from .patience import Patience
from .sender import Sender
from .target import PointReader, Target

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")

_SAVE_S: Final = 1.0  # about as much sending has to be repeated after a kill
_MOVED_S: Final = (0.0, 1.0, 2.0, 4.0)  # pauses before everything is looked at again
_REPAIRS: Final = 2  # times that what is lacking is sent before the run counts as incomplete


@dataclass(frozen=True)
class Options:
    """What the user wants in the tracker, and how sure of it to be."""

    tail: Literal["side", "hold"] = "side"
    superseded: Literal["side", "drop"] = "side"
    verify: Literal["full", "fast", "off"] = "full"

    def leaves_out(self, kind: str) -> bool:
        """Return whether points of a kind are not sent."""
        return (kind == PROVISIONAL and self.tail == "hold") or (kind == SUPERSEDED and self.superseded == "drop")


@dataclass
class Report:
    """What was done for one run.

    Attributes:
        points: Points in the log, by kind.
        sent: Points that were sent, by kind.
        held: Why points were not sent, by kind.
        deleted: Side runs that were deleted.
        ref: The tracker's id of the canonical run.
        url: Where it can be seen.
        notes: What a person should know.
        error: Why it is incomplete; empty when it is not.
        is_refused: The tracker refused, and would again.
    """

    run_id: str
    project: str
    status: str
    points: dict[str, int]
    sent: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    deleted: int = 0
    ref: str = ""
    url: str = ""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    is_refused: bool = False

    def add_note(self, note: str) -> None:
        """Add a note once."""
        if note not in self.notes:
            self.notes.append(note)


class Progress(Protocol):
    """Hears of what happens while it happens, from several threads."""

    def sent(self, points: int) -> None:
        """Hear that so many more points were accepted."""
        ...

    def read(self, records: int) -> None:
        """Hear that so many more records were read back."""
        ...


class _MisplacedError(Exception):
    """A run in the tracker holds points of another, which the cursor did not know of."""


class Replay:
    """Brings one run into one tracker.

    Args:
        con: From `llmtrack.query.connect`.
        sink: The tracker, open.
        run: The run as the log tells it.
        story: What is told of it beside its points.
        cursor: What is remembered of it; its lock is held.
        report: Filled in as things are done, so that it tells how far it got.
        options: What to send.
        patience: What to do about a tracker that does not answer.
        progress: Hears of what happens.
        parent: The tracker's id of the parent's canonical run, if it is there.
    """

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        sink: Sink,
        run: LoggedRun,
        story: Story,
        cursor: Cursor,
        *,
        report: Report,
        options: Options,
        patience: Patience,
        progress: Progress,
        parent: str | None,
    ) -> None:
        self._points = PointReader(con, sink, run)
        self._sink = sink
        self._run = run
        self._story = story
        self._cursor = cursor
        self._options = options
        self._patience = patience
        self._progress = progress
        self._parent = parent
        self._generation = 1
        self._has_changed = False
        self._retired: list[TrackerRun] = []
        self.report = report

    def execute(self, there: list[TrackerRun]) -> None:
        """Do it all.

        Args:
            there: Every run that the tracker has for this one.

        Raises:
            SinkError: The tracker does not answer, or refused; what was accepted is in the cursor.
        """
        self._forget_all_but({run.ref for run in there})
        moved: Exception | None = None
        known = {ref: sum(held.counts.values()) for ref, held in self._cursor.runs.items()}
        for pause_s in _MOVED_S:
            try:
                if pause_s != _MOVED_S[-1]:
                    self._look_for(known, there)
                self._replay(there)
            except (_MisplacedError, MovedError) as error:  # another host was at it since, or an answer was stale
                moved = error
            else:
                return
            time.sleep(pause_s)
            self._cursor.runs.clear()  # look at everything, and begin again
            self._retired.clear()
            there = self._call(lambda: self._sink.list_runs(self._run.project, [self._run.run_id]))
        raise RetryableSinkError(
            f"the tracker gives other answers each time: {moved}", sink=self._sink.name, run_id=self._run.run_id
        )

    def _look_for(self, known: Mapping[str, int], there: list[TrackerRun]) -> None:
        """See that the tracker still tells of what was once read back from it.

        Raises:
            MovedError: It does not: its answer is stale, unless it goes on saying so.
        """
        for run in there:
            if run.records is not None and run.records < known.get(run.ref, 0):
                raise MovedError(f"{run.ref} has {run.records} records, and had {known[run.ref]}", sink=self._sink.name)

    def _replay(self, there: list[TrackerRun]) -> None:
        canonical = self._choose_canonical([run for run in there if run.segment is None])
        sides = self._choose_sides([run for run in there if run.segment is not None])
        self._mark(canonical, sides)
        for target in [canonical, *sides]:
            if target.run is None:
                target.run = self._find_or_create(self._spec(target, canonical))
                target.every = target.run.every
            if not target.verified:
                self._has_changed = True
                self._fill(target)
                self._verify(target)
        self._finish(canonical, sides)

    # What is there, and what it is good for.

    def _forget_all_but(self, refs: set[str]) -> None:
        self._cursor.runs = {ref: held for ref, held in self._cursor.runs.items() if ref in refs}

    def _choose_canonical(self, there: list[TrackerRun]) -> Target:
        target = Target(CANONICAL, None, self._run.parts.get(CANONICAL, {}))
        for run in there:  # in the tracker's order, whoever asks: of two hosts neither keeps what the other deletes
            if run.kind == REPLACED:
                self._generation = max(self._generation, run.generation + 1)
            elif target.run is not None:
                self._retired.append(run)  # made twice, because an answer was lost or by two hosts at a time
            elif not self._take(target, run):
                self._take_back(run)
        if target.run is not None:
            self._generation = max(self._generation, target.run.generation)
        return target

    def _take_back(self, run: TrackerRun) -> None:
        """Mark a canonical run that holds points which are not settled any more, at once: it misleads."""
        left_behind = (stretch.last_ms for stretch in self._run.parts.get(SUPERSEDED, {}).values())
        spec = describe.replaced_spec(self._run, None, run.generation, None, max(left_behind, default=None))
        self._update(run, spec)
        self._generation = max(self._generation, run.generation + 1)
        self._cursor.runs.pop(run.ref, None)
        self.report.add_note(
            f"a forced rollback superseded settled points: generation {run.generation} of the run is tagged replaced,"
            f" and generation {self._generation} has the present curve"
        )

    def _choose_sides(self, there: list[TrackerRun]) -> list[Target]:
        targets: list[Target] = []
        chosen: set[str] = set()
        for kind in (SUPERSEDED, PROVISIONAL):
            if self._options.leaves_out(kind):
                self.report.held |= {kind: describe.held_reason(self._run, kind)} if self._run.points(kind) else {}
                continue
            for segment, stretch in self._run.parts.get(kind, {}).items():
                target = Target(kind, segment, {segment: stretch})
                fitting = [run for run in there if run.segment == segment and run.kind in {kind, PROVISIONAL}]
                for run in sorted(fitting, key=lambda run: run.kind != kind):
                    if target.run is None and run.ref not in chosen and self._take(target, run):
                        chosen.add(run.ref)
                targets.append(target)
        kept = {SUPERSEDED} if self._options.leaves_out(SUPERSEDED) else set()  # made when the option was another one
        self._retired += [run for run in there if run.ref not in chosen and run.kind not in kept]
        return targets

    def _take(self, target: Target, run: TrackerRun) -> bool:
        """Take a run of the tracker for a target, with what it lacks; False when something in it does not belong."""
        target.every = run.every
        held = self._cursor.runs.get(run.ref)
        if self._was_told_of_another(target, run):
            return False
        if held is None and not run.newest:
            target.run = run
            return True
        sure = {newest_digest(run), None} if self._sink.repeats else {newest_digest(run)}
        if held is not None and held.newest in sure and self._still_belongs(target, held):
            target.run, target.marks, target.told = run, dict(held.marks), held.told
            target.began, target.compared, target.counts = dict(held.marks), held.compared, held.counts
            if held.sampled and self._options.verify == "full":
                target.compared, target.counts = {}, {}
            target.sampled = held.sampled and bool(target.compared)
            is_sure = self._options.verify == "off" or target.is_compared()
            target.verified = held.newest is not None and target.is_complete() and is_sure
            return True
        comparison = self._compare(target, run)
        self._has_changed = True
        difference = self._difference(target, comparison)
        if difference.misplaced:
            return False
        self._say_foreign(target, difference)
        target.run, target.counts = run, comparison.counts
        target.complete()
        target.has_holes = difference.lacking > 0
        target.verified = not target.has_holes
        target.compared = target.marks if target.verified else {}
        return True

    def _still_belongs(self, target: Target, held: Held) -> bool:
        """Return whether all that was sent to a run, or may have been, is what the log has for it now."""
        return self._points.agrees(target, held.marks) and self._points.agrees(target, held.goal)

    def _story_of(self, target: Target) -> Story:
        return self._story if target.segment is None else self._story.of_side(target.kind, target.segment)

    def _was_told_of_another(self, target: Target, run: TrackerRun) -> bool:
        """Return whether the newest of what a run was told belongs elsewhere now, as an evaluation left behind does."""
        elsewhere = self._story.points_elsewhere() if target.kind == CANONICAL else self._story.points()
        return any(
            record.key in run.newest and run.newest[record.key][1:4] == record[1:4]
            for record in self._sink.told(elsewhere)
        )

    def _difference(self, target: Target, comparison: Comparison) -> Difference:
        told = self._story_of(target).points()
        return comparison.difference(lambda: self._points.others(target), lambda: self._sink.told(told))

    def _compare(self, target: Target, run: TrackerRun) -> Comparison:
        sent, target.sent = target.sent, None

        def expected() -> Iterator[Record]:
            return self._points.records(target)

        return Comparison(self._sink, run, self._patience, expected, self._progress.read, wanted=sent)

    # Marking what is not what it was.

    def _mark(self, canonical: Target, sides: list[Target]) -> None:
        """Say in the tracker what became of its runs, before any point is sent."""
        if canonical.run is None:
            canonical.run = self._find_or_create(self._spec(canonical, canonical))
            canonical.every = canonical.run.every
        for run in self._retired:
            if run.segment is not None:
                self._update(run, describe.replaced_spec(self._run, run.segment, self._generation, canonical.run.ref))
        for target in sides:
            if target.run is not None and target.run.kind != target.kind:
                target.run = self._update(target.run, self._spec(target, canonical))

    def _find_or_create(self, spec: RunSpec) -> TrackerRun:
        """Make a run; after a lost answer, look first whether it was made."""
        tried = False

        def attempt() -> TrackerRun:
            nonlocal tried
            if tried:
                for run in self._sink.list_runs(spec.project, [spec.run_id]):
                    if (run.kind, run.segment, run.generation) == (spec.kind, spec.segment, spec.generation):
                        return run
            tried = True
            return self._sink.create(spec)

        return self._call(attempt)

    def _spec(self, target: Target, canonical: Target) -> RunSpec:
        if target.kind == CANONICAL:
            return describe.canonical_spec(self._run, self._story, self._generation, self._parent)
        (stretch,) = target.stretches.values()
        return describe.side_spec(self._run, target.kind, stretch, self._generation, canonical.there.ref)

    def _update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        updated = self._call(lambda: self._sink.update(run, spec))
        self._has_changed |= updated is not run
        return updated

    def _call(self, function: Callable[[], T]) -> T:
        return self._patience.call(function)

    # Sending.

    def _fill(self, target: Target) -> None:
        if target.is_complete():
            return
        if target.every > 1:
            self.report.add_note(
                f"thinned out: of each {target.every} steps the rows with a least, greatest or last value were sent"
            )
        mapped = self._call(lambda: self._sink.prepare(target.there, self._points.names(target)))
        for name, key in mapped.items():
            self.report.add_note(f"the metric {name!r} is called {key!r} there")
        if target.has_holes:
            self._fill_holes(target)
        else:
            self._send_rest(target)
        target.complete()

    def _send_rest(self, target: Target) -> None:
        """Send everything beyond the marks, and move them as it is accepted."""
        if target.there.ref in self._cursor.runs:  # a new run that is killed before the first mark is looked at whole
            self._remember(target, target.marks)
        began = saved = time.monotonic()
        # A whole run, sent in one go as whole rows, need not be read from the log once more to be compared.
        sent = Digests() if not (target.marks or self._sink.repeats) else None
        sender = self._sender(target)
        try:
            with sender:
                for segment, stretch in target.stretches.items():
                    if stretch.is_held(target.marks.get(segment)):
                        continue
                    for records, mark in self._points.rest(target, segment):
                        sender.put(segment, mark, records)
                        if sent is not None:
                            sent.add(records)
                        if time.monotonic() - saved > _SAVE_S:
                            self._remember(target, target.marks | sender.accepted)
                            saved = time.monotonic()
        except BaseException:
            self._remember(target, target.marks | sender.accepted)
            raise
        target.sent = sent
        if time.monotonic() - began > _SAVE_S:  # reading back takes its time, too
            self._remember(target, target.marks | sender.accepted)

    def _fill_holes(self, target: Target) -> None:
        """Send what a comparison finds lacking; until all of it is there, only another comparison says what is."""
        self._cursor.runs.pop(target.there.ref, None)
        self._cursor.save()
        comparison = self._compare(target, target.there)
        batch: list[Record] = []
        unmoved = Mark(-1, -1, 0, 0)
        with self._sender(target) as sender:
            for record in comparison.lacking():
                batch.append(record)
                if len(batch) == self._sink.batch_records:
                    sender.put(0, unmoved, batch)
                    batch = []
            sender.put(0, unmoved, batch)

    def _sender(self, target: Target) -> Sender:
        def accepted(points: int) -> None:
            self.report.sent[target.kind] = self.report.sent.get(target.kind, 0) + points
            self._progress.sent(points)

        def flush() -> None:
            self._sink.flush(target.there, lambda: self._points.figures(target))

        # With patience of its own: a sender that failed stops it, and what is tried after that needs some.
        return Sender(self._sink, target.there, self._patience.fork(), accepted, flush)

    def _remember(self, target: Target, marks: Mapping[int, Mark]) -> None:
        """Let a crash from here on find that something may be on its way, and how much has arrived."""
        self._hold(target, marks, None)
        self._cursor.save()

    def _hold(self, target: Target, marks: Mapping[int, Mark], newest: str | None) -> None:
        goal = {number: stretch.mark() for number, stretch in target.stretches.items()}
        self._cursor.runs[target.there.ref] = Held(
            target.kind, target.segment, dict(marks), goal, newest, dict(target.compared), target.counts, target.told,
            target.sampled,
        )  # fmt: skip

    # Reading back.

    def _verify(self, target: Target) -> None:
        """See that the tracker holds what it accepted, and send again what it does not.

        Raises:
            RejectedError: It accepts and does not keep.
        """
        if self._options.verify == "off" or self._tail_is_right(target):
            return
        difference = self._look_back(target)
        for _ in range(_REPAIRS):
            if not difference.lacking:
                return
            self._fill_holes(target)
            target.complete()
            difference = self._look_back(target)
        if not difference.lacking:
            return
        raise RejectedError(
            f"the tracker accepted every point of the {target.kind} run, and {difference.lacking} of them are not there"
            f" ({difference.tell_lacking()})",
            sink=self._sink.name,
            run_id=self._run.run_id,
            hint="see what the tracker's own log says; the next sync sends only what is lacking",
        )

    def _tail_is_right(self, target: Target) -> bool:
        """Return whether the tracker holds what it held when all of it was compared, and exactly what came since."""
        # Where records come back as whole rows there is one key, and its newest one is known by number alone.
        is_sample = self._options.verify == "fast" and self._sink.repeats
        if not (target.compared or is_sample):
            return False
        newest = self._newest(target)
        if is_sample and not self._newest_is_right(target, newest):
            return False
        counts = compare_beyond(
            self._sink,
            target.there,
            self._patience,
            self._points.beyond(target, target.compared),
            told=self._sink.told(self._story_of(target).points()),
            counts=target.counts if target.compared else {},
            newest=newest,
            sample=is_sample,
            on_read=self._progress.read,
        )
        if counts is None:
            return False
        target.compared, target.counts, target.sampled = target.marks, counts, target.sampled or is_sample
        return True

    def _newest(self, target: Target) -> Mapping[str, Record]:
        """Ask what the newest record of each key is by now."""
        runs = self._call(lambda: self._sink.list_runs(self._run.project, [self._run.run_id]))
        return next((run.newest for run in runs if run.ref == target.there.ref), {})

    def _look_back(self, target: Target) -> Difference:
        """Compare all that a run holds, and say what in it is not ours."""
        comparison = self._compare(target, target.there)
        difference = self._difference(target, comparison)
        if difference.misplaced:
            raise _MisplacedError(target.kind)
        self._say_foreign(target, difference)
        if not difference.lacking:
            target.compared, target.counts, target.sampled = target.marks, comparison.counts, False
        return difference

    def _say_foreign(self, target: Target, difference: Difference) -> None:
        if difference.foreign:
            self.report.add_note(
                f"the {target.kind} run holds values that are not from this log ({difference.tell_foreign()});"
                " they are left as they are"
            )

    def _newest_is_right(self, target: Target, newest: Mapping[str, Record]) -> bool:
        """Return whether the newest value of every metric there is the newest of what was there and what was sent."""
        before = target.there.newest
        expected: dict[str, tuple[object, ...]] = {}
        for record in self._points.beyond(target, target.began):
            there = before.get(record.key, record)
            expected[record.key] = max(record[1:4], there[1:4], expected.get(record.key, record[1:4]))
        return all(key in newest and newest[key][1:4] == identity for key, identity in expected.items())

    # Afterwards.

    def _tell(self, target: Target) -> None:
        """Tell what there is beside the points, unless the very same was told before."""
        story = self._story_of(target)
        if target.told == story.digest or (target.told is None and story.is_empty):
            return
        self._has_changed = True
        for note in self._call(lambda: self._sink.tell(target.there, story)):
            self.report.add_note(note)
        target.told = story.digest

    def _finish(self, canonical: Target, sides: list[Target]) -> None:
        """Bring status and names up to date, delete what was replaced, and remember what the tracker now tells."""
        for target in [canonical, *sides]:
            target.run = self._update(target.there, self._spec(target, canonical))
            self._tell(target)
        if held := describe.held_evaluations(self._story.unknown):
            self.report.add_note(held)
        self.report.ref, self.report.url = canonical.there.ref, canonical.there.url
        if not self._has_changed and not self._retired:
            return
        for run in self._retired:
            self._call(lambda run=run: self._sink.delete(run))  # type: ignore[misc]
            self.report.deleted += 1
        there = self._call(lambda: self._sink.list_runs(self._run.project, [self._run.run_id]))
        self._see_that_there_is_one_of_each([canonical, *sides], there)
        for run in there:
            if run.kind == REPLACED and run.segment is None:
                self._update(run, describe.replaced_spec(self._run, None, run.generation, canonical.there.ref))
        self._forget_all_but({run.ref for run in there})
        newest = {run.ref: newest_digest(run) for run in there}
        for target in [canonical, *sides]:
            self._hold(target, target.marks, newest.get(target.there.ref))
        self._cursor.save()

    def _see_that_there_is_one_of_each(self, targets: list[Target], there: list[TrackerRun]) -> None:
        """Look whether somebody made the same runs since we asked what there is: the one who is last sees it.

        Raises:
            MovedError: Another host did.
        """
        ours = {target.there.ref for target in targets} | {run.ref for run in self._retired}
        made = {(target.there.kind, target.there.segment, target.there.generation) for target in targets}
        for run in there:
            if run.ref not in ours and (run.kind, run.segment, run.generation) in made:
                raise MovedError(f"{run.ref} was made by another sync meanwhile", sink=self._sink.name)
