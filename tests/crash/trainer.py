"""A process that trains as far as the log can tell: it does what a test says, and each test gets a fork of its own.

Started by `tests.faults.Trainers`, with storage that fails on request. The test sends two pipes over a socket for each
fork: requests and answers are pickles, each after its length in eight bytes. How the fork ended comes over the socket.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  # imported once, not in each fork: rows may hold NumPy scalars

import llmtrack
from llmtrack.writer.lineage.identity import process_identity
from llmtrack.writer.log.seal import seal_segment
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings

_ERR = 2
_END = object()


class Channel:
    """Two pipes to a test."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers

    def receive(self) -> Any:
        """Return the next request, or None when there will be none."""
        size = self._read(8)
        return pickle.loads(self._read(int.from_bytes(size, "little"))) if size else None  # noqa: S301  # the test's

    def send(self, answer: object) -> None:
        """Send an answer."""
        data = pickle.dumps(answer)
        data = len(data).to_bytes(8, "little") + data
        while data:
            data = data[os.write(self._answers, data) :]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = os.read(self._requests, size - len(data))
            if not more:
                return b""
            data += more
        return data


class Trainer:
    """One training process; every public method is a request."""

    def __init__(self) -> None:
        self.run: Any = None
        self.flooding = threading.Event()
        self.flooder: threading.Thread
        self.step = 0

    def open(self, root: str, settings: Mapping[str, Any], **given: Any) -> dict[str, Any]:
        """Open the run, and say what it is."""
        run = llmtrack.open_run(root, settings=Settings(**settings), **given)
        assert isinstance(run, RecordingRun)
        self.run = run
        return {"run_id": run.run_id, "segment": run.segment, "folder": str(run.folder)}

    def log(self, rows: int, metrics: int = 3, pause_s: float = 0.0) -> float:
        """Log rows of the next steps, and return the seconds that the slowest call took."""
        slowest_s = 0.0
        for _ in range(rows):
            self.step += 1
            row = row_of(self.step, metrics)
            began_s = time.perf_counter()
            self.run.log(row, self.step, tokens_of(self.step))
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
            if pause_s:
                time.sleep(pause_s)
        return slowest_s

    def log_in_threads(self, threads: int, rows: int) -> None:
        """Log from several threads at the same moment, all at one count of tokens, each metrics of its own."""
        together = threading.Barrier(threads)

        def log(thread: int) -> None:
            together.wait()
            for step in range(1, rows + 1):
                self.run.log({f"thread/{thread}": float(step)}, step, 0)

        workers = [threading.Thread(target=log, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def flood(self) -> None:
        """Log without a pause, on a thread of its own, until `end_flood`."""
        self.flooding.clear()

        def log() -> None:
            while not self.flooding.is_set():
                self.log(100, 100)

        self.flooder = threading.Thread(target=log)
        self.flooder.start()

    def end_flood(self) -> int:
        """End what `flood` began, and return how many rows were logged."""
        self.flooding.set()
        self.flooder.join()
        return self.step

    def log_row(self, row: Mapping[Any, Any], step: int, tokens: int) -> None:
        """Log one row that the test made; it is changed right afterwards."""
        mine = dict(row)
        self.run.log(mine, step, tokens)
        mine.clear()

    def log_rows(self, rows: Sequence[tuple[int, int, Mapping[Any, Any]]]) -> None:
        """Log rows that the test made."""
        for step, tokens, row in rows:
            self.log_row(row, step, tokens)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the run."""
        return getattr(self.run, name)(*args, **kwargs)

    def timed(self, name: str, *args: Any, **kwargs: Any) -> float:
        """Call a method of the run, and return the seconds that it took."""
        began_s = time.perf_counter()
        getattr(self.run, name)(*args, **kwargs)
        return time.perf_counter() - began_s

    def seal(self, folder: str) -> list[str]:
        """Seal a segment whose writer is gone."""
        return [path.name for path in seal_segment(Path(folder))]

    def drop_run(self) -> None:
        """Forget the run without a word to it."""
        self.run = None

    def peak_bytes(self) -> int:
        """Return the most memory that this process has held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def resident_bytes(self) -> int:
        """Return the memory that this process holds."""
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # the trainer's own, not a file of the log
            return int(file.read().split()[1]) * resource.getpagesize()

    def run_out_of_files(self) -> None:
        """Let this process open no file more."""
        lowest_free = os.dup(_ERR)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def may_open_files(self) -> None:
        """End what `run_out_of_files` began."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def open_files(self) -> int:
        """Return how many files this process holds open."""
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # numbers, not paths

    def threads(self) -> list[str]:
        """Return the names of the threads that run."""
        return sorted(thread.name for thread in threading.enumerate())

    def fork_worker(self) -> dict[str, Any]:
        """Fork as a data loader does, use the run in the child, and return what that said."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            began_s = time.perf_counter()
            self.log(100)
            self.run.alert("child", "must not be written", self.step, tokens_of(self.step))
            durable = self.run.flush(600.0)
            self.run.finish()
            answer = {"durable": durable, "took_s": time.perf_counter() - began_s, "threads": self.threads()}
            os.write(writing, pickle.dumps(answer))
            os.close(writing)
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:  # noqa: PTH123  # a pipe
            answer = pickle.loads(pipe.read())  # noqa: S301  # from our own child
        os.waitpid(child, 0)
        return dict(answer)

    def map_in_workers(self, workers: int) -> list[int]:
        """Log and flush in the processes of a pool, as a data loader's workers may, and return their ids."""
        with multiprocessing.get_context("fork").Pool(workers, initializer=_remember, initargs=(self,)) as pool:
            return sorted(set(pool.map(_use_the_run, range(20 * workers), chunksize=1)))

    def fork_and_leave(self) -> int:
        """Fork, have the child end as a script does, and return its status."""
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def alarm(self, what: str, from_step: int = 0) -> None:
        """Have a signal handler use the run: `log`, `flush` or `finish`, whatever the main thread is doing then.

        It comes three times a millisecond, and `finish` at the first time from a step on. While one call of it still
        works, the next does nothing: on a slow disk they would pile up until Python's stack ends.
        """
        working = False

        def handle(_number: int, _frame: object) -> None:
            nonlocal working
            if working:
                return
            working = True
            try:
                use_the_run()
            finally:
                working = False

        def use_the_run() -> None:
            if what == "log":
                self.run.log({"from/handler": float(self.step)}, self.step, tokens_of(self.step))
            elif what == "flush":
                self.run.flush(5.0)
            elif self.step >= from_step:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.run.finish("preempted", timeout=60.0)

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0003)

    def no_alarm(self) -> None:
        """End what `alarm` began."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def install(self, number: int, marker: str) -> None:
        """Install a handler that leaves a marker: a file with the signal's number."""

        def handle(received: int, _frame: object) -> None:
            with open(marker, "w", encoding="ascii") as file:  # noqa: PTH123  # a file of the test
                file.write(str(received))

        signal.signal(number, handle)

    def exit(self) -> object:
        """Let the interpreter end as it does after the last line of a script."""
        return _END

    def vanish(self) -> None:
        """End without any cleaning up."""
        os._exit(0)

    def fail(self) -> None:
        """Raise what nobody catches."""
        raise _Failure("the loss is NaN")


class _Failure(Exception):  # noqa: N818  # what a training script may die of
    pass


_parent: list[Trainer] = []


def _remember(trainer: Trainer) -> None:
    _parent.append(trainer)


def _use_the_run(step: int) -> int:
    _parent[0].run.log({"from/worker": 1.0}, step, tokens_of(10**6))
    _parent[0].run.flush(1.0)
    return os.getpid()


def row_of(step: int, metrics: int = 3) -> dict[str, float]:
    """Return the row of a step; a test can make it again."""
    return {f"m/{index:04d}": (step * 1_000_003 + index) / 7 for index in range(metrics)}


def tokens_of(step: int) -> int:
    """Return the tokens seen at a step."""
    return step * 4096


def serve(channel: Channel) -> None:
    """Answer requests until one asks to leave."""
    trainer = Trainer()
    while (request := channel.receive()) is not None:
        name, args, kwargs = request
        try:
            answer = getattr(trainer, name)(*args, **kwargs)
        except _Failure:
            raise
        except Exception as error:  # noqa: BLE001  # the test is told
            channel.send(("raised", error))
            continue
        if answer is _END:
            channel.send(("answer", None))
            return
        channel.send(("answer", answer))


def main(test: socket.socket) -> None:
    """Fork a trainer whenever asked to, and say how it ended."""
    process_identity()  # looks at every installed package, and remembers: once, not in each fork
    while True:
        data, pipes, _, _ = socket.recv_fds(test, 1 << 16, 2)
        if not data:
            return
        request = pickle.loads(data)  # noqa: S301  # from the test that started this process
        child = os.fork()
        if child == 0:
            test.close()
            stderr = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(stderr, _ERR)
            os.close(stderr)
            channel = Channel(*pipes)
            channel.send(("forked", os.getpid()))
            serve(channel)
            return
        for pipe in pipes:
            os.close(pipe)
        _, status = os.waitpid(child, 0)
        test.send(pickle.dumps(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
