"""What the records of a root say of its runs, as far as opening a run needs it: read when asked for, and once.

A record that cannot be read is warned of and counts as not there: a damaged file must not keep a job from training.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from llmtrack.writer.errors import FormatError, VersionError
from llmtrack.writer.format import (
    ADOPTION_FOLDER,
    OPEN_SUFFIX,
    PART_FILE,
    RUN_FOLDER,
    SEGMENT_FOLDER,
    run_folder,
    segment_folder,
)
from llmtrack.writer.log.stream import read_part

from .path import BEFORE_ALL, UNBOUNDED, Start, path

_log = logging.getLogger("llmtrack")

_START_COLUMNS: Final = ("tokens", "from_run", "from_segment", "fork_reason", "recipe_hash", "recipe")
_COLUMNS: Final = {"segments": ("phase", *_START_COLUMNS, "exit", "adopts"), "checkpoints": ("tokens", "ckpt_id")}


@dataclass(frozen=True)
class StartRecord:
    """The columns of a segment's start record that opening a run looks at; `tokens` is where it starts."""

    segment: int
    tokens: int
    from_run: str | None
    from_segment: int | None
    fork_reason: str | None
    recipe_hash: str | None
    recipe: str | None

    @property
    def start(self) -> Start:
        """Return where the segment starts, as the path has it."""
        nowhere = self.from_run is None or self.from_segment is None
        return Start(self.tokens, None if nowhere else (str(self.from_run), int(self.from_segment or 0)))


class Records:
    """The runs of a root as they were when each was first asked for.

    Args:
        root: The root; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.segments = cache(self._segments)
        self.start = cache(self._start)
        self.head = cache(self._head)
        self._adopted = cache(self._find_adopted)
        self._rows = cache(self._read_rows)

    def list_runs(self, prefix: str) -> list[str]:
        """Return the runs whose id begins so, sorted."""
        matches = map(RUN_FOLDER.fullmatch, _names(self._root))
        return sorted(match[1] for match in matches if match and match[1].startswith(prefix))

    def _segments(self, run_id: str) -> tuple[int, ...]:
        """Return the numbers that were claimed, ascending, also of segments that never wrote a record."""
        matches = map(SEGMENT_FOLDER.fullmatch, _names(run_folder(self._root, run_id)))
        return tuple(sorted(int(match[1]) for match in matches if match))

    def _start(self, run_id: str, segment: int) -> StartRecord | None:
        """Return the start record of a segment.

        Raises:
            VersionError: Written by a newer llmtrack.
        """
        row = next((row for row in self._rows(run_id, segment, "segments") if row["phase"] == "start"), None)
        if row is None:
            return None
        row = {**row, **self._adopted(run_id).get(segment, {})}
        return StartRecord(segment, **{column: row[column] for column in _START_COLUMNS})

    def _find_adopted(self, run_id: str) -> dict[int, dict[str, Any]]:
        """Return the segments of a run that were adopted, and where each starts by the last word on it."""
        found = sorted(filter(ADOPTION_FOLDER.fullmatch, _names(run_folder(self._root, run_id))))
        rows = (row for name in found for row in self._rows_in(run_folder(self._root, run_id) / name, "segments"))
        places = ("tokens", "from_run", "from_segment", "fork_reason")
        return {row["adopts"]: {place: row[place] for place in places} for row in rows if row["phase"] == "adopt"}

    def _head(self, run_id: str) -> StartRecord | None:
        """Return the start record of a run's highest segment that has one."""
        return next(
            (start for number in reversed(self.segments(run_id)) if (start := self.start(run_id, number))), None
        )

    def start_of(self, run_id: str, segment: int) -> Start | None:
        """Return where a segment starts; None without a start record."""
        record = self.start(run_id, segment)
        return None if record is None else record.start

    def would_leave_settled(self, run_id: str, place: tuple[str, int, int] | None) -> bool:
        """Return whether settled points of a run are not on the path of a place (run, segment, tokens; or nowhere)."""
        head = self.head(run_id)
        if head is None:
            return False
        settled = self._settled_tokens(run_id, head)
        for old in path(self.start_of, run_id, head.segment):
            if old.run_id != run_id:
                break  # a parent's points are not this run's to lose
            upto = min(old.hi, settled)
            # What a segment logs at its very start is settled by a checkpoint beyond, or by its own end.
            if upto > old.lo or self._ended_at(run_id, old.segment) is not None:
                # The newest settled stretch decides: who has it has all before it.
                return place is None or not any(
                    (new.run_id, new.segment) == (old.run_id, old.segment) and new.hi >= upto
                    for new in path(self.start_of, *place)
                )
        return False

    def has_settled(self, run_id: str) -> bool:
        """Return whether a run has settled points of its own."""
        return self.would_leave_settled(run_id, None)

    def checkpoint_id(self, run_id: str, segment: int, tokens: int) -> str | None:
        """Return the id of the newest checkpoint that was recorded at a place."""
        rows = self._rows(run_id, segment, "checkpoints")
        return next((row["ckpt_id"] for row in reversed(rows) if row["tokens"] == tokens), None)

    def _settled_tokens(self, run_id: str, head: StartRecord) -> int:
        """Return the tokens up to which the run's points are settled."""
        # A checkpoint of an earlier segment is no newer than the head's start, if it is on the path at all.
        settled: list[int] = [BEFORE_ALL if head.start.origin is None else head.tokens]
        settled += [row["tokens"] for row in self._rows(run_id, head.segment, "checkpoints")]
        ended = self._ended_at(run_id, head.segment)
        return max(settled if ended is None else [*settled, ended])

    def _ended_at(self, run_id: str, segment: int) -> int | None:
        """Return the tokens at which a segment ended with nothing to come; None if it did not, or has no points."""
        for row in self._rows(run_id, segment, "segments"):
            if row["exit"] in ("finished", "abandoned") and self._has_points(run_id, segment):
                return UNBOUNDED if row["tokens"] is None else int(row["tokens"])
        return None

    def _has_points(self, run_id: str, segment: int) -> bool:
        parts = map(PART_FILE.fullmatch, _names(segment_folder(self._root, run_id, segment)))
        return any(part[1] == "metrics" for part in parts if part)

    def _read_rows(self, run_id: str, segment: int, table: str) -> list[dict[str, Any]]:
        return self._rows_in(segment_folder(self._root, run_id, segment), table)

    def _rows_in(self, folder: Path, table: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name in sorted(_names(folder)):
            part = PART_FILE.fullmatch(name)
            if part is None or part[1] != table or not name.endswith(OPEN_SUFFIX):
                continue
            try:
                content = read_part(folder / name)
            except VersionError:
                raise
            except (FormatError, OSError) as error:
                _log.warning("llmtrack: cannot read %s (%s); the run is opened without it", folder / name, error)
                continue
            for damage in content.damages:
                _log.warning("llmtrack: damaged: %s; the run is opened without it", damage)
            rows += content.table.select(_COLUMNS[table]).to_pylist()
        return rows


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none when there is no such folder."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
