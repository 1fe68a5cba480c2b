"""Seal, long after, what writers left open that are gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pyarrow as pa

from llmtrack.writer.errors import FormatError, LlmtrackError, UsageError
from llmtrack.writer.format import HEARTBEAT, OPEN_SUFFIX, RUN_FOLDER, SEGMENT_FOLDER, check_root, part_name
from llmtrack.writer.log.seal import list_parts, seal_segment
from llmtrack.writer.log.stream import read_part

DEFAULT_SILENCE_S: Final = 3600.0  # two minutes would do, were it not for clocks that differ and storage that hangs


@dataclass(frozen=True)
class SealResult:
    """What became of the open parts of one segment.

    Attributes:
        folder: The segment's folder.
        sealed: New sealed parts.
        skipped: Why nothing was done; empty when it was.
        error: Why some parts stay open; empty when none does.
    """

    folder: Path
    sealed: tuple[Path, ...] = ()
    skipped: str = ""
    error: str = ""


def seal_root(root: Path, *, run: str = "*", silence_s: float = DEFAULT_SILENCE_S) -> Iterator[SealResult]:
    """Seal the open parts of every segment that has ended, or whose writer has been silent for long.

    A writer that comes back after all finds its part gone, and writes what it still holds into a new one.

    Args:
        root: Folder that holds runs.
        run: Glob over run ids.
        silence_s: Seconds without a heartbeat after which a writer counts as gone.

    Raises:
        UsageError: There is no such folder, or it is the folder of a run.
    """
    if not root.is_dir():
        raise UsageError(f"there is no root at {root}", hint="give the folder that open_run was given")
    check_root(root)
    for run_path in sorted(root.iterdir()):
        name = RUN_FOLDER.fullmatch(run_path.name)
        if name is None or not fnmatchcase(name[1], run):
            continue
        try:
            folders = sorted(path for path in run_path.iterdir() if SEGMENT_FOLDER.fullmatch(path.name))
        except OSError as error:  # not ours to read: the others are
            yield SealResult(run_path, error=_why(error))
            continue
        for folder in folders:
            try:
                if result := _seal_one(folder, silence_s):
                    yield result
            except (LlmtrackError, OSError, pa.ArrowException) as error:
                yield SealResult(folder, error=_why(error))


def _seal_one(folder: Path, silence_s: float) -> SealResult | None:
    if not any(path.suffix == OPEN_SUFFIX for path in list_parts(folder)):
        return None
    if not (has_ended(folder) or (silence := _silence_s(folder)) >= silence_s):
        heard = f"heard of {silence:.0f} s ago, taken for gone after {silence_s:.0f} (--silence-s)"
        return SealResult(folder, skipped=f"may still be written to: {heard}")
    return SealResult(folder, sealed=tuple(seal_segment(folder)))


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def has_ended(folder: Path) -> bool:
    """Return whether a segment has its end record; a record that cannot be read is none."""
    part = 1
    while (path := folder / part_name("segments", part)).exists():
        try:
            if "end" in read_part(path).table["phase"].to_pylist():
                return True
        except (FormatError, OSError):
            return False
        part += 1
    return False


def _silence_s(folder: Path) -> float:
    """Return the seconds since the segment was last heard of, by the clock of the file server."""
    times = [path.stat().st_mtime for path in list_parts(folder)]
    heartbeat = folder / HEARTBEAT
    if heartbeat.exists():
        times.append(heartbeat.stat().st_mtime)
    return max(time.time() - max(times, default=0.0), 0.0)
