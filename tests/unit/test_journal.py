"""What a watch says, and how often."""

from __future__ import annotations

import json

import pytest

from llmtrack.sync import show
from llmtrack.sync.once import Outcome
from llmtrack.sync.replay.replay import Report
from llmtrack.sync.watch.journal import Journal


def _said(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(row["event"], row["run_id"]) for row in rows]


def test_what_cannot_be_read_is_said_once_each_time_and_that_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Not when it was a moment's failure; and the second time as well as the first."""
    with Journal("json", verbose=False, tracker="t") as journal:
        for _ in range(2):
            for reasons in ({"root": "away"}, {}, {"root": "away"}, {"root": "away", "a": "stale"}, {"root": "gone"}):
                journal.unreadable(reasons)
            assert _said(capsys) == [("failed", "root")]
            journal.unreadable({})
            journal.unreadable({})
            assert _said(capsys) == [("recovered", "root")]


def test_what_fails_is_said_once_until_it_is_overcome(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is, with another reason again."""
    with Journal("json", verbose=False, tracker="t") as journal:
        for error in ("full", "full", "away"):
            journal.failed("state", error)
        journal.recovered("state")
        journal.recovered("state")
        journal.failed("state", "full")
    assert _said(capsys) == [(event, "state") for event in ("failed", "failed", "recovered", "failed")]


def test_the_end_of_a_watch_gives_no_rate() -> None:
    """Over the time it was there a rate would mean nothing."""
    outcome = Outcome([Report("run", "p", "finished", {"canonical": 20}, {"canonical": 20})])
    assert "20 points sent, verified" in show.summary(outcome, None, "nowhere", would=False, verified="verified")
    assert "(10 points/s), verified" in show.summary(outcome, 2.0, "nowhere", would=False, verified="verified")
