"""Evaluations of checkpoints: whole Parquet files, written by any process on any host at any time, never changed.

They find their run by the checkpoint's id. One whose checkpoint no run has recorded (yet) is kept in ``ROOT/evals``
and belongs to it as soon as one does.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, SupportsFloat
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.writer.errors import FormatError, LlmtrackError, UsageError
from llmtrack.writer.format import (
    EVALS_FOLDER,
    FORMAT_VERSION,
    OPEN_SUFFIX,
    RUN_FOLDER,
    SCHEMAS,
    SEGMENT_FOLDER,
    check_root,
    run_folder,
)
from llmtrack.writer.log.publish import publish, sync_folder
from llmtrack.writer.log.seal import CHECK_KEY, sign
from llmtrack.writer.log.stream import read_part
from llmtrack.writer.mode import is_disabled
from llmtrack.writer.plain import plain

_CKPT_ID: Final = re.compile(r"\S{1,256}")


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a checkpoint stands in a root."""

    run_id: str
    step: int | None
    tokens: int | None


@dataclass(frozen=True)
class EvalValue:
    """One number that a harness measured.

    Attributes:
        prompt_hash: Two values with different ones were not asked the same; None when that is unknown.
        details: JSON; None when there are none.
    """

    task: str
    metric: str
    value: float
    stderr: float | None = None
    prompt_hash: str | None = None
    details: str | None = None


@dataclass(frozen=True)
class EvalFile:
    """A file of evaluations in a root.

    Attributes:
        path: The file.
        run_id: The run whose folder it is in; None when it is in ``ROOT/evals``.
        is_matched: A run has recorded the checkpoint.
        table: Its rows, with the columns of ``SCHEMAS["evals"]``.
        is_new: False when the very same results had been imported before, and nothing was written.
    """

    path: Path
    run_id: str | None
    is_matched: bool
    table: pa.Table
    is_new: bool


def log_eval(
    root: str | os.PathLike[str],
    ckpt_id: str,
    task: str,
    metrics: Mapping[str, SupportsFloat],
    *,
    stderr: Mapping[str, SupportsFloat | None] | None = None,
    harness: str | None = None,
    harness_version: str | None = None,
    prompt_hash: str | None = None,
    details: Any = None,
    tokens: int | None = None,
    run_id: str | None = None,
) -> Path | None:
    """Keep what one evaluation of one checkpoint measured, durably and beside all earlier ones.

    May be called from any process on any host that sees the root, before or after the checkpoint is recorded. Every
    call writes one file, ``ROOT/run_id=<run>/evals/evals-<unique>.parquet`` where a run has recorded the checkpoint,
    ``ROOT/evals/evals-<unique>.parquet`` where none has: so pass all metrics of a task at once. A second evaluation
    with another harness or prompt is another file.

    Args:
        root: The folder that holds the runs.
        ckpt_id: What `checkpoint_id` gives for the files that were evaluated.
        task: For example ``hellaswag``.
        metrics: Numbers by name; NaN and infinities are kept.
        stderr: Standard errors for some or all of the metrics.
        harness: What measured, for example ``lm-eval``.
        harness_version: Its version.
        prompt_hash: Anything that differs when the prompts differ.
        details: Anything else, kept as JSON.
        tokens: Of the checkpoint; needed only where no run has recorded it.
        run_id: Of the run that has recorded the checkpoint, which saves the search for it through all runs.

    Returns:
        The file, or None when ``LLMTRACK_MODE=disabled``.

    Raises:
        UsageError: A value is no number, there is no such root or run, or tokens are not the checkpoint's.
        LlmtrackError: The storage refused; nothing was written.
    """
    if not metrics:
        raise UsageError(f"no metric for task {task!r}", hint='give at least one, as in {"acc": 0.61}')
    errors = dict(stderr or {})
    if unknown := errors.keys() - metrics.keys():
        raise UsageError(f"stderr for {sorted(unknown)}, which are no metrics", hint="use the names of the metrics")
    text = None if details is None else to_json(details)
    values = [
        EvalValue(
            task,
            metric,
            _number(f"{task}/{metric}", value),
            None if (error := errors.get(metric)) is None else _number(f"stderr of {task}/{metric}", error),
            prompt_hash,
            text,
        )
        for metric, value in metrics.items()
    ]
    if is_disabled():
        return None
    return write_evals(
        root, ckpt_id, values, harness=harness, harness_version=harness_version, tokens=tokens, run_id=run_id
    ).path


def write_evals(
    root: str | os.PathLike[str],
    ckpt_id: str,
    values: Sequence[EvalValue],
    *,
    harness: str | None = None,
    harness_version: str | None = None,
    tokens: int | None = None,
    run_id: str | None = None,
    time_ms: int | None = None,
    unique: str | None = None,
) -> EvalFile:
    """Write one file of evaluations of one checkpoint, whole or not at all.

    Args:
        root: The folder that holds the runs.
        ckpt_id: The checkpoint's id.
        values: At least one.
        harness: What measured.
        harness_version: Its version.
        tokens: Of the checkpoint, for where no run has recorded it.
        run_id: The run that has recorded it; None to look for it.
        time_ms: When it was measured, in ms since 1970 UTC; None for now.
        unique: Part of the file's name; given, a file of that name is proof that these values are there already.

    Raises:
        UsageError: There is no such root or run, or an argument is not what it should be.
        LlmtrackError: The storage refused; nothing was written.
    """
    where = Path(root)
    _check(ckpt_id, values, tokens)
    try:
        if not where.is_dir():
            raise UsageError(f"there is no root {where}", hint="give the folder that holds the runs, or create it")
        check_root(where)
        place = find_checkpoint(where, ckpt_id, run_id=run_id)
        if place is not None and tokens is not None and tokens != place.tokens:
            raise UsageError(
                f"checkpoint {ckpt_id} was saved at {place.tokens} tokens, not at {tokens}",
                hint="leave tokens out, or identify the checkpoint with the right count",
            )
        now_ms = time.time_ns() // 1_000_000
        table = _table(
            ckpt_id,
            values,
            time_ms=now_ms if time_ms is None else time_ms,
            step=place.step if place else None,
            tokens=place.tokens if place else tokens,
            harness=harness,
            harness_version=harness_version,
        )
        name = f"{EVALS_FOLDER}-{unique or _unique(now_ms)}.parquet"
        owner = run_id or (place.run_id if place else None)
        folder = (run_folder(where, owner) if owner else where) / EVALS_FOLDER
        for path in (folder / name, where / EVALS_FOLDER / name):
            if unique is not None and path.exists():
                return EvalFile(path, owner, place is not None, table, is_new=False)
        _create(folder)
        publish(folder / name, _parquet(table))
    except OSError as error:
        raise LlmtrackError(
            f"{error.filename or where}: evaluations could not be written: {error.strerror or error}",
            hint="check the storage and the permissions, then log them again",
        ) from error
    return EvalFile(folder / name, owner, place is not None, table, is_new=True)


def find_checkpoint(root: Path, ckpt_id: str, *, run_id: str | None = None) -> CheckpointPlace | None:
    """Find a run that has recorded a checkpoint, or None.

    Args:
        root: The folder that holds the runs.
        ckpt_id: The checkpoint's id.
        run_id: Look only in this run.

    Raises:
        UsageError: There is no such run in the root.
        OSError: A folder could not be listed.
    """
    if run_id is None:
        found = (match for path in root.iterdir() if (match := RUN_FOLDER.fullmatch(path.name)))
        runs = sorted(match[1] for match in found)
    elif run_folder(root, run_id).is_dir():
        runs = [run_id]
    else:
        raise UsageError(f"there is no run {run_id} in {root}", hint="leave the run out to have it looked for")
    for run in runs:
        for path in _checkpoint_parts(run_folder(root, run)):
            try:
                rows = read_part(path).table
            except (FormatError, FileNotFoundError, PermissionError):
                continue  # damaged, newer, removed, or not ours to read: readers match by id, so nothing is lost
            ids = rows["ckpt_id"].to_pylist()
            if ckpt_id in ids:
                at = ids.index(ckpt_id)
                return CheckpointPlace(run, rows["step"][at].as_py(), rows["tokens"][at].as_py())
    return None


def to_json(value: Any) -> str:
    """Return anything as JSON that every reader takes; NaN and the infinities are the words for them."""
    return json.dumps(plain(value), ensure_ascii=False, sort_keys=True)


def _number(what: str, value: SupportsFloat) -> float:
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, for more than one element
        number = None
    if number is None:
        raise UsageError(f"{what} is {value!r}, which is no number", hint="give a number")
    return number


def _check(ckpt_id: str, values: Sequence[EvalValue], tokens: int | None) -> None:
    if not isinstance(ckpt_id, str) or not _CKPT_ID.fullmatch(ckpt_id):
        raise UsageError(f"{ckpt_id!r} is no checkpoint id", hint="`llmtrack ckpt-id PATH --tokens N` prints one")
    if Path(ckpt_id).exists():
        raise UsageError(
            f"{ckpt_id} is a checkpoint, not its id", hint=f"`llmtrack ckpt-id {ckpt_id} --tokens N --quick` prints it"
        )
    for value in values:
        for what, name in (("task", value.task), ("metric", value.metric)):
            if not isinstance(name, str) or not name.strip():
                raise UsageError(f"{name!r} is no name for a {what}", hint="give a word, as in hellaswag and acc")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 1 << 63):
        raise UsageError(f"tokens {tokens!r} is no token count", hint="give a whole number from 0 on")


def _checkpoint_parts(run: Path) -> Iterator[Path]:
    try:
        segments = sorted(run.iterdir())
    except PermissionError:  # not ours to read
        return
    for segment in segments:
        if SEGMENT_FOLDER.fullmatch(segment.name):
            yield from sorted(segment.glob(f"checkpoints-*{OPEN_SUFFIX}"))


def _table(
    ckpt_id: str,
    values: Sequence[EvalValue],
    *,
    time_ms: int,
    step: int | None,
    tokens: int | None,
    harness: str | None,
    harness_version: str | None,
) -> pa.Table:
    common = {"time": time_ms, "step": step, "tokens": tokens, "ckpt_id": ckpt_id}
    measured_with = {"harness": harness, "harness_version": harness_version}
    rows = [{"seq": seq, **common, **measured_with, **vars(value)} for seq, value in enumerate(values, start=1)]
    said = {"llmtrack.format": str(FORMAT_VERSION), "llmtrack.rows": str(len(rows)), CHECK_KEY: f"{0:08x}"}
    schema = SCHEMAS["evals"].with_metadata(said)
    return pa.table([[row[name] for row in rows] for name in schema.names], schema=schema)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # No statistics: they leave NaN out, and DuckDB concludes that no value is NaN.
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, write_statistics=False)
    data = bytearray(sink.getvalue())
    sign(data)
    return bytes(data)


def _create(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _unique(now_ms: int) -> str:
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_ms / 1000))}-{uuid4().hex[:12]}"
