"""The page of commands in the docs, as their own help says it: ``python -m tests.cli_page`` writes docs/CLI.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from llmtrack import __main__ as program
from llmtrack.sync.cli import command as sync

PAGE: Final = Path(__file__).parents[1] / "docs" / "CLI.md"

_WIDTH: Final = 100
_HEAD: Final = """# Commands

What `--help` of each command says; made by `make docs`. Results go to stdout, everything else to stderr. `--json`
prints an array of rows with the columns of the views ([SQL.md](SQL.md)), for programs.
"""


def helps() -> Iterator[tuple[str, click.Command, str]]:
    """Yield every command's name, the command, and its help."""
    yield from _helps(program.cli, "llmtrack", None)
    yield from _helps(sync, "llmtrack-sync", None)


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name, _, text in helps():
        parts.append(f"## {name}\n\n```\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, click.Command, str]]:
    context = click.Context(
        command,
        parent=parent,
        info_name=name if parent is None else name.rpartition(" ")[2],
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        auto_envvar_prefix=command.context_settings.get("auto_envvar_prefix"),
        help_option_names=command.context_settings.get("help_option_names"),
    )
    yield name, command, command.get_help(context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _helps(found, f"{name} {child}", context)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
