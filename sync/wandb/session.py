"""One stay of the real client in one run of W&B: opened at its end, closed when all is there."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from llmtrack.sync.sink import MovedError
from llmtrack.writer.errors import RejectedError, RetryableSinkError

from . import client as wandb_client
from .encode import TOKENS
from .pace import Pace

_IN_FLIGHT_ROWS: Final = 50_000  # logged and not yet there: bounds the memory of the client's service
_LAST_ROWS: Final = 5_000  # so few may be left to upload when the end begins
_LATE_S: Final = 15.0  # how long rows that were accepted may take to be counted
_TRANSMIT_S: Final = 2.0  # the client's own 15 s would make every wait for the server that long
_GLOB_DOT: Final = "."


class Session:
    """Rows go in with `log`; after `close` returned, all of them are there.

    Args:
        url: The server.
        place: Entity, project and id of the run.
        folder: For the client's own files; removed at the end.
        timeout_s: Seconds without any row arriving after which the server counts as not reachable.
        count: Asks the server how many rows it has.
        pace: Holds rows back.
        exit_code: The run is over, and this is how; None leaves it running.
    """

    def __init__(
        self,
        url: str,
        place: tuple[str, str, str],
        folder: Path,
        *,
        timeout_s: float,
        count: Callable[[], int],
        pace: Pace,
        exit_code: int | None = None,
    ) -> None:
        self._url = url
        self._place = place
        self._folder = folder
        self._timeout_s = timeout_s
        self._count = count
        self._pace = pace
        self._exit_code = exit_code
        self._run: Any = None
        self._there = 0
        self.began_at = 0
        self.logged = 0

    @property
    def rows(self) -> int:
        """How many rows the run has once everything is there."""
        return self.began_at + self.logged

    def open(self, expected: int, names: Sequence[str] = (), **more: Any) -> None:
        """Open the run, and see that it has as many rows as we know of.

        Args:
            expected: So many.
            names: Metrics, as they are called in W&B.
            more: For `wandb.init`, where the run is made.

        Raises:
            MovedError: It has more or fewer: somebody else is at it, or the answer is older than what was accepted.
        """
        wandb = wandb_client.load(self._url)
        entity, project, ref = self._place
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = wandb_client.settings(
            self._url,
            x_update_finish_state=self._exit_code is not None,
            x_file_stream_transmit_interval=_TRANSMIT_S,
            finish_timeout=self._timeout_s,
            finish_timeout_raises=True,
            init_timeout=min(self._timeout_s, 20.0),
        )
        with wandb_client.translated(self._url, ref):
            self._run = wandb.init(
                entity=entity, project=project, id=ref, resume="allow", dir=str(self._folder), settings=settings, **more
            )
        self.began_at = self._there = self._run.starting_step
        # Asked again, because the client begins with the number of one answer at the place of another.
        if self.began_at != expected or (expected and self._count() != expected):
            self.abandon()
            raise MovedError(
                f"the run {ref} should have {expected} rows, and W&B says {self.began_at}",
                sink=wandb_client.NAME,
                run_id=ref,
            )
        with wandb_client.translated(self._url, ref):
            # W&B forgets this when a run is resumed. Its own summary would begin anew each time, so we write it.
            self._run.define_metric(TOKENS, summary="none")
            self._run.define_metric("*", step_metric=TOKENS, summary="none")
        self.define(names)

    def define(self, names: Sequence[str]) -> None:
        """Say what the x-axis of some metrics is, as far as the star does not: a dot is nesting to the client."""
        with wandb_client.translated(self._url, self._place[2]):
            for name in names:
                if _GLOB_DOT in name or not wandb_client.keeps_patterns():
                    self._run.define_metric(name.replace(".", "\\."), step_metric=TOKENS, summary="none")

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand rows to the client.

        Raises:
            RetryableSinkError: Nothing has arrived for too long; none of these rows was logged.
            MovedError: The client lost its service: only a comparison says what arrived.
        """
        if self.rows - self._there > _IN_FLIGHT_ROWS:
            self._wait_until(self.rows - _IN_FLIGHT_ROWS // 2)
        log = self._run.log
        try:
            for row in rows:
                self._pace.take()
                log(row)
                self.logged += 1
        except Exception as error:
            raise self._lost(error) from error

    def say(self, *, summary: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> None:
        """Set values of the summary and of the configuration."""
        try:
            if summary:
                self._run.summary.update(dict(summary))
            if config:
                self._run.config.update(dict(config), allow_val_change=True)
        except Exception as error:
            raise self._lost(error) from error

    def alert(self, title: str, text: str, level: str) -> None:
        """Have W&B tell people, by mail or chat."""
        try:
            self._run.alert(title=title, text=text, level=level, wait_duration=0)
        except Exception as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Wait until everything is there.

        Raises:
            RetryableSinkError: Nothing has arrived for too long.
            RejectedError: The client ended as if all were well, and rows did not arrive.
            MovedError: There are more rows than were sent.
        """
        try:
            self._wait_until(self.rows - _LAST_ROWS)
            self._finish()
            there = self._late_rows()
        finally:
            reason = self._reason()
            shutil.rmtree(self._folder, ignore_errors=True)
        if there < self.rows:
            raise RejectedError(
                f"the upload to {self._url} died: {self.rows - there} of {self.logged} rows are not there{reason}",
                sink=wandb_client.NAME,
                run_id=self._place[2],
                hint="sync again: only what is lacking is sent",
            )
        if there > self.rows:
            raise MovedError(f"the run {self._place[2]} has rows of another", sink=wandb_client.NAME)

    def abandon(self) -> None:
        """Leave the run as it is; what was logged may arrive or not."""
        run, self._run = self._run, None
        if run is not None:
            ending = threading.Thread(target=_quietly, args=(run.finish,), daemon=True, name="llmtrack-wandb-end")
            ending.start()
            ending.join(2.0 if not self.logged else 0.5)
            if ending.is_alive():
                wandb_client.stop_service(at_once=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _finish(self) -> None:
        run, self._run = self._run, None
        try:
            run.finish(exit_code=self._exit_code or 0)
        except TimeoutError as error:
            wandb_client.stop_service(at_once=True)
            raise self._silent() from error
        except Exception as error:
            raise self._lost(error) from error

    def _wait_until(self, wanted: int) -> None:
        """Wait until so many rows are there, as long as more arrive."""
        began = time.monotonic()
        pause_s = 0.05
        while self._there < wanted:
            try:
                there = self._count()
            except RetryableSinkError:
                there = self._there
            if there > self._there:
                self._there, began = there, time.monotonic()
            elif time.monotonic() - began > self._timeout_s:
                self._run = None
                wandb_client.stop_service(at_once=True)
                raise self._silent()
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    def _late_rows(self) -> int:
        """Return how many rows there are; a server may take a moment to count what it accepted."""
        until = time.monotonic() + min(_LATE_S, self._timeout_s)
        pause_s = 0.05
        while True:
            there = self._count()
            if there >= self.rows or time.monotonic() > until:
                return there
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    def _reason(self) -> str:
        """Return what the client's own log says of the failure: it tells nobody else."""
        found = ""
        for path in self._folder.glob("wandb/*/logs/debug-internal.log"):
            with contextlib.suppress(OSError):
                for line in path.read_text(errors="replace").splitlines():
                    if '"ERROR"' in line or "fatal" in line:
                        with contextlib.suppress(ValueError):
                            said = json.loads(line)
                            found = " ".join(str(said[key]) for key in ("msg", "error") if key in said)
        return f" ({found[:300]})" if found else ""

    def _silent(self) -> RetryableSinkError:
        return RetryableSinkError(
            f"{self._url} has taken nothing for {self._timeout_s:.0f} s",
            sink=wandb_client.NAME,
            run_id=self._place[2],
            hint="sync again when it answers: it goes on where it was",
        )

    def _lost(self, error: Exception) -> MovedError:
        return MovedError(f"W&B's client failed: {error}", sink=wandb_client.NAME, run_id=self._place[2])


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # whatever it says: the run is left as it is
        function()
