"""Open a root as SQL: `connect` makes the views of `views.sql` over all parts, `refresh` takes in what is new."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from llmtrack.query.read.columns import to_table
from llmtrack.query.read.log import SMALL_TABLES, Log, News
from llmtrack.query.read.points import PARTS, ROWS, SHAPES, Packer
from llmtrack.writer.errors import UsageError
from llmtrack.writer.format import EVALS_FOLDER, SCHEMAS, TIME

STALLED_AFTER_S: Final = 900.0  # 30 heartbeats: storage may stand still for ten minutes under a run that is well
LOST_AFTER_S: Final = 86_400.0

_KEYS: Final = [("run_id", pa.string()), ("segment", pa.int64())]
_POINT_TYPES: Final = {
    "seq": "BIGINT",
    "time": "TIMESTAMP WITH TIME ZONE",
    "step": "BIGINT",
    "tokens": "BIGINT",
    "name": "VARCHAR",
    "value": "DOUBLE",
}
_POINTS: Final = pa.schema([*_KEYS, *(SCHEMAS["metrics"].field(name) for name in _POINT_TYPES)])
_EVALS: Final = pa.schema([_KEYS[0], ("file", pa.string()), ("row_number", pa.int64()), *SCHEMAS["evals"]])
_REACHED: Final = pa.schema(
    [*_KEYS, ("time", TIME), ("step", pa.int64()), ("tokens", pa.int64()), ("dropped", pa.int64())]
)
_FIRSTS: Final = pa.schema([*_KEYS, ("tokens", pa.int64())])
_DAMAGES: Final = pa.schema(
    [*_KEYS, ("path", pa.string()), ("first_byte", pa.int64()), ("end_byte", pa.int64()), ("reason", pa.string())]
)
_NOW: Final = pa.schema([("time", TIME), ("stalled_before", TIME), ("lost_before", TIME)])
_HIVE: Final = "hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'segment': BIGINT}"
DAMAGES: Final = "SELECT run_id, path, first_byte, end_byte, reason FROM damages ORDER BY path, first_byte"
_OPEN_POINTS: Final = """
    SELECT p.run_id, p.segment, r.seq, r.time, r.step, r.tokens, n.name, r.points[n.position] AS value
    FROM log.open_rows r
    JOIN log.open_shapes n ON n.id = r.shape_id
    JOIN log.open_parts p ON p.id = r.part_id
"""
_FORGET_ROWS: Final = """
    DELETE FROM log.open_rows r
    WHERE EXISTS (
        SELECT 1
        FROM log.open_parts p
        JOIN llmtrack_rows k ON k.run_id = p.run_id AND k.segment = p.segment AND coalesce(k.part, p.part) = p.part
        WHERE p.id = r.part_id AND r.seq >= k.seq
    )
"""
# Where no segment has points at its start: the whole comparison is left out when DuckDB sees at once that it is empty.
_NOTHING_TAKEN: Final = """
    CREATE OR REPLACE VIEW log.taken AS
    SELECT run_id, segment, name FROM log.no_points WHERE false
"""
_VIEWS_BEGIN: Final = "-- ==== Views"
_CONFIG: Final[dict[str, str | bool | int | float | list[str]]] = {
    # Nodes without internet: whatever is not there must fail at once instead of being looked for.
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


@dataclass(frozen=True)
class _Files:
    """What the views name: sealed parts, those among them that starts are compared with (None: no need), evals.

    And whether there are points of open parts. Planning a query of one curve takes a third less where there are none
    and nothing is compared.
    """

    parts: list[str]
    before: list[str] | None
    evals: list[str]
    has_open: bool = False


class _State:
    """What belongs to one connection.

    Attributes:
        is_behind: A refresh failed: what the log and the packer have read since is not in the database.
    """

    def __init__(
        self,
        open_log: Callable[[], Log],
        runs: frozenset[str] | None,
        *,
        points: bool,
        stalled_s: float,
        lost_s: float,
    ) -> None:
        self.open_log = open_log
        self.log = open_log()
        self.is_behind = False
        self.runs = runs
        self.points = points
        self.stalled = dt.timedelta(seconds=stalled_s)
        self.lost = dt.timedelta(seconds=lost_s)
        self.files: _Files | None = None
        self.packer = Packer()


_states: weakref.WeakKeyDictionary[duckdb.DuckDBPyConnection, _State] = weakref.WeakKeyDictionary()


def connect(
    root: str | os.PathLike[str],
    *,
    runs: Collection[str] | None = None,
    points: bool = True,
    check: bool = True,
    stalled_after_s: float | None = None,
    lost_after_s: float | None = None,
) -> duckdb.DuckDBPyConnection:
    """Open a root as a snapshot of this moment, with the views of `views.sql`.

    Args:
        root: The folder that holds the runs.
        runs: See only these runs and the runs they were forked from; None: all. What others have on disk is not read.
        points: False leaves out the points, and the views `metrics`, `live` and `history`: a quick look at the runs.
        check: Read each sealed part whole, the first time it is seen, and compare its checksum: DuckDB looks at none,
            and takes a changed byte for a value. A second for each gigabyte; False leaves that to `llmtrack verify`,
            and has only the footer of each part read: one that DuckDB cannot open is left out all the same.
        stalled_after_s: Silence after which a running run counts as stalled; None: `LLMTRACK_STALLED_AFTER`, or 900.
        lost_after_s: Silence after which it counts as lost; None: `LLMTRACK_LOST_AFTER`, or 86,400.

    Raises:
        UsageError: There is no such folder or run.
    """
    stalled_s = _seconds("LLMTRACK_STALLED_AFTER", STALLED_AFTER_S) if stalled_after_s is None else stalled_after_s
    lost_s = _seconds("LLMTRACK_LOST_AFTER", LOST_AFTER_S) if lost_after_s is None else lost_after_s
    open_log = functools.partial(Log, Path(os.path.abspath(root)), check=check and points, footers=points)
    chosen = None if runs is None else frozenset(runs)
    state = _State(open_log, chosen, points=points, stalled_s=stalled_s, lost_s=lost_s)
    con = duckdb.connect(config=_CONFIG)
    _fill(con, state)
    return con


def save_catalog(
    root: str | os.PathLike[str], path: str | os.PathLike[str], *, runs: Collection[str] | None = None
) -> list[tuple[Any, ...]]:
    """Write a DuckDB database with the views and macros of a root, which DuckDB opens without llmtrack.

    It holds the records, and the points that no sealed part has yet, as they are at this moment; of sealed parts it
    holds the absolute paths. What is written later it does not see: save it again. It appears whole, in the place of an
    older one.

    Args:
        root: The folder that holds the runs.
        path: Is replaced when it is a DuckDB database.
        runs: Only these runs and the runs they were forked from; None: all.

    Returns:
        What could not be read, and the catalog is without: run_id, path, first_byte, end_byte, reason.

    Raises:
        UsageError: There is no such folder or run, the file is something else, or cannot be written.
    """
    target = Path(os.path.abspath(path))
    state = _State(
        functools.partial(Log, Path(os.path.abspath(root)), check=True),
        None if runs is None else frozenset(runs),
        points=True,
        stalled_s=_seconds("LLMTRACK_STALLED_AFTER", STALLED_AFTER_S),
        lost_s=_seconds("LLMTRACK_LOST_AFTER", LOST_AFTER_S),
    )
    try:
        if target.exists() and not _is_database(target):
            raise UsageError(f"{target} is there, and is no DuckDB database", hint="name another file")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            new = Path(folder) / target.name
            # The oldest layout, so that an older DuckDB opens it too; one that has no other does not know the setting.
            layout = {} if duckdb.__version__.startswith("1.1") else {"storage_compatibility_version": "v1.0.0"}
            with duckdb.connect(str(new), config={**_CONFIG, **layout}) as con:
                _fill(con, state)
                damages = con.execute(DAMAGES).fetchall()
            new.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", hint="name another file") from error
    return damages


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == b"DUCK"


def _fill(con: duckdb.DuckDBPyConnection, state: _State) -> None:
    """Make the tables, views and macros of a root in an empty database."""
    # Not in the current folder, which may be the root: made only when memory runs out.
    spill = Path(tempfile.gettempdir()) / f"llmtrack-{os.getpid()}"
    con.execute(f"SET temp_directory = {_literal(str(spill))}")
    con.execute("SET GLOBAL TimeZone = 'UTC'")  # of cursors too
    con.execute("CREATE SCHEMA log")
    for table, schema in (
        *((_table_name(name), pa.schema([*_KEYS, *SCHEMAS[name]])) for name in SMALL_TABLES),
        ("open_parts", PARTS),
        ("open_shapes", SHAPES),
        ("open_rows", ROWS),
        ("no_points", _POINTS),
        ("no_evals", _EVALS),
    ):
        _replace(con, table, pa.Table.from_batches([], schema))
    _states[con] = state
    refresh(con)


def refresh(con: duckdb.DuckDBPyConnection, runs: Collection[str] | None = None) -> None:
    """Take in what is new in the root of a connection made by `connect`, reading only that.

    Cursors of the connection see the root as it was until this returns, and as it is afterwards.

    Args:
        con: Made by `connect`.
        runs: Look only into the folders of these runs, and of those they were forked from, because a watcher knows that
            nothing else changed; None: all that the connection sees.

    Raises:
        UsageError: The connection was not made by `connect`.
    """
    state = _state(con)
    with con.cursor() as writing:  # of its own: the caller may be in the middle of reading a result
        writing.execute("BEGIN")
        try:
            if state.is_behind:
                _start_over(writing, state)
                runs = None
            insert = functools.partial(_insert, writing)
            take = functools.partial(state.packer.add, insert=insert) if state.points else None
            with _collector_at_rest():
                news = state.log.read(state.runs, changed=runs, take_points=take)
                state.packer.flush(insert)
                _apply(writing, state, news)
            writing.execute("COMMIT")
        except BaseException:
            state.is_behind = True
            writing.execute("ROLLBACK")
            raise
        state.is_behind = False


def _start_over(con: duckdb.DuckDBPyConnection, state: _State) -> None:
    """Forget all that was read, so that it is read again."""
    state.log, state.packer = state.open_log(), Packer()
    for table in (*map(_table_name, SMALL_TABLES), "open_parts", "open_shapes", "open_rows"):
        con.execute(f"DELETE FROM log.{table}")


def set_aside(con: duckdb.DuckDBPyConnection, path: str, reason: str) -> None:
    """Leave out a Parquet file that turned out to be unreadable; `damages` has it from now on.

    Raises:
        UsageError: The connection was not made by `connect`.
    """
    _state(con).log.set_aside(path, reason)
    refresh(con)


def log_of(con: duckdb.DuckDBPyConnection) -> Log:
    """Return the log that a connection was filled from, as it was read last.

    Raises:
        UsageError: The connection was not made by `connect`.
    """
    return _state(con).log


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from looking, again and again, through what a long listing has just made: a sixth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _state(con: duckdb.DuckDBPyConnection) -> _State:
    state = _states.get(con)
    if state is None:
        raise UsageError("this connection was not made by llmtrack.query.connect", hint="con = connect(root)")
    return state


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a number", hint=f"give seconds, e.g. {variable}=900") from None


def _apply(con: duckdb.DuckDBPyConnection, state: _State, news: News) -> None:
    log = state.log
    for table in SMALL_TABLES:
        old = sorted({*news.gone, *news.replaced[table]})
        _delete(con, _table_name(table), old)
        for rows in news.rows.get(table, ()):
            _insert(con, _table_name(table), rows)
    _forget_points(con, news)
    _replace(con, "folders", to_table(pa.schema(_KEYS), log.segments()))
    _replace(
        con,
        "reached",
        to_table(_REACHED, [(run, number, r.time, r.step, r.tokens, r.dropped) for run, number, r in log.reached()]),
    )
    _replace(con, "firsts", to_table(_FIRSTS, log.first_tokens()))
    _replace(
        con,
        "damages",
        to_table(_DAMAGES, [(*owner, str(d.path), d.first_byte, d.end_byte, d.reason) for owner, d in log.damages()]),
    )
    now = dt.datetime.now(dt.UTC)
    _replace(con, "now", to_table(_NOW, [(now, now - state.stalled, now - state.lost)]))
    tables, views = _sql("views.sql").split(_VIEWS_BEGIN)
    con.execute(tables)
    places = con.execute("SELECT DISTINCT before_run, before_segment FROM log.befores").fetchall()
    before = log.sealed_parts(set(places)) if places else None
    parts = (log.sealed_parts(), before) if state.points else ([], None)  # DuckDB opens what it is told of
    ((has_open,),) = con.execute("SELECT count(*) > 0 FROM log.open_rows").fetchall()
    files = _Files(*parts, log.eval_files(), has_open)
    if state.files is None or (files.before is None) is not (state.files.before is None):
        _name_files(con, _Files([], None, []))  # each view would look at the 10,000 files once more
        con.execute(_VIEWS_BEGIN + views)
        if files.before is None:
            con.execute(_NOTHING_TAKEN)
        if state.points:
            con.execute(_sql("macros.sql"))
        else:  # an empty view would look like an answer
            con.execute("DROP VIEW history; DROP VIEW live; DROP VIEW metrics")
    if files != state.files:
        _name_files(con, files)
    state.files = files


def _name_files(con: duckdb.DuckDBPyConnection, files: _Files) -> None:
    """Say where the points and evals are: the files are named one by one, so that a snapshot stays what it was."""
    for view, parts in (("points", files.parts), ("points_before", files.before)):
        sources = [_OPEN_POINTS] if files.has_open and parts is not None else []
        if parts:
            # The casts do nothing to our own parts; another program's may have narrower integers.
            columns = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in _POINT_TYPES.items())
            sources.append(f"SELECT run_id, segment, {columns} FROM read_parquet({_literal(parts)}, {_HIVE})")
        source = " UNION ALL ".join(sources or ["SELECT * FROM log.no_points"])
        con.execute(f"CREATE OR REPLACE VIEW log.{view} AS {source}")
    names = ", ".join(SCHEMAS["evals"].names)
    if files.evals:
        # Not hive_partitioning: it wants the same folders above every file, and ROOT/evals has no run above it.
        run_id = f"nullif(regexp_extract(filename, 'run_id=([^/]*)/{EVALS_FOLDER}/[^/]*$', 1), '')"
        source = (
            f"SELECT {run_id} AS run_id, filename AS file, file_row_number AS row_number, {names} FROM read_parquet("
            f"{_literal(files.evals)}, filename = true, file_row_number = true, hive_partitioning = false)"
        )
    else:
        source = "SELECT * FROM log.no_evals"
    con.execute(f"CREATE OR REPLACE VIEW log.eval_rows AS {source}")


def _sql(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _table_name(table: str) -> str:
    return "records" if table == "segments" else table


def _replace(con: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    _with_rows(con, rows, f"CREATE OR REPLACE TABLE log.{table} AS SELECT * FROM llmtrack_rows")


def _insert(con: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    _with_rows(con, rows, f"INSERT INTO log.{table} SELECT * FROM llmtrack_rows")


def _delete(con: duckdb.DuckDBPyConnection, table: str, keys: Sequence[tuple[str, int]]) -> None:
    """Delete all rows of some segments."""
    if keys:
        same = "t.run_id = k.run_id AND t.segment = k.segment"
        statement = f"DELETE FROM log.{table} t WHERE EXISTS (SELECT 1 FROM llmtrack_rows k WHERE {same})"
        _with_rows(con, to_table(pa.schema(_KEYS), keys), statement)


def _forget_points(con: duckdb.DuckDBPyConnection, news: News) -> None:
    """Delete the points of segments that are gone, and those that do not count any more."""
    keys = [*((*key, None, 0) for key in news.gone), *news.taken_back]
    if keys:
        rows = to_table(pa.schema([*_KEYS, ("part", pa.int64()), ("seq", pa.int64())]), keys)
        _with_rows(con, rows, _FORGET_ROWS)


def _with_rows(con: duckdb.DuckDBPyConnection, rows: pa.Table, statement: str) -> None:
    con.register("llmtrack_rows", rows)
    con.execute(statement)
    con.unregister("llmtrack_rows")


def _literal(value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "[" + ", ".join(map(_literal, value)) + "]"
