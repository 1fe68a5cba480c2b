"""One question in SQL, its rows, and what DuckDB has against it. A question changes nothing: it only reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

from llmtrack.query.text.console import to_json
from llmtrack.writer.errors import UsageError

SUFFIXES: Final = (".parquet", ".csv", ".json")

_ROWS: Final = 2048  # fetched at a time: DuckDB's own unit
_EXPLAIN: Final = re.compile(r"\s*EXPLAIN\s+(?:ANALYZE\s+)?", re.IGNORECASE)
_WRITES: Final = "a query only reads"
_WRITES_HINT: Final = (
    "give a SELECT; -o x.parquet writes its rows to a file, and connect() in Python takes any statement"
)


class Answer:
    """The rows of a statement; they can be read once.

    Args:
        con: Made by `connect`. Nothing else must run on it until all rows are read.
        statement: One statement of SQL that reads, as DuckDB has it.

    Raises:
        UsageError: It is none, it would write, or DuckDB does not accept it.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, statement: str) -> None:
        self._con = con
        try:
            _begin(con, statement)
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
            self._con.execute("COMMIT")
        except duckdb.Error as error:
            raise _explained(error) from error


def check_reads(con: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Refuse what is not one statement that reads.

    Raises:
        UsageError: It is empty, it is several, or it would write.
        duckdb.Error: DuckDB does not understand it.
    """
    found = con.extract_statements(statement)
    if not found:
        raise UsageError("the query is empty", hint="llmtrack sql 'SHOW TABLES' lists the views")
    if len(found) > 1:
        raise UsageError(f"these are {len(found)} statements", hint="give one at a time")
    explained = _EXPLAIN.match(statement)
    if explained is not None:
        check_reads(con, statement[explained.end() :])
        return
    kind = found[0].type
    if kind is duckdb.StatementType.SELECT:
        return
    # A PIVOT is two statements to DuckDB, and so is a COPY of one. What reads can stand in parentheses.
    if kind.name == "MULTI" and _can_be_parsed(con, f"FROM (\n{statement.strip().rstrip(';')}\n)"):
        return
    raise UsageError(f"{_WRITES}, and this is {_article(kind.name)}", hint=_WRITES_HINT)


def write_answer(con: duckdb.DuckDBPyConnection, statement: str, path: Path) -> None:
    """Write the rows of a statement to a file; its suffix, one of `SUFFIXES`, says in which format.

    Args:
        con: Made by `connect`.
        statement: One statement of SQL that reads, as DuckDB has it.
        path: Is replaced when it is there.

    Raises:
        UsageError: The statement is no query, DuckDB does not accept it, or the file cannot be written.
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
        _begin(con, statement)
        relation = con.sql(statement)
        (relation.write_parquet if path.suffix == ".parquet" else relation.write_csv)(str(path))
        con.execute("COMMIT")
    except duckdb.Error as error:
        raise _explained(error) from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error


def _begin(con: duckdb.DuckDBPyConnection, statement: str) -> None:
    check_reads(con, statement)
    con.execute("SET python_enable_replacements = false")  # or a misspelt view is a variable of ours
    # Against an INSERT inside a WITH. Not enough by itself: a COPY writes its file here, too.
    con.execute("BEGIN TRANSACTION READ ONLY")


def _can_be_parsed(con: duckdb.DuckDBPyConnection, statement: str) -> bool:
    try:
        con.extract_statements(statement)
    except duckdb.Error:
        return False
    return True


def _article(kind: str) -> str:
    name = kind.replace("_", " ")
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _explained(error: duckdb.Error) -> UsageError:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return UsageError(
        "\n".join(lines), hint="llmtrack sql 'SHOW TABLES' lists the views, and docs/SQL.md their columns"
    )
