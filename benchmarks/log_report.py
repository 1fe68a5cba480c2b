"""The tables of `bench_log`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from measure import NONE, Aim, aims_table, figure, markdown_table, merged_medians
from tools import TOOLS

# tool -> measurement (a workload, loop, kill-W1, ...) -> a result for each round
Figures = dict[str, dict[str, list[Any]]]

_TRACKERS: Final = ("trackio", "neptune", "wandb", "tensorboard", "mlflow", "mlflow-async")
_MB: Final = 1e6


def report(figures: Figures) -> str:
    """Return everything that was measured as Markdown."""
    parts = [
        "### A call of `log`, on the training thread (µs)\n\n" + _calls(figures),
        "### The whole process\n\n" + _process(figures),
        "### On disk, and after `kill -9`\n\n" + _disk(figures),
    ]
    if "llmtrack" in figures:
        parts.append("### What llmtrack aims at\n\n" + _targets(figures))
    return "\n\n".join(parts) + "\n"


def _calls(figures: Figures) -> str:
    columns = ["", "W1 p50", "p99", "p99.9", "max", "p50 / queue", "p50 / JSON", "W3 p50", "p99", "W2 p50", "p99"]
    rows = []
    for name in figures:
        calls = {workload: _call_us(figures, name, workload) for workload in ("W1", "W2", "W3")}
        rows.append(
            [
                TOOLS[name].title,
                *(figure(calls["W1"].get(key)) for key in ("p50", "p99", "p99.9", "max")),
                figure(_ratio(calls["W1"].get("p50"), _call_us(figures, "queue", "W1").get("p50"))),
                figure(_ratio(calls["W1"].get("p50"), _call_us(figures, "json", "W1").get("p50"))),
                *(figure(calls["W3"].get(key)) for key in ("p50", "p99")),
                *(figure(calls["W2"].get(key)) for key in ("p50", "p99")),
            ]
        )
    return markdown_table(columns, rows)


def _process(figures: Figures) -> str:
    columns = [
        "",
        "points/s W1",
        "points/s W2",
        "CPU µs/call W1",
        "with the run's end",
        "CPU µs/call W3",
        "slowdown of 100 steps/s",
        "without waits for a CPU",
        "+ MB (W1)",
        "import + open, s",
    ]
    rows = [
        [
            TOOLS[name].title,
            figure(_points_per_s(figures, name, "W1")),
            figure(_points_per_s(figures, name, "W2")),
            figure(_cpu_us(figures, name, "W1", "durable_cpu_s")),
            figure(_cpu_us(figures, name, "W1", "closed_cpu_s")),
            figure(_cpu_us(figures, name, "W3", "durable_cpu_s")),
            str(_slowdown(figures, name, "ratios") or NONE),
            str(_slowdown(figures, name, "ratios_on_cpu") or NONE),
            figure(_scaled(_medians(figures, name, "W1").get("memory_bytes"), _MB)),
            figure(_medians(figures, name, "W3").get("open_s"), 2),
        ]
        for name in figures
    ]
    return markdown_table(columns, rows)


def _disk(figures: Figures) -> str:
    columns = [
        "",
        "bytes/point W1, open",
        "closed",
        "W3, open",
        "closed",
        "W1 of fp32, closed",
        "W2 of fp32, closed",
        "kept at 200 calls/s",
        "lost, s",
        "kept at full speed",
        "lost, s",
    ]
    rows = []
    for name in figures:
        if TOOLS[name].read is None:
            continue
        sizes = [
            ("W1", "open_bytes"),
            ("W1", "closed_bytes"),
            ("W3", "open_bytes"),
            ("W3", "closed_bytes"),
            ("W1-single", "closed_bytes"),
            ("W2-single", "closed_bytes"),
        ]
        kills = [(kill, _medians(figures, name, kill)) for kill in ("kill-W3", "kill-W1")]
        rows.append(
            [
                TOOLS[name].title,
                *(figure(_bytes_per_point(figures, name, workload, key)) for workload, key in sizes),
                *(
                    text
                    for kill, found in kills
                    for text in (_percent(found.get("kept")), figure(_longest_lost_s(figures, name, kill), 2))
                ),
            ]
        )
    return markdown_table(columns, rows)


def _targets(figures: Figures) -> str:
    ours = _call_us(figures, "llmtrack", "W1")
    p50 = ours.get("p50")
    queue_p50, json_p50 = (_call_us(figures, name, "W1").get("p50") for name in ("queue", "json"))
    trackers = [_call_us(figures, name, "W1").get("p50") for name in _TRACKERS if name in figures]
    fastest = min((value for value in trackers if value is not None), default=None)
    cpu_us = _cpu_us(figures, "llmtrack", "W1", "closed_cpu_s")
    lost_s = _longest_lost_s(figures, "llmtrack", "kill-W3")
    aims = [
        Aim("`log()` of 20 metrics, p50, µs", p50, 2.0, at_most=True),
        Aim("p99, µs", ours.get("p99"), 20.0, at_most=True),
        Aim("p50, times `queue.put_nowait`", _ratio(p50, queue_p50), 1.2, at_most=True),
        Aim("p50, times below the fastest tracker", _ratio(fastest, p50), 20.0, at_most=False),
        Aim("p50, times below ten lines of JSON", _ratio(json_p50, p50), 10.0, at_most=False),
        Aim("CPU of the process a row of 20, sealing included, µs", cpu_us, 25.0, at_most=True),
        Aim("longest loss to `kill -9` at 200 calls/s, s", lost_s, 1.0, at_most=True),
    ]
    slowdown = _slowdown(figures, "llmtrack", "ratios_on_cpu")
    if slowdown is not None:
        percent, error = slowdown.share * 100.0, slowdown.error * 100.0
        aims.append(Aim("slowdown of a loop of 100 steps/s, %", percent, 0.5, at_most=True, error=error))
    return aims_table(aims)


def _medians(figures: Figures, name: str, measurement: str) -> dict[str, float]:
    runs = figures.get(name, {}).get(measurement, [])
    return merged_medians([{key: value for key, value in run.items() if key != "call_us"} for run in runs])


def _call_us(figures: Figures, name: str, workload: str) -> Mapping[str, float]:
    return merged_medians([run["call_us"] for run in figures.get(name, {}).get(workload, [])])


def _points_per_s(figures: Figures, name: str, workload: str) -> float | None:
    if TOOLS[name].read is None:
        return None
    found = _medians(figures, name, workload)
    return _ratio(found.get("points"), found.get("durable_s"))


def _cpu_us(figures: Figures, name: str, workload: str, key: str) -> float | None:
    """Return CPU time a call, less what the loop takes that makes the calls."""
    found, loop = _medians(figures, name, workload), _medians(figures, "none", workload)
    if "calls" not in found:
        return None
    loop_s = loop["durable_cpu_s"] / loop["calls"] if loop else 0.0
    return (found[key] / found["calls"] - loop_s) * 1e6


def _bytes_per_point(figures: Figures, name: str, workload: str, key: str) -> float | None:
    found = _medians(figures, name, workload)
    return _ratio(found.get(key), found.get("points"))


@dataclass(frozen=True)
class _Slowdown:
    """Share of a step's time that logging adds, and the standard error of that."""

    share: float
    error: float

    def __str__(self) -> str:
        return f"{self.share * 100:.1f} ± {self.error * 100:.1f} %"


def _slowdown(figures: Figures, name: str, key: str) -> _Slowdown | None:
    ratios = np.array([ratio for run in figures.get(name, {}).get("loop", []) for ratio in run[key]])
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    # From the median deviation: a stretch that something else disturbed must not count for more than one.
    spread = 1.4826 * float(np.median(np.abs(ratios - middle)))
    return _Slowdown(middle - 1.0, 1.2533 * spread / len(ratios) ** 0.5)


def _longest_lost_s(figures: Figures, name: str, kill: str) -> float | None:
    return max((run["lost_s"] for run in figures.get(name, {}).get(kill, [])), default=None)


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.2f} %"
