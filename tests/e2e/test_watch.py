"""``llmtrack-sync --watch`` as people live with it: real logs, a real MLflow, kills, outages, copies of half a file.

What must be in MLflow is worked out from the files with pyarrow and compared with its database through sqlite3.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

import llmtrack
from llmtrack.sync.mlflow.sink import MlflowSink
from llmtrack.sync.replay.replay import Options
from llmtrack.sync.watch.journal import Journal
from llmtrack.sync.watch.lock import BusyError
from llmtrack.sync.watch.notify import Command
from llmtrack.sync.watch.service import Service, Settings, _Signal
from llmtrack.sync.watch.stalls import read_newest_seq
from tests.faults import wait_until
from tests.handmade import write_segment
from tests.oracle import Point, Segment
from tests.watching import Curves, difference, expected, states, statuses, stored

_LONG_S = 120.0  # for what must happen; nothing is asserted about how fast
# What nohup or a shell in the background had ignored would stay ignored.
_AS_FROM_A_TERMINAL = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL); "
_TRAINER = Path(__file__).with_name("watched.py")


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making one takes seconds, copying it none."""
    database = tmp_path_factory.mktemp("mlflow") / "empty.db"
    sink = MlflowSink(f"sqlite:///{database}", timeout_s=60)
    sink.open()
    sink.close()
    return database


class Heard(Journal):
    """A journal that is kept instead of printed."""

    def __init__(self) -> None:
        super().__init__("quiet", verbose=False, tracker="test")
        self.events: list[tuple[str, dict[str, Any]]] = []

    def say(self, event: str, text: str, *, level: str = "info", **facts: Any) -> None:
        """Keep it."""
        self.events.append((event, {"text": text, "level": level, **facts}))

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return what was said of a kind."""
        return [facts for name, facts in self.events if name == event]


class Watch:
    """A watch in a thread of this process, so that leaks show; its tracker is a database that a test may read."""

    def __init__(self, folder: Path, empty_database: Path, **options: Any) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.root.mkdir(exist_ok=True)
        self.database = folder / "mlflow.db"
        if not self.database.exists():
            shutil.copy(empty_database, self.database)
        self.journal = Heard()
        self._receivers = options.pop("receivers", [])
        settings = Settings(
            root=self.root,
            pattern=None,
            state=folder / "state",
            options=Options(),
            timeout_s=60.0,
            jobs=3,
            poll_s=None,
            stalled_s=None,
            lost_s=None,
            min_level="info",
        )
        self.settings = replace(settings, **options)
        self._raised: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        sink = MlflowSink(f"sqlite:///{self.database}", timeout_s=60)
        self._service = Service(self.settings, sink, self._receivers, self.journal)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.journal.told("watching") or self._raised, "the watch began")
        return self

    def __exit__(self, *_: object) -> None:
        self._service._inbox.put(_Signal(signal.SIGTERM))
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._raised:
            raise self._raised[0]

    def _run(self) -> None:
        try:
            assert self._service.run() == signal.SIGTERM
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self._raised.append(error)

    def wait_for_all(self) -> None:
        """Wait until the tracker holds what the files say."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.difference(), "the tracker has everything")
        assert not self.difference(), (self.difference(), self.journal.events[-20:])

    def difference(self) -> Any:
        """Return what is not as it should be."""
        try:
            return difference(expected(self.root), stored(self.database))
        except (
            AssertionError,
            OSError,
            sqlite3.Error,
        ) as error:  # a part that is sealed just now; a run made twice, so far
            return error


@contextlib.contextmanager
def _training(
    root: Path, folder: Path, run_id: str, *, rows_per_s: float = 50, rows: int = 0, **env: str
) -> Iterator[Any]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(_TRAINER), str(root), str(folder), run_id, str(rows_per_s), str(rows)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | env
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "the trainer did not start"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _finished(root: Path, run_id: str, *, tokens: int = 50) -> None:
    points = [Point(n * 10, "train/loss", float(n)) for n in range(1, tokens // 10 + 1)]
    write_segment(root, Segment(run_id, 1, 0, None, points, [], "finished"), sealed=True, project="watched")


@pytest.mark.parametrize("poll_s", [None, 0.3])
def test_a_row_of_a_running_run_is_there_while_it_runs_and_the_status_follows(
    tmp_path: Path, empty_database: Path, poll_s: float | None
) -> None:
    """One row, and nothing after it for long: what counts is the flush, not how much there is."""
    with Watch(tmp_path, empty_database, poll_s=poll_s) as watch:
        run = llmtrack.open_run(watch.root, run_id="slow", project="watched")
        run.log({"train/loss": 2.5}, step=1, tokens=100)
        wait_until(lambda: stored(watch.database).get(("slow", "provisional", 1)), "the row is there")
        assert statuses(watch.database) == {"slow": "RUNNING"}
        run.log({"train/loss": 2.4}, step=2, tokens=200)
        run.finish()
        watch.wait_for_all()
        wait_until(lambda: statuses(watch.database) == {"slow": "FINISHED"}, "the status follows")
        assert sum(stored(watch.database)["slow", "canonical", None].values()) == 2
    (mode,) = watch.journal.told("watching")
    assert mode["mode"] == ("polling" if poll_s else "events")
    assert [told["run_id"] for told in watch.journal.told("finished")] == ["slow"]


def test_a_killed_trainer_is_stalled_then_lost_and_back_and_the_others_go_on(
    tmp_path: Path, empty_database: Path
) -> None:
    """Each is told once, to the one on call as well, and the tracker's status follows."""
    out = tmp_path / "told"
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    receivers = [Command(f'{sys.executable} -c "{code}" {out}')]
    with Watch(tmp_path, empty_database, stalled_s=2.0, lost_s=5.0, receivers=receivers) as watch:
        with _training(watch.root, tmp_path / "ckpt", "dies"):
            wait_until(lambda: list((tmp_path / "ckpt").glob("dies-*.json")), "a checkpoint")
        wait_until(lambda: watch.journal.told("stalled"), "it is told to be stalled")
        for part in watch.root.glob("run_id=dies/segment=*/*"):
            part.touch()  # a report of a change, without a row more
        (watch.root / "run_id=dies" / "evals").mkdir()  # somebody is about to evaluate
        wait_until(lambda: states(watch.database).get("dies") in {"stalled", "lost"}, "the tracker says so too")
        other = llmtrack.open_run(watch.root, run_id="other", project="watched")
        other.log({"train/loss": 1.0}, step=1, tokens=100)
        wait_until(lambda: watch.journal.told("lost"), "it is told to be lost")
        assert not watch.journal.told("resumed")
        assert all("lives" not in told["text"] for told in watch.journal.told("stalled"))
        wait_until(lambda: statuses(watch.database).get("dies") == "KILLED", "the status follows")
        wait_until(lambda: ("other", "provisional", 1) in stored(watch.database), "the other one goes on")
        newest = max((tmp_path / "ckpt").glob("dies-*.json"))
        with _training(watch.root, tmp_path / "ckpt", "dies", rows=30, RESUME=str(newest)) as process:
            assert process.wait() == 0
        wait_until(lambda: statuses(watch.database).get("dies") == "FINISHED", "it went on and finished")
        assert states(watch.database)["dies"] == "finished"
        other.finish()
        watch.wait_for_all()
        wait_until(lambda: '"finished"' in out.read_text() and "other" in out.read_text(), "all was told")
    told = [json.loads(line) for line in out.read_text().splitlines()]
    of_it = [one["event"] for one in told if one["run_id"] == "dies"]
    assert of_it.count("stalled") == of_it.count("lost") == of_it.count("restarted") == of_it.count("finished") == 1
    assert len({one["id"] for one in told}) == len(told)


def test_runs_wait_neither_for_a_damaged_one_nor_for_a_backlog(tmp_path: Path, empty_database: Path) -> None:
    """A run without a start record, one whose folder cannot be read, ten old ones, and one that trains."""
    root = tmp_path / "root"
    root.mkdir()
    for number in range(10):
        _finished(root, f"old-{number:02d}")
    write_segment(root, Segment("headless", 1, points=[Point(10, "train/loss", 1.0)], started=False))
    (root / "run_id=loop").symlink_to(root / "run_id=loop")

    def without_it() -> Curves:
        return {key: points for key, points in expected(root).items() if key[0] != "headless"}

    with Watch(tmp_path, empty_database, poll_s=0.5) as watch:
        run = llmtrack.open_run(root, run_id="live", project="watched")
        run.log({"train/loss": 1.0}, step=1, tokens=100)
        wait_until(lambda: ("live", "provisional", 1) in stored(watch.database), "the live run is there")
        run.finish()
        wait_until(lambda: len(watch.journal.told("failed")) >= 2, "the others are told of")
        wait_until(lambda: difference(without_it(), stored(watch.database)) == {}, "all are there")
    failed = {told["run_id"]: told["error"] for told in watch.journal.told("failed")}
    assert "no start record" in failed["headless"]
    assert "cannot be read" in failed["loop"]


@pytest.mark.soak  # MLflow itself waits 20 s for its database; the short soak has an outage among other things
def test_an_outage_of_the_tracker_is_waited_out(tmp_path: Path, empty_database: Path) -> None:
    """Nobody can write to its database for a while; the trainer does not notice, and what it logged comes after."""
    with Watch(tmp_path, empty_database, timeout_s=2.0, poll_s=0.3) as watch:
        run = llmtrack.open_run(watch.root, run_id="run", project="watched")
        run.log({"train/loss": 1.0}, step=1, tokens=100)
        watch.wait_for_all()
        held = sqlite3.connect(watch.database, isolation_level=None)
        held.execute("BEGIN EXCLUSIVE")
        for step in range(2, 100):
            run.log({"train/loss": 1.0 / step}, step=step, tokens=step * 100)
        wait_until(lambda: watch.journal.told("waiting"), "it is told")
        held.execute("ROLLBACK")
        held.close()
        run.finish()
        watch.wait_for_all()
        wait_until(lambda: watch.journal.told("reachable"), "it is told that it is over")
    assert len(watch.journal.told("waiting")) == 1


def test_a_root_that_is_copied_while_it_is_written_sends_the_difference_alone(
    tmp_path: Path, empty_database: Path
) -> None:
    """Torn open parts, parts that were sealed between two copies, an end record that came before the last rows."""
    origin = tmp_path / "origin"
    origin.mkdir()
    run = llmtrack.open_run(origin, run_id="run", project="watched")
    folder = origin / "run_id=run" / "segment=00001"
    with Watch(tmp_path, empty_database, poll_s=0.3) as watch:
        copied = watch.root / "run_id=run" / "segment=00001"
        copied.mkdir(parents=True)
        for step in range(1, 41):
            run.log({"train/loss": 1.0 / step}, step=step, tokens=step * 100)
        assert run.flush(60)
        for file in folder.iterdir():
            data = file.read_bytes()
            (copied / file.name).write_bytes(data[: len(data) - 37] if file.name.startswith("metrics") else data)
        wait_until(lambda: ("run", "canonical", None) in stored(watch.database), "the torn copy is there")
        for step in range(41, 81):
            run.log({"train/loss": 1.0 / step}, step=step, tokens=step * 100)
        run.finish()
        late = [file for file in sorted(folder.iterdir()) if file.name.startswith("metrics")]
        for file in folder.iterdir():
            if file not in late:
                shutil.copy(file, copied / file.name)
        wait_until(lambda: statuses(watch.database) == {"run": "FINISHED"}, "the end record came first")
        for file in late:
            shutil.copy(file, copied / file.name)
        watch.wait_for_all()
        assert sum(stored(watch.database)["run", "canonical", None].values()) == 80
        sent = sum(watch.journal.reports["run"].sent.values())
    # What the first copy brought was sent to a provisional run, and again when it was settled; no more than that.
    assert sent <= 80 + 40, watch.journal.reports


def test_two_watches_of_one_root_are_one(tmp_path: Path, empty_database: Path) -> None:
    """The second one says who is at work; once that has ended it may begin, and has nothing to send."""
    _finished(tmp_path / "root", "a")
    with Watch(tmp_path, empty_database) as first:
        first.wait_for_all()
        second = Watch(tmp_path, empty_database)
        with pytest.raises(BusyError, match=f"process {os.getpid()} on .*, since 2"), second:
            pass
    with Watch(tmp_path, empty_database) as third:
        wait_until(lambda: third.journal.reports.get("a"), "it was looked at again")
    assert third.journal.reports["a"].sent == {}


def test_two_hosts_with_a_state_folder_each_make_one_run_of_each(tmp_path: Path, empty_database: Path) -> None:
    """They do not see each other's lock, and come upon every new run at the same moment."""
    (tmp_path / "other").mkdir()
    with Watch(tmp_path, empty_database) as watch:
        uri = f"sqlite:///{watch.database}"
        with _watching(watch.root, "--state", str(tmp_path / "other"), uri=uri) as other:
            _finished(watch.root, "first")
            wait_until(lambda: list(tmp_path.glob("other/*/first.json")), "the other one has sent something")
            for number in range(5):
                _finished(watch.root, f"run-{number}")
            with _training(watch.root, tmp_path / "ckpt", "live", rows=60) as process:
                assert process.wait() == 0
            wait_until(lambda: "live" in watch.journal.reports, "one of them has got to the last one")
            other.send_signal(signal.SIGTERM)
            assert other.wait(_LONG_S) == 0
        watch.wait_for_all()


def test_storage_that_is_away_for_a_while_changes_nothing(tmp_path: Path, empty_database: Path) -> None:
    """A mount that is gone is not a root without runs; when it is back, what came meanwhile is sent."""
    _finished(tmp_path / "root", "a")
    with Watch(tmp_path, empty_database, poll_s=0.3) as watch:
        watch.wait_for_all()
        watch.root.rename(tmp_path / "away")
        wait_until(lambda: watch.journal.told("failed"), "it is told")
        _finished(tmp_path / "away", "b")
        (tmp_path / "away").rename(watch.root)
        watch.wait_for_all()
        assert ("b", "canonical", None) in stored(watch.database)
    assert watch.journal.reports["a"].sent == {"canonical": 5}


def test_a_run_that_is_deleted_is_forgotten(tmp_path: Path, empty_database: Path) -> None:
    """What the tracker has of it stays there."""
    _finished(tmp_path / "root", "a")
    _finished(tmp_path / "root", "b")
    with Watch(tmp_path, empty_database, poll_s=0.3) as watch:
        watch.wait_for_all()
        shutil.rmtree(tmp_path / "root" / "run_id=a")
        _finished(tmp_path / "root", "c")
        wait_until(lambda: ("c", "canonical", None) in stored(watch.database), "the new one is there")
        assert ("a", "canonical", None) in stored(watch.database)
    assert not watch.journal.told("failed")


_ANEW = """
import os
from llmtrack.sync.watch import service
from llmtrack.sync.cli import main
if "LLMTRACK_SYNC_RENEWED" not in os.environ:  # once is enough
    service._FEW_BYTES, service._REST_S, service._TIDY_S = 1, 0.0, 0.5
main()
"""


def _told(log: Path, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [row for row in rows if row["event"] == event]


def test_a_watch_at_rest_begins_anew_and_forgets_nothing(tmp_path: Path, empty_database: Path) -> None:
    """The same process, its lock, what it sums up at the end; SIGTERM ends it with status 0, and the output is JSON."""
    root, log = tmp_path / "root", tmp_path / "log"
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    _finished(root, "a")
    place = ["--to", "mlflow", "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db", "--state", str(tmp_path / "state")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _ANEW, str(root), *place, "--watch", "--json"],
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    try:
        wait_until(lambda: _told(log, "renewed"), "it begins anew")
        wait_until(lambda: len(_told(log, "watching")) == 2, "it has begun")
        _finished(root, "b", tokens=70)
        wait_until(lambda: [told for told in _told(log, "sent") if told["run_id"] == "b"], "it goes on")
        assert list((tmp_path / "state").glob("*/*.owner"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(_LONG_S) == 0
    finally:
        process.kill()
        process.wait()
    summary = {row["run_id"]: row["points_sent"] for row in _told(log, "summary")}
    assert summary == {"a": 5, "b": 7}
    assert not list((tmp_path / "state").glob("*/*.renew"))


@contextlib.contextmanager
def _watching(root: Path, *options: str, uri: str = "http://127.0.0.1:9") -> Iterator[subprocess.Popen[bytes]]:
    """A watch in a process of its own, whose tracker may not answer; killed at the end, if it is still there."""
    place = ["--to", "mlflow", "--tracking-uri", uri, "--state", str(root.parent / "state")]
    code = _AS_FROM_A_TERMINAL + "from llmtrack.sync.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (root.parent / "log").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(root), *place, "--watch", "--json", *options],
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_stall_is_told_once_though_the_watch_is_killed_between(tmp_path: Path) -> None:
    """No heartbeat tells of the rows between two of them: they are at the same place by that."""
    root, out = tmp_path / "root", tmp_path / "told"
    out.touch()
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    command = f'{sys.executable} -c "{code}" {out}'

    def told() -> list[str]:
        return [json.loads(line)["id"] for line in out.read_text().splitlines()]

    def is_told(key: str) -> bool:  # and written down as such: what is killed before that is told again
        files = list(tmp_path.glob("state/*/*.relay"))
        return key in told() and not any(json.loads(file.read_bytes())["waiting"]["on_alert"] for file in files)

    run = llmtrack.open_run(root, run_id="run", project="watched")
    step, seqs = 0, [0]
    for _ in range(2):
        for _ in range(1100):  # so that the pause before them is not among the newest thousand rows
            step += 1
            run.log({"train/loss": 1.0}, step=step, tokens=step * 100)
        wait_until(lambda: read_newest_seq(root, "run", 1) >= seqs[-1] + 1100, "the rows are on disk")
        seqs.append(read_newest_seq(root, "run", 1))
        with _watching(root, "--stalled-after", "1", "--lost-after", "600", "--on-alert", command):
            wait_until(lambda: is_told(f"run/1/stalled/{seqs[-1]}"), "this stall is told")
    run.finish()
    assert len(set(told())) == len(told())
    assert [one for one in told() if "resumed" in one]


@pytest.mark.parametrize("case", [([signal.SIGINT], 130), ([signal.SIGHUP], 0), ([signal.SIGTERM, signal.SIGINT], 130)])
def test_signals_end_a_watch_before_the_tracker_answers(tmp_path: Path, case: tuple[list[int], int]) -> None:
    """Ctrl-C is an interruption, a closed terminal is none, and a second signal ends it at once."""
    numbers, status = case
    root = tmp_path / "root"
    _finished(root, "a")
    with _watching(root) as process:
        wait_until(lambda: _told(tmp_path / "log", "waiting"), "it waits for the tracker")
        for number in numbers:
            process.send_signal(number)
        assert process.wait(_LONG_S) == status
