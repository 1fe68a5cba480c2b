"""What the README shows is true: its code runs, its commands and links exist."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from llmtrack import query
from llmtrack.__main__ import cli

_REPOSITORY = Path(__file__).parents[2]
_README = _REPOSITORY / "README.md"


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    """Files that a page names are there."""
    path = _REPOSITORY / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_command_of_the_readme_exists_with_its_options() -> None:
    """What a reader copies is understood by the command line."""
    from llmtrack.sync.cli import command as sync

    text = _README.read_text(encoding="utf-8")
    commands = re.findall(r"^    llmtrack ([a-z-]+)", text, re.MULTILINE)
    assert len(commands) > 5
    context = click.Context(cli)
    assert [name for name in commands if cli.get_command(context, name) is None] == []
    options = {option for parameter in sync.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", "".join(re.findall(r"^    llmtrack-sync .*", text, re.MULTILINE)))) <= options


def test_the_training_code_of_the_readme_logs_a_run_and_resumes_it(tmp_path: Path) -> None:
    """Run as it stands, with a trainer's functions around it: first from nothing, then from its checkpoint."""
    code = _python_block("import llmtrack").replace("/shared/runs", str(tmp_path / "runs"))
    saved = tmp_path / "checkpoint.json"
    token_counts = itertools.count(1)

    def train_step() -> tuple[float, float, float, int]:
        tokens = 512 * next(token_counts)
        return 1e4 / tokens, 1.0, 3e-4, tokens

    def save(state: dict[str, Any]) -> Path:
        saved.write_text(json.dumps({"llmtrack": state["llmtrack"]}))
        return saved

    def load_latest_checkpoint() -> Any:
        return json.loads(saved.read_text()) if saved.exists() else None

    for steps in (1005, 2010):
        trainer = {"train_step": train_step, "save": save, "load_latest_checkpoint": load_latest_checkpoint}
        exec(code, {**trainer, "config": {"steps": 2010}, "data_mix": {"web": 1.0}, "steps": steps})  # noqa: S102
        token_counts = itertools.count(1001)

    with contextlib.closing(query.connect(tmp_path / "runs")) as log:
        segments = log.sql("SELECT segment, start_step, exit FROM segments ORDER BY segment").fetchall()
        assert segments == [(1, 0, "finished"), (2, 1000, "finished")]
        loss = log.sql("SELECT step, tokens FROM live WHERE name = 'train/loss' ORDER BY step").fetchall()
        assert loss == [(step, 512 * step) for step in range(10, 2011, 10)]
        assert log.sql("SELECT step FROM checkpoints ORDER BY step").fetchall() == [(1000,), (2000,)]


def _python_block(first_line: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(first_line)]
    return str(block)
