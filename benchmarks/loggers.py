"""What is measured beside the trackers, behind the same three calls: llmtrack, the floors, ten lines of JSON."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

# One entry a point that a tool's reader gives back: the step it was logged at.
Steps = npt.NDArray[np.int64]

# The call that training code makes: values, step, tokens.
Log = Callable[[dict[str, float], int, int], object]

_ARROW_BATCH_POINTS: Final = 1_000


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Opened:
    """One run of one tool.

    Attributes:
        log: Makes the call.
        settle: Returns when what was logged is where the tool puts it; ends the run where it knows no other way.
        close: Ends the run; called after `settle`.
    """

    log: Log
    settle: Callable[[], object] = _nothing
    close: Callable[[], object] = _nothing


def open_nothing(folder: Path) -> Opened:  # noqa: ARG001  # all are opened alike
    """Return an empty call: what the clock and the loop cost."""

    def log(values: dict[str, float], step: int, tokens: int) -> None: ...

    return Opened(log)


def open_queue(folder: Path) -> Opened:  # noqa: ARG001  # all are opened alike
    """Return the floor: the row is handed over, and nobody does anything with it."""
    rows: queue.Queue[tuple[dict[str, float], int, int]] = queue.Queue()

    def log(values: dict[str, float], step: int, tokens: int) -> None:
        rows.put_nowait((values, step, tokens))

    return Opened(log)


def open_llmtrack(folder: Path) -> Opened:
    """Return llmtrack, as training code calls it."""
    import llmtrack

    run = llmtrack.open_run(folder, run_id="bench")

    def settle() -> None:
        if not run.flush(timeout=60.0):
            raise TimeoutError("the log did not become durable")

    return Opened(run.log, settle, run.finish)


def read_llmtrack(folder: Path) -> Steps:
    """Read every part, with every checksum."""
    from llmtrack.writer.log.stream import read_part

    parts = sorted(folder.glob("run_id=*/segment=*/metrics-*.arrows"))
    return joined(read_part(path).table["step"].to_numpy() for path in parts)


def open_arrow(folder: Path) -> Opened:
    """Return a loop in which pyarrow writes a compressed stream on the training thread, a batch for 1,000 points."""
    import pyarrow as pa

    pa.array([0.0])  # the first one imports pandas where that is installed
    schema = pa.schema([("time", pa.int64()), ("step", pa.int64()), ("name", pa.string()), ("value", pa.float64())])
    file = (folder / "metrics.arrows").open("wb", buffering=0)
    stream = pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False))
    times: list[int] = []
    steps: list[int] = []
    names: list[str] = []
    numbers: list[float] = []

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # a floor stores less
        points = len(values)
        times.extend([time.time_ns()] * points)
        steps.extend([step] * points)
        names.extend(values)
        numbers.extend(values.values())
        if len(numbers) >= _ARROW_BATCH_POINTS:
            write()

    def write() -> None:
        arrays = [pa.array(times), pa.array(steps), pa.array(names, pa.string()), pa.array(numbers, pa.float64())]
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
        times.clear()
        steps.clear()
        names.clear()
        numbers.clear()

    def settle() -> None:
        if numbers:
            write()

    def close() -> None:
        stream.close()
        file.close()

    return Opened(log, settle, close)


def read_arrow(folder: Path) -> Steps:
    """Read batches until the stream breaks off."""
    import pyarrow as pa

    steps: list[Steps] = []
    with (folder / "metrics.arrows").open("rb") as file:
        try:
            for batch in pa.ipc.open_stream(file):
                steps.append(batch["step"].to_numpy())  # noqa: PERF401  # those before the break count
        except (pa.ArrowInvalid, OSError):
            return joined(steps)  # torn where it was killed
    return joined(steps)


def open_json(folder: Path) -> Opened:
    """Return ten lines of Python: an object and a flush for each call."""
    file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(values: dict[str, float], step: int, tokens: int) -> None:
        file.write(json.dumps({"time": time.time(), "step": step, "tokens": tokens, **values}) + "\n")
        file.flush()

    return Opened(log, close=file.close)


def read_json(folder: Path) -> Steps:
    """Read every whole line."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    return joined(np.full(len(row) - 3, row["step"], np.int64) for row in rows)


def joined(arrays: Iterable[Steps]) -> Steps:
    """Return one array."""
    return np.concatenate([np.empty(0, np.int64), *arrays])
