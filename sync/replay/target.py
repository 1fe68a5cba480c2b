"""A run in the tracker as the log wants it, and the records that belong into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.sync.sink import Record, Sink, TrackerRun

from . import classify
from .classify import LoggedRun, Stretch
from .cursor import Mark
from .figures import Figures, read_figures

if TYPE_CHECKING:
    import duckdb

    from .compare import Digests


@dataclass
class Target:
    """One run in the tracker as the log wants it.

    Attributes:
        kind: `CANONICAL`, `PROVISIONAL` or `SUPERSEDED`.
        segment: The one whose points a side run holds; None for the canonical run.
        stretches: What belongs into it, by segment.
        run: The run in the tracker; None when there is none yet.
        marks: How far the tracker has it, by segment.
        began: How far the tracker had it when the replay began, by segment.
        compared: How far that was read back and compared, by segment.
        sampled: That was not every record.
        counts: How many records the tracker held then, by key.
        has_holes: The marks say nothing: it lacks some of what belongs into it.
        verified: What it holds was compared, and agrees.
        told: Digest of the story that it was told; None when that is not known.
        every: Of each so many steps it has but some rows; see `thin`.
        sent: Digests of all that belongs into it, when all of it was sent just now.
    """

    kind: str
    segment: int | None
    stretches: dict[int, Stretch]
    run: TrackerRun | None = None
    marks: dict[int, Mark] = field(default_factory=dict)
    began: dict[int, Mark] = field(default_factory=dict)
    compared: dict[int, Mark] = field(default_factory=dict)
    sampled: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    has_holes: bool = False
    verified: bool = False
    told: str | None = None
    every: int = 1
    sent: Digests | None = None

    @property
    def points(self) -> int:
        """How many points belong into it."""
        return sum(stretch.points for stretch in self.stretches.values())

    def is_complete(self) -> bool:
        """Return whether everything that belongs into it was accepted."""
        return not self.has_holes and all(s.is_held(self.marks.get(number)) for number, s in self.stretches.items())

    def is_compared(self) -> bool:
        """Return whether everything that belongs into it was read back and compared."""
        return all(s.is_held(self.compared.get(number)) for number, s in self.stretches.items())

    def complete(self) -> None:
        """Say that everything that belongs into it was accepted."""
        self.has_holes = False
        self.marks = {number: stretch.mark() for number, stretch in self.stretches.items()}

    @property
    def there(self) -> TrackerRun:
        """The run in the tracker, once it is made."""
        if self.run is None:
            raise ValueError(f"the {self.kind} run is not made yet")
        return self.run


class PointReader:
    """Reads points of one run from the log, as the records that a sink makes of them."""

    def __init__(self, con: duckdb.DuckDBPyConnection, sink: Sink, run: LoggedRun) -> None:
        self._con = con
        self._sink = sink
        self._run = run

    def names(self, target: Target) -> list[str]:
        """Return the names of the metrics that belong into a target."""
        return classify.names(self._con, self._run.run_id, target.kind, list(target.stretches))

    def agrees(self, target: Target, marks: dict[int, Mark]) -> bool:
        """Return whether the log has, up to each mark, exactly the points of the target that the mark counted."""
        return classify.agrees(self._con, self._run.run_id, target.kind, target.stretches, marks)

    def records(self, target: Target) -> Iterator[Record]:
        """Yield the records of a target."""
        for segment in target.stretches:
            for records in self._read(target.kind, segment, every=target.every):
                yield from records

    def beyond(self, target: Target, marks: Mapping[int, Mark]) -> Iterator[Record]:
        """Yield the records of a target that are not before some marks."""
        for segment, stretch in target.stretches.items():
            mark = marks.get(segment)
            if not stretch.is_held(mark):
                for records in self._read(target.kind, segment, mark, every=target.every):
                    yield from (record for record in records if mark is None or record.seq > mark.seq)

    def figures(self, target: Target) -> list[Figures]:
        """Return what is to be said of each metric of a target as a whole."""
        return read_figures(self._con, self._run.run_id, target.kind, list(target.stretches))

    def others(self, target: Target) -> Iterator[Record]:
        """Yield the records of the run that belong into other targets."""
        for kind, part in self._run.parts.items():
            for segment in part:
                if kind != target.kind or segment not in target.stretches:
                    for records in self._read(kind, segment):
                        yield from records

    def rest(self, target: Target, segment: int) -> Iterator[tuple[list[Record], Mark]]:
        """Yield the records beyond a target's mark, batch by batch, each with the mark that holds once it is accepted.

        A mark never lies within a row: what was read of the last row of a batch counts with the next one.
        """
        mark = target.marks.get(segment)
        points, seq_sum, row, row_points = (mark.points, mark.seq_sum, mark.seq, 0) if mark else (0, 0, -1, 0)
        begin = row
        last: Record | None = None
        for batch in self._read(target.kind, segment, mark, every=target.every):
            records = [record for record in batch if record.seq > begin]
            for record in records:
                if record.seq != row:
                    if last is not None:
                        points, seq_sum = points + row_points, seq_sum + row_points * row
                        mark = Mark(row, last.tokens, points, seq_sum)
                    row, row_points = record.seq, 0
                row_points += record.points
                last = record
            if mark is None:
                mark = Mark(-1, -1, 0, 0)
            yield records, mark
        if last is not None:
            yield [], Mark(row, last.tokens, points + row_points, seq_sum + row_points * row)

    def _read(self, kind: str, segment: int, mark: Mark | None = None, *, every: int = 1) -> Iterator[list[Record]]:
        """Yield batches of records from the tokens of a mark on."""
        encoder = self._sink.encoder(segment)
        from_tokens = None if mark is None else mark.tokens
        part = classify.read_part(self._con, self._run.run_id, kind, segment, from_tokens=from_tokens, every=every)
        for rows in _whole(part):
            yield encoder.encode(rows)


def _whole(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut batches anew, between rows: the last row of each may go on in the next one."""
    begun: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        seq = batch.column("seq")
        last = pc.index(seq, seq[-1]).as_py()
        if last or (begun and begun[0].column("seq")[0] != seq[0]):
            whole = [*begun, batch.slice(0, last)]
            yield from pa.Table.from_batches(whole).combine_chunks().to_batches()
            begun = []
        begun.append(batch.slice(last))
    if begun:
        yield from pa.Table.from_batches(begun).combine_chunks().to_batches()
