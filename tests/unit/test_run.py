"""What training code sees of a run: it takes numbers in any form, refuses mistakes at once, and never waits."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import llmtrack
from llmtrack.writer.log.pending import PendingRow
from llmtrack.writer.run import RecordingRun, Run
from llmtrack.writer.settings import Settings
from tests.faults import TINY
from tests.reading import Segment, bits, read_segment

INT64_MAX = (1 << 63) - 1


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., RecordingRun]]:
    """Yield a function that opens a run in a root of its own; finishes what a failed test leaves open."""
    runs: list[RecordingRun] = []

    def open_(**given: Any) -> RecordingRun:
        run = llmtrack.open_run(tmp_path / "root", settings=Settings(**TINY), **given)
        assert isinstance(run, RecordingRun)
        runs.append(run)
        return run

    yield open_
    for run in runs:
        run.finish()


@pytest.fixture
def run(open_run: Callable[..., RecordingRun]) -> RecordingRun:
    """Return a run that is open."""
    return open_run(run_id="run")


def read(run: RecordingRun) -> Segment:
    """Finish a run, and read what it logged."""
    run.finish()
    return read_segment(run.folder)


class OnlyAMapping(Mapping[str, float]):
    """A mapping that has what a mapping must have, and no copy()."""

    def __getitem__(self, name: str) -> float:
        return {"a": 1.0, "b": 2.0}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


AVERAGES: defaultdict[str, float] = defaultdict(float, a=1.0, b=2.0)


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": 1.0, "b": 2.0},
        {"a": 1, "b": 2},
        {"a": True, "b": 2.0},
        {"a": np.float32(1), "b": np.int64(2)},
        {"a": np.array(1.0), "b": 2.0},
        {"a": torch.tensor(1.0), "b": torch.tensor([2], dtype=torch.bfloat16)},
        {"a": torch.tensor(1.0, requires_grad=True), "b": torch.tensor(2, dtype=torch.int8)},
        {"a": torch.tensor(1.0), "b": np.array(2.0)},
        {"a": Decimal(1), "b": Fraction(2)},
        {"a": 1.0, "b": Fraction(2)},
        OrderedDict(a=1.0, b=2.0),
        AVERAGES,
        MappingProxyType({"a": 1.0, "b": 2.0}),
        UserDict(a=1.0, b=2.0),
        OnlyAMapping(),
    ],
    ids=lambda metrics: f"{type(metrics).__name__} of {', '.join(type(value).__name__ for value in metrics.values())}",
)
def test_numbers_are_taken_in_any_form(run: RecordingRun, metrics: Mapping[str, Any]) -> None:
    """What can be turned into a float is one, whatever holds it."""
    run.log(metrics, 1, 10)
    ((_, step, tokens, values),) = read(run).rows()
    assert (step, tokens, values) == (1, 10, {"a": bits(1.0), "b": bits(2.0)})


@pytest.mark.parametrize(
    "metrics, why",
    [
        ({"a": "1.0"}, "no number"),
        ({"a": "x", "b": 1.0}, "no number"),
        ({"a": None}, "no number"),
        ({"a": 1j}, "no number"),
        ({"a": [1.0]}, "no number"),
        ({"a": b"1"}, "no number"),
        ({"a": 10**400}, "no number"),
        ({"a": torch.zeros(2)}, r"shape \(2,\)"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"shape \(2,\)"),
        ({"a": np.zeros(2)}, "no number"),
        ({"": 1.0}, "called ''"),
        ({7: np.float32(1)}, "called 7"),
        ([1.0], "metrics are a list"),
        (1.0, "metrics are a float"),
        (None, "metrics are a NoneType"),
    ],
)
def test_what_is_no_number_is_refused_at_once(run: RecordingRun, metrics: Any, why: str) -> None:
    """The error names the metric; nothing of the row is stored, and the next row is."""
    with pytest.raises(llmtrack.UsageError, match=why):
        run.log(metrics, 1, 10)
    run.log({"a": 1.0}, 1, 5)
    assert [row.tokens for row in read(run).rows()] == [5]


@pytest.mark.parametrize(
    "step, tokens",
    [(1, -1), (-1, 1), (1.5, 1), (1, "1"), (None, 1), (1, 1 << 63), (1, float("nan")), (1, torch.tensor(1.5))],
)
def test_a_coordinate_that_is_no_count_is_refused(run: RecordingRun, step: Any, tokens: Any) -> None:
    """Step and tokens are integers from 0 on that fit 64 bits."""
    with pytest.raises(llmtrack.UsageError, match="as an integer from 0 on"):
        run.log({"a": 1.0}, step, tokens)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint32, torch.tensor])
def test_a_coordinate_is_any_integer(run: RecordingRun, kind: Callable[[int], Any]) -> None:
    """NumPy's and torch's, and up to where training will never get."""
    run.log({"a": 1.0}, kind(3), kind(4_000))
    run.log({"a": 1.0}, 4, INT64_MAX)
    assert [(row.step, row.tokens) for row in read(run).rows()] == [(3, 4_000), (4, INT64_MAX)]


def test_tokens_that_go_backwards_are_refused(run: RecordingRun) -> None:
    """They are the caller's mistake; the same count again is none."""
    run.log({"a": 1.0}, 1, 10)
    run.log({"a": 2.0}, 1, 10)
    with pytest.raises(llmtrack.UsageError, match="9 after 10"):
        run.log({"a": 3.0}, 2, 9)
    assert [row.tokens for row in read(run).rows()] == [10, 10]


def test_what_the_caller_changes_afterwards_is_not_changed_in_the_log(run: RecordingRun) -> None:
    """A dict, an array and a tensor are used again at every step."""
    metrics: dict[str, Any] = {"float": 1.0}
    array, tensor = np.array(2.0), torch.tensor(3.0)
    run.log(metrics, 1, 1)
    metrics["float"] = -1.0
    metrics["more"] = -1.0
    metrics = {"array": array, "tensor": tensor}
    run.log(metrics, 2, 2)
    array += 100
    tensor += 100
    metrics.clear()
    assert [row.bits for row in read(run).rows()] == [
        {"float": bits(1.0)},
        {"array": bits(2.0), "tensor": bits(3.0)},
    ]


def test_a_row_without_metrics_is_no_row(run: RecordingRun) -> None:
    """Nothing to say is nothing to store."""
    run.log({}, 1, 1)
    assert read(run).rows() == []


def test_values_that_are_no_finite_number_are_stored_as_they_are(run: RecordingRun) -> None:
    """NaN is what a person looks for."""
    values = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
    for step, value in enumerate(values):
        run.log({"a": value}, step, step)
    assert [row.bits["a"] for row in read(run).rows()] == [bits(value) for value in values]


def test_the_start_record_says_what_the_run_was_given(open_run: Callable[..., RecordingRun]) -> None:
    """Configuration with secrets redacted, and the place it starts from."""
    run = open_run(run_id="run", project="pretrain", run_name="seven", config={"lr": 1e-4, "api_key": "s3cret"})
    (start,) = [record for record in read(run)["segments"] if record["phase"] == "start"]
    assert (start["project"], start["run_name"], start["step"], start["tokens"]) == ("pretrain", "seven", 0, 0)
    config = json.loads(start["config"])
    assert config["lr"] == 1e-4
    assert "s3cret" not in start["config"]


def test_a_checkpoint_is_recorded_with_its_id(run: RecordingRun, tmp_path: Path) -> None:
    """The id is that of its content, and flush waits for it."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    run.log({"a": 1.0}, 5, 50)
    run.checkpoint(tmp_path / "model.pt", 5, 50)
    assert run.flush(30.0)
    (record,) = read_segment(run.folder)["checkpoints"]
    assert record["ckpt_id"] == llmtrack.checkpoint_id(tmp_path / "model.pt", 50, full=False)
    assert (record["path"], record["bytes"], record["tokens"]) == (str(tmp_path / "model.pt"), 7, 50)


def test_an_alert_is_recorded(run: RecordingRun) -> None:
    """With an id that no other alert of the run has."""
    run.alert("data", "shard 7 is broken", 3, 30, level="error", metric="train/loss", value=9.5)
    run.alert("data", "shard 8 is broken", 4, 40)
    alerts = read(run)["alerts"]
    assert [(alert["message"], alert["level"], alert["metric"], alert["value"]) for alert in alerts] == [
        ("shard 7 is broken", "error", "train/loss", 9.5),
        ("shard 8 is broken", "warn", None, None),
    ]
    assert len({alert["alert_id"] for alert in alerts}) == 2


def test_meta_is_plain_json_that_continues_the_run(
    run: RecordingRun, open_run: Callable[..., RecordingRun], tmp_path: Path
) -> None:
    """It goes through any file format, and a process that is given it is the next segment."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    run.log({"a": 1.0}, 5, 50)
    run.checkpoint(tmp_path / "model.pt", 5, 50)
    meta = json.loads(json.dumps(run.meta(5, 50)))
    run.finish("preempted")
    again = open_run(checkpoint=meta)
    assert (again.run_id, again.segment, again.start_step, again.start_tokens) == ("run", 2, 5, 50)
    with pytest.raises(llmtrack.UsageError, match="49 after 50"):
        again.log({"a": 1.0}, 5, 49)


def test_a_block_that_is_left_by_an_exception_is_a_run_that_failed(open_run: Callable[..., RecordingRun]) -> None:
    """And one that is left at its end is finished."""
    with open_run(run_id="good") as good:
        good.log({"a": 1.0}, 1, 1)
    with pytest.raises(ZeroDivisionError), open_run(run_id="bad") as bad:
        bad.log({"a": 1 / 0}, 1, 1)
    assert read_segment(good.folder).end["exit"] == "finished"
    end = read_segment(bad.folder).end
    assert (end["exit"], end["detail"]) == ("failed", "ZeroDivisionError: division by zero")


class Defect(PendingRow):
    """A row that raises what no row should."""

    def __len__(self) -> int:
        return 1

    def is_ready(self) -> bool:  # noqa: D102  # as in the base
        raise LookupError("a defect of ours")


def test_a_defect_that_ends_the_log_does_not_reach_the_training_loop(
    run: RecordingRun, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once with where it happened; rows are counted from then on, and nobody waits for what cannot come."""
    run.log({"a": 1.0}, 1, 10)
    assert run.flush(30.0)
    run.log_later(Defect(), 2, 20)
    assert run._drain.ended.wait(30.0)
    for step in range(3, 1000):
        run.log({"a": 1.0}, step, step * 10)
    assert not run.flush(30.0)
    run.finish()
    assert run._buffer.dropped_points >= 997
    assert [record.message.split(":")[0] for record in caplog.records] == ["llmtrack"] * 2
    assert "a defect of ours" in caplog.text
    assert "what was not written is lost" in caplog.text
    assert read_segment(run.folder).steps() == [1]


def test_a_disabled_process_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method is there, and does nothing."""
    monkeypatch.setenv("LLMTRACK_MODE", "disabled")
    run = llmtrack.open_run(tmp_path / "root", run_id="run", checkpoint={"step": 3, "tokens": 30})
    assert type(run) is Run
    assert (run.run_id, run.start_step, run.start_tokens) == ("run", 3, 30)
    with run:
        run.log({"a": 1.0}, 4, 40)
        run.checkpoint("x", 4, 40)
        run.alert("data", "x", 4, 40)
        assert run.flush()
        assert run.meta(4, 40)["tokens"] == 40
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_a_rank_above_0_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Outside torch.distributed the launcher's variable tells."""
    monkeypatch.setenv(variable, "3")
    run = llmtrack.open_run(tmp_path / "root", run_id="run")
    run.log({"a": 1.0}, 1, 1)
    run.finish()
    assert not (tmp_path / "root").exists()


def test_without_a_root_it_is_said_how_to_name_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument or LLMTRACK_DIR."""
    with pytest.raises(llmtrack.UsageError, match="LLMTRACK_DIR"):
        llmtrack.open_run()
    monkeypatch.setenv("LLMTRACK_DIR", str(tmp_path / "root"))
    with llmtrack.open_run():
        assert list((tmp_path / "root").iterdir())


def test_a_root_that_cannot_be_written_to_is_an_error_of_ours(tmp_path: Path) -> None:
    """It names the folder and what to check; nothing is left running or open."""
    (tmp_path / "root").write_bytes(b"a file")
    with pytest.raises(llmtrack.LlmtrackError, match="cannot start a segment in") as caught:
        llmtrack.open_run(tmp_path / "root", run_id="run")
    assert "shared storage" in caught.value.hint


def test_what_comes_after_the_end_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A metric or a checkpoint logged after finish is not recorded, and one warning names the run."""
    run = llmtrack.open_run(tmp_path, run_id="r")
    run.finish()
    for step in range(3):
        run.log({"late": 1.0}, step=step, tokens=step)
    run.checkpoint(tmp_path, step=3, tokens=3)
    assert [record.getMessage() for record in caplog.records] == [
        "llmtrack: log() after the end of run r is not recorded"
    ]


def test_a_checkpoint_without_a_path_is_refused(tmp_path: Path) -> None:
    """None is what a failed save returns."""
    nothing: Any = None
    with llmtrack.open_run(tmp_path) as run, pytest.raises(llmtrack.UsageError, match="path is None"):
        run.checkpoint(nothing, step=1, tokens=1)


@pytest.mark.parametrize("mode", ["disabled", "Disabled", " DISABLED "])
def test_disabled_is_disabled_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Neither a run nor an evaluation leaves anything behind."""
    monkeypatch.setenv("LLMTRACK_MODE", mode)
    with llmtrack.open_run(tmp_path / "root") as run:
        run.log({"loss": 1.0}, step=1, tokens=1)
    assert llmtrack.log_eval(tmp_path / "root", "full-0", "task", {"acc": 1.0}) is None
    assert not (tmp_path / "root").exists()


def test_a_mode_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was not to be recorded must not be because of a typing error."""
    monkeypatch.setenv("LLMTRACK_MODE", "disable")
    with pytest.raises(llmtrack.UsageError, match="LLMTRACK_MODE is 'disable'"):
        llmtrack.open_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
