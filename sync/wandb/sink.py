"""Replays into Weights & Biases with the real client. `docs/WANDB.md` says what a run looks like there."""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from llmtrack.sync.kinds import CANONICAL
from llmtrack.sync.replay.figures import Figures
from llmtrack.sync.sink import Encoder, Record, RunSpec, TrackerRun
from llmtrack.sync.story import Story, StoryPoint
from llmtrack.writer.errors import LlmtrackError, RejectedError, RetryableSinkError, UsageError

from . import client as wandb_client
from .client import DeletedIdError
from .describe import EXIT, OUR_TAGS, about_of, digest, every_of, id_of, name_of, note_of, project_of, tags_of
from .encode import KEY, OURS, TOKENS, RowReader, WandbEncoder, config_of, figures_of, key_of, summary_of, told_records
from .pace import Pace
from .session import Session

_BATCH_ROWS: Final = 500
_SWITCH_S: Final = 0.0005  # or the thread that hands rows to the client waits 5 ms for the one that reads the log
_CLIENT_FOLDER: Final = "WANDB_DIR"
_ID_TRIES: Final = 20  # ids of deleted runs that are passed over
_FRESH_S: Final = 3600.0  # an alert older than this wakes nobody up
_ALIKE: Final = {"running": {"running"}, "finished": {"finished"}, "failed": {"failed", "crashed", "killed"}}
_LEVELS: Final = {"info": "INFO", "warning": "WARN", "warn": "WARN", "error": "ERROR", "critical": "ERROR"}
_ID: Final = re.compile(r"[A-Za-z0-9._-]{0,40}")


class WandbSink:
    """The sink ``wandb``. W&B keeps rows in the order in which they come, and never takes one back.

    So a run of which something may be on its way is compared before more is sent, and every session begins only where
    the server's count of rows equals ours.

    Args:
        uri: Address of the server.
        timeout_s: Seconds without any row arriving after which it counts as not reachable.
        id_prefix: Put before every run id.
        max_rows_per_minute: For all runs together.
        every: Runs that are made from now on get, of each so many steps, but some rows; see `thin`.
    """

    name = wandb_client.NAME
    lanes = 4  # so many runs at a time: the rows of one all go through one lane
    batch_records = _BATCH_ROWS
    repeats = False

    def __init__(
        self,
        uri: str | None,
        *,
        timeout_s: float,
        id_prefix: str = "",
        max_rows_per_minute: int | None = None,
        every: int = 1,
    ) -> None:
        self._url = wandb_client.resolve_url(uri)
        if not _ID.fullmatch(id_prefix):
            raise UsageError(f"{id_prefix!r} cannot be part of a W&B id", hint="letters, digits, '.', '_' and '-'")
        self._prefix = id_prefix
        self._timeout_s = timeout_s
        self._pace = Pace(max_rows_per_minute)
        self._every = every
        self._switch_s = sys.getswitchinterval()
        self._entity = os.environ.get("WANDB_ENTITY") or ""
        self._open_api: Any = None
        self._api_of = -1
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._folder_before: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._failed: dict[str, LlmtrackError] = {}
        self._rows: dict[str, int] = {}  # by run, what the next row is numbered
        self._lines: dict[str, int] = {}  # by run, how many rows there are to read back
        self._names: dict[str, list[str]] = {}
        self.tracker = f"{self._url}/{self._entity}{'#' + id_prefix if id_prefix else ''}"
        self.look = self._url

    def open(self) -> None:
        """Contact the server."""
        wandb_client.require_key(self._url)
        sys.setswitchinterval(_SWITCH_S)
        self._own_folder()
        with wandb_client.translated(self._url):
            if not self._entity:
                self._entity = self._api.default_entity or ""
        if not self._entity:
            raise UsageError(f"{self._url} does not say whose runs these are", hint="WANDB_ENTITY=TEAM_OR_USER")

    def close(self) -> None:
        """End the client's service, whatever it is at: what did not arrive is sent by the next sync."""
        sys.setswitchinterval(self._switch_s)
        unfinished = bool(self._sessions)
        self._sessions.clear()
        self._open_api = None
        wandb_client.stop_service(at_once=unfinished)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
            os.environ.pop(_CLIENT_FOLDER, None)
            os.environ.update(self._folder_before)

    def _own_folder(self) -> Path:
        """Return a folder that is gone in the end; the client makes one in it for every run that it is asked about."""
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="llmtrack-wandb-", ignore_cleanup_errors=True)
                self._folder_before = {name: os.environ[name] for name in (_CLIENT_FOLDER,) if name in os.environ}
                os.environ[_CLIENT_FOLDER] = self._folder.name
            return Path(self._folder.name)

    @property
    def _api(self) -> Any:
        with self._lock:
            if self._open_api is None or self._api_of != wandb_client.stops():
                wandb = wandb_client.load(self._url)
                timeout = max(1, int(min(self._timeout_s, wandb_client.REQUEST_S)))
                overrides = {"base_url": self._url} | ({"entity": self._entity} if self._entity else {})
                self._api_of = wandb_client.stops()
                self._open_api = wandb.Api(overrides=overrides, timeout=timeout)
            return self._open_api

    # What is there.

    def list_runs(self, project: str, run_ids: Sequence[str]) -> list[TrackerRun]:
        """Return every run of these in W&B that carries our dictionary, oldest first."""
        wanted = set(run_ids)
        found: dict[str, Any] = {}
        with wandb_client.translated(self._url):
            filters = {f"config.{OURS}.value.run_id": {"$in": sorted(wanted)}}
            try:
                for run in self._api.runs(self._path(project), filters=filters, lazy=False, per_page=100):
                    found[run.id] = run
            except Exception as error:
                if not wandb_client.is_missing(error):
                    raise
            for run_id in run_ids:  # a search may not know yet what was made a moment ago
                ref = self._prefix + run_id
                if ref not in found and (run := self._get(project, ref)) is not None:
                    found[ref] = run
        runs = [self._tracker_run(run) for run in found.values()]
        ours = [run for run in runs if run is not None and run.run_id in wanted]
        return sorted(ours, key=lambda run: (str(run.native.created_at), run.ref))

    def _path(self, project: str) -> str:
        return f"{self._entity}/{project_of(project)}"

    def _get(self, project: str, ref: str) -> Any:
        api = self._api
        api.flush()  # or it answers what it was told the last time
        try:
            return api.run(f"{self._path(project)}/runs/{ref}")
        except Exception as error:
            if wandb_client.is_missing(error):
                return None
            raise

    def _tracker_run(self, native: Any) -> TrackerRun | None:
        about = _about(native)
        if not {"run_id", "kind"} <= about.keys() or about.get("prefix", "") != self._prefix:
            return None
        rows = _row_count(native)
        self._rows[native.id], self._lines[native.id] = rows, _line_count(native)
        segment = about.get("segment")
        return TrackerRun(
            ref=native.id,
            run_id=str(about["run_id"]),
            kind=str(about["kind"]),
            segment=int(segment) if segment is not None else None,
            generation=int(about.get("generation", 1)),
            newest={KEY: Record(KEY, rows, 0, 0.0)} if rows else {},
            url=native.url,
            native=native,
            records=self._lines[native.id],
            every=int(about.get("every", 1)),
        )

    # Making and marking runs.

    def create(self, spec: RunSpec) -> TrackerRun:
        """Make a run with everything that is said of it; rows come later."""
        base = self._prefix + id_of(spec)
        for number in range(1, _ID_TRIES + 1):
            ref = base if number == 1 else f"{base}-{number}"
            there = self._find(spec.project, ref)
            if there is not None:
                ours = self._tracker_run(there)
                if ours is None or (ours.run_id, ours.kind, ours.segment) != (spec.run_id, spec.kind, spec.segment):
                    raise RejectedError(
                        f"the id {ref} is taken by a run in W&B that is not this one",
                        sink=self.name,
                        run_id=spec.run_id,
                        hint="give all ids a prefix of their own with --wandb-id-prefix",
                    )
                return ours
            try:
                self._make(spec, ref)
            except DeletedIdError:
                continue
            made = self._find(spec.project, ref)
            if made is not None and (run := self._tracker_run(made)) is not None:
                return run
            self._sessions.pop(ref).abandon()
            raise RejectedError(
                f"W&B does not show the run {ref} that was just made", sink=self.name, run_id=spec.run_id
            )
        raise RejectedError(f"{_ID_TRIES} runs called {base} were deleted in W&B", sink=self.name, run_id=spec.run_id)

    def _find(self, project: str, ref: str) -> Any:
        with wandb_client.translated(self._url, ref):
            return self._get(project, ref)

    def _make(self, spec: RunSpec, ref: str) -> None:
        """Make a run, and keep the session for its rows: to begin one takes as long as a thousand rows."""
        session = self._session(spec.project, ref)
        config = config_of(spec.config, spec.recipe) | {
            OURS: about_of(spec, self._prefix) | every_of(spec, self._every)
        }
        session.open(
            0,
            name=name_of(spec),
            group=self._group(spec),
            job_type=None if spec.kind == CANONICAL else spec.kind,
            tags=tags_of(spec),
            notes=note_of(spec.note) or None,
            config=config,
        )
        self._sessions[ref] = session

    def _session(self, project: str, ref: str, exit_code: int | None = None) -> Session:
        self._failed.pop(ref, None)
        return Session(
            self._url,
            (self._entity, project_of(project), ref),
            self._own_folder() / str(next(self._numbers)),
            timeout_s=self._timeout_s,
            count=lambda: self._count(project, ref),
            pace=self._pace,
            exit_code=exit_code,
        )

    def _count(self, project: str, ref: str) -> int:
        native = self._find(project, ref)
        return 0 if native is None else _row_count(native)

    def _refresh(self, run: TrackerRun) -> None:
        """Let the client's object of a run hold what the server has after a session."""
        fresh = self._find(run.native.project, run.ref)
        if fresh is not None:
            vars(run.native).update(vars(fresh))

    def _group(self, spec: RunSpec) -> str:
        """Return the id of the root of the lineage: the parent's group, as far as W&B has the parent."""
        if spec.parent is not None:
            parent = self._find(spec.project, spec.parent)
            if parent is not None and parent.group:
                return str(parent.group)
        return self._prefix + (spec.facts.get("parent_run") or spec.run_id)

    def update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        """Make a run what the spec says, and send only what differs."""
        if run.ref in self._sessions:  # it was made, and there was no row for it
            self._sessions.pop(run.ref).close()
        native = run.native
        changed = self._change(native, spec)
        wanted = "failed" if spec.status == "killed" else spec.status
        ended = native.state not in _ALIKE[wanted]
        if not (changed or ended):
            return run
        with wandb_client.translated(self._url, run.run_id):
            if changed:
                native.update()
        if ended:
            session = self._session(spec.project, run.ref, EXIT.get(spec.status))
            session.open(self._rows[run.ref], self._known(run))
            session.close()
        found = self._find(spec.project, run.ref)
        updated = None if found is None else self._tracker_run(found)
        if updated is None:
            raise RejectedError(f"the run {run.ref} is not in W&B any more", sink=self.name, run_id=run.run_id)
        return updated

    def _change(self, native: Any, spec: RunSpec) -> bool:
        """Write into the client's object what differs; return whether anything did."""
        about, there = about_of(spec, self._prefix), _about(native)
        kept = {name: there[name] for name in ("names", "alerted", "every", "thinned") if name in there}
        changed = False
        if about | kept != there:
            if spec.config and about.get("described") != there.get("described"):
                for key, value in config_of(spec.config, spec.recipe).items():
                    native.config.setdefault(key, value)
            native.config[OURS] = about | kept
            changed = True
        if spec.kind != CANONICAL and native.name != name_of(spec):  # a user may rename the curve itself
            native.name = name_of(spec)
            changed = True
        note = note_of(spec.note)
        if note and note != (native.notes or "") and digest(native.notes or "") in {there.get("note"), digest("")}:
            native.notes = note
            changed = True
        tags = [tag for tag in native.tags or [] if tag not in OUR_TAGS] + tags_of(spec)
        if sorted(tags) != sorted(native.tags or []):
            native.tags = tags
            changed = True
        if spec.kind not in {CANONICAL, str(native.job_type)}:
            native.job_type = spec.kind
            changed = True
        return changed

    def prepare(self, run: TrackerRun, names: Iterable[str]) -> dict[str, str]:
        """Write down what the names that we cannot use are called there, in our dictionary."""
        names = list(names)
        self._names[run.ref] = [key_of(name) for name in names]
        mapped = {name: key for name in names if (key := key_of(name)) != name}
        about = _about(run.native)
        known = dict(about.get("names") or {})
        lacking = {key: name for name, key in mapped.items() if known.get(key) != name}
        session = self._sessions.get(run.ref)
        if session is not None:
            session.define(self._known(run))
        if lacking:
            run.native.config[OURS] = about | {"names": known | lacking}
            if session is None:
                with wandb_client.translated(self._url, run.run_id):
                    run.native.update()
            else:  # whose client would say at its end again what it knows
                session.say(config={OURS: _about(run.native)})
        return mapped

    # Rows.

    def encoder(self, segment: int) -> Encoder:
        """Return an encoder for one part of a segment."""
        return WandbEncoder(segment)

    def append(self, run: TrackerRun, records: Sequence[Record]) -> None:
        """Hand rows to the client; `flush` says whether they arrived."""
        self._opened(run).log([record.content for record in records])

    def _opened(self, run: TrackerRun) -> Session:
        session = self._sessions.get(run.ref)
        if session is None:
            session = self._session(run.native.project, run.ref)
            session.open(self._rows[run.ref], self._known(run))
            self._sessions[run.ref] = session
        return session

    def _known(self, run: TrackerRun) -> list[str]:
        """Return the metrics of a run as far as W&B and we know them: each session has to say them again."""
        defined = (run.native.rawconfig.get("_wandb") or {}).get("m") or []
        told = {metric["1"] for metric in defined if isinstance(metric, dict) and "1" in metric}
        return sorted((told | set(self._names.get(run.ref, ()))) - {TOKENS})

    def flush(self, run: TrackerRun, figures: Callable[[], list[Figures]]) -> None:
        """Close the session: everything has arrived when this returns."""
        if run.ref in self._failed:
            raise self._failed[run.ref]
        session = self._sessions.pop(run.ref, None)
        if session is None:
            return
        try:
            session.say(summary=summary_of(figures()))
            session.close()
        except LlmtrackError as error:
            self._failed[run.ref] = error
            raise
        self._rows[run.ref] = session.rows
        self._lines[run.ref] = self._lines.get(run.ref, 0) + session.logged
        self._refresh(run)

    def tell(self, run: TrackerRun, story: Story) -> list[str]:
        """Add the rows of evaluations and alerts that are not there, and have W&B send fresh alerts on."""
        points = story.points()
        rows = told_records(points)
        lacking = self._lacking(run, rows)
        alerts = self._fresh(run, story) if story.kind == CANONICAL else []
        names = sorted({key_of(point.name) for point in points})
        if lacking or alerts:
            self._names[run.ref] = names
            session = self._opened(run)
            try:
                session.log([record.content for record in lacking])
                if alerts:
                    ids = [str(alert.alert_id) for alert in alerts]
                    there = [*(_about(run.native).get("alerted") or []), *ids]
                    session.say(config={OURS: _about(run.native) | {"alerted": there[-100:]}})
                for alert in alerts:
                    text = f"{alert.message or ''}\n\n{alert.tokens} tokens, step {alert.step}, segment {alert.segment}"
                    title = f"{alert.rule} {alert.metric or ''}".strip()
                    session.alert(title, text.strip(), _LEVELS.get(str(alert.level).lower(), "WARN"))
                self.flush(run, lambda: figures_of(points))
            finally:
                self._sessions.pop(run.ref, None)
            self._end_again(run)
        if lacking and self._lacking(run, lacking):
            raise RejectedError(
                "W&B accepted rows of evaluations and alerts, and they are not there",
                sink=self.name,
                run_id=run.run_id,
                hint="sync again: only what is lacking is sent",
            )
        mapped = {point.name: key for point in points if (key := key_of(point.name)) != point.name}
        return [f"the metric {name!r} is called {key!r} there" for name, key in mapped.items()]

    def _end_again(self, run: TrackerRun) -> None:
        """End a run that had ended: to add a row is to resume it."""
        status = str(_about(run.native).get("status"))
        if status in EXIT:
            session = self._session(run.native.project, run.ref, EXIT[status])
            session.open(self._rows[run.ref], self._known(run))
            session.close()
            self._refresh(run)

    def _lacking(self, run: TrackerRun, rows: Sequence[Record]) -> list[Record]:
        """Return the rows that the run does not hold, by reading all of them back."""
        if not rows or not self._rows.get(run.ref):
            return list(rows)
        there = {record[:4] for record in self.read(run, KEY)}
        return [record for record in rows if record[:4] not in there]

    def _fresh(self, run: TrackerRun, story: Story) -> list[Any]:
        since = (time.time() - _FRESH_S) * 1000
        done: set[Any] = set(_about(run.native).get("alerted") or ())
        raised = [alert for alert in story.alerts if alert.is_raised and alert.time_ms >= since]
        return [alert for alert in raised if alert.alert_id not in done]

    def told(self, points: Iterable[StoryPoint]) -> list[Record]:
        """Return the rows of a story's points."""
        return told_records(points)

    # Reading back.

    def keys(self, run: TrackerRun) -> list[str]:
        """Return the one key, if there are rows."""
        return [KEY] if self._rows.get(run.ref) else []

    def read(self, run: TrackerRun, key: str, *, skip: int = 0) -> Iterator[Record]:
        """Read rows back in the order of their number."""
        if key != KEY:
            return
        reader = RowReader()
        found = 0
        with wandb_client.translated(self._url, run.run_id):
            native = self._get(run.native.project, run.ref)
            if native is None:
                return
            for row in wandb_client.rows_of(native, skip):
                found += 1
                yield reader.record(row)
        wanted = max(self._lines.get(run.ref, 0), _line_count(native))
        if skip + found < wanted:  # from a cache: what it does not show yet is not lacking
            raise RetryableSinkError(
                f"W&B shows {skip + found} of {wanted} rows", sink=self.name, run_id=run.run_id, hint="sync again later"
            )

    def delete(self, run: TrackerRun) -> None:
        """Delete a run; its id is gone for ever."""
        native = self._find(run.native.project, run.ref)
        if native is not None:
            with wandb_client.translated(self._url, run.run_id):
                native.delete()


def _about(native: Any) -> dict[str, Any]:
    about = native.config.get(OURS)
    return dict(about) if isinstance(about, dict) else {}


def _row_count(native: Any) -> int:
    """Return how many rows a run has: what the client will number the next row with."""
    attributes = native._attrs  # noqa: SLF001 - the public names for these two ask the server again
    last = (attributes.get("historyKeys") or {}).get("lastStep", -1)
    summary = native.summary_metrics.get("_step", -1)
    return max(int(attributes.get("historyLineCount") or 0), int(last) + 1, int(summary) + 1)


def _line_count(native: Any) -> int:
    """Return how many rows there are to read back."""
    attributes = native._attrs  # noqa: SLF001 - as above
    lines = attributes.get("historyLineCount")
    return int(lines) if lines is not None else int((attributes.get("historyKeys") or {}).get("lastStep", -1)) + 1
