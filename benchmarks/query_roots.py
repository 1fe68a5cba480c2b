"""Roots to ask: many points, many parts, many segments, and one large part that is still open."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from workload import TOKENS_PER_STEP, metric_names, metric_values

from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter

METRICS: Final = 20
LOSS: Final = metric_names(METRICS)[0]
_NAMES: Final = pa.array(metric_names(METRICS), pa.string())
_BATCH_ROWS: Final = 500  # 10,000 points: what a busy writer flushes at once
_LOST_SHARE: Final = 0.02  # of a segment: what its end had beyond the checkpoint that the next one starts from
_STEP_MS: Final = (1000.0, 20.0)  # a step takes a second, and no two the same
_BEGIN_MS: Final = 1_740_787_200_000  # 2025-03-01


def build_points(root: Path, points: int, *, runs: int = 100, segments: int = 3) -> None:
    """Write runs of some segments each, as the writer and its sealing do; every segment starts from a checkpoint."""
    steps = points // (METRICS * runs * segments)
    kept = max(int(steps * (1.0 - _LOST_SHARE)), 1)
    for number in range(runs):
        run_id = f"run-{number:04d}"
        values = metric_values(steps * segments, METRICS, single=True)
        values += np.random.default_rng(number).normal(0.0, 0.01, values.shape)
        values = values.astype(np.float32).astype(np.float64)
        for segment in range(1, segments + 1):
            write_segment(
                root,
                run_id,
                segment,
                first_step=(segment - 1) * kept + 1,
                values=values[(segment - 1) * kept : (segment - 1) * kept + steps],
                checkpoint_step=segment * kept,
                exit_=None if segment < segments else "finished",
            )


def build_parts(root: Path, *, runs: int, segments: int, parts: int) -> None:
    """Write runs x segments x parts sealed parts, of one row each."""
    values = metric_values(parts, METRICS)
    for number in range(runs):
        for segment in range(1, segments + 1):
            first = (segment - 1) * parts + 1
            write_segment(root, f"run-{number:04d}", segment, first_step=first, values=values, rows_a_part=1)


def build_open(root: Path, part_bytes: int) -> None:
    """Write one run whose part is as large as it gets before it is sealed."""
    values = metric_values(part_bytes // 100, METRICS, single=True)  # 7 bytes a point, and 20 points a row: enough
    write_segment(root, "running", 1, first_step=1, values=values, part_bytes=part_bytes, sealed=False)


def write_segment(
    root: Path,
    run_id: str,
    segment: int,
    *,
    first_step: int,
    values: np.ndarray[Any, np.dtype[np.float64]],
    rows_a_part: int | None = None,
    part_bytes: int | None = None,
    checkpoint_step: int | None = None,
    exit_: str | None = None,
    sealed: bool = True,
) -> None:
    """Write the files of one segment; values are [steps, metrics]."""
    folder = segment_folder(root, run_id, segment)
    folder.mkdir(parents=True)
    start = (first_step - 1) * TOKENS_PER_STEP
    origin = {"from_run": run_id, "from_segment": segment - 1} if segment > 1 else {}
    records = [
        {"phase": "start", "step": first_step - 1, "tokens": start, "world_size": 8, "project": "bench", **origin}
    ]
    last_step = first_step + len(values) - 1
    if exit_ is not None:
        records.append({"phase": "end", "step": last_step, "tokens": last_step * TOKENS_PER_STEP, "exit": exit_})
    _write_rare(folder, "segments", records, first_step)
    if checkpoint_step is not None:
        place = {"step": checkpoint_step, "tokens": checkpoint_step * TOKENS_PER_STEP}
        _write_rare(folder, "checkpoints", [{**place, "ckpt_id": f"{run_id}-{checkpoint_step}"}], checkpoint_step)
    rng = np.random.default_rng(segment)
    times = _BEGIN_MS + first_step * 1000 + np.cumsum(rng.normal(*_STEP_MS, len(values))).astype(np.int64)
    part, written, seq = 1, 0, 10
    while written < len(values):
        rows = len(values) - written if rows_a_part is None else rows_a_part
        path = folder / part_name("metrics", part)
        writer = PartWriter(path, "metrics")
        for begin in range(written, written + rows, _BATCH_ROWS):
            end = min(begin + _BATCH_ROWS, written + rows)
            batch = _batch(values[begin:end], times[begin:end], first_step + begin, seq)
            writer.append(batch, seq, seq + end - begin - 1)
            seq += end - begin
            if part_bytes is not None and writer.bytes >= part_bytes:
                rows = len(values) - written
                break
        writer.close(ended=sealed)
        if sealed:
            seal_part(path)
        part, written = part + 1, written + rows


def _batch(
    values: np.ndarray[Any, np.dtype[np.float64]],
    times: np.ndarray[Any, np.dtype[np.int64]],
    first_step: int,
    first_seq: int,
) -> pa.RecordBatch:
    count, width = values.shape
    steps = np.arange(first_step, first_step + count, dtype=np.int64)
    seqs = np.arange(first_seq, first_seq + count, dtype=np.int64)
    spread = [np.repeat(column, width) for column in (seqs, times, steps, steps * TOKENS_PER_STEP)]
    names = pa.concat_arrays([_NAMES] * count)
    schema = SCHEMAS["metrics"]
    columns = [pa.Array.from_buffers(schema[i].type, len(names), [None, pa.py_buffer(spread[i])]) for i in range(4)]
    doubles = pa.Array.from_buffers(pa.float64(), len(names), [None, pa.py_buffer(np.ascontiguousarray(values))])
    return pa.RecordBatch.from_arrays([*columns, names, doubles], schema=schema)


def _write_rare(folder: Path, table: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    writer = PartWriter(folder / part_name(table, 1), table)
    full = [{"seq": seq, "time": _BEGIN_MS + step * 1000, **row} for seq, row in enumerate(rows, start=1)]
    columns = [pa.array([row.get(field.name) for row in full], field.type) for field in SCHEMAS[table]]
    writer.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[table]), 1, len(full))
    writer.close()


if __name__ == "__main__":  # python benchmarks/query_roots.py FOLDER POINTS
    import sys

    folder, points = Path(sys.argv[1]), int(sys.argv[2])
    started_s = time.perf_counter()
    build_points(folder / "points", points)
    build_parts(folder / "parts", runs=100, segments=10, parts=10)
    build_parts(folder / "segments", runs=1000, segments=10, parts=1)
    build_open(folder / "open", 64 << 20)
    print(f"{time.perf_counter() - started_s:.0f} s")
