"""What the commands that look at a root share: options, the end of a help page, and how damage is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from llmtrack.query.text.console import EXIT_DAMAGED, EXIT_OK, say

if TYPE_CHECKING:
    import duckdb

_SHOWN_DAMAGES: Final = 10

root_option: Final = click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=".",
    envvar="LLMTRACK_DIR",
    show_default="the current folder",
    show_envvar=True,
    help="The folder that holds the runs.",
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print an array of rows.")


def example(*lines: str) -> str:
    """Return the end of a help page; the first character keeps click from filling the lines."""
    return "\n".join(("\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)))


def report_damages(con: duckdb.DuckDBPyConnection, runs: Sequence[str] | None = None) -> int:
    """Say on stderr what could not be read, of some runs or of all, and return the exit status."""
    from llmtrack.query.sql.views import DAMAGES

    found = con.execute(DAMAGES).fetchall()
    return say_damages([row for row in found if runs is None or row[0] in runs])


def say_damages(found: Sequence[tuple[Any, ...]]) -> int:
    """Say rows of the view of damages on stderr, the first few, and return the exit status."""
    for _, path, first_byte, end_byte, reason in found[:_SHOWN_DAMAGES]:
        say(f"damaged: {path}: bytes {first_byte} to {end_byte}: {reason}")
    if len(found) > _SHOWN_DAMAGES:
        say(f"damaged: {len(found) - _SHOWN_DAMAGES} more; llmtrack verify lists all")
    return EXIT_DAMAGED if found else EXIT_OK
