"""Log a run and read it back where only the wheel and pyarrow are installed: `make build` runs this."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import llmtrack


def main() -> None:
    """Fail unless the base install is complete, comes from the wheel, and brings nothing but pyarrow."""
    installed = {found.name for found in importlib.metadata.distributions()}
    assert installed <= {"llmtrack-log", "pyarrow", "pip", "setuptools"}, installed
    assert "site-packages" in Path(llmtrack.__file__).parts, llmtrack.__file__
    for name in {*llmtrack.__all__} - {"Reducer"}:
        getattr(llmtrack, name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with llmtrack.open_run(root, project="base", config={"width": 8}, recipe={"lr": 0.1}) as run:
            for step in range(1, 101):
                run.log({"train/loss": 1 / step, "train/lr": 0.1}, step=step, tokens=step * 1000)
        (sealed,) = root.glob("run_id=*/segment=00001/metrics-*.parquet")
        table = pq.read_table(sealed)
        losses = table.filter(pc.equal(table["name"], "train/loss"))["value"].to_pylist()
    assert losses == [1 / step for step in range(1, 101)], losses
    versions = f"llmtrack {llmtrack.__version__}, pyarrow {pa.__version__}, Python {sys.version.split()[0]}"
    print(f"the base install works: {versions}")  # noqa: T201  a script, and this is its result


if __name__ == "__main__":
    main()
