"""The benchmark of the training loop runs; what it measures is for people to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_loop.py"

pytestmark = pytest.mark.skipif(not _SCRIPT.is_file(), reason="the benchmarks stand in the checkout alone")


def test_bench_loop_measures_every_way_it_is_given(tmp_path: Path) -> None:
    """On one rank and on two: a table for each, with a line for each way."""
    ways = ("none", "llmtrack", "llmtrack-all", "llmtrack-1", "hand", "hand-10", "llmtrack-200", "hand-200")
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(_SCRIPT), "--quick", "--ways", ",".join(ways), "--json", str(figures)]
    tables = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert tables.count("**llmtrack**") == 2
    found = json.loads(figures.read_text(encoding="utf-8"))["figures"]
    assert {ranks: set(measured) for ranks, measured in found.items()} == {"1": set(ways), "2": set(ways)}
