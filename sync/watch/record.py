"""What a sync remembers of the runs of one root, for people and for its next life: a file in the state folder.

    STATE/<sink>-<digest of the tracker>/root-<digest of the root>.json

Nothing depends on it: cursors say how far the tracker is. It saves a look at runs whose files are what they were when
the tracker had all of them, and it is what `llmtrack-sync status` shows beside the log. It may be lost at any time.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from llmtrack.writer.log.publish import publish

from .lock import root_key

_FORMAT: Final = 1


@dataclass
class RunRecord:
    """What is remembered of one run.

    Attributes:
        complete: Digest of the names and sizes of its files when the tracker had everything of them; empty: it lacks
            something, or may.
        last_success: When the tracker was last known to have everything that was there; ISO 8601, UTC.
        last_error: Why the last sync was incomplete; empty when it was not.
        error_time: When that was.
        points_sent: By all syncs of this root into this tracker.
        points_per_s: When points were last sent.
        url: Where a person can look at it.
        silence: In which a watch found it last, as `stalls.Silence.content` gives it; None: it is not silent.
    """

    complete: str = ""
    last_success: str | None = None
    last_error: str = ""
    error_time: str | None = None
    points_sent: int = 0
    points_per_s: float | None = None
    url: str = ""
    silence: dict[str, Any] | None = None


@dataclass
class RootRecord:
    """What is remembered of one root in one tracker.

    Attributes:
        root: The folder of the runs.
        sink: Name of the sink.
        tracker: Its address without credentials.
        options: What was to be sent; when it is something else, no run counts as complete.
        runs: By id.
    """

    root: str
    sink: str
    tracker: str
    options: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)

    def of_run(self, run_id: str) -> RunRecord:
        """Return what is remembered of a run, to be changed."""
        return self.runs.setdefault(run_id, RunRecord())

    def save(self, path: Path) -> None:
        """Write it whole.

        Raises:
            OSError: The state folder does not take it.
        """
        publish(path, json.dumps({"format": _FORMAT, **asdict(self)}).encode())


def record_path(folder: Path, root: Path) -> Path:
    """Return where the record of a root lies.

    Args:
        folder: Of the tracker, in the state folder.
        root: The folder of the runs.
    """
    return folder / f"root-{root_key(root)}.json"


def load(path: Path) -> RootRecord | None:
    """Return the record in a file; None when it is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != _FORMAT:
            return None
        runs = {str(run_id): RunRecord(**run) for run_id, run in content.pop("runs").items()}
        return RootRecord(**content, runs=runs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def now() -> str:
    """Return this moment as a record says it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
