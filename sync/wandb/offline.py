"""Replays into W&B's offline files, for a machine without internet: ``wandb sync`` takes them from there.

    DIR/wandb/offline-run-<time>-<id>/run-<id>.wandb     what W&B's own command uploads, in the order of their times
    DIR/.llmtrack/<project>/<id>.json, <id>.rows         the ledger: what was written, so that no row is written twice

Files may be moved away or deleted once they are uploaded: the ledger remembers. A file is made in a staging folder,
read back record by record, entered into the ledger, and only then moved to where ``wandb sync`` finds it; whatever is
killed, and whenever, the next sync finishes or forgets it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, Final, TextIO
from urllib.parse import quote, unquote

from llmtrack.sync.kinds import CANONICAL, REPLACED
from llmtrack.sync.replay.figures import Figures
from llmtrack.sync.sink import Encoder, Record, RunSpec, TrackerRun
from llmtrack.sync.story import Story, StoryPoint
from llmtrack.writer.errors import FormatError, RejectedError, UsageError
from llmtrack.writer.log.publish import publish

from . import client as wandb_client
from .describe import EXIT, about_of, every_of, id_of, name_of, note_of, project_of, tags_of
from .encode import KEY, OURS, TOKENS, RowReader, WandbEncoder, config_of, figures_of, key_of, summary_of, told_records
from .records import ENDED, read_rows

_BATCH_ROWS: Final = 500
_FOLDER: Final = ".llmtrack"
_LOOK_S: Final = 0.05
_ROW: Final = Struct("<qqd")  # tokens, milliseconds, digest


@dataclass
class _Page:
    """What the ledger says of one run.

    Attributes:
        project: Of the run.
        ref: Its id.
        about: Our dictionary in its configuration.
        shown: Name, group, job type, tags and notes.
        config: Its configuration, ours apart.
        summary: What is said of its metrics; the newest file has all of it, because an upload replaces it.
        written: What of all this is in the files.
        state: As the files say it.
        rows: How many rows are in the files: what the file of rows has beyond them does not count.
        pending: A folder that is to be moved, and to where; both below the folder of the user.
    """

    project: str
    ref: str
    about: dict[str, Any]
    shown: dict[str, Any]
    config: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] | None = None
    state: str = ""
    rows: int = 0
    pending: list[str] = field(default_factory=list)

    def wanted(self) -> dict[str, Any]:
        """Return what is to be in the files."""
        return {"about": self.about, **self.shown}


class WandbOffline:
    """The sink ``wandb`` with ``--wandb-offline``: it contacts nobody.

    Args:
        uri: The folder in which the files go.
        timeout_s: How long the client may take to write the end of a file.
        id_prefix: Put before every run id.
        every: Runs that are made from now on get, of each so many steps, but some rows; see `thin`.
    """

    name = wandb_client.NAME
    lanes = 4
    batch_records = _BATCH_ROWS
    repeats = False

    def __init__(self, uri: str | None, *, timeout_s: float, id_prefix: str = "", every: int = 1) -> None:
        wandb_client.resolve_url(None)
        self._root = Path(uri or ".").absolute()
        self._timeout_s = timeout_s
        self._prefix = id_prefix
        self._every = every
        self._lock = threading.Lock()
        self._guard: TextIO | None = None
        self._pages: dict[tuple[str, str], _Page] = {}
        self._stays: dict[str, _Stay] = {}
        self._entity = os.environ.get("WANDB_ENTITY") or None
        self.tracker = f"offline:{self._root}"
        self.look = f"wandb sync {self._root}/wandb/offline-run-*"

    def open(self) -> None:
        """Read the ledger, and finish or forget what a sync that was killed left behind.

        Raises:
            UsageError: The folder cannot be used, or another sync writes into it.
        """
        home = self._root / _FOLDER
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._guard = (home / "lock").open("a")
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another llmtrack-sync writes into {self._root}", hint="wait for it to end") from None
        except OSError as error:
            raise UsageError(f"{self._root} cannot be written: {error.strerror}", hint="--wandb-offline DIR") from error
        for path in sorted(home.glob("*/*.json")):
            page = _Page(**json.loads(path.read_text()))
            self._move(page)
            self._pages[unquote(path.parent.name), page.ref] = page
        shutil.rmtree(home / "staging", ignore_errors=True)

    def close(self) -> None:
        """End the client's service, and let others write into the folder."""
        self._stays.clear()
        wandb_client.stop_service()
        shutil.rmtree(self._root / _FOLDER / "staging", ignore_errors=True)
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def list_runs(self, project: str, run_ids: Sequence[str]) -> list[TrackerRun]:
        """Return every run of these that the ledger has."""
        pages = [page for (of, _), page in self._pages.items() if of == project]
        return [
            self._tracker_run(page)
            for page in pages
            if page.about["run_id"] in run_ids and page.about.get("prefix", "") == self._prefix
        ]

    def _tracker_run(self, page: _Page) -> TrackerRun:
        about = page.about
        return TrackerRun(
            ref=page.ref,
            run_id=about["run_id"],
            kind=about["kind"],
            segment=about.get("segment"),
            generation=about["generation"],
            newest={KEY: Record(KEY, page.rows, 0, 0.0)} if page.rows else {},
            url="",
            native=page,
            records=page.rows,
            every=about.get("every", 1),
        )

    def create(self, spec: RunSpec) -> TrackerRun:
        """Enter a run into the ledger; a file of it comes with its first rows, or with `update`."""
        ref = self._prefix + id_of(spec)
        page = self._pages.get((spec.project, ref)) or _Page(spec.project, ref, {}, {}, {})
        page.config = config_of(spec.config, spec.recipe)
        self._describe(page, spec)
        self._pages[spec.project, ref] = page
        self._save(page)
        return self._tracker_run(page)

    def _describe(self, page: _Page, spec: RunSpec) -> None:
        parent = self._pages.get((spec.project, spec.parent or ""))
        group = parent.shown.get("group") if parent else page.shown.get("group")
        kept = every_of(spec, page.about.get("every", 1) if page.about else self._every)
        page.about = about_of(spec, self._prefix) | kept
        page.shown = {
            "name": name_of(spec),
            "group": group or self._prefix + (spec.facts.get("parent_run") or spec.run_id),
            "job_type": None if spec.kind == CANONICAL else spec.kind,
            "tags": tags_of(spec),
            "notes": note_of(spec.note) or page.shown.get("notes"),
        }

    def update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        """Write a file without rows where what the files say is not what the spec says."""
        page: _Page = run.native
        self._describe(page, spec)
        if page.written == page.wanted() and page.state == spec.status:
            return run
        stay = self._stay(page)
        stay.open()
        self._publish(page, stay)
        return self._tracker_run(page)

    def prepare(self, run: TrackerRun, names: Iterable[str]) -> dict[str, str]:
        """Return what names that we cannot use are called; our dictionary says it too."""
        mapped = {name: key for name in names if (key := key_of(name)) != name}
        page: _Page = run.native
        page.config.setdefault("llmtrack_names", {}).update({key: name for name, key in mapped.items()})
        if not page.config["llmtrack_names"]:
            del page.config["llmtrack_names"]
        return mapped

    def encoder(self, segment: int) -> Encoder:
        """Return an encoder for one part of a segment."""
        return WandbEncoder(segment)

    def append(self, run: TrackerRun, records: Sequence[Record]) -> None:
        """Hand rows to the client."""
        page: _Page = run.native
        stay = self._stays.get(page.ref)
        if stay is None:
            stay = self._stay(page)
            stay.open()
            self._stays[page.ref] = stay
        stay.log(records)

    def flush(self, run: TrackerRun, figures: Callable[[], list[Figures]]) -> None:
        """End the file, read it back, and publish it."""
        stay = self._stays.pop(run.ref, None)
        if stay is not None:
            run.native.summary.update(summary_of(figures()))
            self._publish(run.native, stay)

    def tell(self, run: TrackerRun, story: Story) -> list[str]:
        """Write the rows of evaluations and alerts that are in no file yet; nobody is woken up weeks later."""
        points = story.points()
        there = {record[:4] for record in self.read(run, KEY)}
        lacking = [record for record in told_records(points) if record[:4] not in there]
        if lacking:
            self.append(run, lacking)
            self.flush(run, lambda: figures_of(points))
        mapped = {point.name: key for point in points if (key := key_of(point.name)) != point.name}
        return [f"the metric {name!r} is called {key!r} there" for name, key in mapped.items()]

    def told(self, points: Iterable[StoryPoint]) -> list[Record]:
        """Return the rows of a story's points."""
        return told_records(points)

    def keys(self, run: TrackerRun) -> list[str]:
        """Return the one key, if there are rows."""
        return [KEY] if run.native.rows else []

    def read(self, run: TrackerRun, key: str, *, skip: int = 0) -> Iterator[Record]:
        """Yield what the ledger says was read back from the files."""
        page: _Page = run.native
        if key != KEY or page.rows <= skip:
            return
        with self._path(page, "rows").open("rb") as rows:
            rows.seek(skip * _ROW.size)
            for _ in range(page.rows - skip):
                yield Record(KEY, *_ROW.unpack(rows.read(_ROW.size)))

    def delete(self, run: TrackerRun) -> None:
        """Mark a run: what was uploaded already cannot be deleted from here."""
        page: _Page = run.native
        page.about["kind"] = REPLACED
        page.shown["tags"] = [*page.shown["tags"][:1], REPLACED]
        self._save(page)

    # Files.

    def _stay(self, page: _Page) -> _Stay:
        home = self._root / _FOLDER / "staging"
        with self._lock:
            number = 1 + max((int(path.name) for path in home.glob("[0-9]*")), default=0)
            folder = home / str(number)
            folder.mkdir(parents=True)
        return _Stay(page, folder, self._entity, self._timeout_s)

    def _publish(self, page: _Page, stay: _Stay) -> None:
        """Enter a file that was read back into the ledger, and move it to where it is looked for."""
        made = stay.close()
        path = self._path(page, "rows")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as rows:
            rows.truncate(page.rows * _ROW.size)
            rows.write(stay.logged)
            rows.flush()
            os.fsync(rows.fileno())
        page.rows += stay.rows
        page.written = page.wanted()
        page.state = page.about["status"]
        with self._lock:
            page.pending = [str(made.relative_to(self._root)), self._free_name(made.name)]
            self._save(page)
            self._move(page)

    def _free_name(self, name: str) -> str:
        """Return where a folder goes: two of one run that are made within a second get different names."""
        taken = {path.name for path in (self._root / "wandb").glob("offline-run-*")}
        stem, _, ref = name.removeprefix("offline-run-").partition("-")
        number = 0
        while (free := f"offline-run-{stem[:9]}{int(stem[9:]) + number:06d}-{ref}") in taken:
            number += 1
        return f"wandb/{free}"

    def _move(self, page: _Page) -> None:
        if not page.pending:
            return
        made, goal = (self._root / name for name in page.pending)
        if made.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            made.rename(goal)
            _sync_folder(goal.parent)
        page.pending = []
        self._save(page)

    def _save(self, page: _Page) -> None:
        path = self._path(page, "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, json.dumps(vars(page)).encode())

    def _path(self, page: _Page, kind: str) -> Path:
        return self._root / _FOLDER / quote(page.project, safe="") / f"{page.ref}.{kind}"


class _Stay:
    """One file of the client while it is written.

    Args:
        page: The run it is of.
        folder: A staging folder of its own.
        entity: Whose run it is; None leaves that to ``wandb sync``.
        timeout_s: How long the client may take to write the end of its file.
    """

    def __init__(self, page: _Page, folder: Path, entity: str | None, timeout_s: float) -> None:
        self._page = page
        self._folder = folder
        self._entity = entity
        self._timeout_s = timeout_s
        self._run: Any = None
        self._resumes = True
        self.logged = bytearray()  # as in the ledger: 24 bytes a row

    @property
    def rows(self) -> int:
        """How many rows it was given."""
        return len(self.logged) // _ROW.size

    def open(self) -> None:
        """Begin the file with everything that is said of the run."""
        url = wandb_client.CLOUD
        wandb = wandb_client.load(url)
        page = self._page
        self._resumes = wandb_client.numbers_offline_rows()
        config: Mapping[str, Any] = page.config if page.written is None or not self._resumes else {}
        self._run = wandb.init(
            entity=self._entity,
            project=project_of(page.project),
            id=page.ref,
            mode="offline",
            resume="allow" if self._resumes else None,
            dir=str(self._folder),
            config={**config, OURS: page.about},
            settings=wandb_client.settings(url, mode="offline"),
            **page.shown,
        )
        self._run.define_metric(TOKENS, summary="none")
        self._run.define_metric("*", step_metric=TOKENS, summary="none")

    def log(self, records: Sequence[Record]) -> None:
        """Write rows."""
        for record in records:
            # Before W&B numbers them by itself, each says its number: in every file from where the last one ended.
            self._run.log(record.content, step=None if self._resumes else self._page.rows + self.rows)
            self.logged += _ROW.pack(*record[1:4])

    def close(self) -> Path:
        """End the file, read it back, and return its folder.

        Raises:
            RejectedError: It does not hold what was written.
        """
        self._run.summary.update(self._page.summary)
        self._run.finish(exit_code=EXIT.get(self._page.about["status"], 0))
        (folder,) = self._folder.glob("wandb/offline-run-*")
        (path,) = folder.glob("*.wandb")
        until = time.monotonic() + self._timeout_s
        while problem := self._problem(path):  # `finish` may return before the last bytes are written
            if time.monotonic() > until:
                raise RejectedError(
                    f"the client was given {self.rows} rows, and {problem}",
                    sink=wandb_client.NAME,
                    run_id=self._page.about["run_id"],
                    hint="see whether there is room on the disk",
                )
            time.sleep(_LOOK_S)
        for rest in ("logs", "tmp"):  # they say more about this machine than wandb sync needs
            shutil.rmtree(folder / rest, ignore_errors=True)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return folder

    def _problem(self, path: Path) -> str:
        """Return what is not as it should be in the file; nothing when it holds just what was written, and ends."""
        reader = RowReader()
        wanted = _ROW.iter_unpack(self.logged)
        held = 0
        try:
            for row in read_rows(path):
                if row is ENDED:
                    return "" if next(wanted, None) is None else f"{path.name} holds {held} of them"
                if reader.record(row)[1:4] != next(wanted, None):
                    return f"row {held} of {path.name} is another one"
                held += 1
        except FormatError as error:
            return f"the file cannot be read: {error}"
        return f"{path.name} holds {held} of them and does not end"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
