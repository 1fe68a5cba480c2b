"""`open_run`, and the run that training code talks to."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import index
from pathlib import Path
from time import monotonic, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, SupportsFloat, SupportsIndex

from .alerts.detector import Detector
from .alerts.history import read_history
from .alerts.hook import Hook, OnAlert
from .alerts.watch import Watch, check_detectors
from .checkpoints.checkpoint import identify
from .errors import LlmtrackError, UsageError
from .lineage.identity import process_identity
from .lineage.opening import Opening, open_segment
from .log.buffer import Barrier, Buffer, End, Exit, Record
from .log.drain import Drain
from .log.ids import Pause, StepIds, take_ids
from .log.pending import DeviceRow, PendingRow
from .log.tensors import PendingValue, take_value
from .log.worker import Worker
from .mode import is_disabled
from .ranks import decide_on_rank_zero, world_size
from .redact import redact
from .settings import Settings
from .shutdown import end_on_signal, forget, keep_until_exit

if TYPE_CHECKING:
    from torch import Tensor

    from .capture.flops import Flops

    Value = SupportsFloat | Tensor

_log = logging.getLogger("llmtrack")

_INT64_MAX: Final = (1 << 63) - 1
_FINISH_TIMEOUT_S: Final = 60.0
_HURRY_S: Final = 0.25  # at most so often rows with NaN are written without waiting for the next flush
_HOOK_S: Final = 5.0  # for what on_alert still has to tell when the run ends


class Run:
    """A run as training code sees it; this one does nothing, and is what ranks above 0 and disabled processes get.

    Attributes:
        run_id: Id of the run; it goes into every checkpoint with `meta`. On a rank that writes nothing and knows of no
            rank 0 (no `torch.distributed`), the id that was given, or an empty one.
        segment: Number of this process lifetime, from 1; 0 when unknown.
        start_step: Optimiser step that this process continues from.
        start_tokens: Tokens seen up to there.
        recipe_hash: Of the recipe; None without one.
    """

    def __init__(
        self, run_id: str, segment: int, start_step: int = 0, start_tokens: int = 0, recipe_hash: str | None = None
    ) -> None:
        self.run_id = run_id
        self.segment = segment
        self.start_step = start_step
        self.start_tokens = start_tokens
        self.recipe_hash = recipe_hash

    def log(
        self,
        metrics: Mapping[str, Value],
        step: SupportsIndex,
        tokens: SupportsIndex,
        batch_ids: object = None,
        position: SupportsIndex | None = None,
    ) -> None:
        """Put a row of metrics in memory and return; within a second it is on storage.

        Never waits for a disk, a lock or a GPU. When the storage does not keep up, rows are dropped and counted, and
        the log has their token range as a gap. May be called from any thread.

        Args:
            metrics: Name -> number: float, int, bool, NumPy scalar, or a tensor with one element, also on a GPU.
            step: The optimiser step, a coordinate beside `tokens`: nothing is ordered by it, and it is not checked.
            tokens: Tokens seen by the run, the x-axis; they never go backwards within a segment.
            batch_ids: What the step was trained on; see `batches`.
            position: In the order of the data; see `batches`.

        Raises:
            UsageError: A value that is no number, a step or tokens that are no integer, or tokens that go backwards.
                Nothing of the row is stored.
        """

    def batches(
        self,
        step: SupportsIndex,
        ids: object = None,
        position: SupportsIndex | None = None,
        *,
        rank: int | None = None,
        tokens: SupportsIndex | None = None,
    ) -> None:
        """Say what a step was trained on, before the row of that step is logged; it is kept for a while.

        The ids of the last steps are in memory only. Around an alert they go into the table `batches`, those from
        before it and those that come after it. What is given in parts, one micro-batch after another, is put together.

        Args:
            step: The optimiser step.
            ids: One id or many, strings or integers: of sequences, documents, shards; arrays too, from the host.
            position: In the order of the data, so that the batch can be found again.
            rank: Whose ids these are; None where one rank speaks for all. Those of others than rank 0 come after an
                alert, from the reducer, and are recorded at once.
            tokens: Tokens seen by the run; default: what the last row had, until a row of this step says more.

        Raises:
            UsageError: A step or a position that is no integer, or ids that are none.
        """

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do something else than training, such as an evaluation: no alert says that the next row was slow.

        For a throughput that the caller measures; a `Throughput` leaves `Reducer.pause` out itself.
        """
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return what should survive a restart, as plain JSON: what the detectors have learned.

        It goes into the checkpoint beside `meta`. Empty on ranks that write nothing.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` gave when the checkpoint was saved; right after `open_run`, on every rank.

        Without it the detectors learn from what the log has of the run.

        Args:
            state: What `state_dict` returned; None or empty for nothing.

        Raises:
            UsageError: It is something else.
        """

    def log_later(self, row: PendingRow, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Put a row in memory whose values are still on their way; what the reducer does.

        It keeps its place and its time. What comes after it is written once its values have arrived, or never will.

        Args:
            row: Asked for its values on another thread.
            step: The optimiser step.
            tokens: Tokens seen by the run.

        Raises:
            UsageError: A step or tokens that are no integer, or tokens that go backwards.
        """

    def checkpoint(
        self, path: str | os.PathLike[str], step: SupportsIndex, tokens: SupportsIndex, *, full: bool = False
    ) -> None:
        """Record a checkpoint once it is saved; its id is made on a thread of its own.

        Args:
            path: The file or folder that was saved.
            step: The optimiser step.
            tokens: Tokens seen by the model in it.
            full: Read every byte for the id, instead of sizes and samples.

        Raises:
            UsageError: A path that is none, or a step or tokens that are no integer.
        """

    def alert(
        self,
        rule: str,
        message: str,
        step: SupportsIndex,
        tokens: SupportsIndex,
        *,
        level: Literal["info", "warn", "error"] = "warn",
        metric: str | None = None,
        value: float | None = None,
    ) -> None:
        """Record an alert of the caller's own; it is never dropped.

        Args:
            rule: Short name of the kind of alert, e.g. ``data``.
            message: What a person on call should read.
            step: The optimiser step.
            tokens: Tokens seen by the run.
            level: How bad it is.
            metric: The metric that it is about.
            value: Its value.

        Raises:
            UsageError: A step or tokens that are no integer.
        """

    def context(self, message: str, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Add to the newest alert what else is known of it, as a record of phase ``context``; nothing before the first.

        Args:
            message: What a person should read.
            step: The optimiser step.
            tokens: Tokens seen by the run.

        Raises:
            UsageError: A step or tokens that are no integer.
        """

    @property
    def alert_step(self) -> int:
        """Return the step of the newest alert that is worse than an information; 0 before the first."""
        return 0

    def on_alert(self, act: Callable[[], None]) -> None:
        """Have something done on this rank when an alert is recorded that is worse than an information.

        Args:
            act: Called on the thread that records the alert; returns at once.
        """

    def meta(self, step: SupportsIndex, tokens: SupportsIndex) -> dict[str, str | int | None]:
        """Return what a checkpoint must hold so that a later process can continue the run; plain JSON.

        Args:
            step: The optimiser step of the checkpoint.
            tokens: Tokens seen by the model in it.

        Raises:
            UsageError: A step or tokens that are no integer.
        """
        return {
            "run_id": self.run_id,
            "segment": self.segment,
            "recipe_hash": self.recipe_hash,
            "step": _coordinate("step", step),
            "tokens": _coordinate("tokens", tokens),
        }

    def flush(self, timeout: float = 10.0) -> bool:  # noqa: ARG002  # the interface
        """Wait until everything logged so far is durable, ids of checkpoints included.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether it is.
        """
        return True

    def finish(
        self,
        exit: Exit = "finished",  # noqa: A002  # the column's name
        detail: str | None = None,
        timeout: float = _FINISH_TIMEOUT_S,
    ) -> None:
        """Make everything durable, write how the segment ended, and seal its files. Never raises.

        Args:
            exit: ``finished`` settles every point; ``abandoned`` too, for a run that nobody will continue.
            detail: Why, for a person.
            timeout: Seconds after which a storage that does not answer is given up.
        """

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish the run: as failed when the block is left by an exception."""
        if error is None:
            self.finish()
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")


class RecordingRun(Run):
    """The run on rank 0, which writes the log.

    Args:
        opening: The segment that this process became.
        start: Its start record.
        settings: Limits of memory and time.
        detectors: Look at what is logged.
        hook: Is told of alerts.

    Raises:
        OSError: The start record could not be written.
    """

    def __init__(
        self,
        opening: Opening,
        start: Record,
        settings: Settings,
        detectors: Sequence[Detector] = (),
        hook: Hook | None = None,
    ) -> None:
        super().__init__(opening.run_id, opening.segment, opening.start_step, opening.start_tokens, opening.recipe_hash)
        self.folder = opening.folder
        self._buffer = Buffer(settings.queue_points, opening.start_tokens)
        self._alert_numbers = count(1)
        self._hook = hook
        self._watch = Watch(detectors, self._next_alert_id, self._alert_was_raised, recipe_hash=opening.recipe_hash)
        start.values["alerts"] = self._watch.describe() if detectors else None
        self._drain = Drain(opening.folder, self._buffer, start, settings, self._watch)
        self._checkpointer = Worker("llmtrack-checkpoint")
        self._recording: list[Record] = []  # checkpoints that are not durable yet
        self._last_alert: dict[str, object] | None = None  # above information
        self._on_alert: list[Callable[[], None]] = []
        self._is_over = False
        self._has_end = False
        self._has_warned = False
        self._is_disowned = False
        self._hurried_at_s = -_HURRY_S
        self._learner = Worker("llmtrack-history")
        self._drain.open()
        self._learn_from(opening)
        keep_until_exit(self)

    def _learn_from(self, opening: Opening) -> None:
        """Have the detectors learn from the log what this run was like before; on a thread of its own."""
        if opening.from_run is None or opening.from_segment is None or opening.recipe_diff is not None:
            return  # what another recipe does, the past does not tell
        metrics = self._watch.past_metrics
        if not metrics:
            return
        root, place = opening.folder.parents[1], (opening.from_run, opening.from_segment, opening.start_tokens)
        take = self._watch.wait_for_history()

        def learn() -> None:
            rows = []
            try:
                rows = read_history(root, *place, metrics)
            finally:
                take(rows)
                self._drain.wake()

        self._learner.submit(learn)

    def log(
        self,
        metrics: Mapping[str, Value],
        step: SupportsIndex,
        tokens: SupportsIndex,
        batch_ids: object = None,
        position: SupportsIndex | None = None,
    ) -> None:
        """Put a row of metrics in memory and return; see `Run.log`."""
        # The common case, a dict of floats, takes no call of ours: summing it is the cheapest proof of its types.
        buffer = self._buffer
        try:
            given: Any = metrics  # what has no sum or no copy is looked at below
            total: Any = sum(given.values())
            kind: type | None = type(total)
            values: dict[str, float] = given.copy()
        except Exception:  # noqa: BLE001  # whatever adding two values of a kind raises: each is looked at below
            kind, values, total = None, {}, 0.0
        if (
            kind is not float
            or type(step) is not int
            or type(tokens) is not int
            or not buffer.tokens <= tokens <= _INT64_MAX
            or step < 0
            or "" in metrics
        ):
            self._log_with_care(metrics, step, tokens, batch_ids, position)
            return
        if batch_ids is not None or position is not None:
            self.batches(step, batch_ids, position)
        buffer.tokens = tokens
        points = buffer.put_points + len(values)
        if points <= buffer.easy_points and buffer.gap is None:
            buffer.put_points = points
            buffer.items.append((time_ns(), step, tokens, values))
        else:
            self._put(step, tokens, values)
        if total - total:  # NaN, for NaN and the infinities
            self._hurry()

    def _hurry(self) -> None:
        """Have a row written at once that has something that is no number: the trainer may end now."""
        now_s = monotonic()
        if now_s >= self._hurried_at_s + _HURRY_S and not self._is_over:  # some metrics are NaN in every row
            self._hurried_at_s = now_s
            self._drain.wake()

    def _put(self, step: int, tokens: int, values: dict[str, float] | PendingRow) -> None:
        if self._is_over:
            self._warn_of_end("log")
            return
        self._buffer.put(step, tokens, values)
        if self._buffer.put_points > self._buffer.easy_points:
            self._drain.wake()

    def _warn_of_end(self, call: str) -> None:
        """Say once that something came after the end; a forked child, which is to be silent, says nothing."""
        if not (self._is_disowned or self._has_warned):
            self._has_warned = True
            _log.warning("llmtrack: %s() after the end of run %s is not recorded", call, self.run_id)

    def _log_with_care(
        self,
        metrics: Mapping[str, Value],
        step: SupportsIndex,
        tokens: SupportsIndex,
        batch_ids: object,
        position: SupportsIndex | None,
    ) -> None:
        if not isinstance(metrics, Mapping):
            raise UsageError(f"metrics are a {type(metrics).__name__}", hint="give a dict of name -> number")
        values = {_name(name): take_value(name, value) for name, value in metrics.items()}
        known: dict[str, float] = {name: value for name, value in values.items() if not isinstance(value, PendingValue)}
        at_step, at_tokens = self._place(step, tokens)
        if batch_ids is not None or position is not None:
            self.batches(at_step, batch_ids, position)
        if len(known) < len(values):
            self._put(at_step, at_tokens, DeviceRow(values))
        elif known:
            self._put(at_step, at_tokens, known)

    def batches(
        self,
        step: SupportsIndex,
        ids: object = None,
        position: SupportsIndex | None = None,
        *,
        rank: int | None = None,
        tokens: SupportsIndex | None = None,
    ) -> None:
        """Say what a step was trained on; see `Run.batches`."""
        at = None if position is None else _coordinate("position", position)
        place = self._buffer.tokens if tokens is None else _coordinate("tokens", tokens)
        mark = StepIds(_coordinate("step", step), place, take_ids(ids), at, rank, is_foreign=bool(rank))
        if (mark.ids or at is not None) and not self._is_over:
            self._buffer.put_mark(mark)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do something else than training; see `Run.pause`."""
        try:
            yield
        finally:
            if not self._is_over:
                self._buffer.put_mark(Pause())

    def state_dict(self) -> dict[str, Any]:
        """Return what should survive a restart; see `Run.state_dict`."""
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what another process had learned; see `Run.load_state_dict`."""
        if state is not None and state != {}:
            self._watch.load_state_dict(state)

    def log_later(self, row: PendingRow, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Put a row in memory whose values are still on their way; see `Run.log_later`."""
        self._put(*self._place(step, tokens), row)

    def _place(self, step: SupportsIndex, tokens: SupportsIndex) -> tuple[int, int]:
        """Return where a row stands, which is not before the last one."""
        at_step, at_tokens = _coordinate("step", step), _coordinate("tokens", tokens)
        if at_tokens < self._buffer.tokens:
            raise UsageError(
                f"tokens go backwards in run {self.run_id}, segment {self.segment}: {at_tokens} after "
                f"{self._buffer.tokens}",
                hint="after loading an older checkpoint finish() this run and open_run() again with its meta",
            )
        self._buffer.tokens = at_tokens
        return at_step, at_tokens

    def checkpoint(
        self, path: str | os.PathLike[str], step: SupportsIndex, tokens: SupportsIndex, *, full: bool = False
    ) -> None:
        """Record a checkpoint once it is saved; see `Run.checkpoint`."""
        try:
            place = os.path.abspath(os.fspath(path))  # it will be looked for from other folders
        except TypeError as error:
            raise UsageError(
                f"the checkpoint's path is {path!r}", hint="give the file or folder that was saved"
            ) from error
        record = self._record("checkpoints", step, tokens, path=place)
        if self._is_over:
            self._warn_of_end("checkpoint")
            return
        self._recording = [waiting for waiting in self._recording if not waiting.durable.is_set()]
        self._recording.append(record)
        self._checkpointer.submit(lambda: self._record_checkpoint(record, full=full))

    def _record_checkpoint(self, record: Record, *, full: bool) -> None:
        """Make the id and put the record behind what was logged before it; on the checkpoint thread."""
        path, tokens = Path(str(record.values["path"])), int(str(record.values["tokens"]))
        is_recorded = False
        try:
            identity = identify(path, tokens, full=full)
            record.values.update(ckpt_id=identity.ckpt_id, bytes=identity.bytes)
            self._buffer.put_item(record)
            is_recorded = True
            self._drain.wake()
        except LlmtrackError as error:
            _log.warning("llmtrack: the checkpoint %s is not recorded: %s", path, error)
        finally:
            if not is_recorded:
                record.durable.set()  # whatever went wrong: nobody is to wait for it

    def alert(
        self,
        rule: str,
        message: str,
        step: SupportsIndex,
        tokens: SupportsIndex,
        *,
        level: Literal["info", "warn", "error"] = "warn",
        metric: str | None = None,
        value: float | None = None,
    ) -> None:
        """Record an alert of the caller's own; see `Run.alert`."""
        record = self._record(
            "alerts",
            step,
            tokens,
            alert_id=self._next_alert_id(),
            rule=str(rule),
            level=str(level),
            metric=metric,
            value=None if value is None else float(value),
            message=str(message),
            phase="raised",
        )
        told = dict(record.values)
        if not self._is_over:
            self._buffer.put_item(record)
            self._drain.wake()
        self._alert_was_raised(told)

    def context(self, message: str, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Add to the newest alert what else is known of it; see `Run.context`."""
        alert = self._last_alert
        if alert is None or self._is_over:
            return
        same = {name: alert.get(name) for name in ("alert_id", "rule", "metric")}
        record = self._record("alerts", step, tokens, **same, level="info", message=str(message), phase="context")
        self._buffer.put_item(record)

    @property
    def alert_step(self) -> int:
        """Return the step of the newest alert; see `Run.alert_step`."""
        return 0 if self._last_alert is None else int(str(self._last_alert["step"]))

    def _next_alert_id(self) -> str:
        return f"{self.run_id}-{self.segment}-{next(self._alert_numbers)}"

    def _alert_was_raised(self, alert: dict[str, object]) -> None:
        """Do what is to be done about an alert; on the thread that raised it, or that writes the log."""
        if alert["level"] == "info" or self._is_disowned:
            return
        self._last_alert = alert
        for act in self._on_alert:
            act()
        if self._hook is not None:
            self._hook.tell({"run_id": self.run_id, "segment": self.segment, **alert})

    def on_alert(self, act: Callable[[], None]) -> None:
        """Have something done when an alert is recorded; see `Run.on_alert`."""
        self._on_alert.append(act)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything logged so far is durable; see `Run.flush`."""
        if self._is_over or self._drain.ended.is_set():
            return self._drain.durable.is_set()
        deadline_s = monotonic() + timeout
        barrier = Barrier()
        self._buffer.put_item(barrier)
        self._drain.wake()
        waiting = [*(record.durable for record in self._recording), barrier.durable]
        return all(flag.wait(deadline_s - monotonic()) for flag in waiting)

    def finish(
        self,
        exit: Exit = "finished",  # noqa: A002  # the column's name
        detail: str | None = None,
        timeout: float = _FINISH_TIMEOUT_S,
    ) -> None:
        """Make everything durable, write how the segment ended, and seal its files; see `Run.finish`."""
        # A signal handler may come in at any line here, and finishes what is left to do.
        if self._is_disowned or (self._is_over and self._drain.ended.is_set()):
            return
        self._is_over = True
        deadline_s = monotonic() + timeout
        identified_s = deadline_s - timeout / 2  # a checkpoint that cannot be read does not take the rest along
        for record in self._recording:
            record.durable.wait(identified_s - monotonic())
        if not self._has_end:
            self._has_end = True
            self._buffer.put_item(End({"time": time_ns() // 1_000_000, "phase": "end", "exit": exit, "detail": detail}))
        self._drain.give_up_at(deadline_s)
        self._drain.wake()
        self._drain.ended.wait(deadline_s - monotonic() + 1.0)
        self._checkpointer.stop(0.0)
        self._learner.stop(0.0)
        if self._hook is not None and not self._hook.stop(min(_HOOK_S, max(deadline_s - monotonic(), 0.0))):
            _log.warning("llmtrack: on_alert was still at work when run %s ended", self.run_id)
        forget(self)
        if not self._drain.durable.is_set():
            _log.warning(
                "llmtrack: the storage of %s did not take everything within %.0f s; what was not written is lost, at "
                "least %d points with those dropped before. Free or repair it; `llmtrack verify` says what is there",
                self.folder,
                timeout,
                self._buffer.dropped_points + self._buffer.waiting_points(),
            )

    def disown(self) -> None:
        """Do nothing more, in a forked child: the files belong to the parent, and its threads are not here."""
        self._is_over = self._is_disowned = True
        self._buffer.refuse()

    def _record(self, table: str, step: SupportsIndex, tokens: SupportsIndex, **values: object) -> Record:
        place = {
            "time": time_ns() // 1_000_000,
            "step": _coordinate("step", step),
            "tokens": _coordinate("tokens", tokens),
        }
        return Record(table, {**place, **values}, after_sync=table == "checkpoints")


def open_run(
    root: str | os.PathLike[str] | None = None,
    *,
    run_id: str | None = None,
    project: str = "default",
    run_name: str | None = None,
    config: object = None,
    recipe: object = None,
    checkpoint: Mapping[str, object] | None = None,
    on_rollback: Literal["fork", "continue"] = "fork",
    fork: bool = False,
    preempt_signal: int | None = None,
    flops: Flops | None = None,
    alerts: bool | Sequence[Detector] | None = None,
    on_alert: OnAlert | None = None,
    settings: Settings | None = None,
) -> Run:
    """Open a run, or go on with the one that a checkpoint belongs to: every process lifetime is a segment of a run.

    Every rank calls it. Rank 0 decides and writes; the others get its answer through one broadcast of
    `torch.distributed` where that is initialised, and a run whose methods do nothing. `docs/LINEAGE.md` has the rules
    by which a process becomes the next segment of a run or the first one of a child run.

    Args:
        root: Folder on shared storage that holds runs; made if it is not there. Default: ``LLMTRACK_DIR``.
        run_id: Id of the run; default ``LLMTRACK_RUN_ID``, else the checkpoint's, else a new one.
        project: Experiment in MLflow, project in W&B.
        run_name: Name for people.
        config: Everything a person may want to look up; secrets are redacted.
        recipe: What makes this training what it is (learning-rate schedule, data mix, model shape): a run that goes
            on with another recipe becomes a child run.
        checkpoint: What `Run.meta` gave when the checkpoint was saved; None when training starts from nothing.
        on_rollback: What becomes of a checkpoint older than the newest: a child run, or a continuation that leaves
            settled points behind.
        fork: Open a child run whatever the rules say.
        preempt_signal: Signal that means the job is about to be killed, such as ``signal.SIGTERM``: everything is made
            durable, the segment ends as preempted, then what was installed for that signal before happens.
        flops: What a token costs and the devices can do, from `llmtrack.flops.estimate`; kept for whoever computes the
            utilisation again.
        alerts: Detectors that look at what is logged, such as `llmtrack.alerts.default` returns; True and None for
            those, False for none. Each run needs its own.
        on_alert: Called with each alert that is worse than an information, as a dict, on a thread of its own; or a
            command, which gets it as JSON on its standard input. Neither can block or end the training.
        settings: Limits of memory and time.

    Raises:
        UsageError: No root, an id or a checkpoint that is not valid, a recipe that cannot be compared, detectors that
            are none, a command that is not there.
        LlmtrackError: The storage refused the start of the segment, or (on other ranks) rank 0 raised.
    """
    if is_disabled():
        return _silent_run(run_id, checkpoint)

    opened: list[RecordingRun] = []

    def open_on_rank_zero() -> tuple[str, int, int, int, str | None]:
        started_ms = time_ns() // 1_000_000
        where = _root(root)
        detectors = check_detectors(alerts, world_size())
        hook = None if on_alert is None else Hook(on_alert)
        try:
            opening = open_segment(
                where, run_id=run_id, checkpoint=checkpoint, recipe=recipe, on_rollback=on_rollback, fork=fork
            )
            start = _start_record(opening, started_ms, project, run_name, config, flops=flops)
            run = RecordingRun(opening, start, settings or Settings(), detectors, hook)
        except OSError as error:
            raise LlmtrackError(
                f"cannot start a segment in {where}: {error.strerror} ({error.filename})",
                hint="check that the folder is on shared storage, can be written to, and has room",
            ) from error
        opened.append(run)
        return run.run_id, run.segment, run.start_step, run.start_tokens, run.recipe_hash

    answer = decide_on_rank_zero(open_on_rank_zero)
    if opened:
        if preempt_signal is not None:
            end_on_signal(opened[0], preempt_signal)
        return opened[0]
    return Run(*answer) if answer is not None else _silent_run(run_id, checkpoint)


def _root(root: str | os.PathLike[str] | None) -> Path:
    given = root if root is not None else os.environ.get("LLMTRACK_DIR")
    if not given:
        raise UsageError("no root", hint="give open_run a folder on shared storage, or set LLMTRACK_DIR")
    return Path(given)


def _start_record(
    opening: Opening, time_ms: int, project: str, run_name: str | None, config: object, *, flops: Flops | None
) -> Record:
    values = {
        **process_identity(),
        "time": time_ms,
        "step": opening.start_step,
        "tokens": opening.start_tokens,
        "phase": "start",
        "project": project,
        "run_name": run_name,
        "from_run": opening.from_run,
        "from_segment": opening.from_segment,
        "from_ckpt": opening.from_ckpt,
        "fork_reason": opening.fork_reason,
        "recipe_hash": opening.recipe_hash,
        "recipe": opening.recipe,
        "recipe_diff": opening.recipe_diff,
        "config": None if config is None else json.dumps(redact(config)),
        "flops": None if flops is None else flops.to_json(),
    }
    return Record("segments", values)


def _silent_run(run_id: str | None, checkpoint: Mapping[str, object] | None) -> Run:
    """Return a run that writes nothing, knowing only what it was given."""
    meta = checkpoint or {}
    known = run_id or os.environ.get("LLMTRACK_RUN_ID") or str(meta.get("run_id", ""))
    return Run(known, 0, _coordinate("step", meta.get("step", 0)), _coordinate("tokens", meta.get("tokens", 0)))


def _coordinate(what: str, value: object) -> int:
    given: Any = value  # what is no integer is refused here
    try:
        number = index(given)
    except TypeError:
        number = -1
    if not 0 <= number <= _INT64_MAX:
        raise UsageError(f"{what} is {value!r}", hint=f"give {what} as an integer from 0 on")
    return number


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f"a metric is called {name!r}", hint="name it with a string such as 'train/loss'")
    return name
