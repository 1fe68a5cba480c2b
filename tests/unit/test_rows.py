"""Rows become a batch with a line for each point."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.log import rows
from llmtrack.writer.log.buffer import Row
from llmtrack.writer.log.rows import RowEncoder
from tests.reading import bits
from tests.strategies import INT64_MAX, doubles, names


def points(encoded: Any) -> list[tuple[Any, ...]]:
    """Return each line of a batch, the value as bits."""
    columns = [encoded["seq"], encoded["time"].cast("int64"), *(encoded[name] for name in ("step", "tokens", "name"))]
    values = [bits(value) for value in encoded["value"].to_pylist()]
    return list(zip(*(column.to_pylist() for column in columns), values, strict=True))


@given(
    st.lists(
        st.tuples(
            st.integers(0, INT64_MAX),
            st.integers(0, INT64_MAX),
            st.integers(0, INT64_MAX),
            st.dictionaries(names, doubles, min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 1 << 40),
)
def test_every_point_is_a_line_bit_for_bit(given_rows: list[Row], seq_first: int) -> None:
    """In the order of the rows, and of the names within each."""
    batch = RowEncoder().encode(given_rows, seq_first)
    batch.validate(full=True)
    assert batch.schema.equals(SCHEMAS["metrics"])
    assert points(batch) == [
        (seq_first + index, time_ns // 1_000_000, step, tokens, name, bits(value))
        for index, (time_ns, step, tokens, values) in enumerate(given_rows)
        for name, value in values.items()
    ]


def test_the_same_names_in_another_order_are_another_row() -> None:
    """What is kept of a set of names is kept of its order too."""
    encoder = RowEncoder()
    batch = encoder.encode([(0, 1, 1, {"a": 1.0, "b": 2.0}), (0, 2, 2, {"b": 3.0, "a": 4.0})], 1)
    assert batch["name"].to_pylist() == ["a", "b", "b", "a"]
    assert batch["value"].to_pylist() == [1.0, 2.0, 3.0, 4.0]


def test_a_name_for_every_step_does_not_fill_the_memory() -> None:
    """Some scripts put the step into the name: rows are right, and what is kept stays bounded."""
    encoder = RowEncoder()
    limit = rows._LAYOUTS_LIMIT
    for first in range(0, 3 * limit, 1000):
        batch = encoder.encode([(0, step, step, {f"loss/step_{step}": 1.0}) for step in range(first, first + 1000)], 1)
        assert batch["name"].to_pylist() == [f"loss/step_{step}" for step in range(first, first + 1000)]
        assert len(encoder._layouts) <= limit


def test_a_row_of_very_many_metrics_is_one_batch() -> None:
    """A probe of every tensor of a large model."""
    many = {f"layer/{index}": float(index) for index in range(20_000)}
    batch = RowEncoder().encode([(0, 1, 1, many), (0, 2, 2, {"a": math.nan})], 1)
    assert batch.num_rows == 20_001
    assert batch["value"].to_pylist()[:20_000] == list(many.values())


BAD: list[dict[Any, Any]] = [
    {1: 1.0},
    {None: 1.0},
    {"\ud800": 1.0},
    {"a": None},
    {"a": "1"},
    {"a": 10**400},
]


@pytest.mark.parametrize("values", BAD, ids=repr)
def test_what_cannot_be_stored_is_refused_as_a_whole(values: dict[Any, Any]) -> None:
    """By `check` and by `encode`; nothing of it stays behind in the encoder."""
    encoder = RowEncoder()
    row = (0, 1, 1, {"good": 1.0, **values})
    for attempt in (lambda: encoder.check(row), lambda: encoder.encode([row], 1)):
        with pytest.raises(Exception, match=r"."):
            attempt()
    assert encoder.encode([(0, 1, 1, {"good": 1.0})], 1)["value"].to_pylist() == [1.0]


@pytest.mark.parametrize("step, tokens", [(1 << 63, 1), (1, 1 << 63), (1.5, 1)])
def test_a_coordinate_that_does_not_fit_is_refused(step: Any, tokens: Any) -> None:
    """The columns have 64 bits."""
    with pytest.raises((OverflowError, TypeError)):
        RowEncoder().check((0, step, tokens, {"a": 1.0}))
