"""Roots to draw: one with every kind of oddity, and one that is large."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import llmtrack
from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter, encode_head
from tests.handmade import write_heartbeat, write_part

BEGIN: Final = dt.datetime(2026, 3, 1, 8, tzinfo=dt.UTC)
TOKENS_PER_STEP: Final = 4_194_304
SPIKE: Final = 9.25  # of train/loss, at one step
METRICS: Final = ("train/loss", "train/grad_norm", "train/lr", "throughput/tokens_per_s", "memory/max_bytes")


def loss(step: int, seed: int = 0) -> float:
    """Return what the loss of a step might be."""
    noise = random.Random(step * 7 + seed).gauss(0, 0.04)
    return 2.0 + 7.0 / math.pow(1 + step / 60, 0.7) + noise


def points(first: int, last: int, *, every: int = 1, seed: int = 0, begin: dt.datetime = BEGIN) -> list[dict[str, Any]]:
    """Return the points of the usual metrics from after one step up to another; a row a step."""
    rows = []
    for step in range(first + every, last + 1, every):
        values = {
            "train/loss": loss(step, seed),
            "train/grad_norm": 0.4 + random.Random(step + seed).random() * 0.3,
            "train/lr": 3e-4 * min(1, step / 50) * (0.5 + 0.5 * math.cos(step / 900)),
            "throughput/tokens_per_s": 1.1e6 + random.Random(step * 3).gauss(0, 2e4),
            "memory/max_bytes": 62e9,
        }
        place = {
            "step": step,
            "tokens": step * TOKENS_PER_STEP,
            "time": begin + dt.timedelta(seconds=4 * (step - first)),
        }
        rows += [{**place, "name": name, "value": value} for name, value in values.items()]
    for seq, _ in enumerate(METRICS * (len(rows) // len(METRICS))):
        rows[seq]["seq"] = 2 + seq // len(METRICS)
    return rows


def segment(
    root: Path,
    run_id: str,
    number: int,
    first: int,
    last: int,
    *,
    begin: dt.datetime = BEGIN,
    origin: tuple[str, int] | None = None,
    exit_: str | None = None,
    seed: int = 0,
    values: dict[tuple[str, int], float] | None = None,
    **start: Any,
) -> Path:
    """Write a segment that trained from after one step up to another, with checkpoints every 100 steps."""
    folder = segment_folder(root, run_id, number)
    rows = points(first, last, seed=seed, begin=begin)
    for row in rows:
        row["value"] = (values or {}).get((row["name"], row["step"]), row["value"])
    from_run, from_segment = origin or (None, None)
    place = {"tokens": first * TOKENS_PER_STEP, "step": first, "time": begin, "seq": 1}
    records = [
        {**place, "phase": "start", "from_run": from_run, "from_segment": from_segment, "world_size": 64, **start}
    ]
    after = rows[-1]["seq"]
    end = begin + dt.timedelta(seconds=4 * (last - first))
    saved = [step for step in range(first + 1, last + 1) if step % 100 == 0]
    write_part(
        folder,
        "checkpoints",
        [
            {
                "seq": after + index,
                "tokens": step * TOKENS_PER_STEP,
                "step": step,
                "time": begin + dt.timedelta(seconds=4 * (step - first)),
                "ckpt_id": f"{run_id}-{number}-{step}",
                "path": f"/checkpoints/{run_id}/step-{step}",
                "bytes": 14_000_000_000,
            }
            for index, step in enumerate(saved, start=1)
        ],
    )
    if exit_:
        records.append(
            {"seq": after + len(saved) + 2, "tokens": last * TOKENS_PER_STEP, "step": last, "time": end, "phase": "end"}
            | {"exit": exit_}
        )
    write_part(folder, "segments", records)
    write_part(folder, "metrics", rows, batch=250)
    return folder


def alert(number: int, step: int, message: str, time: dt.datetime, **more: Any) -> dict[str, Any]:
    """Return the record of an alert at a step."""
    return {
        "seq": 900_000 + number,
        "tokens": step * TOKENS_PER_STEP,
        "step": step,
        "time": time,
        "alert_id": f"a{number}",
        "rule": "spike",
        "level": "warning",
        "metric": "train/loss",
        "message": message,
        "phase": "raised",
        **more,
    }


def odd_root(root: Path) -> Path:
    """Make a run of 7 billion parameters that was killed, resumed twice, forked, and damaged in one batch.

    Run ``pretrain-7b``: segment 1 to step 700, killed; segment 2 from step 600, whose loss has a spike, a NaN and an
    infinity, to 1,200; segment 3 from step 1,100 to 2,000, with another configuration, a gap and a damaged batch.
    Run ``pretrain-7b-recipe-1`` was forked from it at step 1,000 with another learning rate and still runs.
    """
    config: dict[str, Any] = {"nodes": 8, "data": {"path": "/data/web", "workers": 4}, "flash": True}
    recipe = {"lr": 3e-4, "schedule": "cosine", "layers": 32}
    common: dict[str, Any] = {
        "project": "llm",
        "run_name": "seven billion",
        "recipe": json.dumps(recipe),
        "recipe_hash": "r1",
    }
    one = segment(root, "pretrain-7b", 1, 0, 700, config=json.dumps(config), host="node01", **common)
    write_heartbeat(one, BEGIN + dt.timedelta(seconds=2810), tokens=700 * TOKENS_PER_STEP)
    odd = {("train/loss", 800): SPIKE, ("train/loss", 900): math.nan, ("train/grad_norm", 901): math.inf}
    begin = BEGIN + dt.timedelta(hours=2)
    folder = segment(
        root, "pretrain-7b", 2, 600, 1200, begin=begin, origin=("pretrain-7b", 1), exit_="preempted", seed=1,
        values=odd, config=json.dumps(config), host="node01", from_ckpt="pretrain-7b-1-600", **common,
    )  # fmt: skip
    write_part(
        folder,
        "alerts",
        [
            alert(
                1,
                800,
                "loss 9.25, usually 3.1",
                begin + dt.timedelta(seconds=800),
                batch_hash="b800",
                batch_ids=["web-000812", "code-000093"],
                value=SPIKE,
            ),
            alert(
                2,
                900,
                "loss is NaN",
                begin + dt.timedelta(seconds=1200),
                rule="nonfinite",
                level="error",
                batch_ids=["web-000901"],
                value=math.nan,
            ),
        ],
    )
    changed = {**config, "nodes": 16, "data": {**config["data"], "workers": 8}}
    begin = BEGIN + dt.timedelta(hours=5)
    folder = segment(
        root, "pretrain-7b", 3, 1100, 2000, begin=begin, origin=("pretrain-7b", 2), exit_="finished", seed=2,
        config=json.dumps(changed), host="node07", from_ckpt="pretrain-7b-2-1100", **common,
    )  # fmt: skip
    gap = {"seq": 911, "tokens": 1520 * TOKENS_PER_STEP, "step": 1520, "points": 100, "reason": "io_error", "errno": 28}
    write_part(
        folder,
        "gaps",
        [{**gap, "first_tokens": 1500 * TOKENS_PER_STEP, "last_tokens": 1520 * TOKENS_PER_STEP, "time": begin}],
    )
    damage(folder, 60_000)
    begin = BEGIN + dt.timedelta(hours=7)
    changed_recipe = {**recipe, "lr": 1e-4}
    child = segment(
        root, "pretrain-7b-recipe-1", 1, 1000, 1400, begin=begin, origin=("pretrain-7b", 2), seed=3,
        fork_reason="recipe", recipe=json.dumps(changed_recipe), recipe_hash="r2", config=json.dumps(config),
        recipe_diff=json.dumps({"lr": [3e-4, 1e-4]}), project="llm", run_name="lower lr",
    )  # fmt: skip
    write_heartbeat(child, dt.datetime.now(dt.UTC), tokens=1400 * TOKENS_PER_STEP)
    for ckpt, step, acc in (
        ("1-600", 600, 0.41),
        ("2-1000", 1000, 0.47),
        ("3-1500", 1500, 0.53),
        ("3-2000", 2000, 0.52),
    ):
        llmtrack.log_eval(
            root, f"pretrain-7b-{ckpt}", "hellaswag", {"acc": acc}, stderr={"acc": 0.01}, harness="lm-eval",
            harness_version="0.4.9",
        )  # fmt: skip
        llmtrack.log_eval(root, f"pretrain-7b-{ckpt}", "wikitext", {"word_perplexity": 30 - step / 200})
    return root


def damage(folder: Path, at: int) -> Path:
    """Flip one bit of a segment's first part of metrics, some bytes behind its head."""
    path = folder / part_name("metrics", 1)
    content = bytearray(path.read_bytes())
    content[len(encode_head("metrics")) + at] ^= 1
    path.write_bytes(content)
    return path


def large_root(root: Path, rows: int, metrics: int, *, run_id: str = "large", spike_at: int = 777) -> Path:
    """Make a sealed run of many points: two segments, the second from the middle of the first."""
    names = ["train/loss", *(f"layers/{index:03d}/norm" for index in range(1, metrics))]
    half = rows // 2
    for number, first, last in ((1, 0, half + half // 2), (2, half, rows)):
        folder = segment_folder(root, run_id, number)
        folder.mkdir(parents=True)
        start = {"seq": 1, "tokens": first * 1000, "step": first, "phase": "start", "time": BEGIN, "world_size": 8}
        origin = {"from_run": run_id, "from_segment": 1} if number > 1 else {}
        write_part(folder, "segments", [start | origin])
        writer = PartWriter(folder / part_name("metrics", 1), "metrics")
        for begin in range(first, last, 5000):
            steps = range(begin + 1, min(begin + 5000, last) + 1)
            some = [(step, name) for step in steps for name in names]
            seqs = [2 + step - first for step, _ in some]
            columns = {
                "seq": seqs,
                "time": [BEGIN + dt.timedelta(seconds=step, hours=number) for step, _ in some],
                "step": [step for step, _ in some],
                "tokens": [step * 1000 for step, _ in some],
                "name": [name for _, name in some],
                "value": [
                    SPIKE
                    if (step, name) == (spike_at, "train/loss")
                    else 2 + math.sin(step / 900 + len(name)) / 9 + step % 97 / 500
                    for step, name in some
                ],
            }
            writer.append(pa.RecordBatch.from_pydict(columns, schema=SCHEMAS["metrics"]), seqs[0], seqs[-1])
        writer.close(ended=False)
        seal_part(folder / part_name("metrics", 1))
    return root


HOSTILE: Final = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    '" onmouseover="window.hacked=1" x=\'',
    "' autofocus onfocus=window.hacked=1 '",
    "]]>--><!--<svg onload=window.hacked=1>",
    "${window.hacked = 1}`{{7*7}}",
    "javascript:window.hacked=1",
    "\x00\x07\x1b[31mred\x7f\x9b\r\nnext line",
    "\u202eright to left\u2066 \u2028 \u2029 \ufeff",
    "&lt;b&gt; &amp; &#x3c;",
    "日本語 🦙 $\\frac{1}{2}$ _under_",
    "long " * 20_000,
)


def hostile_root(root: Path) -> Path:
    """Make a run every text of which would like to be something else than a text."""
    joined = " ".join(HOSTILE[:9])
    folder = segment_folder(root, "hostile", 1)
    config = json.dumps({text: {text: index} for index, text in enumerate(HOSTILE)})
    start = {"seq": 1, "tokens": 0, "step": 0, "time": BEGIN, "phase": "start", "project": joined, "run_name": joined}
    start |= {"config": config, "recipe": config, "host": joined, "git_commit": joined, "versions": "no JSON <b>"}
    write_part(folder, "segments", [start | {"world_size": 8}])
    rows = [
        {
            "seq": 2 + at,
            "tokens": 10 * at,
            "step": at,
            "time": BEGIN + dt.timedelta(seconds=at),
            "name": name,
            "value": 1.0 + at,
        }
        for name in HOSTILE
        for at in range(1, 6)
    ]
    write_part(folder, "metrics", sorted(rows, key=lambda row: row["seq"]))
    alerts = [
        {
            "seq": 100 + index, "tokens": 20, "step": 2, "time": BEGIN, "alert_id": text, "rule": text, "level": text,
            "metric": text, "message": text, "batch_hash": text, "batch_ids": [text] * 40, "phase": "raised",
        }
        for index, text in enumerate(HOSTILE)
    ]  # fmt: skip
    write_part(folder, "alerts", alerts)
    saved = [
        {"seq": 200 + index, "tokens": 20 + index, "step": 2, "time": BEGIN, "ckpt_id": f"c{index}", "path": text}
        for index, text in enumerate(HOSTILE)
    ]
    write_part(folder, "checkpoints", saved)
    gap = {"seq": 300, "tokens": 30, "step": 3, "time": BEGIN, "first_tokens": 20, "last_tokens": 30, "points": 5}
    write_part(folder, "gaps", [{**gap, "reason": text} for text in HOSTILE])
    end = {"seq": 400, "tokens": 50, "step": 5, "time": BEGIN + dt.timedelta(seconds=9), "phase": "end"}
    write_part(folder, "segments", [{**end, "exit": "failed", "detail": joined}], part=2)
    for index, text in enumerate(HOSTILE[:4]):
        llmtrack.log_eval(root, f"c{index}", text, {text: 0.5}, harness=text, harness_version=text)
    return root
