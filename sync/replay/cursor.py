"""The durable position of one run in one tracker: a small JSON file in the user's state folder.

    STATE/<sink>-<digest of the tracker's address>/<run>.json
    STATE/<sink>-<digest of the tracker's address>/<run>.lock

A cursor is a memory of what the tracker accepted, and never the truth about it: it saves reading everything back, it
may be lost or damaged at any time, and it is checked against the log and the tracker before it is relied on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.publish import publish

_FORMAT: Final = 1
_APP: Final = "llmtrack"
# What a file system answers that has no locks: then we go on without one.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True)
class Mark:
    """How far into one segment the tracker has accepted points, and what a count of the log must find up to there.

    Attributes:
        seq: Every point of the run's part that the tracker holds, with a `seq` up to this one, was accepted.
        tokens: Tokens of the row with that `seq`.
        points: Number of those points.
        seq_sum: Sum of their `seq`: with `points` it tells whether the log still says the same about them.
    """

    seq: int
    tokens: int
    points: int
    seq_sum: int


@dataclass
class Held:
    """What is known of one run in the tracker.

    Attributes:
        kind: As in its tags.
        segment: Likewise; None for a canonical run.
        marks: How far everything was accepted, by segment.
        goal: How far it may have been accepted: what was on its way when this was written.
        newest: Digest of the newest record per key as the tracker told it when all of the goal was there; None while
            something is on its way.
        compared: How far all that the tracker holds was read back and compared, by segment.
        counts: How many records it held then, by key.
        told: Digest of the story that it was told; None while it was told none.
        sampled: Not every record up to `compared` was compared: the counts of all keys were, and all of some keys.
    """

    kind: str
    segment: int | None
    marks: dict[int, Mark] = field(default_factory=dict)
    goal: dict[int, Mark] = field(default_factory=dict)
    newest: str | None = None
    compared: dict[int, Mark] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    told: str | None = None
    sampled: bool = False


@dataclass
class Cursor:
    """What is known of one run of the log in one tracker; `runs` is keyed by the tracker's own run ids."""

    path: Path
    runs: dict[str, Held] = field(default_factory=dict)

    def save(self) -> None:
        """Write the cursor whole: it is durable when this returns, and a crash leaves the old one or the new one.

        Raises:
            UsageError: The state folder does not take it.
        """
        content = {"format": _FORMAT, "runs": {ref: asdict(held) for ref, held in self.runs.items()}}
        try:
            publish(self.path, json.dumps(content).encode())
        except OSError as error:
            raise _unusable(self.path.parent, error) from error


def default_state() -> Path:
    """Return the folder in which cursors lie unless the user names another."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / _APP


def cursor_path(state: Path, sink: str, tracker: str, run_id: str) -> Path:
    """Return where the cursor of one run in one tracker lies.

    Args:
        state: The state folder.
        sink: Name of the sink.
        tracker: Address of the tracker, without credentials.
        run_id: The run of the log.
    """
    return state / f"{sink}-{hashlib.sha256(tracker.encode()).hexdigest()[:16]}" / f"{run_id}.json"


def load(path: Path) -> Cursor:
    """Return the cursor in a file; one that is missing, damaged or of another format counts as none."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            return Cursor(path)
        return Cursor(path, {str(ref): _held(held) for ref, held in content["runs"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Cursor(path)


def _held(content: dict[str, Any]) -> Held:
    segment, newest, told = content["segment"], content["newest"], content.get("told")
    if not isinstance(segment, int | None) or not isinstance(newest, str | None) or not isinstance(told, str | None):
        raise TypeError("a cursor's fields have their types")
    counts = {str(key): int(count) for key, count in content["counts"].items()}
    marks, goal, compared = (_marks(content[name]) for name in ("marks", "goal", "compared"))
    sampled = bool(content.get("sampled"))
    return Held(str(content["kind"]), segment, marks, goal, newest, compared, counts, told, sampled)


def _marks(content: dict[str, Any]) -> dict[int, Mark]:
    marks = {int(segment): Mark(**mark) for segment, mark in content.items()}
    if not all(isinstance(number, int) for mark in marks.values() for number in asdict(mark).values()):
        raise TypeError("a mark is made of integers")
    return marks


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold the cursor's lock while a run is replayed; yields False when another process on this host has it.

    Two processes that replay one run into one tracker would both create what neither finds. The lock saves that work;
    nothing depends on it, because what was created twice is found by its tags.

    Raises:
        UsageError: The state folder cannot be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise _unusable(path.parent, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        for left in path.parent.glob(f".{path.name}.*.tmp"):  # by a process that was killed while it saved
            left.unlink(missing_ok=True)
        yield True


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the state folder {folder} cannot be used: {error.strerror or error}",
        hint="give a writable folder with --state DIR",
    )
