"""The Sink protocol: what replay asks of a tracker, with the contract in words, and how a sink is found.

**Who does what.** `replay` decides what is sent, in which order, and whether it arrived. A sink knows how its tracker
says it. Every method contacts the tracker once and returns, or raises:

- `RetryableSinkError`: the tracker is down, slow or busy. Replay waits and calls again, so a sink never retries by
  itself, and its client's own retries are switched off.
- `RejectedError`: the tracker refused for good. With ``run_id=None`` it refused us as such (credentials) and no other
  run will fare better; otherwise only this run ends, with the reason.
- `MovedError`: the tracker holds something else than replay was told; replay looks at everything and begins again.
- `UsageError`: the caller's mistake, e.g. an address that this tracker cannot have.

**Idempotent.** `append`, `update`, `prepare`, `tell` and `delete` may be called again with the same arguments, after an
answer was lost or after a crash at any moment, and the tracker then holds the same as after one call. A sink whose
tracker does not give this by itself must see to it (by asking how far the tracker has got). `create` is not: whoever
calls it again looks first with `list_runs`, and two runs that came to be all the same are found by their equal tags.

**Accepted** means that the tracker answered that it has the records for good. `append` returns only then or, where
`repeats` is False, `flush` does. What was accepted need not be visible at once to `list_runs`, but must be to `read`.

**Beside the points.** A run has more than points: segments, settings that changed, alerts, evaluated checkpoints. All
of it is a `story.Story`, made from the log at every sync. Replay calls `tell(run, story)` for each run in the tracker
after its points were verified, and not again until the story changed: the digest of what was told is in the cursor. So
`tell` is where a sink looks at what is there, sends what differs (first what marks something as left behind), looks
again, and raises `RejectedError` when the tracker does not keep it. It may be called with the same story any number of
times, and after a kill at any moment. The canonical run's story has everything; a side run's has the alerts and the
evaluated checkpoints of its stretch. `story.points()` says what of it becomes points of this very run, and `told` as
which records they lie there, so that read-back takes them neither for points of the log nor for somebody else's. A
story loses a point only when settled points were taken back, and then the run is replaced as a whole.

**Read-back.** `read` returns every record that the tracker holds under a key, each once, exactly as it would give it to
anyone else: equal in key, tokens, time and value to what the sink's encoder made of the log, or the comparison fails.
Values that the tracker cannot hold are the encoder's business, which puts them into another form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa

from llmtrack.writer.errors import SinkError, UsageError

if TYPE_CHECKING:
    from .replay.figures import Figures
    from .story import Story, StoryPoint

_GROUP: Final = "llmtrack.sinks"
_BUILT_IN: Final = {  # for a checkout that is not installed
    "mlflow": "llmtrack.sync.mlflow.sink:MlflowSink",
    "wandb": "llmtrack.sync.wandb.sink:WandbSink",
}


class Record(NamedTuple):
    """One value as a tracker holds it; the first four fields are its identity there."""

    key: str
    tokens: int
    time_ms: int
    value: float
    seq: int = 0  # of the row in the log; not known of what was read back
    points: int = 1  # of the log, which it carries: 0 for what a sink adds, many for a whole row
    content: Any = None  # what else the sink needs to send it


class MovedError(SinkError):
    """A run in the tracker is not as replay found it a moment ago: another sync is at it, or an answer was stale."""


class Encoder(Protocol):
    """Turns the rows of one segment into records; holds what it must remember from one batch to the next."""

    def encode(self, rows: pa.RecordBatch) -> list[Record]:
        """Return the records of the next rows.

        Called with the rows of one part of one segment in the order of their `seq`, each of them whole. What comes out
        depends on these rows alone, and for rows of one tokens count on no row of another: replay starts again at any
        tokens count.

        Args:
            rows: Columns `seq`, `time_ms`, `step`, `tokens` (int64), `name` (string) and `value` (float64).
        """
        ...


@dataclass(frozen=True)
class RunSpec:
    """A run as it is to be in the tracker.

    Attributes:
        run_id: The run of the log.
        kind: `CANONICAL`, `PROVISIONAL`, `SUPERSEDED` or `REPLACED`.
        segment: The segment whose points a side run holds; None for a canonical run.
        generation: 1, and one more for each time that settled points were taken back.
        project: The tracker's name for what runs are gathered in.
        name: As a person is to see it.
        status: running, finished, failed or killed.
        start_ms: Milliseconds since the epoch.
        end_ms: Likewise; None while it runs, and when the end is to stay as it is.
        parent: The tracker's id of the run that this one is nested in; None at the top.
        facts: Further facts by name, which the tracker shows and can search.
        config: What the tracker is to show as the run's parameters.
        recipe: Likewise, apart from the configuration.
        note: For people, in Markdown.
    """

    run_id: str
    kind: str
    segment: int | None
    generation: int
    project: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None = None
    parent: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class TrackerRun:
    """A run that the tracker holds and that carries our tags.

    Attributes:
        ref: The tracker's own id of it.
        newest: The newest record per key, as the tracker's list of runs tells it.
        url: Where a person can look at it; empty when there is no server that shows it.
        native: What the sink needs to know of it again; nobody else looks inside.
        records: How many records it holds, where the tracker's list of runs tells.
        every: It was made to have, of each so many steps, but some rows; see `thin`.
    """

    ref: str
    run_id: str
    kind: str
    segment: int | None
    generation: int
    newest: Mapping[str, Record]
    url: str
    native: Any = None
    records: int | None = None
    every: int = 1


class Sink(Protocol):
    """One tracker. Made with the tracker's address and a timeout; nothing is contacted or imported until `open`.

    Attributes:
        name: As in ``--to``.
        tracker: The tracker's address without credentials: the identity under which cursors are kept.
        look: How a person gets to see what was sent, in one line.
        lanes: How many `append` and `read` may be under way at once. Records of one key always go through the same
            lane, in order.
        batch_records: How many records one `append` takes at most.
        repeats: `append` may be repeated, and what it took is accepted. Where it is False, what it took is accepted
            once `flush` returned, a run of which something may be on its way is compared before more is sent, and
            ``--verify fast`` compares every new record, as ``full`` does.
    """

    name: str
    tracker: str
    look: str
    lanes: int
    batch_records: int
    repeats: bool

    def __init__(self, uri: str | None, *, timeout_s: float) -> None:
        """Check the address.

        Raises:
            UsageError: It cannot be one, or the tracker's library is not installed.
        """
        ...

    def open(self) -> None:
        """Contact the tracker."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...

    def list_runs(self, project: str, run_ids: Sequence[str]) -> list[TrackerRun]:
        """Return every run of these in the tracker that carries our tags, oldest first; deleted ones are not there."""
        ...

    def create(self, spec: RunSpec) -> TrackerRun:
        """Make a run with everything that the spec says; its tags are there as soon as the run is."""
        ...

    def update(self, run: TrackerRun, spec: RunSpec) -> TrackerRun:
        """Make a run what the spec says, and send only what differs; the same object comes back when nothing did."""
        ...

    def prepare(self, run: TrackerRun, names: Iterable[str]) -> dict[str, str]:
        """Get ready for metrics of these names, before any of them is sent.

        Returns:
            The names that the tracker refuses, with what they are called there. The tracker itself also says so.
        """
        ...

    def encoder(self, segment: int) -> Encoder:
        """Return an encoder for one part of a segment."""
        ...

    def append(self, run: TrackerRun, records: Sequence[Record]) -> None:
        """Add records, at most `batch_records`; may be called from several threads."""
        ...

    def flush(self, run: TrackerRun, figures: Callable[[], list[Figures]]) -> None:
        """Return once all that was appended to a run is accepted.

        Args:
            run: Whose last batch was appended.
            figures: Reads what is to be said of each metric as a whole; called only by a sink that says it.
        """
        ...

    def tell(self, run: TrackerRun, story: Story) -> list[str]:
        """Make what the tracker says of a run beside its points what the story says.

        Returns:
            What a person should know of it: what the tracker could not take, and what it is called there.
        """
        ...

    def told(self, points: Iterable[StoryPoint]) -> Iterable[Record]:
        """Return every record under which points of a story may lie in their run, as `read` would return it."""
        ...

    def keys(self, run: TrackerRun) -> list[str]:
        """Return every key under which the tracker holds records of a run."""
        ...

    def read(self, run: TrackerRun, key: str, *, skip: int = 0) -> Iterator[Record]:
        """Read back the records of one key; may be called from several threads.

        Args:
            run: As the tracker listed it.
            key: One of `keys`.
            skip: Leave out so many from the beginning, in an order in which what is added at later times comes last.
        """
        ...

    def delete(self, run: TrackerRun) -> None:
        """Delete a run; one that is not there any more is deleted already."""
        ...


def known_sinks() -> list[str]:
    """Return the names that ``--to`` takes."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=_GROUP))})


def sink_class(name: str) -> type[Sink]:
    """Return the class of a sink.

    Raises:
        UsageError: There is none of this name.
    """
    found = next(iter(entry_points(group=_GROUP, name=name)), None)
    if found is None and name in _BUILT_IN:
        from importlib.metadata import EntryPoint

        found = EntryPoint(name, _BUILT_IN[name], _GROUP)
    if found is None:
        raise UsageError(f"there is no tracker {name!r}", hint=f"--to {' or --to '.join(known_sinks())}")
    loaded: type[Sink] = found.load()
    return loaded
