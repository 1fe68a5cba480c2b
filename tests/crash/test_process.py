"""How a training process may end or multiply, and what the log has of it then."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.trainer import tokens_of
from tests.faults import TINY, Storage, Trainer, failing_storage, wait_until
from tests.reading import find_segment, read_segment

Start = Callable[..., Trainer]
SLOW: dict[str, Any] = {"flush_interval_s": 3600.0, "fsync_interval_s": 3600.0}  # only what asks for it is written


@pytest.fixture
def failing() -> Iterator[tuple[Storage, Start]]:
    """Yield storage that works so far, and what starts a training process on it."""
    with failing_storage() as (storage, start):
        yield storage, start


@pytest.fixture
def trainer(failing: tuple[Storage, Start]) -> Trainer:
    """Return a trainer whose run is open, and whose log is written when somebody asks for it."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), SLOW, run_id="run")
    return trainer


@pytest.fixture
def root(failing: tuple[Storage, Start]) -> Path:
    """Return the root."""
    return failing[0].root


def test_a_script_that_ends_without_finish_leaves_everything(trainer: Trainer, root: Path) -> None:
    """The last rows are in the log, and its end says that nobody knows whether the training came to its own."""
    trainer.log(100)
    assert trainer.leave() == 0
    segment = read_segment(find_segment(root))
    assert segment.steps() == list(range(1, 101))
    assert (segment.end["exit"], segment.end["detail"]) == ("failed", "the process ended without finish()")


def test_a_run_that_nobody_holds_any_more_is_finished_too(trainer: Trainer, root: Path) -> None:
    """A training function that returned has taken its run along."""
    trainer.log(100)
    trainer.drop_run()
    assert trainer.leave() == 0
    segment = read_segment(find_segment(root))
    assert segment.steps() == list(range(1, 101))
    assert segment.end["exit"] == "failed"


def test_an_exception_that_nobody_caught_is_the_detail_of_the_end(trainer: Trainer, root: Path) -> None:
    """Who looks at the log finds why it ended."""
    trainer.log(100)
    trainer.send("fail")
    assert trainer.wait() == 1
    segment = read_segment(find_segment(root))
    assert segment.steps() == list(range(1, 101))
    assert segment.end["exit"] == "failed"
    assert "the loss is NaN" in segment.end["detail"]


def test_the_interpreter_does_not_wait_for_storage_that_hangs(failing: tuple[Storage, Start]) -> None:
    """Threads that sit in a system call do not keep a process that was finished from ending."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    storage.fail("write hang 600000 0 0 metrics", "fsync hang 600000 0 0 segments")
    trainer.log(100)
    storage.wait_for("hanging")
    assert trainer.timed("finish", timeout=0.2) < 30
    assert trainer.leave() == 0
    assert any("did not take everything within" in line for line in trainer.warnings())


@pytest.mark.parametrize("operation", ["write", "fsync", "open", "rename", "close", "unlink"])
def test_finish_returns_within_its_timeout(failing: tuple[Storage, Start], operation: str) -> None:
    """Whatever hangs, the trainer is told and goes on."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(100)
    storage.fail(f"{operation} hang 600000 0 0 metrics")
    assert trainer.timed("finish", timeout=0.3) < 30
    storage.heal()
    folder = find_segment(storage.root)
    wait_until(lambda: read_segment(folder).steps() == list(range(1, 101)), "every row is there")


def test_a_checkpoint_that_cannot_be_read_takes_no_end_along(failing: tuple[Storage, Start]) -> None:
    """Its id takes half of the time that finish has; the other half is for the log."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    (storage.root / "model.pt").write_bytes(b"weights")
    storage.fail("open hang 600000 0 0 model.pt")
    trainer.log(100)
    assert trainer.call("flush", 60.0)  # so that little is left for the other half
    trainer.call("checkpoint", str(storage.root / "model.pt"), 100, tokens_of(100))
    storage.wait_for("hanging")
    trainer.call("finish", timeout=8.0)
    segment = read_segment(find_segment(storage.root))
    assert segment.steps() == list(range(1, 101))
    assert segment.end["exit"] == "finished"
    assert segment["checkpoints"] == []


@pytest.mark.parametrize("path", ["/nowhere", "not a path\0"])
def test_nobody_waits_for_a_checkpoint_that_is_not_there(failing: tuple[Storage, Start], path: str) -> None:
    """It is said once, and everything else is durable."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(1)
    trainer.call("checkpoint", path, 1, tokens_of(1))
    assert trainer.call("flush", 60.0)
    trainer.call("finish")
    assert read_segment(find_segment(storage.root)).end["exit"] == "finished"
    assert trainer.warnings()[0].startswith("llmtrack: ")


def test_a_signal_that_means_preemption_ends_the_segment_so(trainer: Trainer, root: Path, failing: Any) -> None:
    """Everything is in the log, its end says preempted, and then the process dies of the signal."""
    storage, start = failing
    trainer.kill()
    trainer.wait()
    trainer = start()
    opened = trainer.open(str(root), SLOW, run_id="other", preempt_signal=int(signal.SIGTERM))
    trainer.log(100)
    trainer.kill(signal.SIGTERM)
    assert trainer.wait() == -signal.SIGTERM
    segment = read_segment(Path(opened["folder"]))
    assert segment.steps() == list(range(1, 101))
    assert (segment.end["exit"], segment.end["detail"]) == ("preempted", "SIGTERM")
    assert storage.operations("unlink", path="metrics-00001.arrows")  # sealed


def test_what_was_installed_for_the_signal_still_happens(failing: tuple[Storage, Start], tmp_path: Path) -> None:
    """After the end is durable, the handler of the trainer runs, and the process goes on."""
    storage, start = failing
    trainer = start()
    trainer.install(int(signal.SIGUSR1), str(tmp_path / "marker"))
    trainer.open(str(storage.root), SLOW, run_id="run", preempt_signal=int(signal.SIGUSR1))
    trainer.log(10)
    trainer.kill(signal.SIGUSR1)
    wait_until((tmp_path / "marker").exists, "the trainer's own handler")
    assert read_segment(find_segment(storage.root)).end["exit"] == "preempted"
    trainer.log(10)
    assert trainer.leave() == 0
    assert read_segment(find_segment(storage.root)).steps() == list(range(1, 11))


def test_without_being_asked_no_signal_is_handled(trainer: Trainer, root: Path) -> None:
    """SIGTERM is the trainer's: it kills the process, and what was flushed is there."""
    trainer.log(100)
    assert trainer.call("flush", 30.0)
    trainer.kill(signal.SIGTERM)
    assert trainer.wait() == -signal.SIGTERM
    segment = read_segment(find_segment(root))
    assert segment.steps() == list(range(1, 101))
    assert [record["phase"] for record in segment["segments"]] == ["start"]


def test_a_signal_in_the_middle_of_finish_waits_for_it(failing: tuple[Storage, Start]) -> None:
    """A job that is told to end while it ends anyway has an end in its log before it dies."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run", preempt_signal=int(signal.SIGTERM))
    trainer.log(100)
    storage.fail("fsync hang 600000")
    trainer.send("call", "finish")
    storage.wait_for("hanging")
    trainer.kill(signal.SIGTERM)
    storage.heal()
    assert trainer.wait() == -signal.SIGTERM
    segment = read_segment(find_segment(storage.root))
    assert segment.steps() == list(range(1, 101))
    assert segment.end["exit"] == "finished"


@pytest.mark.parametrize("what", ["log", "flush"])
def test_a_signal_handler_may_use_the_run_that_it_interrupts(failing: tuple[Storage, Start], what: str) -> None:
    """In the middle of log, flush or anything else: no row is lost, and nothing waits for itself."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), {"flush_interval_s": 0.001}, run_id="run")
    trainer.alarm(what)
    for _ in range(30):
        trainer.log(100)
        assert trainer.call("flush", 20.0)
    trainer.no_alarm()
    trainer.call("finish")
    segment = read_segment(find_segment(storage.root))
    assert [step for step, row in ((row.step, row.bits) for row in segment.rows()) if "m/0000" in row] == list(
        range(1, 3001)
    )
    assert segment["gaps"] == []


@pytest.mark.parametrize("from_step", [1, 1_000, 10_000])
def test_a_signal_handler_may_finish_the_run_in_the_middle_of_log(
    failing: tuple[Storage, Start], from_step: int
) -> None:
    """What was logged before is there, the end says preempted, and what is logged later is not."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), {"flush_interval_s": 0.001}, run_id="run")
    trainer.alarm("finish", from_step)
    for _ in range(30):
        trainer.log(2_000)
    segment = read_segment(find_segment(storage.root))
    steps = segment.steps()
    assert from_step - 1 <= len(steps) < 60_000  # the row of that step may not have been taken yet
    assert steps == list(range(1, len(steps) + 1))
    assert segment.end["exit"] == "preempted"
    assert segment["gaps"] == []
    assert trainer.leave() == 0
    assert ["after the end of run run" in line for line in trainer.warnings()] == [True]


def test_a_forked_worker_neither_writes_nor_hangs(failing: tuple[Storage, Start]) -> None:
    """A data loader's workers hold a copy of the run: it does nothing there, and the parent's goes on."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    for _ in range(5):
        trainer.log(50)
        answer = trainer.fork_worker()
        assert not answer["durable"]
        assert answer["took_s"] < 300  # it was told to wait for longer
        assert answer["threads"] == ["MainThread"]
    trainer.log(50)
    trainer.call("finish")
    assert {done.pid for done in storage.operations()} == {trainer.pid}
    segment = read_segment(find_segment(storage.root))
    assert segment.steps() == list(range(1, 301))
    assert segment["alerts"] == []
    assert segment.end["exit"] == "finished"


def test_a_pool_of_workers_leaves_the_log_alone(failing: tuple[Storage, Start]) -> None:
    """Processes of the multiprocessing module, forked while the drain is at work."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(100)
    assert trainer.pid not in trainer.map_in_workers(3)
    trainer.log(100)
    trainer.call("finish")
    assert {done.pid for done in storage.operations()} == {trainer.pid}
    assert read_segment(find_segment(storage.root)).steps() == list(range(1, 201))


def test_a_forked_worker_that_ends_as_a_script_does_writes_no_end(trainer: Trainer, root: Path) -> None:
    """What runs at exit there is not for the parent's run."""
    trainer.log(10)
    assert trainer.fork_and_leave() == 0
    assert trainer.call("flush", 30.0)
    assert [record["phase"] for record in read_segment(find_segment(root))["segments"]] == ["start"]


def test_several_threads_may_log(failing: tuple[Storage, Start]) -> None:
    """Each row of each thread is in the log, in the order of its thread."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log_in_threads(8, 2_000)
    trainer.call("finish")
    segment = read_segment(find_segment(storage.root))
    for thread in range(8):
        assert segment.series(f"thread/{thread}") == [float(step) for step in range(1, 2_001)]
    assert segment["gaps"] == []


def test_what_was_logged_after_finish_changes_nothing(failing: tuple[Storage, Start]) -> None:
    """The end stays the end."""
    storage, start = failing
    trainer = start()
    trainer.open(str(storage.root), TINY, run_id="run")
    trainer.log(10)
    trainer.call("finish")
    trainer.log(10)
    trainer.call("alert", "data", "too late", 20, tokens_of(20))
    trainer.call("checkpoint", "/nowhere", 20, tokens_of(20))
    assert trainer.call("flush", 5.0)
    trainer.call("finish", "failed")
    assert trainer.leave() == 0
    segment = read_segment(find_segment(storage.root))
    assert segment.steps() == list(range(1, 11))
    assert segment.end["exit"] == "finished"
    assert ["after the end of run run" in line for line in trainer.warnings()] == [True]
