"""Arrow arrays are what pyarrow itself makes of the same values."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.format import SCHEMAS, TIME
from llmtrack.writer.log.arrays import one, record_batch, strings
from tests.strategies import names

LIST = pa.list_(pa.string())


@given(st.lists(st.none() | names | st.just("")))
def test_strings_are_an_array_of_strings(values: list[str | None]) -> None:
    """Of any script, empty ones and nulls among them."""
    array = strings(values)
    array.validate(full=True)
    assert array.equals(pa.array(values, pa.string()))


@pytest.mark.parametrize(
    "value, kind",
    [
        (7, pa.int64()),
        (-(1 << 63), pa.int64()),
        (1_700_000_000_123, TIME),
        (0.1, pa.float64()),
        (3, pa.float64()),
        (True, pa.bool_()),
        (False, pa.bool_()),
        ("損失", pa.string()),
        ([], LIST),
        (["a", None, "c"], LIST),
        *((None, kind) for kind in (pa.int64(), TIME, pa.float64(), pa.bool_(), pa.string(), LIST)),
    ],
)
def test_one_value_is_an_array_of_one(value: Any, kind: pa.DataType) -> None:
    """Of every type that a column of the log has."""
    array = one(value, kind)
    array.validate(full=True)
    assert array.equals(pa.array([value], kind))


@pytest.mark.parametrize(
    "value, kind",
    [
        ("7", pa.int64()),
        (1 << 63, pa.int64()),
        (1.5, pa.int64()),
        ("high", pa.float64()),
        (10**400, pa.float64()),
        (7, pa.string()),
        (b"bytes", pa.string()),
        ("\ud800", pa.string()),
        ("a", LIST),
        ([7], LIST),
    ],
)
def test_a_value_of_another_type_is_refused(value: Any, kind: pa.DataType) -> None:
    """Nothing is guessed or cut off."""
    with pytest.raises((TypeError, ValueError, OverflowError, struct.error)):
        one(value, kind)


@pytest.mark.parametrize("table", SCHEMAS)
def test_every_table_can_be_made_a_row_of(table: str) -> None:
    """What the row lacks is null, and what the table lacks is left out."""
    batch = record_batch({"seq": 3, "tokens": 5, "nonsense": 7}, SCHEMAS[table])
    batch.validate(full=True)
    assert batch.to_pylist() == [dict.fromkeys(SCHEMAS[table].names) | {"seq": 3, "tokens": 5}]


LIFE = """
import sys
import llmtrack
from pathlib import Path
from llmtrack.writer.settings import Settings

root = Path(sys.argv[1])
(root / "model.pt").write_bytes(b"weights")
run = llmtrack.open_run(root / "root", config={"a": 1}, recipe={"lr": 1}, settings=Settings(flush_interval_s=0.01))
run.log({"a": 1.0, "b": 2}, 1, 1)
run.alert("data", "look", 1, 1)
run.checkpoint(root / "model.pt", 1, 1)
assert run.flush(60)
run.finish()
llmtrack.open_run(root / "root", checkpoint=run.meta(1, 1), recipe={"lr": 1}).finish()
print([name for name in ("pandas", "torch", "duckdb", "mlflow", "wandb", "sqlite3") if name in sys.modules])
"""


def test_a_training_process_loads_none_of_the_large_libraries(tmp_path: Path) -> None:
    """From its opening to its sealed end, though they are installed: each costs seconds on shared storage."""
    done = subprocess.run([sys.executable, "-c", LIFE, tmp_path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
