"""`verify` finds what the readers would leave out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import llmtrack
from llmtrack.query.read.log import Log
from llmtrack.writer.upkeep.verify import verify


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """Return the sealed part of a run that has ended, with one evaluation."""
    with llmtrack.open_run(tmp_path, run_id="a") as run:
        for step in range(200):
            run.log({"train/loss": step / 7}, step=step, tokens=step)
    llmtrack.log_eval(tmp_path, "some-checkpoint", "task", {"acc": 0.5})
    (part,) = tmp_path.glob("run_id=a/segment=00001/metrics-*.parquet")
    assert verify(tmp_path).findings == []
    return part


def test_a_changed_byte_of_a_sealed_part_is_found_without_being_asked_for(tmp_path: Path, sealed: Path) -> None:
    """Intact is what query and sync would take: they compare the checksum of every sealed part."""
    whole = sealed.read_bytes()
    for position in range(0, len(whole), 97):
        sealed.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        (finding,) = verify(tmp_path).findings
        assert (finding.path, finding.kind) == (sealed, "damaged")


def test_any_byte_that_was_changed_in_evals_is_found(tmp_path: Path, sealed: Path) -> None:
    """Also in the footer: a step that is null, or a name that is no text any more, must not reach a query."""
    assert sealed.exists()
    (evals,) = tmp_path.glob("evals/*.parquet")
    whole = evals.read_bytes()
    for position in range(0, len(whole), 7):
        evals.write_bytes(whole[:position] + bytes([whole[position] ^ 0x80]) + whole[position + 1 :])
        assert [(finding.path, finding.kind) for finding in verify(tmp_path).findings] == [(evals, "damaged")]
        log = Log(tmp_path, check=True)
        log.read()
        assert ([damage.path for _, damage in log.damages()], log.eval_files()) == ([evals], [])


def test_a_copy_of_a_sealed_part_is_found(tmp_path: Path, sealed: Path) -> None:
    """It is intact, and its rows are there twice."""
    copy = Path(shutil.copy(sealed, sealed.with_name("metrics-00002.parquet")))
    assert [(finding.path, finding.reason) for finding in verify(tmp_path).findings] == [
        (copy, f"is a copy of {sealed.name}")
    ]


def test_parquet_of_another_program_promised_nothing(tmp_path: Path, sealed: Path) -> None:
    """Readers take it as it is."""
    pq.write_table(pq.read_table(sealed, partitioning=None).replace_schema_metadata(None), sealed)
    assert verify(tmp_path).findings == []
    assert verify(tmp_path, deep=True).findings == []
