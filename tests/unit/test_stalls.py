"""When a run counts as stalled or lost, and when it does not: time passes as the test says."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

from llmtrack.sync.watch.stalls import Place, Sign, Stalls, Verdict, read_sign
from llmtrack.writer.format import segment_folder


class World:
    """A run, a clock of ours, and the clock of the run's host, which may be another."""

    def __init__(self, *, stalled_s: float = 900.0, lost_s: float = 86_400.0, pause_s: float = 1.0) -> None:
        self.now_s = 5000.0
        self.pause_s = pause_s
        self.asked = 0
        self.stalls = Stalls(stalled_s, lost_s, self._longest_pause_s, clock=lambda: self.now_s)
        self.place = Place(1, 10, 10, 1000)
        self.time = dt.datetime.now(dt.UTC)

    def _longest_pause_s(self, run_id: str, segment: int) -> float:
        assert (run_id, segment) == ("run", self.place.segment)
        self.asked += 1
        return self.pause_s

    def train(self, *, segment: int | None = None) -> None:
        """Log a row."""
        number = self.place.segment if segment is None else segment
        self.place = Place(number, self.place.seq + 1, self.place.step + 1, self.place.tokens + 100)
        self.beat()

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
    world.stalls.progress("run")
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
        world.stalls.progress("run")
    assert world.stalls.status("run") == "running"


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
