"""Leaves out sealed parts that were damaged since they were sealed: a tracker would keep their wrong values for ever.

DuckDB reads Parquet without comparing checksums. Open parts need nothing here: they are read with their checksums.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.query.sql.views import set_aside
from llmtrack.writer.errors import CorruptSegmentError
from llmtrack.writer.log.seal import CHECK_KEY, verify_sealed

if TYPE_CHECKING:
    import duckdb

_NEWER: Final = "written in format "  # as the reading of parts says it


def set_damaged_aside(con: duckdb.DuckDBPyConnection, root: Path, run_ids: Collection[str] | None = None) -> bool:
    """Compare every sealed part with the checksum it was sealed with, and read no further what fails.

    Args:
        con: From `llmtrack.query.connect`; it sees what is new in the root when something was set aside.
        root: The same root.
        run_ids: Only the parts of these runs; None: of all.

    Returns:
        Whether something was set aside. The view `damages` has it.
    """
    damaged: list[tuple[Path, str]] = []
    for folder in root.glob("run_id=*") if run_ids is None else [root / f"run_id={run_id}" for run_id in run_ids]:
        for part in sorted(folder.glob("segment=*/metrics-*.parquet")):
            try:
                if _has_checksum(part):
                    verify_sealed(part)
            except CorruptSegmentError as error:
                damaged.append((part, error.reason))
            except FileNotFoundError:  # a run that is being deleted
                continue
    for part, reason in damaged:
        set_aside(con, str(part.absolute()), reason)
    return bool(damaged)


class Unread(NamedTuple):
    """A file of the log that could not be read, or not whole; bytes from `first_byte` to before `end_byte`."""

    run_id: str
    path: str
    first_byte: int
    end_byte: int
    reason: str

    @property
    def is_newer(self) -> bool:
        """Whether nothing is wrong with it: a newer llmtrack wrote it."""
        return self.reason.startswith(_NEWER)


def unread(con: duckdb.DuckDBPyConnection) -> list[Unread]:
    """Return what could not be read, by path.

    Args:
        con: From `llmtrack.query.connect`.
    """
    rows = con.execute("SELECT run_id, path, first_byte, end_byte, reason FROM damages ORDER BY path, first_byte")
    return [Unread(*row) for row in rows.fetchall()]


def _has_checksum(part: Path) -> bool:
    """Return whether we sealed it; anybody may put Parquet with our columns there, and then nothing was promised."""
    try:
        return CHECK_KEY.encode() in (pq.read_metadata(part).metadata or {})
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is no text any more
        if isinstance(error, FileNotFoundError):
            raise
        raise CorruptSegmentError(part, f"cannot be read: {error}") from error
