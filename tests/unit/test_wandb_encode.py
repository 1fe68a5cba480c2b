"""How rows are said in W&B, and that what is read back is recognised."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.sync.replay.figures import Figures
from llmtrack.sync.sink import RunSpec
from llmtrack.sync.story import StoryPoint
from llmtrack.sync.wandb.describe import id_of, note_of
from llmtrack.sync.wandb.encode import (
    CHECKPOINT,
    SEGMENT,
    STEP,
    TIME,
    TOKENS,
    RowReader,
    WandbEncoder,
    config_of,
    key_of,
    summary_of,
    told_records,
)
from llmtrack.sync.wandb.pace import Pace

Point = tuple[int, int, int, int, str, float]  # seq, time, step, tokens, name, value


def batch(points: Sequence[Point]) -> pa.RecordBatch:
    """Return points as replay gives them."""
    names = ("seq", "time_ms", "step", "tokens", "name", "value")
    columns = [[point[at] for point in points] for at in range(len(names))]
    types = (pa.int64(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.float64())
    return pa.record_batch([pa.array(c, type=t) for c, t in zip(columns, types, strict=True)], names=names)


def as_w_and_b(content: dict[str, object], number: int) -> dict[str, object]:
    """Return a row as it comes back: keys in another order, 5.0 as 5, with W&B's own."""
    shown = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in content.items()}
    return dict(reversed([*json.loads(json.dumps(shown)).items(), ("_step", number), ("_runtime", 0.5)]))


finite = st.floats(allow_nan=True, allow_infinity=True)
rows_of_points = st.lists(
    st.tuples(
        st.integers(0, 2**60),
        st.integers(0, 2**41),
        st.integers(0, 2**40),
        st.dictionaries(st.text(max_size=8), finite, min_size=1, max_size=5),
    ),
    max_size=12,
)


@given(rows_of_points)
def test_a_row_that_comes_back_has_the_identity_of_the_one_that_was_sent(
    rows: list[tuple[int, int, int, dict[str, float]]],
) -> None:
    """Whatever the names and values: JSON and the order of keys change nothing, and each log call is one record."""
    points = [
        (seq, time, step, tokens, name, value)
        for seq, (tokens, time, step, metrics) in enumerate(rows, start=1)
        for name, value in metrics.items()
    ]
    records = WandbEncoder(3).encode(batch(points))
    reader = RowReader()
    back = [reader.record(as_w_and_b(record.content, number)) for number, record in enumerate(records)]
    assert [record[:4] for record in back] == [record[:4] for record in records]
    assert len(records) == len(rows)
    assert [record.points for record in records] == [len(metrics) for *_, metrics in rows]
    assert all(math.isfinite(v) for record in records for v in record.content.values())


@given(st.lists(st.text(max_size=12), unique=True))
def test_no_two_names_meet(names: list[str]) -> None:
    """Mapped or not, also with what becomes of a value that is not finite."""
    keys = {key_of(name) for name in names}
    assert len(keys) == len(names)
    assert not keys & {f"{key}_nonfinite" for key in keys}
    assert not keys & {TOKENS, STEP, SEGMENT, TIME, CHECKPOINT, "_step", "_runtime", ""}


def test_a_row_says_where_and_when_it_was_logged() -> None:
    """Milliseconds as seconds, tokens and step as integers, and the segment."""
    (record,) = WandbEncoder(2).encode(batch([(1, 1_767_225_600_007, 5, 2**53 + 1, "loss", 0.1)]))
    assert record.content == {TIME: 1_767_225_600.007, TOKENS: 2**53 + 1, STEP: 5, SEGMENT: 2, "loss": 0.1}


def test_what_is_not_finite_is_said_in_numbers() -> None:
    """NaN, +Inf and -Inf are 0, 1 and -1 under another name; the rest of the row is as ever."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e308, "e": 1.7e308}
    (record,) = WandbEncoder(1).encode(batch([(1, 0, 1, 1, name, value) for name, value in values.items()]))
    said = {k: v for k, v in record.content.items() if k not in {TIME, TOKENS, STEP, SEGMENT}}
    assert said == {"a_nonfinite": 0.0, "b_nonfinite": 1.0, "c_nonfinite": -1.0, "d": 1e308, "e": 1.7e308}


def test_rows_that_are_equal_in_everything_are_told_apart() -> None:
    """W&B keeps both, so both are looked for; a name that is there twice in one call makes two rows."""
    points = [(1, 7, 1, 10, "x", 1.0), (2, 7, 1, 10, "x", 1.0), (3, 7, 1, 10, "x", 1.0), (3, 7, 1, 10, "x", 2.0)]
    records = WandbEncoder(1).encode(batch(points))
    assert len({record[:4] for record in records}) == 4
    assert records[0].content == records[1].content


def test_another_value_step_segment_or_name_is_another_row() -> None:
    """Each of them is in the digest; -0.0 is 0.0."""
    base = (1, 7, 1, 10, "x", 1.0)
    others = [(1, 7, 2, 10, "x", 1.0), (1, 7, 1, 10, "y", 1.0), (1, 7, 1, 10, "x", math.nextafter(1.0, 2.0))]
    (record,) = WandbEncoder(1).encode(batch([base]))
    assert record[:4] not in {WandbEncoder(1).encode(batch([other]))[0][:4] for other in others}
    assert record[:4] != WandbEncoder(2).encode(batch([base]))[0][:4]
    zeros = [WandbEncoder(1).encode(batch([(1, 7, 1, 10, "x", zero)]))[0][:4] for zero in (0.0, -0.0)]
    assert zeros[0] == zeros[1]


@pytest.mark.parametrize(
    "row", [{}, {"_step": 1, "mine": 1.0}, {TOKENS: "x", TIME: None}, {TOKENS: 1, TIME: 1.0, "t": {"a": [1]}}]
)
def test_a_row_of_somebody_else_is_a_record_too(row: dict[str, object]) -> None:
    """It equals none of ours, and nothing fails."""
    assert RowReader().record(row).key == "rows"


def test_what_is_remembered_does_not_grow_with_the_rows() -> None:
    """W&B's client writes the keys of each row in another order, and there are as many orders as there are rows."""
    points = [(n, n, n, n, f"m{metric}", float(metric)) for n in range(1, 201) for metric in range(8)]
    encoder, reader, generator = WandbEncoder(1), RowReader(), random.Random(4)
    for record in encoder.encode(batch(points)):
        row = list(as_w_and_b(record.content, record.seq).items())
        generator.shuffle(row)
        assert reader.record(dict(row))[:4] == record[:4]
    assert (len(reader._plans), len(encoder._plans), len(encoder._keys)) == (1, 1, 1)


def test_what_was_measured_of_a_checkpoint_at_one_time_is_one_row() -> None:
    """It names the checkpoint; what was measured at another time is another row, whatever else is told."""
    points = [
        StoryPoint("eval/mmlu/acc", 300, 30, 5, 0.25, "ckpt", 1),
        StoryPoint("eval/mmlu/f1", 300, 30, 5, math.nan, "ckpt", 1),
        StoryPoint("eval/arc/acc", 300, 30, 6, 0.5, "ckpt", 1),
        StoryPoint("alert/spike", 310, 31, 7, 9.5, None, 1),
    ]
    records = told_records(points)
    assert [{k: v for k, v in r.content.items() if k not in {TIME, TOKENS, STEP, SEGMENT}} for r in records] == [
        {"eval/mmlu/acc": 0.25, "eval/mmlu/f1_nonfinite": 0.0, CHECKPOINT: "ckpt"},
        {"eval/arc/acc": 0.5, CHECKPOINT: "ckpt"},
        {"alert/spike": 9.5},
    ]
    assert {r[:4] for r in told_records(points[2:])} < {r[:4] for r in records}
    reader = RowReader()
    assert [reader.record(as_w_and_b(r.content, 0))[:4] for r in records] == [r[:4] for r in records]


def test_no_key_of_a_configuration_is_lost_to_ours() -> None:
    """Ours and W&B's own give way a line further down."""
    config = {"llmtrack": 1, "llmtrack_": 2, "_wandb": 3, "recipe": 4, "lr": 5, "": 6}
    shown = config_of(config, {"lr": 1})
    assert shown == {"llmtrack__": 1, "llmtrack_": 2, "_wandb_": 3, "recipe_": 4, "lr": 5, "_": 6, "recipe": {"lr": 1}}
    assert config_of({"recipe": 4}, {}) == {"recipe": 4}


def test_a_summary_says_what_is_best_where_a_name_does() -> None:
    """Losses and errors want to be small, accuracies large; of the rest nobody knows."""
    summary = summary_of(
        [Figures("train/loss", 2.0, 1.0, 5.0), Figures("eval/x/acc", 0.5, 0.1, 0.9), Figures("train/lr", 1.0, 0.0, 2.0)]
    )
    assert summary == {
        "train/loss": {"last": 2.0, "min": 1.0, "max": 5.0, "best": 1.0},
        "eval/x/acc": {"last": 0.5, "min": 0.1, "max": 0.9, "best": 0.9},
        "train/lr": {"last": 1.0, "min": 0.0, "max": 2.0},
    }
    assert summary_of([Figures("all/nan", None, None, None)]) == {}


def test_a_note_names_no_host() -> None:
    """The table of segments goes without that column."""
    table = "| segment | from tokens | ended | host | ranks |\n| --- | --- | --- | --- | --- |\n| 1 | 0 |  | n-17 | 8 |"
    note = f"Run.\n\n{table}"
    assert note_of(note).split("\n")[2:] == [
        "| segment | from tokens | ended | ranks |", "| --- | --- | --- | --- |", "| 1 | 0 |  | 8 |",
    ]  # fmt: skip


def test_an_id_of_a_side_run_says_where_it_begins() -> None:
    """So none is ever wanted twice: W&B gives no id of a deleted run out again."""
    spec = RunSpec("r", "provisional", 2, 1, "p", "n", "running", 0, facts={"first_tokens": "4000"})
    assert id_of(spec) == "r-s2-p4000"
    assert id_of(RunSpec("r", "canonical", None, 3, "p", "n", "running", 0)) == "r-g3"


def test_rows_are_held_back_to_so_many_a_minute() -> None:
    """After a pause no more than a few seconds' worth goes at once."""
    now, slept = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept[0] += seconds

    pace = Pace(60, clock=lambda: now[0], sleep=sleep)
    for _ in range(120):
        pace.take()
    assert slept[0] == pytest.approx(120)
    now[0] += 1000
    for _ in range(10):
        pace.take()
    assert slept[0] == pytest.approx(125)
    free = Pace(None, sleep=lambda _: pytest.fail("nothing holds rows back"))
    for _ in range(10):
        free.take()


def test_a_digest_is_a_number_that_a_double_holds() -> None:
    """It goes through a cursor as JSON and comes back the same."""
    records = WandbEncoder(1).encode(batch([(n, n, n, n, "x", float(n)) for n in range(1, 200)]))
    assert all(r.value == int(r.value) < 2**52 for r in records)
    assert all(struct.unpack("<d", struct.pack("<d", r.value))[0] == r.value for r in records)
