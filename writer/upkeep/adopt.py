"""Join a run to the place that it really started from, long after: by a record that is added, never by editing one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.writer.errors import FormatError, LlmtrackError, UsageError, VersionError
from llmtrack.writer.format import (
    PART_FILE,
    SCHEMAS,
    SEALED_SUFFIX,
    adoption_folder,
    check_root,
    check_run_id,
    segment_folder,
)
from llmtrack.writer.lineage.opening import claim_folder
from llmtrack.writer.lineage.path import UNBOUNDED, Stretch, path
from llmtrack.writer.lineage.records import Records
from llmtrack.writer.log.appender import Appender
from llmtrack.writer.log.publish import sync_folder
from llmtrack.writer.log.stream import encode_batch, read_part


@dataclass(frozen=True)
class Adoption:
    """Where a segment starts from now on.

    Attributes:
        run_id: The run that was adopted.
        segment: Its segment that starts there.
        from_run: The run that it goes on from.
        from_segment: The segment of that run.
        tokens: Tokens seen up to there.
        folder: Where the record is.
    """

    run_id: str
    segment: int
    from_run: str
    from_segment: int
    tokens: int
    folder: Path


def adopt(
    root: Path,
    run_id: str,
    *,
    from_run: str,
    tokens: int,
    from_segment: int | None = None,
    segment: int | None = None,
    step: int | None = None,
) -> Adoption:
    """Say that a segment, which started from nowhere as far as it knew, goes on from a place of another run.

    What the run logged below those tokens is on no path any more; what the other logged beyond them stays the other's.
    The record is in a folder of its own that `mkdir` claims; a later adoption of the same segment replaces it.

    Args:
        root: Folder that holds both runs.
        run_id: The run to join.
        from_run: The run that it really went on from.
        tokens: Tokens seen up to the place.
        from_segment: The segment of `from_run`; default: the one whose curve it is at these tokens.
        segment: The segment of `run_id`; default: its first.
        step: Optimiser step at the place; default: what the segment's start record has.

    Raises:
        UsageError: There is no such run, segment or place, or the place itself goes on from the run.
        LlmtrackError: The storage refused.
        VersionError: Written by a newer llmtrack.
    """
    check_root(root)
    records = Records(root)
    for name in (run_id, from_run):
        if not records.segments(check_run_id(name)):
            raise UsageError(f"there is no run {name} in {root}", hint="llmtrack ls shows the runs")
    starts = (start for number in records.segments(run_id) if (start := records.start(run_id, number)))
    adopted = next((start for start in starts if segment in (None, start.segment)), None)
    if adopted is None:
        raise UsageError(f"run {run_id} has no segment {segment or ''}", hint=f"llmtrack show {run_id} shows them")
    if from_run == run_id:
        raise UsageError(f"{run_id} cannot start from itself", hint="--from names the other run")
    origin = _place(root, records, from_run, from_segment, tokens)
    for stretch in path(records.start_of, from_run, origin.segment, tokens):
        if stretch.run_id == run_id and stretch.segment >= adopted.segment:
            raise UsageError(
                f"{from_run} itself goes on from segment {stretch.segment} of {run_id}", hint="adopt it the other way"
            )
    values: dict[str, object] = {
        "seq": 1,
        "time": time.time_ns() // 1_000_000,
        "step": step,
        "tokens": tokens,
        "phase": "adopt",
        "adopts": adopted.segment,
        "from_run": from_run,
        "from_segment": origin.segment,
        "from_ckpt": records.checkpoint_id(from_run, origin.segment, tokens),
        "fork_reason": "adopted",
    }
    try:
        _, folder = claim_folder(adoption_folder, root, run_id, 1)
        appender = Appender(folder, "segments")
        appender.append(encode_batch(pa.RecordBatch.from_pylist([values], schema=SCHEMAS["segments"]), 1, 1))
        appender.end_part()
        sync_folder(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise LlmtrackError(
            f"the adoption of {run_id} could not be written: {error.strerror or error}",
            hint="check the storage and the permissions, then adopt again",
        ) from error
    return Adoption(run_id, adopted.segment, from_run, origin.segment, tokens, folder)


def _place(root: Path, records: Records, run_id: str, segment: int | None, tokens: int) -> Stretch:
    """Return the stretch that a place is on."""
    head = records.head(run_id)
    newest = segment if segment is not None else head.segment if head is not None else 0
    stretches = path(records.start_of, run_id, newest)
    for stretch in stretches:
        if stretch.run_id == run_id and stretch.lo < tokens <= stretch.hi and segment in (None, stretch.segment):
            reached = _reached(root, stretch) if stretch.hi == UNBOUNDED else None
            if reached is not None and tokens > reached:
                raise UsageError(
                    f"segment {stretch.segment} of {run_id} came to {reached} tokens, and never to {tokens}",
                    hint=f"--tokens {reached} is its end",
                )
            return stretch
    raise UsageError(
        f"{tokens} tokens are on no stretch of {f'segment {segment} of ' if segment else ''}run {run_id}",
        hint=f"llmtrack show {run_id} shows from where to where its segments go",
    )


def _reached(root: Path, stretch: Stretch) -> int | None:
    """Return the tokens of the furthest point or record of a segment; None if not all of it can be read."""
    furthest = stretch.lo
    try:
        for part in segment_folder(root, stretch.run_id, stretch.segment).iterdir():
            match = PART_FILE.fullmatch(part.name)
            if match is None:
                continue
            if part.suffix == SEALED_SUFFIX:
                tokens = [int((pq.read_metadata(part).metadata or {})[b"llmtrack.tokens_max"])]
            else:
                content = read_part(part)
                if content.damages:
                    return None
                tokens = [value for value in content.table["tokens"].to_pylist() if value is not None]
            furthest = max([furthest, *tokens])
    except VersionError:
        raise
    except (OSError, FormatError, pa.ArrowException, KeyError, ValueError):
        return None  # `llmtrack verify` tells of damage
    return furthest
