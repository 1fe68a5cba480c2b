"""Logs to replay, written with the writer's own stream so that times and values are the test's to choose."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmtrack.writer.format import HEARTBEAT, SCHEMAS, part_name, segment_folder
from llmtrack.writer.stream import PartWriter

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

Row = tuple[int, Mapping[str, float]]  # tokens, metrics


class SegmentLog:
    """One segment of a run, open until `end` is called; a test that just stops leaves it as a kill would."""

    def __init__(self, root: Path, run_id: str, segment: int, start: Mapping[str, Any], began: dt.datetime) -> None:
        self.run_id = run_id
        self.segment = segment
        self.folder = segment_folder(root, run_id, segment)
        self.folder.mkdir(parents=True)
        self.time = began
        self._seq = 0
        self._parts: dict[str, int] = {}
        self._write(
            "segments", [{"tokens": start.get("tokens", 0), "step": start.get("step", 0), **start}], phase="start"
        )

    def log(self, rows: Sequence[Row], *, tokens_per_step: int = 10, ms: int = 7) -> SegmentLog:
        """Log rows, `ms` milliseconds apart, as one batch of a part of their own."""
        points = []
        for tokens, metrics in rows:
            self.time += dt.timedelta(milliseconds=ms)
            self._seq += 1
            points += [
                {"seq": self._seq, "tokens": tokens, "step": tokens // tokens_per_step, "name": name, "value": value}
                | {"time": self.time}
                for name, value in metrics.items()
            ]
        self._append("metrics", points)
        return self

    def train(
        self, first: int, last: int, every: int = 10, names: Sequence[str] = ("train/loss", "train/lr")
    ) -> SegmentLog:
        """Log values that depend on segment, name and tokens, for tokens first + every to last."""
        return self.log(
            [
                (tokens, {name: (self.segment + 0.1 * n) * 1000.0 / (tokens + 3) for n, name in enumerate(names)})
                for tokens in range(first + every, last + 1, every)
            ]
        )

    def checkpoint(self, tokens: int) -> SegmentLog:
        """Record a checkpoint."""
        self._write(
            "checkpoints", [{"tokens": tokens, "step": tokens // 10, "ckpt_id": f"ckpt-{self.segment}-{tokens}"}]
        )
        return self

    def end(self, how: str = "finished", tokens: int = 0) -> SegmentLog:
        """Write how the segment ended."""
        self._write("segments", [{"tokens": tokens, "step": tokens // 10, "exit": how, "dropped": 0}], phase="end")
        return self

    def alive(self) -> SegmentLog:
        """Write a heartbeat of this moment."""
        beat = {"time": dt.datetime.now(dt.UTC).isoformat(), "seq": self._seq, "step": 0, "tokens": 0, "dropped": 0}
        (self.folder / HEARTBEAT).write_text(json.dumps(beat | {"pid": 1, "host": "node"}))
        return self

    def _write(self, table: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        self._seq += 1
        self.time += dt.timedelta(milliseconds=1)
        self._append(table, [{"seq": self._seq, "time": self.time, **row, **more} for row in rows])

    def _append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        part = self._parts[table] = self._parts.get(table, 0) + 1
        writer = PartWriter(self.folder / part_name(table, part), table)
        batch = pa.RecordBatch.from_pylist(list(rows), schema=SCHEMAS[table])
        writer.append(batch, rows[0]["seq"], rows[-1]["seq"])
        writer.close()


class Log:
    """A root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._segments: dict[str, int] = {}
        self._began = EPOCH

    def segment(
        self,
        run_id: str = "run",
        *,
        after: tuple[str, int, int] | None = None,
        project: str = "pretrain",
        config: Any = None,
        **start: Any,
    ) -> SegmentLog:
        """Start the next segment of a run.

        Args:
            run_id: The run.
            after: Run, segment and tokens of the place it starts from.
            project: As in the start record.
            config: Likewise.
            start: Further columns of the start record.
        """
        number = self._segments[run_id] = self._segments.get(run_id, 0) + 1
        self._began += dt.timedelta(hours=1)
        place = (
            {"from_run": after[0], "from_segment": after[1], "tokens": after[2], "step": after[2] // 10}
            if after
            else {}
        )
        record = (
            {"project": project, "config": json.dumps(config or {}), "recipe": "{}", "host": "node-1"} | place | start
        )
        return SegmentLog(self.root, run_id, number, record, self._began)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """An empty root."""
    root = tmp_path / "root"
    root.mkdir()
    return Log(root)


@pytest.fixture
def new_log(tmp_path: Path) -> Callable[[str], Log]:
    """Make further roots."""

    def make(name: str) -> Log:
        root = tmp_path / name
        root.mkdir()
        return Log(root)

    return make
