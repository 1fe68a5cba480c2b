"""What the loggers are given: metrics as a pre-training run has them, and three ways of logging them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

TOKENS_PER_STEP: Final = 4_194_304
_SEED: Final = 20_250_301
# Of ten metrics, so many are of each kind; the rest are per-layer norms, as in the runs that log hundreds.
_LOSSES, _SCHEDULES, _THROUGHPUTS, _CONSTANTS = 2, 1, 1, 1


@dataclass(frozen=True)
class Workload:
    """Calls of `log`.

    Attributes:
        calls: How many.
        metrics: Points in each.
        per_second: Calls a second; None without a pause.
    """

    name: str
    calls: int
    metrics: int
    per_second: float | None = None


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("W1", 20_000, 20),
        Workload("W2", 2_000, 500),
        Workload("W3", 2_000, 20, per_second=200.0),
    )
}


def metric_names(metrics: int) -> tuple[str, ...]:
    """Return as many names as a model has things to watch."""
    return tuple(f"{_kind(index)}/{index:03d}" for index in range(metrics))


def _kind(index: int) -> str:
    place = index % 10
    for kind, count in (
        ("train/loss", _LOSSES),
        ("schedule", _SCHEDULES),
        ("throughput", _THROUGHPUTS),
        ("memory", _CONSTANTS),
    ):
        if place < count:
            return kind
        place -= count
    return "grad_norm/layer"


def metric_values(calls: int, metrics: int, *, single: bool = False) -> npt.NDArray[np.float64]:
    """Return noisy losses, lognormal gradient norms, schedules, throughputs and near-constants.

    Args:
        calls: Rows.
        metrics: Columns.
        single: Round to float32 first, as what comes from a GPU is.

    Returns:
        ``[calls, metrics]``, float64.
    """
    random = np.random.default_rng(_SEED)
    progress = np.arange(1, calls + 1) / calls
    columns: list[npt.NDArray[np.float64]] = []
    for index in range(metrics):
        match _kind(index):
            case "train/loss":
                columns.append(2.0 + 9.0 * np.exp(-5.0 * progress) + random.normal(0.0, 0.03, calls))
            case "schedule":
                columns.append(3e-4 * 0.5 * (1.0 + np.cos(np.pi * progress)))
            case "throughput":
                columns.append(51_200.0 + random.normal(0.0, 300.0, calls))
            case "memory":
                columns.append(np.full(calls, 68_719_476_736.0))
            case _:
                columns.append(np.exp(random.normal(-1.0, 0.35, calls)))
    values = np.stack(columns, axis=1)
    return values.astype(np.float32).astype(np.float64) if single else values
