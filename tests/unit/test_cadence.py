"""How often groups of metrics are due, and tables that make no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import llmtrack
from llmtrack.writer.capture.cadence import DEFAULT_FILE, Cadence, Group

TABLE = """
burst_steps = 3

[groups.optimisation]
purpose = "Is it learning?"
every = 10
metrics = ["train/*"]
points = 12

[groups.per_layer]
every = 100
metrics = ["layers/*", "train/layer?/*"]
points_per_layer = 6
burst = true
"""


def test_a_table_says_what_is_due_when(tmp_path: Path) -> None:
    """Groups keep their order, and what is not said has its default."""
    path = tmp_path / "cadence.toml"
    path.write_text(TABLE, encoding="utf-8")
    cadence = Cadence.load(path)
    assert list(cadence.groups.values()) == [
        Group("optimisation", 10, "Is it learning?", ("train/*",), points=12),
        Group("per_layer", 100, metrics=("layers/*", "train/layer?/*"), points_per_layer=6, burst=True),
    ]
    assert cadence.burst_steps == 3


def test_a_group_is_due_at_steps_of_the_run() -> None:
    """Whatever step a segment starts from: a restart logs where the job before it did."""
    cadence = Cadence.parse(TABLE)
    assert [step for step in range(1_234, 1_262) if cadence.due("optimisation", step)] == [1_240, 1_250, 1_260]
    assert [step for step in range(50, 301) if cadence.due("per_layer", step)] == [100, 200, 300]


def test_a_burst_is_for_the_groups_that_are_marked_for_it() -> None:
    """From the next step on, for so many steps; another one begins anew."""
    cadence = Cadence.parse(TABLE)
    cadence.begin_burst(14)
    assert [step for step in range(11, 21) if cadence.due("per_layer", step)] == [11, 12, 13, 14, 15, 16, 17]
    assert [step for step in range(11, 21) if cadence.due("optimisation", step)] == [20]


def test_a_burst_is_asked_for_once() -> None:
    """However many alerts there were since the last log step."""
    cadence = Cadence.parse(TABLE)
    assert not cadence.take_request()
    cadence.ask_for_burst()
    cadence.ask_for_burst()
    assert cadence.take_request()
    assert not cadence.take_request()
    assert cadence.burst_until_step == 0  # the ranks do not know yet


def test_the_first_group_that_fits_takes_a_metric() -> None:
    """Others belong to none."""
    cadence = Cadence.parse(TABLE)
    assert cadence.group_of("train/loss") == "optimisation"
    assert cadence.group_of("train/layer3/norm") == "optimisation"
    assert cadence.group_of("layers/3/norm") == "per_layer"
    assert cadence.group_of("eval/loss") is None


def test_the_table_that_comes_along_is_one() -> None:
    """With a purpose for each group, and a group for each of what a trainer logs."""
    cadence = Cadence.default()
    assert list(cadence.groups) == ["optimisation", "throughput", "data", "per_layer", "evaluation", "system"]
    assert all(group.purpose and group.metrics for group in cadence.groups.values())
    assert [group.name for group in cadence.groups.values() if group.burst] == ["per_layer"]
    for metric in ("train/loss", "train/grad_norm", "throughput/mfu", "memory/max_bytes", "eval/hellaswag/acc"):
        assert cadence.group_of(metric)
    assert DEFAULT_FILE.read_text(encoding="utf-8").startswith("#")  # it explains itself


def test_an_unknown_group_is_refused_with_those_that_there_are() -> None:
    """A misspelt name would never be due, in silence."""
    with pytest.raises(llmtrack.UsageError, match="there are optimisation, per_layer"):
        Cadence.parse(TABLE).due("perlayer", 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[groups.a\nevery = 1", "no TOML.*line 1"),
        ("", "no groups"),
        ("[groups]", "no groups"),
        ("[groups.a]", "groups.a has no every"),
        ("[groups.a]\nevery = 0", "every of a is 0"),
        ("[groups.a]\nevery = 1.5", "groups.a: every is 1.5.*a whole number"),
        ("[groups.a]\nevery = true", "every is True.*a whole number"),
        ("[groups.a]\nevery = '10'", "every is '10'.*a whole number"),
        ("[groups.a]\nevry = 10", "'evry', which means nothing.*every"),
        ("[groups.a]\nevery = 1\nmetrics = 'train/*'", "metrics is 'train/.'.*a list"),
        ("[groups.a]\nevery = 1\nmetrics = [1]", "patterns"),
        ("[groups.a]\nevery = 1\npoints = -1", "points is -1"),
        ("[groups.a]\nevery = 1\nburst = 1", "burst is 1.*true or false"),
        ("[groups.a]\nevery = 1\npurpose = 3", "purpose is 3.*text"),
        ("groups = 3", "groups is 3.*a table"),
        ("[groups]\na = 10", r"groups.a is 10.*\[groups.a\]"),
        ("burst_steps = 0\n[groups.a]\nevery = 1", "burst_steps is 0"),
        ("brust_steps = 3\n[groups.a]\nevery = 1", "'brust_steps', which means nothing"),
        ("[groups.a]\nevery = 1\n[groups.a]\nevery = 2", "no TOML"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the file, the group, the key, and what is right."""
    path = tmp_path / "cadence.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(llmtrack.UsageError, match=f"(?s){message}") as caught:
        Cadence.load(path)
    assert str(path) in str(caught.value) or "every of" in message or "burst_steps is" in message


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """With the command that prints one."""
    with pytest.raises(llmtrack.UsageError, match="llmtrack plan --default"):
        Cadence.load(tmp_path / "gone.toml")
    (tmp_path / "latin-1.toml").write_bytes(b"# \xe9")
    with pytest.raises(llmtrack.UsageError, match=r"latin-1\.toml"):
        Cadence.load(tmp_path / "latin-1.toml")


def test_two_groups_of_one_name_are_refused() -> None:
    """From Python, where TOML does not see to it."""
    with pytest.raises(llmtrack.UsageError, match="two groups of one name"):
        Cadence([Group("a", 1), Group("a", 2)])


def test_a_cadence_needs_no_torch() -> None:
    """A plan is made on a laptop."""
    script = "import sys, llmtrack; llmtrack.Cadence.default(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
