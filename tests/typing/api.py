"""How a trainer calls llmtrack, as type checkers see it: checked with the rest, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

from torch import Tensor

import llmtrack


def train(root: Path, saved: dict[str, Any] | None, loss: float) -> None:
    """Every public call, with what it returns."""
    run = llmtrack.open_run(
        root,
        run_id=llmtrack.new_run_id(),
        project="pretrain-7b",
        run_name="third try",
        config={"width": 4096},
        recipe={"lr": 3e-4, "schedule": {"warmup": 2000}},
        checkpoint=saved,
        on_rollback="continue",
        flops=llmtrack.flops.estimate("6n", parameters=7e9),
        alerts=[llmtrack.alerts.NonFinite(), llmtrack.alerts.LossSpike(threshold=9.0)],
        on_alert=print,
    )
    assert_type(run, llmtrack.Run)
    assert_type(run.run_id, str)
    assert_type(run.segment, int)
    assert_type(run.start_step, int)
    assert_type(run.start_tokens, int)
    run.log({"train/loss": loss, "train/lr": 3e-4}, step=1, tokens=4096)
    run.log({"train/loss": loss}, 1, 4096, batch_ids=["doc-1", 7], position=7)
    run.batches(1, range(8), position=7)
    assert_type(run.state_dict(), dict[str, Any])
    run.load_state_dict(saved)
    with run.pause():
        run.context("the loader was restarted", step=1, tokens=4096)
    assert_type(run.meta(step=1, tokens=4096), dict[str, str | int | None])
    run.checkpoint(root / "step-1", step=1, tokens=4096)
    run.checkpoint("checkpoints/step-1", step=1, tokens=4096)
    run.alert("data", "a shard was empty", step=1, tokens=4096)
    assert_type(run.flush(timeout=10.0), bool)
    run.finish()


def reduce(run: llmtrack.Run, loss: Tensor, file: Path) -> None:
    """What a training loop gives is put together over micro-batches and ranks."""
    cadence = llmtrack.Cadence.load(file)
    assert_type(cadence, llmtrack.Cadence)
    assert_type(cadence.due("per_layer", 100), bool)
    flops = llmtrack.flops.estimate("palm", parameters=7e9, layers=32, heads=32, head_dim=128, sequence=4096)
    assert_type(flops.mfu(1e5), float | None)
    reducer = llmtrack.Reducer(run, every=10, cadence=cadence, throughput=llmtrack.Throughput(flops))
    reducer.mean("train/loss", loss, weight=loss.new_tensor(4096))
    reducer.mean("train/aux", None)
    reducer.sum("data/documents", 3)
    reducer.min("data/oldest", 3.5)
    reducer.max("throughput/slowest", 3.5, names_rank=False)
    reducer.last("train/lr", 3e-4)
    reducer.grad_norm(loss)
    with reducer.data_wait(), reducer.pause():
        reducer.step(1, 4096, batch_ids=["doc-1"], position=7)
    reducer.flush(step=1, tokens=4096)


def by_context(root: str) -> None:
    """A run is its own context manager."""
    with llmtrack.open_run(root) as run:
        assert_type(run, llmtrack.Run)


def evaluate(root: Path, path: Path) -> None:
    """An evaluator needs a checkpoint's id, and no run."""
    ckpt_id = llmtrack.checkpoint_id(path, 4096)
    assert_type(ckpt_id, str)
    llmtrack.log_eval(
        root,
        ckpt_id,
        "arc_easy",
        {"acc": 0.61},
        stderr={"acc": 0.01},
        harness="lm-eval",
        harness_version="0.4.9",
        prompt_hash=None,
        details=None,
    )


def handle(root: str) -> str:
    """Every error has a hint, and the caller's mistakes are ValueErrors as well."""
    try:
        llmtrack.open_run(root, run_id="not valid")
    except llmtrack.UsageError as error:
        assert_type(error.hint, str)
        value_error: ValueError = error
        return str(value_error)
    except llmtrack.LlmtrackError as error:
        return error.hint
    return llmtrack.__version__
