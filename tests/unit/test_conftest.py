"""The check that ends every test: it must see what it is there for, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_under_the_check(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test with our conftest, in a pytest of its own; its standard input stays open until it has ended."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(test)
    environment = {**os.environ, "LLMTRACK_DIR": "/somebody/else", "RANK": "3"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("message", "test"),
    [
        (
            "threads left running",
            "import threading\ndef test(): threading.Thread(target=threading.Event().wait, daemon=True).start()",
        ),
        ("files left open", "kept = []\ndef test(tmp_path): kept.append((tmp_path / 'left').open('w'))"),
    ],
)
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path, message: str, test: str) -> None:
    """A thread that goes on and a file that stays open are errors at the end of the test that left them."""
    result = run_under_the_check(tmp_path, test)
    assert result.returncode == 1, result.stdout
    assert message in result.stdout


@pytest.mark.parametrize(
    "test",
    [
        "import threading\ndef test(): threading.Thread(target=int).start()",
        "def test(tmp_path): (tmp_path / 'done').write_text('')",
        "import os\ndef test(): assert 'LLMTRACK_DIR' not in os.environ and 'RANK' not in os.environ",
        "from hypothesis import given, strategies as st\n@given(st.integers())\ndef test(number): pass",
    ],
    ids=["a thread that ends", "a closed file", "a clean environment", "a property"],
)
def test_a_clean_test_passes(tmp_path: Path, test: str) -> None:
    """What ends, what is closed, and the settings of the shell do not trouble a test."""
    result = run_under_the_check(tmp_path, test)
    assert result.returncode == 0, result.stdout
