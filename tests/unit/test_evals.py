"""Evaluations find their checkpoint from anywhere, at any time, and never replace each other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.checkpoints.evals import find_checkpoint, log_eval, to_json
from llmtrack.writer.errors import LlmtrackError, UsageError
from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.stream import PartWriter

CKPT = "quick-0123456789abcdef0123456789abcdef"
TOKENS = 10**15


def record_checkpoint(root: Path, run_id: str, ckpt_id: str, *, segment: int = 1, step: int = 4000) -> None:
    """Write the open part that a run would have written on saving a checkpoint."""
    folder = segment_folder(root, run_id, segment)
    folder.mkdir(parents=True, exist_ok=True)
    row = {"seq": 9, "time": 0, "step": step, "tokens": TOKENS, "ckpt_id": ckpt_id, "path": "/x", "bytes": 7}
    batch = pa.RecordBatch.from_pylist([row], schema=SCHEMAS["checkpoints"])
    part = PartWriter(folder / part_name("checkpoints", 1), "checkpoints")
    part.append(batch, 9, 9)
    part.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with three runs, the second of which recorded the checkpoint in its second segment."""
    for run_id, segment, ckpt_id in (("a", 1, "quick-a"), ("b", 1, "quick-b"), ("b", 2, CKPT), ("c", 1, "quick-c")):
        record_checkpoint(tmp_path, run_id, ckpt_id, segment=segment)
    return tmp_path


def rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of one file of evaluations."""
    assert path is not None
    with pq.ParquetFile(path) as file:  # read_table would add the folders' names as columns
        found: list[dict[str, Any]] = file.read().to_pylist()
    return found


def test_an_evaluation_lies_with_the_run_that_recorded_the_checkpoint(root: Path) -> None:
    """The run is found by the id alone; step and tokens are the checkpoint's."""
    path = log_eval(
        root,
        CKPT,
        "hellaswag",
        {"acc": 0.61, "acc_norm": 0.7},
        stderr={"acc": 0.01},
        harness="lm-eval",
        harness_version="0.4.9",
        prompt_hash="f00",
        details={"limit": None},
    )
    assert path is not None
    assert path.parent == root / "run_id=b" / "evals"
    assert path.name.startswith("evals-")
    assert path.suffix == ".parquet"
    first, second = rows(path)
    assert first.pop("time").tzinfo is not None
    assert first == {
        "seq": 1,
        "step": 4000,
        "tokens": TOKENS,
        "ckpt_id": CKPT,
        "task": "hellaswag",
        "metric": "acc",
        "value": 0.61,
        "stderr": 0.01,
        "harness": "lm-eval",
        "harness_version": "0.4.9",
        "prompt_hash": "f00",
        "details": '{"limit": null}',
    }
    assert (second["seq"], second["metric"], second["value"], second["stderr"]) == (2, "acc_norm", 0.7, None)


def test_the_columns_are_those_of_the_format(root: Path) -> None:
    """The file has the schema of the evals table and says its format."""
    path = log_eval(root, CKPT, "t", {"acc": 1})
    assert path is not None
    schema = pq.read_schema(path)
    assert schema.remove_metadata() == SCHEMAS["evals"]
    assert schema.metadata[b"llmtrack.format"] == b"1"
    assert schema.metadata[b"llmtrack.rows"] == b"1"


def test_an_evaluation_of_an_unknown_checkpoint_is_kept_beside_the_runs(root: Path) -> None:
    """It lies in ROOT/evals, with the tokens it was told."""
    path = log_eval(root, "full-unknown", "t", {"acc": 0.5}, tokens=77)
    assert path is not None
    assert path.parent == root / "evals"
    assert [(row["step"], row["tokens"], row["ckpt_id"]) for row in rows(path)] == [(None, 77, "full-unknown")]


def test_an_evaluation_is_taken_where_no_run_is_yet(tmp_path: Path) -> None:
    """An empty root will do: the run may arrive later."""
    path = log_eval(tmp_path, CKPT, "t", {"acc": 0.5})
    assert rows(path)[0]["tokens"] is None


def test_a_second_evaluation_is_another_file(root: Path) -> None:
    """Another harness version, or the same once more, replaces nothing."""
    paths = [log_eval(root, CKPT, "t", {"acc": 0.5}, harness_version=version) for version in ("1", "2", "2")]
    assert len(set(paths)) == 3
    assert [rows(path)[0]["harness_version"] for path in paths] == ["1", "2", "2"]


def test_many_evaluators_at_once_lose_nothing(root: Path) -> None:
    """Sixteen at a time, the folder not there yet: each leaves its file, none leaves anything else."""
    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(lambda i: log_eval(root, CKPT, f"t{i}", {"acc": i}), range(64)))
    assert len(paths) == 64
    assert set((root / "run_id=b" / "evals").iterdir()) == paths


def test_another_process_can_log_an_evaluation(root: Path) -> None:
    """The evaluator needs the root and the id, and nothing of the trainer."""
    script = f"import llmtrack; print(llmtrack.log_eval({str(root)!r}, {CKPT!r}, 't', {{'acc': 1}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert rows(Path(done.stdout.strip()))[0]["value"] == 1.0


@given(value=st.floats(), stderr=st.none() | st.floats(min_value=0))
def test_every_float_is_kept_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, value: float, stderr: float | None
) -> None:
    """NaN, infinities and denormals come back; a missing standard error is null."""
    path = log_eval(tmp_path_factory.mktemp("root"), CKPT, "t", {"acc": value}, stderr={"acc": stderr})
    (row,) = rows(path)
    assert row["value"] == value or (math.isnan(value) and math.isnan(row["value"]))
    assert row["stderr"] == stderr or (stderr is not None and math.isnan(stderr) and math.isnan(row["stderr"]))


def test_numbers_of_other_libraries_are_taken(root: Path) -> None:
    """NumPy scalars, tensors of one element and truth values are numbers, as they are for a run."""
    path = log_eval(root, CKPT, "t", {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": 3, "d": True})
    assert [row["value"] for row in rows(path)] == [0.5, 0.25, 3.0, 1.0]


@pytest.mark.parametrize("value", ["0.61", None, b"1", [0.1], {}, 1j, torch.ones(2)])
def test_what_is_no_number_is_refused(root: Path, value: Any) -> None:
    """The message names task and metric, and nothing is written."""
    with pytest.raises(UsageError, match=r"hellaswag/acc is .*no number"):
        log_eval(root, CKPT, "hellaswag", {"ok": 1.0, "acc": value})
    stderr: dict[str, Any] = {"acc": "N/A"}
    with pytest.raises(UsageError, match="stderr of hellaswag/acc is 'N/A'"):
        log_eval(root, CKPT, "hellaswag", {"acc": 1.0}, stderr=stderr)
    assert not (root / "run_id=b" / "evals").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"root": "gone"}, "there is no root"),
        ({"ckpt_id": ""}, "is no checkpoint id"),
        ({"ckpt_id": "two words"}, "is no checkpoint id"),
        ({"task": " "}, "no name for a task"),
        ({"metrics": {"": 1.0}}, "no name for a metric"),
        ({"metrics": {}}, "no metric for task 't'"),
        ({"stderr": {"f1": 0.1}}, r"stderr for \['f1'\]"),
        ({"tokens": -1}, "no token count"),
        ({"tokens": 1.5}, "no token count"),
        ({"tokens": 5}, f"was saved at {TOKENS} tokens, not at 5"),
        ({"run_id": "gone"}, "there is no run gone"),
        ({"run_id": "../a"}, "is not valid"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_remedy(root: Path, changed: dict[str, Any], message: str) -> None:
    """Each names what is wrong and what to do, and nothing is written."""
    arguments: dict[str, Any] = {"root": root, "ckpt_id": CKPT, "task": "t", "metrics": {"acc": 1.0}, **changed}
    with pytest.raises(UsageError, match=message) as caught:
        log_eval(**arguments)
    assert caught.value.hint
    assert not list(root.rglob("*.parquet"))


def test_a_named_run_takes_evaluations_before_it_records_the_checkpoint(root: Path) -> None:
    """With its run given, an evaluation lies there whatever is recorded."""
    path = log_eval(root, "quick-later", "t", {"acc": 1.0}, run_id="c", tokens=3)
    assert path is not None
    assert path.parent == root / "run_id=c" / "evals"
    assert find_checkpoint(root, CKPT, run_id="c") is None


def test_storage_that_refuses_is_an_error_and_leaves_nothing(root: Path) -> None:
    """A file where the folder of evaluations should be: the message names it and the remedy."""
    (root / "run_id=b" / "evals").write_text("in the way")
    with pytest.raises(LlmtrackError, match="could not be written") as caught:
        log_eval(root, CKPT, "t", {"acc": 1.0})
    assert caught.value.hint
    assert sorted(path.name for path in (root / "run_id=b").iterdir()) == ["evals", "segment=00001", "segment=00002"]


def test_a_damaged_or_newer_part_hides_only_its_own_checkpoints(root: Path) -> None:
    """The search goes on in the other runs, and an id that was in the damage counts as not recorded."""
    (segment_folder(root, "a", 1) / part_name("checkpoints", 1)).write_bytes(b"not Arrow at all" * 40)
    newer = segment_folder(root, "b", 1) / part_name("checkpoints", 1)
    schema = SCHEMAS["checkpoints"].with_metadata({"llmtrack.format": "2"})
    newer.write_bytes(schema.serialize().to_pybytes())
    assert find_checkpoint(root, "quick-a") is None
    place = find_checkpoint(root, CKPT)
    assert place is not None
    assert (place.run_id, place.step, place.tokens) == ("b", 4000, TOKENS)


def test_what_is_no_run_is_passed_over(root: Path) -> None:
    """Files and folders of others in a root do not disturb the search."""
    (root / "notes.txt").write_text("x")
    (root / "run_id=").mkdir()
    (root / "run_id=a" / "segment=x").mkdir()
    (root / "run_id=a" / "notes.txt").write_text("x")
    assert find_checkpoint(root, "quick-c") is not None


def test_disabled_writes_nothing_and_still_checks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLMTRACK_MODE=disabled is a no-op for right calls."""
    monkeypatch.setenv("LLMTRACK_MODE", "disabled")
    assert log_eval(root, CKPT, "t", {"acc": 1.0}) is None
    wrong: dict[str, Any] = {"acc": "1.0"}
    with pytest.raises(UsageError):
        log_eval(root, CKPT, "t", wrong)
    assert not list(root.rglob("*.parquet"))


def test_details_are_json_that_any_reader_takes() -> None:
    """NaN and infinities, which JSON has not, become words; keys are sorted; other scripts stay readable."""
    text = to_json({"b": [math.nan, -math.inf, (1.5,), np.float32(0.5), {2, 1}], "a": "für"})
    assert text == '{"a": "für", "b": ["NaN", "-Infinity", [1.5], 0.5, [1, 2]]}'
    assert json.loads(text)["b"][2] == [1.5]


def test_a_path_is_no_checkpoint_id(tmp_path: Path) -> None:
    """Whoever gives the checkpoint itself is told how to get its id, and nothing is written."""
    path = tmp_path / "step.pt"
    path.write_bytes(b"weights")
    with pytest.raises(UsageError, match="is a checkpoint, not its id"):
        log_eval(tmp_path, str(path), "task", {"acc": 1.0})
    assert list(tmp_path.iterdir()) == [path]
