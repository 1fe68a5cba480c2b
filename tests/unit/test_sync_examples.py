"""The examples of ways to run the sync say what the command understands."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import llmtrack.examples
from llmtrack.sync.cli import main

_FOLDER = Path(next(iter(llmtrack.examples.__path__))) / "sync"


def _shown(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--print-config"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


def test_the_service_and_the_file_of_options_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """What systemd would start, with the file that it would read."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read(_FOLDER / "llmtrack-sync.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("llmtrack-sync")
    words = [str(_FOLDER / "llmtrack.toml") if word.endswith(".toml") else word for word in words]
    shown = _shown(capsys, words)
    assert "watch = true  # command line" in shown
    assert 'min_level = "warn"  # file' in shown
    assert 'root = "/shared/runs"  # file' in shown


def test_the_job_is_a_script_and_the_crontab_calls_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """As far as that can be told without Slurm and cron."""
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(_FOLDER / "slurm_sync.sh")], check=True)
    (line,) = [line for line in (_FOLDER / "crontab").read_text().splitlines() if line.startswith("*")]
    words = shlex.split(line)
    begin = next(number for number, word in enumerate(words) if word.endswith("llmtrack-sync"))
    assert "quiet = true  # command line" in _shown(capsys, words[begin + 1 :])
