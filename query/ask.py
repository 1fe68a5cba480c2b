"""One question in SQL, whatever becomes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

from llmtrack.writer.errors import LlmtrackError, UsageError

from .console import to_json
from .views import set_aside

_ROWS: Final = 2048  # fetched at a time
_QUOTED_PATH: Final = re.compile(r"""["'](/[^"']*\.parquet)["']""")


class Answer:
    """The rows of a statement; they can be read once."""

    def __init__(self, con: duckdb.DuckDBPyConnection, statement: str) -> None:
        self._con = con
        self._statement = statement
        self.columns = [column[0] for column in con.description or ()]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows."""
        while some := self._con.fetchmany(_ROWS):
            yield from some

    def write(self, path: Path) -> None:
        """Write the rows to a file; its suffix says in which format.

        Raises:
            UsageError: It cannot be written, or the statement has no rows to write.
        """
        try:
            if path.suffix == ".json":
                rows = (dict(zip(self.columns, row, strict=True)) for row in self.rows())
                path.write_text(to_json(rows) + "\n", encoding="utf-8")
                return
            relation = self._con.sql(self._statement)
            if relation is None:
                raise UsageError("the statement has no rows to write", hint="give a SELECT")
            (relation.write_parquet if path.suffix == ".parquet" else relation.write_csv)(str(path))
        except (OSError, duckdb.IOException) as error:
            raise UsageError(
                f"cannot write {path}: {error}", hint="-o with a file in a folder that is there"
            ) from error


def ask(con: duckdb.DuckDBPyConnection, statement: str) -> Answer:
    """Run one statement; a sealed part that turns out to be unreadable is set aside, and the rest answers.

    Args:
        con: Made by `connect`.
        statement: SQL, as DuckDB has it.

    Raises:
        UsageError: DuckDB does not accept it.
    """
    seen: set[str] = set()
    while True:
        try:
            con.execute(statement)
            return Answer(con, statement)
        except duckdb.Error as error:
            path = _QUOTED_PATH.search(str(error))
            if path is None or path[1] in seen or not Path(path[1]).exists():
                raise _explained(error) from error
            seen.add(path[1])
            set_aside(con, path[1], str(error).partition("\n")[0])


def _explained(error: duckdb.Error) -> LlmtrackError:
    lines = str(error).strip().splitlines()
    text = "\n".join(line for line in lines if line.strip())
    return UsageError(
        text, hint="the views and their columns are in docs/SQL.md; llmtrack sql 'SHOW TABLES' lists them"
    )
