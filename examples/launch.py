"""Start the training example with torchrun, read what it says, and kill it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import llmtrack
from llmtrack.writer.format import OPEN_SUFFIX
from llmtrack.writer.log.stream import read_part

SCRIPT: Final = Path(__file__).resolve().with_name("pretrain_gpt.py")
_RANK_LINE: Final = re.compile(r"rank \d+ of \d+: pid (\d+)")
_GRACE_S: Final = 10.0  # for torchrun to stop its ranks when it is asked to


class Training:
    """One torchrun of the example on this machine, over loopback, with its output in hand.

    A context manager: whatever happens inside, nothing of it runs on afterwards.
    """

    def __init__(self, arguments: Sequence[str], *, ranks: int = 2, env: Mapping[str, str] | None = None) -> None:
        import_from = str(Path(llmtrack.__file__).absolute().parents[1])  # a checkout need not be installed
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
                # a free port, found by the one that listens on it; no look-up of a host name, no way off the machine
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
                *(str(SCRIPT), *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, and we stop it in order
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                "PYTHONPATH": os.pathsep.join(filter(None, [import_from, os.environ.get("PYTHONPATH")])),
                **(env or {}),
            },
        )
        self.rank_pids: list[int] = []

    def lines(self) -> Iterator[str]:
        """Yield each line that torchrun and its ranks print, as it comes, until all of them have ended."""
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            if found := _RANK_LINE.search(line):
                self.rank_pids.append(int(found[1]))
            yield line.rstrip("\n")

    def kill(self) -> None:
        """Kill torchrun and every rank that has said its pid with SIGKILL: no handler runs, nothing is flushed.

        torchrun goes first, or it would see a rank die and stop the others politely. It gives each rank a session of
        its own, so that killing its process group alone would leave them running.
        """
        for pid in (self.process.pid, *self.rank_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> int:
        """Wait for torchrun to end, and return its exit status: negative when a signal ended it."""
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class SegmentTail:
    """What a segment that is being written has on disk, read on from where the last look ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint_steps: list[int] = []
        self.last_step = 0
        self._offsets: dict[Path, int] = {}

    def look(self) -> None:
        """Take in what has been written since."""
        self.last_step = max([self.last_step, *self._new_steps("metrics")])
        self.checkpoint_steps += self._new_steps("checkpoints")

    def _new_steps(self, table: str) -> list[int]:
        steps: list[int] = []
        for part in sorted(self.folder.glob(f"{table}-*{OPEN_SUFFIX}")):
            try:
                content = read_part(part, offset=self._offsets.get(part, 0))
            except FileNotFoundError:  # the segment has ended, and this part is sealed
                continue
            self._offsets[part] = content.next_offset
            steps += content.table["step"].to_pylist()
        return steps
