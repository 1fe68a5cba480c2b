"""What the small tables say of runs and of what happened to them."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrack.sync.watch.ledger import Ledger, of_verdict
from llmtrack.sync.watch.stalls import Place, Sign, Status, Verdict
from llmtrack.writer.format import segment_folder
from tests.handmade import DAY, write_heartbeat, write_part, write_segment
from tests.oracle import Point, Segment


def _kinds(ledger: Ledger, *changed: str) -> list[tuple[str, str, str]]:
    return [(one.run_id, one.kind, one.level) for one in ledger.refresh(changed or None)]


def test_ends_restarts_and_alerts_are_what_happened(tmp_path: Path) -> None:
    """A crash is worse than a preemption; a context is no news of its own; what is over is no alarm."""
    folder = write_segment(tmp_path, Segment("a", 1, exit="failed"))
    write_segment(tmp_path, Segment("a", 2, 40, ("a", 1), exit="preempted"))
    write_segment(tmp_path, Segment("a", 3, 50, ("a", 2)))
    write_segment(tmp_path, Segment("b", 1, exit="finished"))
    alert = {"rule": "loss_spike", "level": "error", "message": "up", "value": 3.0, "tokens": 30}
    phases = [{**alert, "alert_id": "1", "phase": phase} for phase in ("raised", "context", "cleared")]
    write_part(folder, "alerts", phases)
    ledger = Ledger(tmp_path)
    happened = ledger.refresh()
    assert [(one.run_id, one.kind, one.level) for one in happened] == [
        ("a", "crashed", "error"),
        ("a", "restarted", "info"),
        ("a", "preempted", "warn"),
        ("a", "restarted", "info"),
        ("b", "finished", "info"),
        ("a", "alert", "error"),
        ("a", "cleared", "info"),
    ]
    assert len({one.key for one in happened}) == len(happened)
    texts = [one.text for one in happened]
    assert "a: restarted at 40 tokens as segment 2 after segment 1, ended failed" in texts[1]
    assert texts[5] == "a: loss_spike: up (step 3, 30 tokens)"
    assert happened[5].facts["value"] == 3.0
    assert (ledger.runs["a"].is_open, ledger.runs["b"].is_open) == (True, False)
    assert ledger.resting() == {"b"}
    assert ledger.ended() == {("a", 1), ("a", 2), ("b", 1)}


def test_only_what_changed_is_read_and_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    """The same words come again when a part has grown; the relay knows them."""
    write_segment(tmp_path, Segment("a", 1))
    write_segment(tmp_path, Segment("b", 1, exit="finished"))
    ledger = Ledger(tmp_path)
    assert _kinds(ledger) == [("b", "finished", "info")]
    assert _kinds(ledger, "a", "b") == []
    write_segment(tmp_path, Segment("a", 2, 10, ("a", 1)))
    assert _kinds(ledger, "b") == []
    assert _kinds(ledger, "a") == [("a", "restarted", "info")]
    for file in (tmp_path / "run_id=b").rglob("*.arrows"):
        file.unlink()
    (tmp_path / "run_id=b" / "segment=00001").rmdir()
    (tmp_path / "run_id=b").rmdir()
    assert _kinds(ledger, "b") == []
    assert set(ledger.runs) == {"a"}


def test_what_a_copy_brought_late_is_taken_in_when_asked_for(tmp_path: Path) -> None:
    """The segment had ended, and nobody looks at such any more."""
    folder = write_segment(tmp_path, Segment("a", 1, exit="finished"))
    ledger = Ledger(tmp_path)
    ledger.refresh()
    write_part(
        folder, "alerts", [{"alert_id": "1", "rule": "data", "message": "m", "level": "warn", "phase": "raised"}]
    )
    assert [one.kind for one in ledger.reread("a")] == ["finished", "alert"]
    assert ledger.reread("nobody") == []


def test_a_fork_names_its_parents(tmp_path: Path) -> None:
    """They go first."""
    write_segment(tmp_path, Segment("a", 1))
    write_segment(tmp_path, Segment("b", 1, 10, ("a", 1)))
    write_segment(tmp_path, Segment("b", 2, 20, ("b", 1)))
    ledger = Ledger(tmp_path)
    ledger.refresh()
    assert (ledger.runs["a"].parents, ledger.runs["b"].parents) == (set(), {"a"})


def test_a_folder_that_is_claimed_and_empty_is_a_run_that_has_not_ended(tmp_path: Path) -> None:
    """Its start record comes in a moment, or never."""
    segment_folder(tmp_path, "a", 1).mkdir(parents=True)
    ledger = Ledger(tmp_path)
    assert ledger.refresh() == []
    assert ledger.runs["a"].is_open
    assert ledger.sign("a") == Sign(Place(1, 0, 0, 0), None)


def test_a_run_shows_its_heartbeat_and_its_longest_pause(tmp_path: Path) -> None:
    """The pause is between rows, not between the points of one."""
    folder = write_segment(tmp_path, Segment("a", 1))
    noon = DAY + dt.timedelta(hours=12)
    write_heartbeat(folder, noon, tokens=500)
    rows = [
        {"seq": seq, "time": DAY + dt.timedelta(seconds=second), "tokens": seq * 10, "name": name, "value": 1.0}
        for seq, second in ((2, 0), (3, 1), (4, 61), (5, 62))
        for name in ("loss", "lr")
    ]
    write_part(folder, "metrics", rows)
    ledger = Ledger(tmp_path)
    ledger.refresh()
    assert ledger.sign("a") == Sign(Place(1, 1, 50, 500), noon)
    assert ledger.longest_pause_s("a", 1) == 60.0
    assert ledger.longest_pause_s("a", 2) == 0.0
    assert ledger.longest_pause_s("nobody", 1) == 0.0


@pytest.mark.parametrize(
    "case",
    [
        ("stalled", False, "stalled", "error", "stalled: no sign of life for 2 hours"),
        ("stalled", True, "stalled", "error", "its process lives, and has logged nothing for 2 hours"),
        ("lost", False, "lost", "error", "lost: no sign of life for 2 hours"),
        ("running", True, "resumed", "info", "goes on, it was stalled"),
    ],
)
def test_a_verdict_is_said_with_the_time_at_which_it_came_true(
    tmp_path: Path, case: tuple[Status, bool, str, str, str]
) -> None:
    """Of a run that died a month ago it is a month old, and no news."""
    status, is_alive, kind, level, text = case
    write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    ledger = Ledger(tmp_path)
    ledger.refresh()
    verdict = Verdict(status, "stalled", 7200.0, DAY, is_alive, Place(1, 5, 2, 10), 5)
    happening = of_verdict(ledger.runs["a"], verdict)
    assert (happening.kind, happening.level, happening.time) == (kind, level, DAY)
    assert text in happening.text
    assert of_verdict(ledger.runs["a"], verdict).key == happening.key
    assert of_verdict(ledger.runs["a"], replace(verdict, seq=6)).key != happening.key


def test_of_a_process_that_may_live_only_what_is_known_is_said(tmp_path: Path) -> None:
    """Its heartbeat is as old as its last row."""
    write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    ledger = Ledger(tmp_path)
    ledger.refresh()
    verdict = Verdict("stalled", "running", 12.0, DAY, is_alive=False, place=Place(1, 5, 2, 10), seq=5, beat_s=11.0)
    assert "stalled: no row for 12 seconds, last heartbeat 11 seconds ago" in of_verdict(ledger.runs["a"], verdict).text
