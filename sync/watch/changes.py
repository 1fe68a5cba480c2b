"""Which runs of a root changed: a scanner whose cost grows with what changed, and events where they are known to come.

The scanner decides. Events only let it be asked less often, and it notices when one did not come. It never relies on
a time alone: attributes may be a minute old on a network file system, a time may be as coarse as two seconds, and the
clocks of hosts differ. What counts are names and sizes; times of folders only put off a look at them.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmtrack.query.read.files import VANISHED
from llmtrack.writer.format import ADOPTION_FOLDER, EVALS_FOLDER, HEARTBEAT, RUN_FOLDER, SEALED_SUFFIX, SEGMENT_FOLDER

from .mounts import why_no_events

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent

ROOT: Final = ""  # in place of a run: evaluations that lie in the root, of whichever run

_COLD_LOOKS: Final = 16  # folders of runs at rest that one scan looks at, whatever their number
_QUIET_S: Final = 3600.0  # without a change: after it a segment that has no end record is looked at less often
_WAITING_S: Final = 86_400.0  # likewise a run that may be restarted any moment
_SHARE: Final = 0.1  # a folder at rest for an hour is looked at every six minutes,
_LONGEST_S: Final = 600.0  # and any folder this often, as far as the number of looks allows
_DOUBT_S: Final = 70.0  # attributes may be a minute old: until then the time of a folder says nothing
_RELIST_S: Final = 3600.0  # after it names are listed again, though the folder's time is what it was
_GROWING: Final = 2  # sealed parts of a segment whose size is looked at again
_MISSES: Final = 2  # scans that found what no event told, after which events are not believed any more

_Print = frozenset[tuple[str, int]]  # names, and the sizes of what may grow
_Key = tuple[str, int]  # run and segment


@dataclass
class _Folder:
    """What is known of one folder.

    Attributes:
        run_id: The run whose change a change in it is.
        segment: Its number; 0 for the folder of a run, and of evaluations.
        seen: Names and sizes when it was last listed; None when it never was.
        stat: What the file system said of the folder itself before it was last listed.
        stat_since_s: When it first said so, by our own clock.
        listed_s: When it was last listed.
        changed_s: When it last was another than before.
        due_s: When it is to be looked at next.
    """

    path: str
    run_id: str
    segment: int = 0
    seen: _Print | None = None
    stat: tuple[int, ...] = ()
    stat_since_s: float = 0.0
    listed_s: float = 0.0
    changed_s: float = 0.0
    due_s: float = 0.0


@dataclass
class _Run:
    main: _Folder
    segments: dict[int, _Folder] = field(default_factory=dict)
    evals: _Folder | None = None


class Scanner:
    """Looks a root over, again and again, and says which runs changed since the last time.

    A scan lists the root, the folder of each run that may be at work, and its newest segment. Of everything else it
    looks at a fixed number of folders, those whose turn it is: the longer at rest, the more seldom.

    Args:
        root: The folder of the runs.
        clock: Seconds, never going backwards.
        cold_looks: How many folders at rest one scan looks at.

    Attributes:
        unreadable: Why runs could not be looked at, by run; `ROOT` for the root itself.
        late: Runs in which a segment changed although it had ended, since somebody last emptied this: a copy brought
            what was still lacking.
    """

    def __init__(
        self, root: Path, *, clock: Callable[[], float] = time.monotonic, cold_looks: int = _COLD_LOOKS
    ) -> None:
        self._root = str(root)
        self._clock = clock
        self._cold_looks = cold_looks
        self._runs: dict[str, _Run] = {}
        self._evals: _Folder | None = None
        self._ended: set[_Key] = set()
        self._resting: set[str] = set()
        self.unreadable: dict[str, str] = {}
        self.late: set[str] = set()

    def set_state(self, ended: Collection[_Key], resting: Collection[str]) -> None:
        """Hear from the log what need not be looked at every time.

        Args:
            ended: Segments with an end record.
            resting: Runs of which the newest segment has one that nothing usually follows.
        """
        self._ended = set(ended)
        self._resting = set(resting)

    def scan(self) -> set[str]:
        """Return the runs that changed since the last scan, and at the first all: new ones, gone ones, and `ROOT`."""
        now = self._clock()
        changed: set[str] = set()
        names = self._names(self._root, ROOT)
        if names is None:
            return changed  # the storage does not answer: nothing is known to have changed
        there = {match[1] for name in names if (match := RUN_FOLDER.fullmatch(name))}
        for run_id in self._runs.keys() - there:
            del self._runs[run_id]
            self.unreadable.pop(run_id, None)
            changed.add(run_id)
        for run_id in there - self._runs.keys():
            self._runs[run_id] = _Run(_Folder(f"{self._root}/run_id={run_id}", run_id))
        if EVALS_FOLDER in names and self._evals is None:
            self._evals = _Folder(f"{self._root}/{EVALS_FOLDER}", ROOT)
        cold: list[_Folder] = []
        for run in list(self._runs.values()):
            self._scan_run(run, now, cold, changed)
        if self._evals is not None:
            self._sort(self._evals, now, cold, changed, is_hot=False)
        cold.sort(key=lambda folder: folder.due_s)
        for folder in cold[: self._cold_looks]:
            self._look(folder, now, changed)
        return changed

    def readable(self) -> set[str]:
        """Return the runs that could be looked at."""
        return self._runs.keys() - self.unreadable.keys()

    def fingerprint(self, run_id: str) -> str:
        """Return a digest of the names and sizes of all files of a run, as they were last seen; empty: unknown."""
        run = self._runs.get(run_id)
        if run is None:
            return ""
        folders = [run.main, *(folder for _, folder in sorted(run.segments.items()))]
        folders += [run.evals] if run.evals is not None else []
        if any(folder.seen is None for folder in folders):
            return ""
        seen = [(folder.segment, sorted(folder.seen or ())) for folder in folders]
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:32]

    def size_bytes(self, run_id: str) -> int:
        """Return the size of all parts of a run, as they were last seen."""
        run = self._runs.get(run_id)
        seen = [folder.seen or () for folder in run.segments.values()] if run is not None else []
        return sum(max(0, size) for names in seen for _, size in names)

    def _scan_run(self, run: _Run, now: float, cold: list[_Folder], changed: set[str]) -> None:
        run_id = run.main.run_id
        active_s = max((folder.changed_s for folder in run.segments.values()), default=run.main.changed_s)
        is_waiting = run_id not in self._resting and now - active_s < _WAITING_S
        self._sort(run.main, now, cold, changed, is_hot=is_waiting)
        newest = max(run.segments, default=0)
        for number, folder in list(run.segments.items()):
            is_hot = number == newest and (run_id, number) not in self._ended and now - folder.changed_s < _QUIET_S
            self._sort(folder, now, cold, changed, is_hot=is_hot)
        if run.evals is not None:
            self._sort(run.evals, now, cold, changed, is_hot=False)

    def _sort(self, folder: _Folder, now: float, cold: list[_Folder], changed: set[str], *, is_hot: bool) -> None:
        """Look at a folder that may change any moment, or that is new; leave others for their turn."""
        if folder.seen is None or is_hot:
            self._look(folder, now, changed)
        elif now >= folder.due_s:
            cold.append(folder)

    def _look(self, folder: _Folder, now: float, changed: set[str]) -> None:
        """Find out whether a folder changed, and say when to look again."""
        stat = _stat(folder.path)
        is_append = folder.segment != 0 and (folder.run_id, folder.segment) not in self._ended
        if stat != folder.stat:
            folder.stat, folder.stat_since_s = stat, now
        is_trusted = folder.listed_s - folder.stat_since_s >= _DOUBT_S and now - folder.listed_s < _RELIST_S
        if folder.seen is None or is_append or not is_trusted:
            seen = self._list(folder)
            folder.listed_s = now
            if seen is not None and seen != folder.seen:
                if folder.segment and not is_append and folder.seen is not None:
                    self.late.add(folder.run_id)
                folder.seen, folder.changed_s = seen, now
                changed.add(folder.run_id)
                self._take_in(folder, seen, now, changed)
        folder.due_s = now + min(_LONGEST_S, _SHARE * (now - folder.changed_s))

    def _list(self, folder: _Folder) -> _Print | None:
        """Return names and sizes; None when they cannot be had now."""
        names = self._names(folder.path, folder.run_id)
        if names is None:
            return None
        if folder.segment == 0:
            return frozenset((name, 0) for name in names if not name.startswith("."))
        known = {name: size for name, size in folder.seen or () if name.endswith(SEALED_SUFFIX)}
        for name in sorted(known)[-_GROWING:]:  # a copy of it may be under way; older ones never change
            del known[name]
        return frozenset(
            (name, known[name] if name in known else _size(f"{folder.path}/{name}"))
            for name in names
            if name != HEARTBEAT and not name.startswith(".")
        )

    def _take_in(self, folder: _Folder, seen: _Print, now: float, changed: set[str]) -> None:
        """Note the folders below that of a run."""
        run = self._runs.get(folder.run_id)
        if run is None or folder is not run.main:
            return
        names = {name for name, _ in seen}
        numbers = {int(match[1]): name for name in names if (match := SEGMENT_FOLDER.fullmatch(name))}
        # What an adoption says is written once; it is looked at like a segment until it is.
        numbers |= {-int(match[1]): name for name in names if (match := ADOPTION_FOLDER.fullmatch(name))}
        for number in run.segments.keys() - numbers.keys():
            del run.segments[number]
        for number in sorted(numbers.keys() - run.segments.keys()):
            path = f"{folder.path}/{numbers[number]}"
            run.segments[number] = _Folder(path, folder.run_id, number, changed_s=now)
            self._look(run.segments[number], now, changed)
        if EVALS_FOLDER not in names:
            run.evals = None
        elif run.evals is None:
            run.evals = _Folder(f"{folder.path}/{EVALS_FOLDER}", folder.run_id)
            self._look(run.evals, now, changed)

    def _names(self, path: str, run_id: str) -> list[str] | None:
        try:
            names = os.listdir(path)  # noqa: PTH208 - a thousand runs: plain strings
        except OSError as error:
            if run_id != ROOT and error.errno in VANISHED:
                return []  # the folder above says so too, or will
            self.unreadable[run_id] = f"{path}: {error.strerror}"
            return None
        self.unreadable.pop(run_id, None)
        return names


class Events:
    """Tells of changes as they happen, through watchdog; a context manager.

    Args:
        root: The folder of the runs.
        tell: Called from another thread with the run of each change, or `ROOT`.

    Raises:
        OSError: The kernel has no room for so many watches.
    """

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        from watchdog.events import (
            DirCreatedEvent,
            DirDeletedEvent,
            DirMovedEvent,
            FileCreatedEvent,
            FileDeletedEvent,
            FileModifiedEvent,
            FileMovedEvent,
            FileSystemEventHandler,
        )
        from watchdog.observers import Observer

        # It watches a folder twice when it appears while its parent is walked, and says so, with all that it watches in
        # the message: megabytes for many runs; and where warnings are errors, its thread would end.
        warnings.filterwarnings("ignore", "Callback with id", RuntimeWarning)
        prefix = os.fspath(root).rstrip("/") + "/"

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                for path in {event.src_path, event.dest_path}:
                    text = os.fsdecode(path)
                    if text.startswith(prefix) and not text.endswith((HEARTBEAT, ".tmp")):
                        match = RUN_FOLDER.fullmatch(text[len(prefix) :].partition("/")[0])
                        tell(match[1] if match else ROOT)

        self._observer = Observer()
        # Only what writing does: our own reading would be told too, and answered by reading.
        kinds: list[type[FileSystemEvent]] = [DirCreatedEvent, DirDeletedEvent, DirMovedEvent]
        kinds += [FileCreatedEvent, FileDeletedEvent, FileModifiedEvent, FileMovedEvent]
        self._observer.schedule(Handler(), os.fspath(root), recursive=True, event_filter=kinds)
        try:
            self._observer.start()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Return whether events can still come."""
        return self._observer.is_alive() and all(emitter.is_alive() for emitter in self._observer.emitters)

    def stop(self) -> None:
        """End the threads and close the watches."""
        self._observer.stop()
        if self._observer.ident is not None:
            self._observer.join()


class Trust:
    """Whether events may be relied on: what a scan finds, an event must have told, before or until the next scan."""

    def __init__(self) -> None:
        self._heard: set[str] = set()
        self._untold: set[str] = set()
        self._misses = 0

    def hear(self, run_id: str) -> None:
        """Take note of an event."""
        self._heard.add(run_id)

    def compare(self, changed: Collection[str]) -> bool:
        """Take note of what a scan found; False when events did not tell of such changes again and again."""
        self._misses += bool(self._untold - self._heard)
        self._untold = set(changed) - self._heard
        self._heard.clear()
        return self._misses < _MISSES


def choose(root: Path, poll_s: float | None, tell: Callable[[str], None]) -> tuple[Events | None, str]:
    """Start events where they are known to come.

    Args:
        root: The folder of the runs.
        poll_s: Not None when the user wants polling.
        tell: See `Events`.

    Returns:
        The events, or None with the reason why the root has to be polled.
    """
    if poll_s is not None:
        return None, "--poll"
    if why := why_no_events(root):
        return None, why
    try:
        return Events(Path(os.path.realpath(root)), tell), ""
    except ModuleNotFoundError:
        return None, "watchdog is not installed"
    except OSError as error:
        return None, f"the kernel takes no more watches ({error.strerror or error}): raise fs.inotify.max_user_watches"


def _stat(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink, found.st_size


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - as above
    except OSError:
        return -1
