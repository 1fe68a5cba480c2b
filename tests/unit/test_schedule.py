"""Which run is synced next; time passes as the test says."""

from __future__ import annotations

import math

from llmtrack.sync.watch.schedule import BATCH_RUNS, Schedule, Urgency

LIVE, NEWS, RECHECK = Urgency.LIVE, Urgency.NEWS, Urgency.RECHECK


def test_live_runs_come_before_backlogs_and_these_before_rechecks() -> None:
    """Whatever was known first."""
    schedule = Schedule(jobs=1)
    schedule.mark("recheck", RECHECK, 0)
    schedule.mark("backlog", NEWS, 1)
    schedule.mark("live", LIVE, 2)
    order = []
    for _ in range(3):
        (run_id,) = schedule.take(10)
        order.append(run_id)
        assert schedule.take(10) == []  # one at a time
        schedule.done(run_id, 10)
    assert order == ["live", "backlog", "recheck"]
    assert schedule.take(100) == []


def test_one_thread_is_left_for_live_runs() -> None:
    """Three backlogs do not fill three threads."""
    schedule = Schedule(jobs=3)
    for name in "abc":
        schedule.mark(name, NEWS, 0)
    assert [schedule.take(1), schedule.take(1), schedule.take(1)] == [["a"], ["b"], []]
    schedule.mark("live", LIVE, 2)
    assert schedule.take(2) == ["live"]
    assert schedule.take(2) == []


def test_runs_have_their_turn_in_turn() -> None:
    """The one that was served longest ago is next, however often the others change."""
    schedule = Schedule(jobs=1)
    served = []
    for now in range(0, 40, 2):
        for name in ("a", "b", "c"):
            schedule.mark(name, LIVE, now)
        (run_id,) = schedule.take(now)
        served.append(run_id)
        schedule.done(run_id, now + 0.1)
    assert {name: served.count(name) for name in "abc"} == {"a": 7, "b": 7, "c": 6}


def test_a_parent_goes_before_its_child_once() -> None:
    """Later they do not wait for each other; a parent that fails does not hold up its child for ever."""
    schedule = Schedule(jobs=4)
    schedule.mark("child", LIVE, 0, ["parent"])
    schedule.mark("parent", NEWS, 0, ["unknown"])
    assert schedule.take(1) == ["parent"]
    assert schedule.take(1) == []
    schedule.failed("parent", 2, for_good=False)
    assert schedule.take(2) == ["child"]
    schedule.done("child", 2.5)
    schedule.mark("child", LIVE, 100, ["parent"])
    assert schedule.take(100) in (["child"], ["parent"])
    assert schedule.take(100) in (["child"], ["parent"])


def test_parents_in_a_circle_are_synced_all_the_same() -> None:
    """Only damage makes such."""
    schedule = Schedule(jobs=2)
    schedule.mark("a", NEWS, 0, ["b"])
    schedule.mark("b", NEWS, 0, ["a"])
    (first,) = schedule.take(1)
    schedule.done(first, 2)
    (second,) = schedule.take(3)
    assert {first, second} == {"a", "b"}


def test_what_changes_while_it_is_synced_is_synced_again_after_a_pause() -> None:
    """The pause is as long as the sync took, so that a slow tracker is not asked all the time."""
    schedule = Schedule(jobs=1)
    schedule.mark("a", LIVE, 0)
    assert schedule.take(0) == ["a"]
    schedule.mark("a", LIVE, 1)
    schedule.done("a", 8)
    assert schedule.take(8) == []
    assert schedule.due_s(8) == 8
    assert schedule.take(16) == ["a"]
    schedule.done("a", 16.1)
    assert schedule.pending() == []
    assert schedule.due_s(17) == math.inf


def test_a_failure_is_tried_again_after_growing_pauses_and_the_others_go_on() -> None:
    """They end at ten minutes."""
    schedule = Schedule(jobs=1)
    now, pauses = 0.0, []
    schedule.mark("a", LIVE, now)
    for _ in range(10):
        assert schedule.take(now) == ["a"]
        schedule.failed("a", now, for_good=False)
        schedule.mark("b", LIVE, now)
        assert schedule.take(now) == ["b"]
        schedule.done("b", now)
        pauses.append(schedule.due_s(now))
        now += pauses[-1]
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == 600
    assert schedule.take(now) == ["a"]
    schedule.done("a", now)
    schedule.mark("a", LIVE, now)
    assert schedule.due_s(now) == 2  # a success makes it begin anew


def test_what_was_refused_is_tried_again_when_it_changed_or_after_an_hour() -> None:
    """Not every few seconds: the answer would be the same."""
    schedule = Schedule(jobs=1)
    schedule.mark("a", NEWS, 0)
    schedule.take(0)
    schedule.failed("a", 0, for_good=True)
    schedule.retry(3599)
    assert schedule.take(3599) == []
    schedule.retry(3600)
    assert schedule.take(3600) == ["a"]
    schedule.failed("a", 3600, for_good=True)
    schedule.mark("a", NEWS, 3620)
    assert schedule.take(3620) == ["a"]


def test_a_long_sync_makes_room_when_others_wait() -> None:
    """It goes on from where it was, after the others had their turn."""
    schedule = Schedule(jobs=1)
    schedule.mark("long", LIVE, 0)
    assert schedule.take(0) == ["long"]
    schedule.mark("short", LIVE, 1)
    assert schedule.overdue(5) is None
    assert schedule.overdue(11) == "long"
    schedule.stopped("long", 12)
    assert schedule.take(12) == ["short"]
    schedule.done("short", 12.5)
    assert schedule.take(12.5) == ["long"]
    schedule.mark("recheck", RECHECK, 13)
    assert schedule.overdue(100) is None  # nothing makes room for what is in no hurry


def test_rechecks_go_together() -> None:
    """What costs is opening them."""
    schedule = Schedule(jobs=4)
    ids = {f"r{n:03d}" for n in range(BATCH_RUNS + 10)}
    for run_id in ids:
        schedule.mark(run_id, RECHECK, 0)
    first, second = schedule.take(1), schedule.take(1)
    assert (len(first), len(second)) == (BATCH_RUNS, 10)
    assert {*first, *second} == ids
    for run_id in ids:
        schedule.done(run_id, 2)
    assert schedule.pending() == []


def test_small_runs_that_nobody_trains_go_together() -> None:
    """A large one among them goes alone, and so does one that failed."""
    schedule = Schedule(jobs=4)
    for name in "abc":
        schedule.mark(name, NEWS, 0, is_small=True)
    schedule.mark("large", NEWS, 0)
    schedule.mark("live", LIVE, 0, is_small=True)
    assert schedule.take(1) == ["live"]
    assert schedule.take(1) == ["a", "b", "c"]
    assert schedule.take(1) == ["large"]
    schedule.failed("a", 2, for_good=False)
    schedule.done("b", 2)
    schedule.done("c", 2)
    for name in "bc":
        schedule.mark(name, NEWS, 100, is_small=True)
    assert schedule.take(100) in (["a"], ["b", "c"])
    assert schedule.take(100) in (["a"], ["b", "c"])


def test_a_run_that_is_gone_is_forgotten() -> None:
    """Also one that is being synced, when that ends."""
    schedule = Schedule(jobs=1)
    schedule.mark("a", LIVE, 0)
    schedule.forget("a")
    assert schedule.take(1) == []
    schedule.mark("b", LIVE, 1)
    assert schedule.take(1) == ["b"]
    schedule.mark("b", LIVE, 1)
    schedule.forget("b")
    schedule.done("b", 2)
    assert schedule.take(10) == []


def test_a_tracker_that_is_back_is_asked_at_once() -> None:
    """The pauses after failures were for it."""
    schedule = Schedule(jobs=1)
    schedule.mark("a", LIVE, 0)
    schedule.take(0)
    schedule.failed("a", 0, for_good=False)
    assert schedule.take(1) == []
    schedule.hurry(schedule.pending())
    assert schedule.take(1) == ["a"]


def test_a_run_that_is_gone_and_back_while_it_is_synced_is_not_begun_twice() -> None:
    """Storage that said for a moment that its folder is not there."""
    schedule = Schedule(jobs=2)
    schedule.mark("a", LIVE, 0)
    assert schedule.take(1) == ["a"]
    schedule.forget("a")
    schedule.mark("a", LIVE, 2)
    assert schedule.take(3) == []
    schedule.done("a", 4)
    assert schedule.take(100) == ["a"]
    schedule.forget("a")
    schedule.done("a", 101)
    assert schedule.pending() == []
    assert schedule.take(200) == []
