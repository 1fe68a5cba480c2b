"""When a run counts as stalled or lost, and when it does not: time passes as the test says."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

from llmtrack.sync.watch.stalls import Place, Sign, Silence, Stalls, Verdict, read_newest_seq, read_sign, read_written
from llmtrack.writer.format import segment_folder
from llmtrack.writer.log.seal import seal_part
from tests.handmade import write_part


class World:
    """A run, a clock of ours, and the clock of the run's host, which may be another."""

    def __init__(self, *, stalled_s: float = 900.0, lost_s: float = 86_400.0, pause_s: float = 1.0) -> None:
        self.now_s = 5000.0
        self._stalled_s, self._lost_s = stalled_s, lost_s
        self.pause_s = pause_s
        self.asked = 0
        self.newest_seq = 10
        self.stalls = self.watch()
        self.place = Place(1, 10, 10, 1000)
        self.bytes = 1000
        self.report()
        self.time = dt.datetime.now(dt.UTC)

    def watch(self) -> Stalls:
        """Return what a watch knows that has just been started."""
        return Stalls(
            self._stalled_s, self._lost_s, self._longest_pause_s, lambda *_: self.newest_seq, clock=lambda: self.now_s
        )

    def _longest_pause_s(self, run_id: str, segment: int) -> float:
        assert (run_id, segment) == ("run", self.place.segment)
        self.asked += 1
        return self.pause_s

    def train(self, *, segment: int | None = None) -> None:
        """Log a row."""
        number = self.place.segment if segment is None else segment
        self.place = Place(number, self.place.seq + 1, self.place.step + 1, self.place.tokens + 100)
        self.beat()

    def write(self) -> None:
        """Log a row of which no heartbeat tells yet."""
        self.bytes += 100
        self.newest_seq += 1
        self.report()

    def report(self) -> None:
        """Tell of a change in the run's folder, whatever it is."""
        self.stalls.written("run", {"metrics": (self.place.segment, 1, self.bytes)})

    def beat(self) -> None:
        """Write a heartbeat."""
        self.time += dt.timedelta(seconds=1)

    def pass_time(self, seconds: float) -> Verdict | None:
        """Let time pass, and look."""
        self.now_s += seconds
        return self.stalls.look("run", Sign(self.place, self.time))


def test_a_run_that_dies_is_stalled_then_lost_and_back_when_it_goes_on() -> None:
    """Each is said once."""
    world = World()
    for _ in range(10):
        world.train()
        assert world.pass_time(10) is None
    assert world.pass_time(890) is None
    verdict = world.pass_time(20)
    assert verdict is not None
    assert (verdict.status, verdict.before, verdict.is_alive) == ("stalled", "running", False)
    assert verdict.silent_s == pytest.approx(910)
    assert world.pass_time(3600) is None
    verdict = world.pass_time(90_000)
    assert verdict is not None
    assert verdict.status == "lost"
    assert not world.stalls.needs_look("run")
    world.now_s += 1
    world.report()
    assert not world.stalls.needs_look("run")
    world.write()
    assert world.stalls.needs_look("run")
    verdict = world.pass_time(1)
    assert verdict is not None
    assert (verdict.status, verdict.before) == ("running", "lost")


def test_rows_are_progress_though_the_heartbeat_is_between_two_beats() -> None:
    """With a bound of seconds a run must not stall between its heartbeats."""
    world = World(stalled_s=5)
    world.train()
    for _ in range(30):
        world.pass_time(2)
        world.write()
    assert world.stalls.status("run") == "running"


def test_a_report_of_a_change_is_no_progress_without_a_row_more() -> None:
    """A scan finds what an event had told before, somebody evaluates, the part of a dead run is sealed."""
    world = World(stalled_s=10)
    for _ in range(10):
        world.write()
        world.pass_time(1)
    verdicts = [world.pass_time(1) for _ in range(12)]
    for _ in range(10):
        world.report()
        world.stalls.written("run", {"metrics": (1, 1, 0)})
        world.stalls.written("run", {})
        verdicts.append(world.pass_time(1))
    assert [verdict.status for verdict in verdicts if verdict is not None] == ["stalled"]
    assert world.stalls.status("run") == "stalled"


def test_a_second_stall_after_rows_is_another_and_none_without() -> None:
    """The heartbeat may have had no time to tell of the rows between: the place is the same then."""
    world = World(stalled_s=10)
    world.pass_time(0)
    told = []
    for _ in range(2):
        world.write()
        told += [world.pass_time(1), *(world.pass_time(4) for _ in range(6))]
    said = [verdict for verdict in told if verdict is not None]
    assert [verdict.status for verdict in said] == ["stalled", "running", "stalled"]
    assert said[0].place == said[2].place
    assert said[0].seq != said[2].seq


@pytest.mark.parametrize("rows", [0, 1])
def test_a_watch_that_begins_again_goes_on_with_the_silence_it_left(rows: int) -> None:
    """Between the two a row came, of which no heartbeat tells yet, or none; the process beats all along."""
    world = World(stalled_s=100)
    world.pass_time(0)
    first = [verdict for _ in range(12) if (verdict := world.pass_time(10)) is not None]
    silence = Silence.of(first[-1])
    assert silence is not None
    world.stalls = world.watch()
    world.stalls.remember("run", Silence.read(json.loads(json.dumps(silence.content()))) or silence)
    assert world.stalls.status("run") == "stalled"
    world.newest_seq += rows
    second = []
    for _ in range(30):
        world.beat()
        second.append(world.pass_time(10))
    said = [(verdict.status, verdict.seq) for verdict in second if verdict is not None]
    assert said == ([("running", 11), ("stalled", 11)] if rows else [])
    assert first[-1].seq == 10
    assert world.stalls.status("run") == "stalled"


def test_what_is_no_silence_is_not_remembered() -> None:
    """A file of another version, or of another hand."""
    assert Silence.read({"status": "stalled"}) is None
    assert Silence.read({"status": "lost", "segment": 1, "seq": 2, "since": "2026-01-01T00:00:00"}) is None


def test_a_heartbeat_that_tells_late_of_rows_is_no_progress() -> None:
    """A process hangs; its next heartbeat has the place of rows that were seen before."""
    world = World(stalled_s=10)
    world.pass_time(0)
    world.write()
    verdicts = [world.pass_time(4) for _ in range(4)]
    world.train()
    verdicts += [world.pass_time(4) for _ in range(4)]
    assert [verdict.status for verdict in verdicts if verdict is not None] == ["stalled"]


def test_a_heartbeat_that_cannot_be_read_once_is_no_progress() -> None:
    """Then a look finds the place of the start record, and the next one that of the heartbeat again."""
    world = World(stalled_s=10)
    world.train()
    verdicts = [world.pass_time(4) for _ in range(4)]
    place, world.place = world.place, Place(1, 0, 0, 0)
    verdicts.append(world.pass_time(1))
    world.place = place
    verdicts += [world.pass_time(1) for _ in range(2)]
    assert [verdict.status for verdict in verdicts if verdict is not None] == ["stalled"]


@pytest.mark.parametrize("beats", [False, True])
def test_a_process_lives_only_when_its_heartbeat_moved_after_its_last_row(beats: bool) -> None:
    """One that was killed right after a checkpoint, whose heartbeat we saw a moment later than its rows."""
    world = World(stalled_s=12)
    world.pass_time(0)
    world.now_s += 1
    world.write()
    world.beat()
    assert world.pass_time(2) is None
    assert world.pass_time(3) is None
    if beats:
        world.beat()
    assert world.pass_time(3) is None
    verdict = world.pass_time(5)
    assert verdict is not None
    assert (verdict.status, verdict.is_alive) == ("stalled", beats)
    assert verdict.beat_s == pytest.approx(5 if beats else 11)


def test_a_heartbeat_of_long_ago_says_nothing_of_now() -> None:
    """It beat after its last row, and was killed ten minutes before the bound."""
    world = World()
    world.train()
    world.pass_time(0)
    world.pass_time(1)
    world.beat()
    world.pass_time(300)
    verdict = world.pass_time(601)
    assert verdict is not None
    assert (verdict.status, verdict.is_alive) == ("stalled", False)
    assert verdict.beat_s == pytest.approx(601)


def test_what_a_segment_holds_grows_with_rows_and_parts_and_not_when_sealed(tmp_path: Path) -> None:
    """Whoever seals the part of a dead run adds nothing to it."""
    assert read_written(tmp_path, "run", 1) == {}
    folder = segment_folder(tmp_path, "run", 1)
    folder.mkdir(parents=True)
    (folder / "heartbeat.json").write_text("{}")
    (folder / "metrics-00001.parquet").write_bytes(bytes(900))
    (folder / "metrics-00002.arrows").write_bytes(bytes(10))
    before = read_written(tmp_path, "run", 1)
    assert before == {"metrics": (1, 2, 10)}
    (folder / "metrics-00002.arrows").rename(folder / "metrics-00002.parquet")
    assert read_written(tmp_path, "run", 1)["metrics"] < before["metrics"]
    (folder / "metrics-00003.arrows").write_bytes(bytes(5))
    assert read_written(tmp_path, "run", 1)["metrics"] > before["metrics"]


@pytest.mark.parametrize("batch", [10, 20_000])
def test_the_newest_seq_is_that_of_the_newest_part_of_any_table(tmp_path: Path, batch: int) -> None:
    """Open or sealed, with a part that has nothing in it yet, and a batch that is larger than the end that is read."""
    folder = segment_folder(tmp_path, "run", 1)
    assert read_newest_seq(tmp_path, "run", 1) == 0
    rows = [{"tokens": n, "name": f"metric-{n}", "value": n / 7} for n in range(20_000)]
    part = write_part(folder, "metrics", rows, batch=batch)
    assert read_newest_seq(tmp_path, "run", 1) == 20_000
    seal_part(part)
    write_part(folder, "metrics", [], part=2)
    assert read_newest_seq(tmp_path, "run", 1) == 20_000
    write_part(folder, "checkpoints", [{"seq": 20_001, "tokens": 5, "ckpt_id": "a"}])
    assert read_newest_seq(tmp_path, "run", 1) == 20_001
    (folder / "metrics-00002.arrows").write_bytes(b"not ours")
    (folder / "checkpoints-00001.arrows").unlink()
    assert read_newest_seq(tmp_path, "run", 1) == 20_000


def test_a_process_that_hangs_and_still_beats_is_stalled_and_never_lost() -> None:
    """A collective that never returns: the scheduler calls the job running, and so does its heartbeat."""
    world = World()
    verdicts = []
    world.train()
    world.pass_time(1)
    for _ in range(2 * 86_400 // 30):
        world.beat()
        verdicts.append(world.pass_time(30))
    said = [verdict for verdict in verdicts if verdict is not None]
    assert [(verdict.status, verdict.is_alive) for verdict in said] == [("stalled", True)]


def test_a_run_that_pauses_longer_than_the_bound_by_habit_is_not_stalled() -> None:
    """One that evaluates for an hour each day may be silent for three."""
    world = World(pause_s=3600)
    world.train()
    world.pass_time(1)
    for _ in range(10_000 // 30):
        world.beat()
        assert world.pass_time(30) is None
    assert world.asked == 1  # the log is not read again and again for one silence
    for _ in range(1000 // 30):
        world.beat()
        verdict = world.pass_time(30)
        if verdict is not None:
            break
    assert world.stalls.status("run") == "stalled"


def test_a_habit_of_long_pauses_does_not_hide_a_dead_process() -> None:
    """Its heartbeat has a rhythm of its own."""
    world = World(pause_s=3600)
    world.train()
    world.pass_time(1)
    verdict = world.pass_time(901)
    assert verdict is not None
    assert verdict.status == "stalled"


def test_a_bound_of_seconds_is_kept_for_a_fast_run_and_stretched_for_a_slow_one() -> None:
    """A run that logs every half a minute does not stall all the time because somebody set five seconds."""
    fast, slow = World(stalled_s=5, lost_s=60, pause_s=0.05), World(stalled_s=5, lost_s=600, pause_s=30)
    for world in (fast, slow):
        for _ in range(10):
            world.train()
            world.pass_time(1)
        world.pass_time(5.5)
    assert fast.stalls.status("run") == "stalled"
    assert slow.stalls.status("run") == "running"
    fast.pass_time(60)
    assert fast.stalls.status("run") == "lost"
    slow.pass_time(90)
    assert slow.stalls.status("run") == "stalled"


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_clock_that_differs_makes_no_stall(hours: int) -> None:
    """It goes three hours behind ours, or before."""
    world = World()
    world.time += dt.timedelta(hours=hours)
    for _ in range(100):
        world.train()
        assert world.pass_time(30) is None
    assert world.stalls.status("run") == "running"
    world.pass_time(901)
    assert world.stalls.status("run") == "stalled"


def test_a_run_that_was_silent_before_we_came_is_judged_after_a_while() -> None:
    """By then it would have given a sign of life."""
    world = World()
    world.time -= dt.timedelta(hours=2)
    assert world.pass_time(0) is None
    assert world.pass_time(60) is None
    verdict = world.pass_time(61)
    assert verdict is not None
    assert verdict.status == "stalled"
    assert verdict.silent_s == pytest.approx(7321, abs=60)
    since_s = (dt.datetime.now(dt.UTC) - verdict.since).total_seconds()
    assert since_s == pytest.approx(7321 - 900, abs=60)  # so that nobody takes it for news


def test_a_restart_of_a_stalled_run_is_running_again() -> None:
    """A new segment has started."""
    world = World()
    world.train()
    world.pass_time(0)
    world.pass_time(1000)
    assert world.stalls.status("run") == "stalled"
    world.train(segment=2)
    world.pass_time(1)
    assert world.stalls.status("run") == "running"


def test_a_heartbeat_adds_to_what_the_records_say(tmp_path: Path) -> None:
    """One that is being rewritten, or that has no zone, counts as none."""
    folder = segment_folder(tmp_path, "run", 2)
    folder.mkdir(parents=True)
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    last = Sign(Place(2, 0, 5, 50), noon)
    assert read_sign(tmp_path, "run", 2, last) == last
    beat = {"seq": 9, "step": 7, "tokens": 70}
    later = noon + dt.timedelta(seconds=30)
    (folder / "heartbeat.json").write_text(json.dumps({**beat, "time": later.isoformat()}))
    assert read_sign(tmp_path, "run", 2, last) == Sign(Place(2, 9, 7, 70), later)
    for torn in ("", "{", json.dumps({**beat, "time": "2026-01-01T12:00:30"}), json.dumps({**beat, "time": None})):
        (folder / "heartbeat.json").write_text(torn)
        assert read_sign(tmp_path, "run", 2, last) == last
