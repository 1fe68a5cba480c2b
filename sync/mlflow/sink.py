"""Replays into MLflow: a server, or a database beside the caller. `docs/SYNC.md` says what a run looks like there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from llmtrack.sync.kinds import CANONICAL, PROVISIONAL, REPLACED, SUPERSEDED
from llmtrack.sync.sink import Encoder, Record, RunSpec, TrackerRun
from llmtrack.sync.story import Story, StoryPoint
from llmtrack.writer.errors import RejectedError

from . import client as mlflow_client
from .encode import MlflowEncoder, key_of, left_out, params_of, text_tags, told_records

if TYPE_CHECKING:
    from mlflow.entities import Run

    from llmtrack.sync.replay.figures import Figures

    from .database import DatabaseClient
    from .rest import RestClient

_BATCH_METRICS: Final = 1000  # the API refuses more
_LANES: Final = 4  # over HTTP the client encodes while the server inserts; more than four gain nothing
_PAGE_METRICS: Final = 20_000  # read back at once, 3 MB of JSON: a server sorts all of a key anew for each page
_NAME_CHARS: Final = 250

_STATUS: Final = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_COLOR: Final = {SUPERSEDED: "#c0c0c0", REPLACED: "#c0c0c0", "provisional": "#8c8c8c"}  # greys: not the curve itself

# Facts that MLflow's pages have a place for.
_SHOWN_BY_MLFLOW: Final = {
    "git_commit": "mlflow.source.git.commit",
    "git_dirty": "mlflow.source.git.dirty",
}
# Of curves, none of them grey. Those that MLflow would choose meet too often.
_COLORS: Final = (
    "#1f6fb5", "#d1495b", "#2e8b57", "#8e5ea2", "#e07b00", "#00838f", "#a0522d", "#c2338a", "#6b7f00", "#3f51b5",
)  # fmt: skip
_RUN_COLOR: Final = "mlflow.runColor"
_PAGES: Final = "workflowType=machine_learning"  # of MLflow's two sets of pages, not the one for agents
_PARENT: Final = "mlflow.parentRunId"
_NOTE: Final = "mlflow.note.content"
_DESCRIBED: Final = "llmtrack.described"  # digest of the configuration whose parameters are all there


class MlflowSink:
    """The sink ``mlflow``. MLflow's database makes appending idempotent: equal metrics are one row there."""

    name = mlflow_client.NAME
    batch_records = _BATCH_METRICS
    repeats = True

    def __init__(self, uri: str | None, *, timeout_s: float) -> None:
        self._uri = mlflow_client.resolve_uri(uri)
        self._timeout_s = timeout_s
        self._is_server = self._uri.startswith(("http://", "https://"))
        self._experiments: dict[str, str] = {}
        self._folder = mlflow_client.local_folder(self._uri)
        self._open: RestClient | DatabaseClient | None = None
        self.tracker = mlflow_client.without_credentials(self._uri)
        self.lanes = _LANES if self._is_server else 1  # in this process the inserting holds the interpreter
        self.look = self.tracker if self._is_server else f"mlflow server --backend-store-uri {self.tracker}"

    def open(self) -> None:
        """Contact the tracker; a local database is made if it is not there."""
        if self._open is None:
            self._open = mlflow_client.connect(self._uri, self._timeout_s)

    def close(self) -> None:
        """Let go of connections and files."""
        if self._open is not None:
            self._open.close()
            self._open = None

    @property
    def _client(self) -> RestClient | DatabaseClient:
        self.open()
        assert self._open is not None  # noqa: S101 - open() returned
        return self._open

    def list_runs(self, project: str, run_ids: Sequence[str]) -> list[TrackerRun]:
        """Return every run of these in MLflow that carries our tags, oldest first."""
        with mlflow_client.translated(self._uri):
            experiment = self._client.get_experiment_by_name(project)
            if experiment is None:
                return []
            if experiment.lifecycle_stage != "active":
                raise RejectedError(
                    f"the experiment {project!r} was deleted in MLflow",
                    sink=self.name,
                    run_id=run_ids[0] if run_ids else "",
                    hint=f"mlflow experiments restore -x {experiment.experiment_id}",
                )
            self._experiments[project] = experiment.experiment_id
            runs = self._client.ours(experiment.experiment_id, run_ids)
        wanted = set(run_ids)
        return [run for run in map(self._tracker_run, runs) if run is not None and run.run_id in wanted]

    def create(self, spec: RunSpec) -> TrackerRun:
        """Make a run; its tags come with the request that makes it."""
        tags = _tags(spec)
        tags.pop(_DESCRIBED, None)  # not before the parameters are there
        if spec.kind == CANONICAL:
            tags[_RUN_COLOR] = _color(spec.run_id, spec.facts.get("parent_run"))  # once: a user may choose another
        with mlflow_client.translated(self._uri, spec.run_id):
            native = self._client.create_run(
                self._experiment(spec.project), start_time=spec.start_ms, tags=tags, run_name=_name(spec)
            )
        return self.update(_ours(self._tracker_run(native)), spec)

    def update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        """Make a run what the spec says, and send only what differs."""
        native: Run = run.native
        tags = _tags(spec) | self._note(native, spec)
        changed = {key: value for key, value in tags.items() if native.data.tags.get(key) != value}
        renamed = spec.kind != CANONICAL and native.info.run_name != _name(spec)  # a user may rename the curve itself
        status = _STATUS[spec.status]
        ended = status != "RUNNING" and spec.end_ms is not None and native.info.end_time != spec.end_ms
        if not (changed or renamed or ended or native.info.status != status):
            return run
        with mlflow_client.translated(self._uri, spec.run_id):
            if changed:
                self._describe(run.ref, spec, changed)
            if renamed:
                self._client.update_run(run.ref, name=_name(spec))
            if status == "RUNNING":
                self._client.update_run(run.ref, status=status)
            elif ended or native.info.status != status:
                self._client.set_terminated(run.ref, status, end_time=spec.end_ms or native.info.end_time)
            return _ours(self._tracker_run(self._client.get_run(run.ref)))

    def prepare(self, run: TrackerRun, names: Iterable[str]) -> dict[str, str]:
        """Write down what the names that MLflow refuses are called there, in tags ``llmtrack.name.<key>``."""
        mapped = {name: key for name in names if (key := key_of(name)) != name}
        tags: dict[str, str] = {}
        for name, key in mapped.items():
            tags.update(text_tags(f"llmtrack.name.{key}", name))
        lacking = {key: value for key, value in tags.items() if run.native.data.tags.get(key) != value}
        if lacking:
            with mlflow_client.translated(self._uri, run.run_id):
                self._log(run.ref, tags=lacking)
        return mapped

    def encoder(self, segment: int) -> Encoder:  # noqa: ARG002 - MLflow is not told of it
        """Return an encoder for one part of a segment."""
        return MlflowEncoder()

    def append(self, run: TrackerRun, records: Sequence[Record]) -> None:
        """Add at most a thousand metrics in one request."""
        with mlflow_client.translated(self._uri, run.run_id):
            self._client.log_records(run.ref, records)

    def flush(self, run: TrackerRun, figures: Callable[[], list[Figures]]) -> None:
        """Do nothing: what `append` took is accepted, and MLflow makes its own figures."""

    def tell(self, run: TrackerRun, story: Story) -> list[str]:
        """Make models of evaluated checkpoints, points of alerts and evaluations, and tables of all."""
        from .story import Teller

        mapped = self.prepare(run, sorted({point.name for point in story.points()}))
        notes = [f"the metric {name!r} is called {key!r} there" for name, key in mapped.items()]
        notes += filter(None, [left_out([(setting.config, setting.recipe) for setting in story.settings])])
        has_artifacts = self._is_server or self._folder is not None
        with mlflow_client.translated(self._uri, run.run_id):
            return notes + Teller(self._client, run, story, has_artifacts=has_artifacts).tell()

    def told(self, points: Iterable[StoryPoint]) -> list[Record]:
        """Return the records of a story's points."""
        return told_records(points)

    def keys(self, run: TrackerRun) -> list[str]:
        """Return every key that has metrics in a run."""
        with mlflow_client.translated(self._uri, run.run_id):
            return sorted(self._client.get_run(run.ref).data.metrics)

    def read(self, run: TrackerRun, key: str, *, skip: int = 0) -> Iterator[Record]:
        """Read back the history of one key, which MLflow gives in the order of time, step and value."""
        with mlflow_client.translated(self._uri, run.run_id):
            yield from self._client.history(run.ref, key, page=_PAGE_METRICS, skip=skip)

    def delete(self, run: TrackerRun) -> None:
        """Delete a run as MLflow does: it can be restored until ``mlflow gc``.

        Of a local database a provisional run is gone at once, because there is one for every checkpoint.
        """
        with mlflow_client.translated(self._uri, run.run_id):
            self._client.delete_run(run.ref)
            if self._folder is not None and run.kind == PROVISIONAL:
                self._client.forget_run(run.ref)

    def _experiment(self, project: str) -> str:
        if project not in self._experiments:
            place = self._artifact_location(project)
            self._experiments[project] = self._client.create_experiment(project, place)
        return self._experiments[project]

    def _artifact_location(self, project: str) -> str | None:
        """Return where MLflow is to keep a project's tables: beside a local database, not in the current folder."""
        return None if self._folder is None else (self._folder / "mlartifacts" / quote(project, safe="")).as_uri()

    def _tracker_run(self, native: Run) -> TrackerRun | None:
        tags = native.data.tags
        if "llmtrack.run_id" not in tags or "llmtrack.kind" not in tags:
            return None
        info = native.info
        segment, generation = tags.get("llmtrack.segment", ""), tags.get("llmtrack.generation", "")
        return TrackerRun(
            ref=info.run_id,
            run_id=tags["llmtrack.run_id"],
            kind=tags["llmtrack.kind"],
            segment=int(segment) if segment.isdecimal() else None,
            generation=int(generation) if generation.isdecimal() else 1,
            newest={
                metric.key: Record(metric.key, metric.step, metric.timestamp, metric.value)
                for metric in native.data._metric_objs  # noqa: SLF001 - the public dictionary has values alone
            },
            url=self._page(info.experiment_id, info.run_id),
            native=native,
        )

    def _page(self, experiment_id: str, ref: str) -> str:
        return f"{self.tracker}/#/experiments/{experiment_id}/runs/{ref}?{_PAGES}" if self._is_server else ""

    def _describe(self, ref: str, spec: RunSpec, tags: dict[str, str]) -> None:
        """Write tags, and the parameters that are not there yet: MLflow never changes one."""
        params, long_values = params_of(spec.config, spec.recipe)
        if params and _DESCRIBED in tags:
            there = self._client.get_run(ref).data.params
            self._log(ref, params={key: value for key, value in params.items() if key not in there}, tags=long_values)
        self._log(ref, tags=tags)

    def _log(self, ref: str, *, params: dict[str, str] | None = None, tags: dict[str, str] | None = None) -> None:
        self._client.log_texts(ref, params or {}, tags or {})

    def _note(self, native: Run, spec: RunSpec) -> dict[str, str]:
        """Return the tags of the note, unless somebody has written another one there."""
        there = native.data.tags.get(_NOTE)
        if not spec.note or (there is not None and native.data.tags.get("llmtrack.note") != _digest(there)):
            return {}
        return {_NOTE: spec.note, "llmtrack.note": _digest(spec.note)}


def _tags(spec: RunSpec) -> dict[str, str]:
    tags = {
        "llmtrack.run_id": spec.run_id,
        "llmtrack.kind": spec.kind,
        "llmtrack.generation": str(spec.generation),
    }
    if spec.segment is not None:
        tags["llmtrack.segment"] = str(spec.segment)
    if spec.parent is not None:
        tags[_PARENT] = spec.parent
    if spec.kind in _COLOR:
        tags[_RUN_COLOR] = _COLOR[spec.kind]
    if len(spec.name) > _NAME_CHARS:
        tags |= text_tags("llmtrack.run_name", spec.name)
    for key, value in spec.facts.items():
        name = key_of(f"llmtrack.{key}")
        tags.update(text_tags(name, value))
        if name != f"llmtrack.{key}":
            tags.update(text_tags(f"llmtrack.name.{name}", key))
    tags |= {shown: spec.facts[fact] for fact, shown in _SHOWN_BY_MLFLOW.items() if fact in spec.facts}
    if spec.kind == CANONICAL:
        tags |= {"mlflow.source.type": "JOB" if "job_id" in spec.facts else "LOCAL", "mlflow.source.name": "llmtrack"}
        if "job_name" in spec.facts:
            tags["mlflow.source.name"] = spec.facts["job_name"]
    if spec.config or spec.recipe:
        tags[_DESCRIBED] = _digest(json.dumps([spec.config, spec.recipe], sort_keys=True))
    return tags


def _name(spec: RunSpec) -> str:
    """Return what MLflow has room for; the whole name is a tag."""
    return spec.name if len(spec.name) <= _NAME_CHARS else f"{spec.name[: _NAME_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _color(run_id: str, parent_run: str | None) -> str:
    """Return the colour of a run's curve: always the same, and another one than its parent's."""
    number = int(_digest(run_id), 16)
    if parent_run is not None and (number - int(_digest(parent_run), 16)) % len(_COLORS) == 0:
        number += 1
    return _COLORS[number % len(_COLORS)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ours(run: Any) -> TrackerRun:
    if run is None:
        raise RejectedError(
            "MLflow returned a run without the tags it was given",
            sink=mlflow_client.NAME,
            hint="look whether something between here and the server removes tags",
        )
    found: TrackerRun = run
    return found
