"""What runs are called and what is said of them, before any tracker is asked."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrack.sync.kinds import PROVISIONAL, SUPERSEDED
from llmtrack.sync.replay.classify import LoggedRun, Segment, Stretch
from llmtrack.sync.replay.describe import canonical_spec, changes, held_evaluations, merged, side_spec
from llmtrack.sync.story import Alert, Evaluation, Setting, Story, Unknown

_NOTE_CHARS = 5000  # what every version of MLflow has room for


def logged(segments: int = 1, **more: Any) -> LoggedRun:
    """Return a run with some segments, each from a thousand tokens further on."""
    known: dict[str, Any] = {
        "run_id": "run", "project": "p", "name": "run", "status": "running", "parent_run": None, "fork": {},
        "settled_to": 4000, "start_ms": 5, "end_ms": None, "git_commit": None, "config": {}, "recipe": {},
    }  # fmt: skip
    rows = [Segment(n, 1000 * (n - 1), 5 * n, None, None, f"node-{n}", 8) for n in range(1, segments + 1)]
    return LoggedRun(segments=rows, **known | more)


def stretch(first: int, last: int, *by: int, segment: int = 1) -> Stretch:
    """Return some points of a segment."""
    return Stretch(segment, 10, 100, 20, first, last, 99, by)


def alert(tokens: int, message: str = "said", **more: Any) -> Alert:
    """Return an alert that was raised."""
    known: dict[str, Any] = {
        "alert_id": f"a{tokens}", "segment": 1, "time_ms": tokens, "step": 1, "tokens": tokens, "rule": "spike",
        "level": "warn", "metric": "train/loss", "value": 4.5, "baseline": 2.0, "score": 9.0, "message": message,
        "phase": "raised", "batch_hash": None, "batch_ids": (), "superseded_by": None, "settled": True,
    }  # fmt: skip
    return Alert(**known | more)


def test_a_side_run_says_what_it_is_in_its_name() -> None:
    """Which segment, which tokens, and what left them behind; short enough for a list of runs."""
    run = logged(3)
    assert side_spec(run, SUPERSEDED, stretch(1100, 2500, 2), 1, "ref").name == (
        "segment 1: superseded by 2, 1000\N{EN DASH}2500 tokens"
    )
    assert side_spec(run, SUPERSEDED, stretch(500, 2500, 2, 3), 1, "ref").name.startswith(
        "segment 1: superseded by 2 and 3, 500\N{EN DASH}"
    )
    assert side_spec(run, PROVISIONAL, stretch(4010, 4500, segment=3), 1, "ref").name == (
        "segment 3: provisional beyond 4000 tokens"
    )
    large = side_spec(run, SUPERSEDED, stretch(4_194_304_000, 4_949_278_720, 9, segment=2), 1, "ref").name
    assert large == "segment 2: superseded by 9, 4.194B\N{EN DASH}4.949B tokens"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ([{"a": 1}, {"a": 2}], {"a": 1}),
        ([{"a": 1}, {"b": 2}], {"a": 1, "b": 2}),
        ([{"m": {"x": 1}}, {"m": {"x": 2, "y": 3}}], {"m": {"x": 1, "y": 3}}),
        ([{"m": 1}, {"m": {"x": 2}}], {"m": 1}),
        ([], {}),
    ],
)
def test_a_setting_has_its_first_value(settings: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """A parameter never changes in MLflow, so keys that come later are added and no value is replaced."""
    assert merged(settings) == expected


def test_changes_name_every_key_that_is_another_one_from_a_segment_on() -> None:
    """Set, set otherwise, and set no more; nested keys by their path, the recipe apart."""
    story = Story(
        "run",
        settings=(
            Setting(1, {"lr": 0.1, "data": {"seed": 1}}, {"mix": "a"}),
            Setting(3, {"lr": 0.1, "data": {"seed": 2}, "new": None}, {"mix": "b"}),
            Setting(4, {"lr": 0.1, "data": {"seed": 2}}, {"mix": "b"}),
        ),
    )
    assert [tuple(change) for change in changes(story)] == [
        ("data.seed", 3, "1", "2"), ("new", 3, "(not set)", "null"), ("recipe.mix", 3, "a", "b"),
        ("new", 4, "null", "(not set)"),
    ]  # fmt: skip
    facts = canonical_spec(logged(4), story, 1, None).facts
    assert facts["changed.new"] == "(not set) \u2192 null (segment 3); null \u2192 (not set) (segment 4)"


def test_the_difference_of_a_fork_is_in_facts_and_note() -> None:
    """By key, before and after, beside the JSON of the log."""
    fork = {
        "tokens": "4000",
        "segment": "2",
        "reason": "recipe",
        "recipe_diff": '{"lr": [0.1, 0.2], "mix": [null, "b"]}',
    }
    spec = canonical_spec(logged(parent_run="parent", fork=fork), Story("run"), 1, "ref")
    assert spec.facts["changed.recipe.lr"] == "0.1 \u2192 0.2 (since the fork)"
    assert "Forked from `parent`, segment 2, at 4000 tokens (recipe)." in spec.note
    assert "| recipe.mix | null | b |" in spec.note


@pytest.mark.parametrize("difference", ["", "no JSON", "[1]", '{"lr": 3}', '{"lr": [1]}'])
def test_a_difference_that_is_none_is_kept_as_it_is(difference: str) -> None:
    """Whatever is in the log, a run is described."""
    spec = canonical_spec(logged(parent_run="parent", fork={"recipe_diff": difference}), Story("run"), 1, "ref")
    assert spec.facts["fork_recipe_diff"] == difference
    assert "fork_recipe_diff" in spec.note


def test_a_note_has_room_for_any_run() -> None:
    """A hundred of everything, and long: tables are shortened and say so, and the note stays below the limit."""
    story = Story(
        "run",
        settings=tuple(Setting(n, {f"k{n}": "v" * 500 for _ in range(3)}, {}) for n in range(100)),
        alerts=tuple(alert(n, "m" * 3000) for n in range(100)),
    )
    note = canonical_spec(logged(100, run_id="r" * 64), story, 1, None).note
    assert len(note) < _NOTE_CHARS
    assert note.count("see the artifacts") == 3
    assert "**100 alerts**" in note


def test_markdown_in_a_message_does_not_break_a_table() -> None:
    """A bar or a new line in a message stays in its cell."""
    note = canonical_spec(logged(), Story("run", alerts=(alert(10, "a|b\nc"),)), 1, None).note
    assert "| 10 | 1 | warn | spike | train/loss | a\\|b c |" in note


def test_a_run_that_hangs_is_said_to() -> None:
    """No tracker has a status of its own for that."""
    assert canonical_spec(logged(state="stalled"), Story("run"), 1, None).facts["state"] == "stalled"


def test_facts_of_many_changes_are_bounded_and_counted() -> None:
    """A configuration in which everything changed is better read as a whole."""
    settings = (Setting(1, {f"k{n}": 1 for n in range(80)}, {}), Setting(2, {f"k{n}": 2 for n in range(80)}, {}))
    facts = canonical_spec(logged(2), Story("run", settings=settings), 1, None).facts
    assert sum(key.startswith("changed.") for key in facts) == 50
    assert facts["changed"] == "80 settings, 50 of them as tags"


def test_held_evaluations_are_named_by_their_checkpoints() -> None:
    """A few ids, and how many more."""
    value = Evaluation("mmlu", "acc", 0.5, None, 1, None, None, None, None)
    assert held_evaluations([]) == ""
    assert held_evaluations([Unknown("c1", value)]).startswith("1 evaluation held back: no run has recorded")
    many = held_evaluations([Unknown(f"c{n}", value) for n in range(9)])
    assert "c0, c1, c2, c3, c4 and 4 more" in many
