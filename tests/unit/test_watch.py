"""Which runs changed, and what finding out costs: real folders, and a count of the calls that look at them."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmtrack.sync.watch.changes import ROOT, Events, Scanner, Trust, choose
from tests.faults import wait_until
from tests.handmade import write_segment
from tests.oracle import Point, Segment


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return it."""
        return self.now_s


def _segment(root: Path, run_id: str, number: int = 1, size: int = 10) -> Path:
    folder = root / f"run_id={run_id}" / f"segment={number:05d}"
    folder.mkdir(parents=True)
    (folder / "metrics-00001.arrows").write_bytes(b"x" * size)
    (folder / "segments-00001.arrows").write_bytes(b"x" * 50)
    (folder / "heartbeat.json").write_text("{}")
    return folder


def _append(file: Path, data: bytes = b"x") -> None:
    with file.open("ab") as out:
        out.write(data)


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls that look at files."""
    calls: Counter[str] = Counter()
    for name in ("stat", "listdir", "scandir", "lstat", "open"):
        real = getattr(os, name)

        def counting(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, counting)
    yield calls
    monkeypatch.undo()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still."""
    return Clock()


def _scanner(root: Path, clock: Clock, **options: Any) -> Scanner:
    scanner = Scanner(root, clock=clock, **options)
    scanner.scan()
    return scanner


def test_the_first_scan_tells_of_all_runs_and_the_next_of_none(tmp_path: Path, clock: Clock) -> None:
    """What is not ours is not looked at."""
    _segment(tmp_path, "a")
    _segment(tmp_path, "b")
    (tmp_path / "notes").mkdir()
    scanner = Scanner(tmp_path, clock=clock)
    assert scanner.scan() == {"a", "b"}
    assert scanner.scan() == set()


def test_bytes_more_a_new_part_and_a_sealed_one_are_changes(tmp_path: Path, clock: Clock) -> None:
    """Sizes and names decide, though the times of all files stay what they were."""
    folder = _segment(tmp_path, "a")
    _segment(tmp_path, "b")
    scanner = _scanner(tmp_path, clock)
    times = folder.stat().st_mtime_ns, (folder / "metrics-00001.arrows").stat().st_mtime_ns

    def turn_back() -> None:
        for file in folder.iterdir():
            os.utime(file, ns=(times[1], times[1]))
        os.utime(folder, ns=(times[0], times[0]))

    def create() -> None:
        (folder / "checkpoints-00001.arrows").write_bytes(b"x")

    def seal() -> None:
        (folder / "metrics-00001.arrows").rename(folder / "metrics-00001.parquet")

    def grow() -> None:
        _append(folder / "metrics-00001.arrows")

    for change in (grow, create, seal):
        change()
        turn_back()
        assert scanner.scan() == {"a"}
        assert scanner.scan() == set()


def test_a_heartbeat_is_no_change(tmp_path: Path, clock: Clock) -> None:
    """There is nothing to send for it."""
    folder = _segment(tmp_path, "a")
    scanner = _scanner(tmp_path, clock)
    (folder / "heartbeat.json").write_text("{'another': 1}")
    (folder / ".metrics-00001.parquet.123.tmp").write_text("being written")
    assert scanner.scan() == set()


def test_new_and_gone_runs_segments_adoptions_and_evals_are_changes(tmp_path: Path, clock: Clock) -> None:
    """Whatever appears below the folder of a run counts as that run's."""
    _segment(tmp_path, "a")
    scanner = _scanner(tmp_path, clock)
    _segment(tmp_path, "b")
    assert scanner.scan() == {"b"}
    newer = _segment(tmp_path, "a", 2)
    assert scanner.scan() == {"a"}
    _append(newer / "metrics-00001.arrows")
    assert scanner.scan() == {"a"}
    (tmp_path / "run_id=a" / "adoption=00001").mkdir()
    assert scanner.scan() == {"a"}
    (tmp_path / "run_id=a" / "evals").mkdir()
    assert scanner.scan() == {"a"}
    shutil.rmtree(tmp_path / "run_id=b")
    assert scanner.scan() == {"b"}
    (tmp_path / "evals").mkdir()
    assert scanner.scan() == {ROOT}
    assert scanner.scan() == set()


def test_a_folder_that_is_claimed_first_and_filled_later_is_followed(tmp_path: Path, clock: Clock) -> None:
    """On a network file system a folder is there before what is in it."""
    scanner = _scanner(tmp_path, clock)
    folder = tmp_path / "run_id=a"
    folder.mkdir()
    assert scanner.scan() == {"a"}
    (folder / "segment=00001").mkdir()
    assert scanner.scan() == {"a"}
    (folder / "segment=00001" / "metrics-00001.arrows").write_bytes(b"x")
    assert scanner.scan() == {"a"}


def test_a_run_that_cannot_be_read_yet_is_told_of_and_read_later(tmp_path: Path, clock: Clock) -> None:
    """The others are not held back."""
    _segment(tmp_path, "a")
    scanner = _scanner(tmp_path, clock)
    loop = tmp_path / "run_id=b"
    loop.symlink_to(loop)  # what root cannot read either
    other = _segment(tmp_path, "c")
    assert scanner.scan() == {"c"}
    assert "b" in scanner.unreadable
    loop.unlink()
    _segment(tmp_path, "b")
    _append(other / "metrics-00001.arrows")
    assert scanner.scan() == {"b", "c"}
    assert scanner.unreadable == {}


def test_a_root_that_does_not_answer_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    """Storage that is away for a moment must not look like runs that are gone."""
    root = tmp_path / "root"
    folder = _segment(root, "a")
    scanner = _scanner(root, clock)
    root.rename(tmp_path / "away")
    assert scanner.scan() == set()
    assert "No such file" in scanner.unreadable[ROOT]
    (tmp_path / "away").rename(root)
    _append(folder / "metrics-00001.arrows")
    assert scanner.scan() == {"a"}


def test_a_scan_of_a_thousand_finished_runs_costs_what_changed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One live run among them: a listing of the root, a look at that run, and a few looks at those at rest."""
    live = _segment(tmp_path, "live")
    ids = [f"done-{number:04d}" for number in range(1000)]
    for run_id in ids:
        _segment(tmp_path, run_id)
    scanner = _scanner(tmp_path, clock)
    scanner.set_state({(run_id, 1) for run_id in ids}, set(ids))
    for _ in range(200):  # so that every one had its turn, and its attributes are beyond doubt
        clock.now_s += 15
        assert scanner.scan() == set()
    _append(live / "metrics-00001.arrows")
    clock.now_s += 15
    with _counted(monkeypatch) as calls:
        assert scanner.scan() == {"live"}
    assert calls.total() < 40, calls
    with _counted(monkeypatch) as calls:
        assert scanner.scan() == set()
    assert calls.total() < 40, calls


_POLL = """
import os, sys
from pathlib import Path
from llmtrack.sync.watch.ledger import Ledger
from llmtrack.sync.watch.changes import Scanner
root = Path(sys.argv[1])
scanner, ledger = Scanner(root), Ledger(root)
scanner.scan()
ledger.refresh()
scanner.set_state(ledger.ended(), ledger.resting())
def poll():
    changed = scanner.scan()
    if changed:
        ledger.refresh(changed)
    return changed
poll()
os.path.exists("/begin-idle")
assert poll() == set()
os.path.exists("/begin-changed")
with open(root / "run_id=live" / "segment=00001" / "metrics-00001.arrows", "ab") as out:
    out.write(b"x")
os.path.exists("/begin-poll")
assert poll() == {"live"}
os.path.exists("/end")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_system_calls_of_a_poll_of_a_thousand_runs_are_a_few_dozen(tmp_path: Path) -> None:
    """Counted by the kernel, with reading what changed, for a root of which one run changed and for one at rest."""
    root = tmp_path / "root"
    write_segment(root, Segment("live", 1, points=[Point(10, "loss", 1.0)]))
    one = write_segment(tmp_path / "one", Segment("done", 1, points=[Point(10, "loss", 1.0)], exit="finished")).parent
    for number in range(1000):
        shutil.copytree(one, root / f"run_id=done-{number:04d}")
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-e", "trace=%file,%desc", "-o", str(trace), sys.executable, "-c", _POLL, str(root)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr
    calls = trace.read_text().split("/begin-idle")[1]
    idle, _, rest = calls.partition("/begin-changed")
    changed = rest.partition("/begin-poll")[2].partition("/end")[0]
    counts = idle.count("\n"), changed.count("\n")
    print("calls of a poll, at rest and with one change:", counts)  # noqa: T201 - for the documents
    assert max(counts) < 200, counts  # a look at each run would be thousands


def test_what_is_new_in_a_finished_run_is_found_within_its_turn(tmp_path: Path, clock: Clock) -> None:
    """An evaluation days later, a new segment, and a part that a copy brought late."""
    ids = [f"done-{number:03d}" for number in range(100)]
    folders = {run_id: _segment(tmp_path, run_id) for run_id in ids}
    (tmp_path / "run_id=done-007" / "evals").mkdir()
    scanner = _scanner(tmp_path, clock)
    scanner.set_state({(run_id, 1) for run_id in ids}, set(ids))
    for _ in range(1000):
        clock.now_s += 15
        assert scanner.scan() == set()
    (tmp_path / "run_id=done-007" / "evals" / "evals-1.parquet").write_bytes(b"x")
    _segment(tmp_path, "done-050", 2)
    (folders["done-099"] / "metrics-00002.parquet").write_bytes(b"x")
    found: set[str] = set()
    for _ in range(41):  # ten minutes
        clock.now_s += 15
        found |= scanner.scan()
    assert found == {"done-007", "done-050", "done-099"}


def test_a_folders_time_that_lies_puts_off_a_look_and_does_not_prevent_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that leaves the attributes of a folder as they were, or a cache that does."""
    _segment(tmp_path, "a")
    folder = tmp_path / "run_id=a"
    scanner = _scanner(tmp_path, clock)
    scanner.set_state({("a", 1)}, {"a"})
    for _ in range(100):
        clock.now_s += 60
        assert scanner.scan() == set()
    before, real = folder.stat(), os.stat
    monkeypatch.setattr(os, "stat", lambda path, **given: before if path == str(folder) else real(path, **given))
    _segment(tmp_path, "a", 2)
    found: set[str] = set()
    for _ in range(100):
        clock.now_s += 60
        found |= scanner.scan()
    monkeypatch.undo()
    assert found == {"a"}


def test_a_run_that_waits_for_its_restart_is_looked_at_every_time(tmp_path: Path, clock: Clock) -> None:
    """Preempted in the evening, and back in the queue for hours."""
    _segment(tmp_path, "a")
    scanner = _scanner(tmp_path, clock)
    scanner.set_state({("a", 1)}, set())
    for _ in range(1000):
        clock.now_s += 60
        assert scanner.scan() == set()
    folder = _segment(tmp_path, "a", 2)
    assert scanner.scan() == {"a"}
    _append(folder / "metrics-00001.arrows")
    assert scanner.scan() == {"a"}


def test_an_old_segment_that_goes_on_is_found(tmp_path: Path, clock: Clock) -> None:
    """The process that was thought dead was not, and the run has a newer segment."""
    old = _segment(tmp_path, "a")
    _segment(tmp_path, "a", 2)
    scanner = _scanner(tmp_path, clock)
    clock.now_s += 1000
    scanner.scan()
    _append(old / "metrics-00001.arrows")
    clock.now_s += 110
    assert scanner.scan() == {"a"}


def test_events_tell_of_writing_and_not_of_reading(tmp_path: Path) -> None:
    """Otherwise every look at a file would be answered by another one."""
    folder = _segment(tmp_path, "a")
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    events, why = choose(tmp_path, None, told.put)
    assert events is not None, why
    try:
        (folder / "metrics-00001.arrows").read_bytes()
        list(folder.iterdir())
        (folder / "heartbeat.json").write_text("{}")
        _append(folder / "metrics-00001.arrows")
        assert told.get(timeout=60) == "a"
        new = _segment(tmp_path, "b")
        assert _until(told, "b") == {"b"}
        (new / "metrics-00001.arrows").rename(new / "metrics-00001.parquet")
        (tmp_path / "evals").mkdir()
        assert _until(told, ROOT) == {"b", ROOT}
        assert events.is_alive()
    finally:
        events.stop()
    assert not events.is_alive()


def test_a_folder_watched_twice_is_nothing_to_talk_of(tmp_path: Path) -> None:
    """It happens when folders appear fast; the library's warning would end its thread, or fill the log."""
    folder = os.fsencode(_segment(tmp_path, "a"))
    events, why = choose(tmp_path, None, lambda _: None)
    assert events is not None, why
    try:
        (emitter,) = events._observer.emitters
        vars(emitter)["_inotify"]._add_all_callbacks(folder)
    finally:
        events.stop()


def test_events_of_a_root_that_is_gone_are_dead(tmp_path: Path) -> None:
    """So that the watch goes over to polling."""
    root = tmp_path / "root"
    root.mkdir()
    events, why = choose(root, None, lambda _: None)
    assert events is not None, why
    try:
        root.rmdir()
        wait_until(lambda: not events.is_alive(), "the events are dead")
    finally:
        events.stop()


def _until(told: queue.SimpleQueue[str], wanted: str) -> set[str]:
    """Return the runs that events told of until one of a certain run came; earlier ones of the run `a` set aside."""
    seen: set[str] = set()
    while wanted not in seen:
        seen.add(told.get(timeout=60))
    return seen - {"a"}


def test_a_kernel_without_room_for_watches_is_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sync says so, with the setting to raise."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchdog.observers.inotify.InotifyWatchGroup.__init__", full)
    events, why = choose(tmp_path, None, lambda _: None)
    assert events is None
    assert "max_user_watches" in why


def test_polling_can_be_forced(tmp_path: Path) -> None:
    """Whatever the file system is."""
    assert choose(tmp_path, 5.0, lambda _: None) == (None, "--poll")


def test_events_that_do_not_come_are_noticed() -> None:
    """Once may be a matter of moments; twice is a file system that does not tell."""
    trust = Trust()
    trust.hear("a")
    assert trust.compare({"a"})
    assert trust.compare({"b"})  # its event may be under way
    trust.hear("b")
    assert trust.compare(set())
    assert trust.compare({"c"})
    assert trust.compare({"c"})  # one scan untold
    assert not trust.compare(set())


def test_events_are_given_up_when_their_thread_has_ended(tmp_path: Path) -> None:
    """Nobody would notice otherwise."""
    events = Events(tmp_path, lambda _: None)
    assert events.is_alive()
    events.stop()
    assert not events.is_alive()
