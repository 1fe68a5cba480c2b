"""Everything that can be measured, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import loggers
import trackers
from loggers import Opened, Steps


@dataclass(frozen=True)
class Tool:
    """What is measured.

    Attributes:
        name: For the command line.
        title: For people.
        open: Folder -> a run in it.
        read: Folder -> what the tool's own reader gives back after a crash; None for what keeps nothing.
        share: Part of a workload's calls that it is given: some take minutes for all.
    """

    name: str
    title: str
    open: Callable[[Path], Opened]
    read: Callable[[Path], Steps] | None = None
    share: float = 1.0


TOOLS: Final = {
    tool.name: tool
    for tool in (
        Tool("none", "an empty call (the clock)", loggers.open_nothing),
        Tool("queue", "`queue.put_nowait` (floor)", loggers.open_queue),
        Tool("llmtrack", "**llmtrack**", loggers.open_llmtrack, loggers.read_llmtrack),
        Tool("arrow", "bare Arrow loop (floor)", loggers.open_arrow, loggers.read_arrow),
        Tool("json", "ten lines of JSON", loggers.open_json, loggers.read_json),
        Tool("trackio", "Trackio", trackers.open_trackio, trackers.read_trackio),
        Tool("neptune", "neptune-scale, offline", trackers.open_neptune, trackers.read_neptune),
        Tool("wandb", "wandb, offline", trackers.open_wandb, trackers.read_wandb),
        Tool("tensorboard", "TensorBoard", trackers.open_tensorboard, trackers.read_tensorboard),
        Tool("mlflow", "MLflow, SQLite", trackers.open_mlflow, trackers.read_mlflow, share=0.02),
        Tool("mlflow-async", "MLflow, SQLite, async", trackers.open_mlflow_async, trackers.read_mlflow, share=0.05),
    )
}
