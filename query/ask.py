"""One question in SQL, its rows, and what DuckDB has against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

from llmtrack.writer.errors import UsageError

from .console import to_json

SUFFIXES: Final = (".parquet", ".csv", ".json")

_ROWS: Final = 2048  # fetched at a time: DuckDB's own unit


class Answer:
    """The rows of a statement; they can be read once.

    Args:
        con: Made by `connect`. Nothing else must run on it until all rows are read.
        statement: SQL, as DuckDB has it.

    Raises:
        UsageError: DuckDB does not accept it.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, statement: str) -> None:
        self._con = con
        try:
            con.execute(statement)
        except duckdb.Error as error:
            raise _explained(error) from error
        self.columns = [column[0] for column in con.description or ()]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows.

        Raises:
            UsageError: DuckDB found only now that it cannot answer.
        """
        try:
            while some := self._con.fetchmany(_ROWS):
                yield from some
        except duckdb.Error as error:
            raise _explained(error) from error


def write_answer(con: duckdb.DuckDBPyConnection, statement: str, path: Path) -> None:
    """Write the rows of a statement to a file; its suffix, one of `SUFFIXES`, says in which format.

    Args:
        con: Made by `connect`.
        statement: SQL, as DuckDB has it.
        path: Is replaced when it is there.

    Raises:
        UsageError: DuckDB does not accept the statement, it has no rows, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot tell the format of {path}", hint=f"end its name with {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder", hint="make it, or name another")
    try:
        if path.suffix == ".json":
            answer = Answer(con, statement)
            rows = (dict(zip(answer.columns, row, strict=True)) for row in answer.rows())
            path.write_text(to_json(rows) + "\n", encoding="utf-8")
            return
        relation = con.sql(statement)
        if not isinstance(relation, duckdb.DuckDBPyRelation):  # DuckDB 1 gives None for what is no query
            raise UsageError("the statement has no rows to write", hint="give a SELECT")
        (relation.write_parquet if path.suffix == ".parquet" else relation.write_csv)(str(path))
    except duckdb.Error as error:
        raise _explained(error) from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error


def _explained(error: duckdb.Error) -> UsageError:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return UsageError(
        "\n".join(lines), hint="llmtrack sql 'SHOW TABLES' lists the views, and docs/SQL.md their columns"
    )
