"""Check a root: every part of every segment, what is damaged in it, and what is missing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.writer.errors import CorruptSegmentError, FormatError, UsageError, VersionError
from llmtrack.writer.format import (
    ADOPTION_FOLDER,
    EVALS_FOLDER,
    OPEN_SUFFIX,
    PART_FILE,
    RUN_FOLDER,
    SEALED_SUFFIX,
    SEGMENT_FOLDER,
    check_root,
)
from llmtrack.writer.log.seal import list_copies, verify_sealed
from llmtrack.writer.log.stream import read_part

Kind = Literal["damaged", "missing", "newer", "torn", "unstarted"]

# What `kill -9` leaves: a torn tail, or a moment after the folder was claimed no start record yet.
_HARMLESS: Final = frozenset({"torn", "unstarted"})


@dataclass(frozen=True)
class Finding:
    """Something in a log that is not whole.

    Attributes:
        path: The file, or the folder when a file is missing.
        kind: ``damaged`` and ``missing`` lost something; ``newer`` needs a newer llmtrack; ``torn`` is a last batch cut
            off by a kill and ``unstarted`` a segment killed before its first write: both lost nothing that was durable.
        reason: For a person.
        first_byte: Start of the range in the file that cannot be read.
        end_byte: End of the range, exclusive.
    """

    path: Path
    kind: Kind
    reason: str
    first_byte: int = 0
    end_byte: int = 0

    def __str__(self) -> str:
        where = f" (bytes {self.first_byte} to {self.end_byte})" if self.end_byte else ""
        return f"{self.kind}: {self.path}: {self.reason}{where}"

    @property
    def is_loss(self) -> bool:
        """Return whether something that was written cannot be read."""
        return self.kind not in _HARMLESS


@dataclass
class Report:
    """What a check of a root has seen."""

    runs: int = 0
    segments: int = 0
    open_parts: int = 0
    sealed_parts: int = 0
    rows: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_intact(self) -> bool:
        """Return whether everything that was written can be read."""
        return not any(finding.is_loss for finding in self.findings)


def verify(root: Path, *, deep: bool = False) -> Report:
    """Check every part of a root; nothing is changed.

    Every file is read whole and its checksums compared. If `deep`, the rows of sealed parts are, too, with the digest
    that was made from the open part.

    Args:
        root: Folder that holds runs.
        deep: Decode sealed parts.

    Raises:
        UsageError: There is no such folder, or it is the folder of a run.
    """
    if not root.is_dir():
        raise UsageError(f"there is no root at {root}", hint="give the folder that open_run was given")
    check_root(root)
    report = Report()
    in_root = _listed(root, report) or []
    evals = [path for path in in_root if path.name == EVALS_FOLDER]
    for run in (path for path in in_root if RUN_FOLDER.fullmatch(path.name)):
        report.runs += 1
        inside = _listed(run, report) or []
        evals += [path for path in inside if path.name == EVALS_FOLDER]
        for adoption in (path for path in inside if ADOPTION_FOLDER.fullmatch(path.name)):
            _verify_segment(adoption, report, deep=deep)
        for segment in (path for path in inside if SEGMENT_FOLDER.fullmatch(path.name)):
            report.segments += 1
            _verify_segment(segment, report, deep=deep)
    for folder in evals:
        for path in _listed(folder, report) or []:
            if path.suffix == SEALED_SUFFIX:
                _verify_file(path, report, deep=False)  # they have no digest of rows
    return report


def _listed(folder: Path, report: Report) -> list[Path] | None:
    """Return what is in a folder, sorted; one that cannot be listed is a finding, and keeps nobody from the others."""
    try:
        return sorted(folder.iterdir())
    except NotADirectoryError:  # nobody's, whatever it is called
        return None
    except OSError as error:
        report.findings.append(Finding(folder, "damaged", f"cannot be listed: {error.strerror}"))
        return None


def _verify_segment(folder: Path, report: Report, *, deep: bool) -> None:
    paths = _listed(folder, report)
    if paths is None:
        return
    parts: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in paths:  # X.parquet comes after X.arrows, and is the one that counts
        name = PART_FILE.fullmatch(path.name)
        if name is not None:
            parts[name[1]][int(name[2])] = path
    for table, numbered in parts.items():
        for part in range(1, max(numbered) + 1):
            if part not in numbered:
                report.findings.append(Finding(folder, "missing", f"part {part} of {table} is not there"))
        for path in numbered.values():
            _verify_file(path, report, deep=deep)
        copies = list_copies(path for path in numbered.values() if path.suffix == SEALED_SUFFIX)
        for path, original in copies.items():
            report.findings.append(Finding(path, "damaged", f"is a copy of {original.name}"))
    if "segments" not in parts:
        kind: Kind = "missing" if parts else "unstarted"
        report.findings.append(Finding(folder, kind, "the segment has no start record"))


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _verify_file(path: Path, report: Report, *, deep: bool) -> None:
    try:
        report.bytes += path.stat().st_size
        if path.suffix == OPEN_SUFFIX:
            report.open_parts += 1
            content = read_part(path)
            report.rows += content.table.num_rows
            for damage in content.damages:
                report.findings.append(Finding(path, "damaged", damage.reason, damage.first_byte, damage.end_byte))
            if content.torn_bytes:
                end = content.next_offset + content.torn_bytes
                report.findings.append(Finding(path, "torn", "the last batch is not whole", content.next_offset, end))
        else:
            report.sealed_parts += 1
            verify_sealed(path, rows=deep)
            report.rows += pq.read_metadata(path).num_rows
    except FileNotFoundError:
        sealed = path.with_suffix(SEALED_SUFFIX)
        if path != sealed and sealed.exists():  # it was sealed between listing and reading
            _verify_file(sealed, report, deep=deep)
        else:
            report.findings.append(Finding(path, "missing", "it vanished while the root was checked"))
    except VersionError as error:
        report.findings.append(Finding(path, "newer", error.reason))
    except (FormatError, pa.ArrowException, OSError) as error:
        reason = error.reason if isinstance(error, CorruptSegmentError) else f"cannot be read: {_why(error)}"
        report.findings.append(Finding(path, "damaged", reason, 0, path.stat().st_size if path.exists() else 0))
