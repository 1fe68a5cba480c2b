"""Roots made by hand, file by file: for what the public API refuses to write, and to be quick."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmtrack.writer.format import HEARTBEAT, SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter
from tests.oracle import Segment

DAY = dt.datetime(2025, 3, 1, tzinfo=dt.UTC)


def write_part(folder: Path, table: str, rows: Iterable[Mapping[str, Any]], *, part: int = 1, batch: int = 10) -> Path:
    """Write one open part; `time`, `step` and `seq` are filled in where a row does not have them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / part_name(table, part)
    writer = PartWriter(path, table)
    full: list[dict[str, Any]] = [
        {
            "seq": index,
            "time": DAY + dt.timedelta(seconds=index),
            "step": (row.get("tokens") or 0) // 10,
            "tokens": 0,
            **row,
        }
        for index, row in enumerate(rows, start=1)
    ]
    for first in range(0, len(full), batch):
        some = full[first : first + batch]
        writer.append(pa.RecordBatch.from_pylist(some, schema=SCHEMAS[table]), some[0]["seq"], some[-1]["seq"])
    writer.close(ended=False)
    return path


def write_segment(root: Path, segment: Segment, *, sealed: bool = False, **start: Any) -> Path:
    """Write what a segment of the oracle wrote, with further columns of its start record."""
    folder = segment_folder(root, segment.run_id, segment.number)
    folder.mkdir(parents=True, exist_ok=True)
    begin = DAY + dt.timedelta(hours=segment.number)
    seq = iter(range(1, 1_000_000))
    records: list[dict[str, Any]] = []
    if segment.started:
        from_run, from_segment = segment.origin or (None, None)
        place = {"seq": next(seq), "time": begin, "tokens": segment.start, "step": segment.start // 10}
        records.append(
            {**place, "phase": "start", "from_run": from_run, "from_segment": from_segment, "world_size": 8, **start}
        )
    points = [
        {
            "seq": next(seq),
            "time": begin + dt.timedelta(minutes=1),
            "tokens": p.tokens,
            "name": p.name,
            "value": p.value,
        }
        for p in segment.points
    ]
    checkpoints = [
        {
            "seq": next(seq),
            "time": begin + dt.timedelta(minutes=2),
            "tokens": tokens,
            "ckpt_id": f"{segment.key}@{tokens}",
        }
        for tokens in segment.checkpoints
    ]
    last = max([segment.start, *(p.tokens for p in segment.points), *segment.checkpoints])
    if segment.exit:
        end = {"seq": next(seq), "time": begin + dt.timedelta(minutes=50), "tokens": last, "step": last // 10}
        records.append({**end, "phase": "end", "exit": segment.exit})
    if records:
        write_part(folder, "segments", records)
    if points:
        path = write_part(folder, "metrics", points)
        if sealed:
            seal_part(path)
    if checkpoints:
        write_part(folder, "checkpoints", checkpoints)
    return folder


def write_heartbeat(folder: Path, time: dt.datetime, *, tokens: int = 0, dropped: int = 0) -> Path:
    """Write a heartbeat as the writer does."""
    beat = {"time": time.isoformat(timespec="milliseconds"), "seq": 1, "step": tokens // 10, "tokens": tokens}
    path = folder / HEARTBEAT
    path.write_text(json.dumps({**beat, "dropped": dropped, "pid": 1, "host": "node1"}), encoding="utf-8")
    return path
