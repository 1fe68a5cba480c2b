"""Today's trackers behind the same three calls, and what reads their files after a crash.

Each is imported when its run is opened, in a process of its own, and set up as its documentation says for a machine
without network. Nothing is tuned.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from loggers import Opened, Steps, joined

_OFFLINE: Final = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "NEPTUNE_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
_LEVELDB_BLOCK_BYTES: Final = 32_768
_LEVELDB_LAST_PIECE: Final = (1, 4)


def go_offline() -> None:
    """Have no tool look for a network."""
    os.environ.update(_OFFLINE)


def _imported(module: str) -> Any:
    """Import what only the benchmark's own environment has to have."""
    return import_module(module)


def open_tensorboard(folder: Path) -> Opened:
    """Return the SummaryWriter of torch, which takes one point a call."""
    writer = _imported("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # it has one x-axis
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Opened(log, writer.flush, writer.close)


def read_tensorboard(folder: Path) -> Steps:
    """Read with TensorBoard's loader of event files."""
    loader = _imported("tensorboard.backend.event_processing.event_file_loader")
    steps = [
        event.step
        for path in folder.glob("events.*")
        for event in loader.EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]
    return np.array(steps, np.int64)


def open_trackio(folder: Path) -> Opened:
    """Return Trackio, local, without the probes of CPU and GPU that it may start."""
    os.environ["TRACKIO_DIR"] = str(folder)
    trackio = _imported("trackio")
    trackio.init(project="bench", name="bench", embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # it has one x-axis
        trackio.log(values, step=step)

    return Opened(log, trackio.finish)


def read_trackio(folder: Path) -> Steps:
    """Read with Trackio's own storage class."""
    os.environ["TRACKIO_DIR"] = str(folder)
    rows = _imported("trackio.sqlite_storage").SQLiteStorage.get_logs("bench", "bench")
    return joined(np.full(_points(row), row["step"], np.int64) for row in rows)


def open_wandb(folder: Path) -> Opened:
    """Return Weights & Biases in offline mode."""
    wandb = _imported("wandb")
    run = wandb.init(project="bench", dir=str(folder), mode="offline")

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # it has one x-axis
        run.log(values, step=step)

    return Opened(log, run.finish, wandb.teardown)


def read_wandb(folder: Path) -> Steps:
    """Read the records of the offline file: wandb has no reader for it that works without a network."""
    records = _imported("wandb.proto.wandb_internal_pb2")
    steps: list[int] = []
    for path in folder.rglob("*.wandb"):
        for payload in _leveldb_records(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(payload)
            if record.HasField("history"):
                names = [item.key or "/".join(item.nested_key) for item in record.history.item]
                steps += [record.history.step.num] * _points(names)
    return np.array(steps, np.int64)


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, up to the first that is not whole."""
    head = struct.Struct("<IHB")
    position, record = 7, b""  # behind the file's own head
    while position + head.size <= len(data):
        left = _LEVELDB_BLOCK_BYTES - position % _LEVELDB_BLOCK_BYTES
        if left < head.size:
            position += left
            continue
        _, length, kind = head.unpack_from(data, position)
        position += head.size
        if kind == 0 or position + length > len(data):
            return
        record += data[position : position + length]
        position += length
        if kind in _LEVELDB_LAST_PIECE:
            yield record
            record = b""


def open_mlflow(folder: Path) -> Opened:
    """Return MLflow into SQLite, each call a transaction of its own."""
    return _open_mlflow(folder, synchronous=True)


def open_mlflow_async(folder: Path) -> Opened:
    """Return MLflow into SQLite, with its queue and thread."""
    return _open_mlflow(folder, synchronous=False)


def _open_mlflow(folder: Path, *, synchronous: bool) -> Opened:
    mlflow = _imported("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    experiment = mlflow.create_experiment("bench", artifact_location=str(folder / "artifacts"))
    mlflow.start_run(experiment_id=experiment)

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # it has one x-axis
        mlflow.log_metrics(values, step=step, synchronous=synchronous)

    return Opened(log, mlflow.flush_async_logging, mlflow.end_run)


def read_mlflow(folder: Path) -> Steps:
    """Read with MLflow's client."""
    client = _imported("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("bench")
    steps = [
        point.step
        for run in client.search_runs([experiment.experiment_id])
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    return np.array(steps, np.int64)


def open_neptune(folder: Path) -> Opened:
    """Return neptune-scale in offline mode, without capture of the console and of the source code."""
    run = _imported("neptune_scale").Run(
        project="bench/bench",
        run_id="bench",
        mode="offline",
        log_directory=str(folder),
        enable_console_log_capture=False,
        source_tracking_config=None,
    )

    def log(values: dict[str, float], step: int, tokens: int) -> None:  # noqa: ARG001  # it has one x-axis
        run.log_metrics(values, step=step)

    return Opened(log, close=run.close)


def read_neptune(folder: Path) -> Steps:
    """Read with the class that its sync reads with."""
    repository = _imported("neptune_scale.sync.operations_repository")
    steps: list[int] = []
    for path in folder.rglob("run_operations.sqlite3"):
        store, last = repository.OperationsRepository(db_path=path), None
        while operations := store.get_operations(up_to_bytes=64 << 20, from_exclusive=last):
            last = operations[-1].sequence_id
            for operation in operations:
                if operation.operation_type == repository.OperationType.UPDATE_SNAPSHOT:
                    steps += [operation.operation.step.whole] * len(operation.operation.append)
        store.close(cleanup_files=False)
    return np.array(steps, np.int64)


def _points(names: Any) -> int:
    """Return how many names are ours: the tools add their own, without a slash."""
    return sum("/" in name for name in names)
