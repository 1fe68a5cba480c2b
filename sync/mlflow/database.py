"""MLflow's client for a database that it writes by itself, with the calls that points need beside its own.

What a local SQLite file holds is listed without MLflow, whose import takes longer than all the rest of a sync that
finds nothing to do. Nothing is written that way, and a file that looks otherwise than expected is left to MLflow.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from llmtrack.sync.sink import Record

from .rest import OLDEST_FIRST, PAGE_RUNS, Data, Experiment, Info, Latest, Run, filters, whole_client

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_PAGE_OBJECTS: Final = 5_000  # SQLAlchemy's objects in this process: 20,000 at once take 100 MB
_RUNS: Final = """
    SELECT t.value, r.run_uuid, r.name, r.status, r.start_time, r.end_time, r.lifecycle_stage, r.artifact_uri
    FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'llmtrack.run_id'
    WHERE r.experiment_id = ? AND r.lifecycle_stage = 'active'
    ORDER BY r.start_time, r.run_uuid
"""


class DatabaseClient:
    """MLflow's client with the calls of this module beside its own; may be used by several threads.

    Args:
        uri: As MLflow takes it.
        file: Of a local SQLite database; None: another kind.
    """

    def __init__(self, uri: str, file: Path | None) -> None:
        self._uri = uri
        self._file = file
        self._lock = threading.RLock()
        self._writing = (
            threading.Lock()
        )  # one writer at a time is all that SQLite has, and all that this process can do
        self._whole: MlflowClient | None = None

    def __getattr__(self, name: str) -> Any:
        """Return whatever else MLflow's client can do."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._client, name)

    @property
    def _client(self) -> MlflowClient:
        with self._lock:
            if self._whole is None:
                self._whole = whole_client(self._uri)
            return self._whole

    @property
    def _store(self) -> Any:
        return self._client._tracking_client.store  # noqa: SLF001 - the public client neither pages nor closes

    def close(self) -> None:
        """Close what MLflow holds open: it has no call for that, and its pool keeps a local database open."""
        if self._whole is not None:
            engine = getattr(self._store, "engine", None)
            if engine is not None:
                engine.dispose()

    def probe(self) -> None:
        """See that the database is there and can be used; a local one is made if it is not there."""
        if self._file is None or not _has_our_tables(self._file):
            self._client.search_experiments(max_results=1)

    def get_experiment_by_name(self, name: str) -> Any:
        """Return an experiment, deleted or not."""
        if self._whole is None and self._file is not None:
            try:
                with closing(_read_only(self._file)) as con:
                    query = "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ?"
                    found = con.execute(query, [name]).fetchone()
                    return None if found is None else Experiment(str(found[0]), found[1])
            except sqlite3.Error:
                pass  # MLflow tries, and says what is wrong
        return self._client.get_experiment_by_name(name)

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        """Make an experiment, unless another sync did so a moment ago; return its id."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(name, artifact_location))
        except MlflowException as error:
            there = self.get_experiment_by_name(name) if error.error_code == "RESOURCE_ALREADY_EXISTS" else None
            if there is None:
                raise
            return str(there.experiment_id)

    def ours(self, experiment_id: str, run_ids: Sequence[str]) -> list[Any]:
        """Return at least those runs of an experiment that are tagged as some runs of the log, oldest first."""
        if self._whole is None and self._file is not None:
            try:
                with closing(_read_only(self._file)) as con:
                    return _list_runs(con, experiment_id, run_ids)
            except (sqlite3.Error, TypeError, ValueError):
                pass  # MLflow tries, and says what is wrong
        return [run for text in filters(run_ids) for run in self._search(experiment_id, text)]

    def _search(self, experiment_id: str, text: str) -> Iterator[Any]:
        token = None
        while True:
            found = self._client.search_runs(
                [experiment_id], text, max_results=PAGE_RUNS, order_by=OLDEST_FIRST, page_token=token
            )
            yield from found
            token = found.token
            if not token:
                return

    def log_texts(self, ref: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Write parameters and tags."""
        from mlflow.entities import Param, RunTag

        self._client.log_batch(
            ref,
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )

    def log_records(self, ref: str, records: Sequence[Record]) -> None:
        """Add at most a thousand records in one transaction."""
        from mlflow.entities import Metric

        metrics = [Metric(key, value, time_ms, tokens) for key, tokens, time_ms, value, *_ in records]
        with self._writing:  # the store looks at every metric; the client in front of it would look a second time
            self._store.log_batch(ref, metrics=metrics, params=[], tags=[])

    def forget_run(self, ref: str) -> None:
        """Remove a deleted run for good, as ``mlflow gc`` does; where this MLflow has no such call it stays deleted."""
        forget = getattr(self._store, "_hard_delete_run", None)
        if forget is not None:
            with self._writing:
                forget(ref)

    def history(self, ref: str, key: str, *, page: int, skip: int) -> Iterator[Record]:
        """Yield the records of one key in MLflow's order: time, step, value."""
        from mlflow.utils.search_utils import SearchUtils

        page = min(page, _PAGE_OBJECTS)
        token = SearchUtils.create_page_token(skip) if skip else None  # type: ignore[no-untyped-call]
        while True:
            found = self._store.get_metric_history(run_id=ref, metric_key=key, max_results=page, page_token=token)
            for metric in found:
                yield Record(key, metric.step, metric.timestamp, metric.value)
            token = found.token
            if token is None:
                return


def _read_only(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)


def _has_our_tables(file: Path) -> bool:
    try:
        with closing(_read_only(file)) as con:
            _list_runs(con, "0", [])
    except sqlite3.Error:
        return False
    return True


def _list_runs(con: sqlite3.Connection, experiment_id: str, run_ids: Sequence[str]) -> list[Run]:
    wanted = set(run_ids)
    latest = "SELECT key, value, timestamp, step, is_nan FROM latest_metrics WHERE run_uuid = ?"
    return [
        Run(
            Info(ref, name or "", experiment_id, status, start, end, stage, uri or ""),
            Data(
                [
                    Latest(key, math.nan if is_nan else value, time_ms, step)
                    for key, value, time_ms, step, is_nan in con.execute(latest, [ref])
                ],
                dict(con.execute("SELECT key, value FROM params WHERE run_uuid = ?", [ref])),
                dict(con.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [ref])),
            ),
        )
        for run_id, ref, name, status, start, end, stage, uri in con.execute(_RUNS, [int(experiment_id)]).fetchall()
        if run_id in wanted
    ]
