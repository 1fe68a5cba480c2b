"""The benchmarks run; what they measure is for people to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not _BENCHMARKS.is_dir(), reason="the benchmarks stand in the checkout alone")


def _run(script: str, *options: str) -> str:
    command = [sys.executable, str(_BENCHMARKS / script), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_bench_log_measures_every_tool_it_is_given(tmp_path: Path) -> None:
    """Each tool has a line in the tables, and each of its processes left figures."""
    figures = tmp_path / "figures.json"
    tables = _run("bench_log.py", "--quick", "--only", "queue,llmtrack,json", "--json", str(figures))
    assert all(title in tables for title in ("**llmtrack**", "`queue.put_nowait`", "ten lines of JSON"))
    found = json.loads(figures.read_text(encoding="utf-8"))["figures"]
    assert set(found) == {"queue", "llmtrack", "json"}
    assert set(found["llmtrack"]) == set(found["json"]) == {"W1", "W2", "W3", "W1-single", "loop", "kill-W3"}
    assert found["llmtrack"]["W1"][0]["points"] == 400 * 20


def test_bench_append_measures_every_width_it_is_given() -> None:
    """A quick run prints its tables."""
    tables = _run("bench_append.py", "--quick")
    assert "sealing" in tables


def test_bench_query_asks_every_root_it_builds() -> None:
    """A quick run prints its tables."""
    tables = _run("bench_query.py", "--points", "18000", "--parts", "16", "--open-mib", "1", "--peers", "llmtrack")
    assert all(
        title in tables for title in ("one series of one run", "last value of all runs", "ls of 10,000 segments")
    )
