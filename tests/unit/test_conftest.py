"""The check that ends every test: it must see what it is there for, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import os, threading
from hypothesis import given, strategies

kept = []

def test_thread_that_stays():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_file_that_stays_open(tmp_path):
    kept.append((tmp_path / "open").open("w"))

def test_thread_that_ends():
    threading.Thread(target=int).start()

def test_file_that_is_closed(tmp_path):
    (tmp_path / "closed").write_text("")

def test_settings_of_the_shell():
    assert not {"LLMTRACK_DIR", "RANK", "SLURM_JOB_ID"} & set(os.environ)

@given(strategies.integers())
def test_property(number):
    pass
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what a pytest of its own says of the tests above, under our conftest."""
    folder = tmp_path_factory.mktemp("checked")
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "COLUMNS": "300", "LLMTRACK_DIR": "/elsewhere", "RANK": "3", "SLURM_JOB_ID": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    ).stdout


@pytest.mark.parametrize(
    ("test", "message"),
    [("test_thread_that_stays", "threads left running"), ("test_file_that_stays_open", "files left open")],
)
def test_what_a_test_leaves_behind_fails_it(outcome: str, test: str, message: str) -> None:
    """A thread that goes on and a file that stays open are errors at the end of the test that left them."""
    assert f"ERROR test_it.py::{test} - AssertionError: {message}" in outcome


@pytest.mark.parametrize(
    "test",
    ["test_thread_that_ends", "test_file_that_is_closed", "test_settings_of_the_shell", "test_property"],
)
def test_a_clean_test_passes(outcome: str, test: str) -> None:
    """What ends, what is closed, and the settings of the shell do not trouble a test."""
    assert f"PASSED test_it.py::{test}" in outcome
    assert f"ERROR test_it.py::{test}" not in outcome
