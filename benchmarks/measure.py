"""Read off a process what it took: time, CPU of it and of its helpers, memory, bytes on disk."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil

NONE: Final = "\N{EN DASH}"  # in a table, where there is no figure


def cpu_s() -> float:
    """Return CPU seconds of this process, of its helpers that ended, and of those that run."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for helper in psutil.Process().children(recursive=True):
        try:
            times = helper.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Memory:
    """Resident memory added from when this is made, helpers included."""

    def __init__(self) -> None:
        self._linux = sys.platform == "linux"
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        self._before = _resident_bytes(os.getpid()) if self._linux else _peak_bytes()

    def added_bytes(self) -> int:
        """Return the peak of this process over what it had, and what its helpers have now."""
        helpers = psutil.Process().children(recursive=True)
        return _peak_bytes() - self._before + sum(_resident_bytes(helper.pid) for helper in helpers)


def _peak_bytes() -> int:
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync_folder_files(folder: Path) -> None:
    """Make durable what a tool left to the page cache, so that every tool's time ends at the same place."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def waited_for_cpu_s() -> float:
    """Return how long the calling thread was ready to run and had no CPU, since it started; 0 where nobody counts."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def percentiles_us(times_ns: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return p50, p99, p99.9 and the maximum in us; a percentile that so few calls cannot tell is left out."""
    ordered = np.sort(times_ns) / 1e3
    result = {"p50": float(np.median(ordered)), "max": float(ordered[-1])}
    for name, share in (("p99", 0.99), ("p99.9", 0.999)):
        if len(ordered) * (1.0 - share) >= 1.0:
            result[name] = float(np.quantile(ordered, share))
    return result


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(values))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class Aim:
    """What is aimed at, and what was measured.

    Attributes:
        what: For people, with the unit.
        measured: None when it was not.
        aim: Where it should be.
        at_most: It should be below, not above.
        error: The standard error of `measured`.
    """

    what: str
    measured: float | None
    aim: float
    at_most: bool
    error: float = 0.0

    @property
    def met(self) -> str:
        """Whether it is; an error that reaches beyond the aim leaves that open."""
        distance = (self.aim - (self.measured or 0.0)) * (1.0 if self.at_most else -1.0)
        return "not resolved" if abs(distance) < 2.0 * self.error else "yes" if distance >= 0 else "no"


def aims_table(aims: Sequence[Aim]) -> str:
    """Return what is aimed at beside what was measured."""
    rows = []
    for aim in aims:
        if aim.measured is None:
            continue
        measured = f"{aim.measured:.2f} ± {aim.error:.2f}" if aim.error else figure(aim.measured)
        rows.append([aim.what, ("≤ " if aim.at_most else "≥ ") + figure(aim.aim, 2), measured, aim.met])
    return markdown_table(["", "aim", "measured", "met"], rows)


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number for people: so many significant digits, thousands apart, a dash where there is none."""
    if value is None or not np.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    places = max(digits - 1 - int(np.floor(np.log10(abs(value)))), 0)
    return f"{value:,.{places}f}"


def machine() -> dict[str, str | int | float]:
    """Return what the figures were taken on."""
    return {
        "python": sys.version.split()[0],
        "system": f"{os.uname().sysname} {os.uname().release}",
        "cpus": os.cpu_count() or 0,
        "load": os.getloadavg()[0],
    }


def merged_medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over runs that may lack some."""
    keys = {key for run in runs for key in run}
    return {key: median([run[key] for run in runs if key in run]) for key in sorted(keys)}
