"""docs/CLI.md is what the commands say of themselves, and each says all that one needs."""

from __future__ import annotations

import re

import click
import pytest

pytest.importorskip("llmtrack.sync.cli", reason="the page has the commands of the sync, too")

from tests import cli_page

_HELPS = list(cli_page.helps())
_WITHOUT_ROWS = {"llmtrack", "llmtrack eval", "llmtrack demo"}  # groups; and what only prints a story


@pytest.mark.skipif(not cli_page.PAGE.is_file(), reason="the documents stand in the checkout alone")
def test_the_page_is_what_help_says() -> None:
    """Words, not spaces: versions of click fill lines differently. `make docs` writes it anew."""
    assert cli_page.PAGE.read_text(encoding="utf-8").split() == cli_page.page().split()


@pytest.mark.parametrize(("name", "command", "text"), _HELPS, ids=[name for name, _, _ in _HELPS])
def test_a_command_says_what_it_does_how_it_is_called_and_how_it_ends(
    name: str, command: click.Command, text: str
) -> None:
    """With an example, every option explained, `--json` where it prints rows, and its exit statuses."""
    assert command.help
    assert re.search(r"Examples?:\n +(\$ )?(llmtrack|export|llmtrack-sync) ", text)
    assert re.search(r"[Ee]xit\s+status", text)
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert [option.name for option in options if not option.help and not option.hidden] == []
    assert ("--json" in text) is (name not in _WITHOUT_ROWS)
