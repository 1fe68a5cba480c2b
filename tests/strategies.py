"""What a training script may log, for Hypothesis, and parts made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from llmtrack.writer.log.buffer import Row
from llmtrack.writer.log.rows import RowEncoder
from llmtrack.writer.log.stream import PartWriter, encode_batch
from tests.reading import DROPPED

INT64_MAX = (1 << 63) - 1

# Every plane of Unicode, and what looks like a part of a path or of SQL.
names = st.one_of(
    st.sampled_from(
        ["train/loss", "train/grad_norm", "eval/mmlu/acc", "損失", "потеря/обучение", "🔥", "a'b\"c", "../x", " "]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
).filter(lambda name: name != DROPPED)

# All doubles: NaN of any kind, infinities, -0.0 and denormals among them.
doubles = st.one_of(
    st.floats(),
    st.sampled_from(
        [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308]
    ),
)

numbers = st.one_of(
    doubles,
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    doubles.map(np.float64),
    st.integers(-(1 << 31), (1 << 31) - 1).map(np.int32),
    st.integers(0, 255).map(np.uint8),
    doubles.map(np.array),  # 0-d
)


def make_rows(steps: range, metrics: int = 2) -> list[Row]:
    """Return rows with metrics that come in another order than that of their names."""
    return [
        (step * 1_000_000_000, step, step * 100, {f"m/{metrics - index}": step + index / 8 for index in range(metrics)})
        for step in steps
    ]


def write_part(path: Path, batches: Sequence[range], *, metrics: int = 2, ended: bool = True) -> list[int]:
    """Write an open part of metrics, a batch for each range of `seq`, and return the offset after each batch."""
    writer = PartWriter(path, "metrics")
    encoder = RowEncoder()
    offsets = [
        writer.write(encode_batch(encoder.encode(make_rows(seqs, metrics), seqs.start), seqs.start, seqs.stop - 1))
        for seqs in batches
    ]
    writer.close(ended=ended)
    return offsets
