"""Rank 0 decides for all, and who is rank 0 is asked where the launcher says it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from llmtrack.writer.errors import LlmtrackError, UsageError
from llmtrack.writer.ranks import decide_on_rank_zero, rank, world_size


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (5, 16)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (0, 2)),
        ({"RANK": "", "SLURM_PROCID": "5"}, (5, 1)),
        ({"RANK": "none", "WORLD_SIZE": "0", "SLURM_NTASKS": "-4"}, (0, 1)),
    ],
)
def test_without_torch_distributed_the_launcher_tells(
    environment: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of torchrun first, then those of Slurm; what is no number counts as not there."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (rank(), world_size()) == expected


def test_without_torch_distributed_only_rank_0_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get None, and what is decided is not decided by them."""
    assert decide_on_rank_zero(lambda: "decided") == "decided"
    monkeypatch.setenv("RANK", "1")
    assert decide_on_rank_zero(lambda: pytest.fail("rank 1 decides nothing")) is None


def test_without_torch_distributed_an_error_is_raised_as_it_is() -> None:
    """There is nobody to tell."""

    def refuse() -> None:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        decide_on_rank_zero(refuse)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Have a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_torch_distributed_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have joined another group than the launcher meant."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (rank(), world_size()) == (0, 1)
    assert decide_on_rank_zero(lambda: "decided") == "decided"


RANKS = """
import sys
import torch.distributed as dist
from llmtrack.writer.errors import LlmtrackError
from llmtrack.writer.ranks import decide_on_rank_zero, rank

store, number, outcome = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(number), world_size=2)

def decide():
    assert rank() == 0
    if outcome == "fails":
        raise OSError("no room")
    return "run", 3

try:
    print(decide_on_rank_zero(decide))
except (LlmtrackError, OSError) as error:
    print(type(error).__name__, error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "outcome, expected",
    [
        ("works", ["('run', 3)"] * 2),
        ("fails", ["OSError no room", "LlmtrackError rank 0 could not open the run: OSError: no room"]),
    ],
)
def test_every_rank_gets_the_answer_of_rank_0(tmp_path: Path, outcome: str, expected: list[str]) -> None:
    """Also when the answer is an error: a rank that went on alone would hang the rest."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(number), outcome],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert said == expected
    assert issubclass(UsageError, LlmtrackError)
