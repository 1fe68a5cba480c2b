"""One alert for each event, whatever detectors say; what they learned survives, and what they break breaks nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import pytest

from llmtrack.alerts import Detector, Finding, LossSpike, NonFinite, default
from llmtrack.writer.alerts.batches import BatchRing, hash_of
from llmtrack.writer.alerts.watch import Watch, check_detectors
from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.buffer import Record, Row
from llmtrack.writer.log.ids import Pause, StepIds, take_ids


class Above(Detector):
    """Finds what is above a limit."""

    rule = "above"
    clear_after = 2
    cooldown = 5
    STATE = ("seen",)

    def __init__(self, metric: str = "a", limit: float = 1.0, family: str | None = None) -> None:
        self.metrics = (metric,)
        self.limit = limit
        self.family = family
        self.seen = 0
        self.paused = 0

    def pause(self) -> None:
        """Count pauses."""
        self.paused += 1

    def update(self, values: Mapping[str, float]) -> Finding | None:
        """Look at one value."""
        value = values[self.metrics[0]]
        self.seen += 1
        if value > self.limit:
            return Finding(self.metrics[0], value, self.limit, value, f"{self.metrics[0]} is {value}")
        return None


class Broken(Detector):
    """Raises."""

    metrics = ("a",)

    def update(self, values: Mapping[str, float]) -> Finding | None:
        """Raise."""
        raise ZeroDivisionError(values)


def watch_of(*detectors: Detector, **given: Any) -> tuple[Watch, list[Any]]:
    """Return a watch, and where it tells of alerts."""
    told: list[Any] = []
    numbers = count(1)
    return Watch(detectors, lambda: f"alert-{next(numbers)}", told.append, **given), told


def rows_of(values: Sequence[float | Mapping[str, float]], first: int = 1) -> list[Row]:
    """Return rows of one metric, or of several."""
    return [
        (step * 1_000_000, step, step * 10, {"a": value} if isinstance(value, int | float) else dict(value))
        for step, value in enumerate(values, start=first)
    ]


def said(records: list[Record]) -> list[tuple[Any, ...]]:
    """Return alert, phase and step of every record of an alert."""
    return [
        (record.values["alert_id"], record.values["phase"], record.values["step"])
        for record in records
        if record.table == "alerts"
    ]


def test_one_event_is_one_alert_with_its_context_and_its_end() -> None:
    """However long it lasts; its end says how bad it was."""
    watch, told = watch_of(Above())
    records = watch.look(rows_of([0.0] * 3 + [2.0, 5.0, *[2.0] * 20] + [0.0] * 3))
    assert [record.values["phase"] for record in records] == ["raised", "context"]
    records += watch.end()
    assert said(records) == [("alert-1", "raised", 4), ("alert-1", "context", 12), ("alert-1", "cleared", 27)]
    raised, context, cleared = (record.values for record in records)
    assert told == [raised]
    assert (raised["rule"], raised["level"], raised["metric"], raised["value"]) == ("above", "warn", "a", 2.0)
    assert (raised["baseline"], raised["score"], raised["message"]) == (1.0, 2.0, "a is 2.0")
    assert context["message"] == "8 rows later: at worst a was 5 at step 5; now nothing of it is logged"
    assert cleared["message"] == "over after 23 rows; at worst a was 5 at step 5"
    assert (cleared["level"], cleared["value"]) == ("info", 0.0)


def test_what_comes_back_in_the_cool_down_is_the_same_event() -> None:
    """Later it is another one."""
    watch, told = watch_of(Above())
    records = watch.look(rows_of([2.0, *[0.0] * 4, 3.0, *[0.0] * 10, 4.0]))
    assert [entry[:2] for entry in said(records)] == [
        ("alert-1", "raised"),
        ("alert-1", "context"),
        ("alert-1", "context"),  # again
        ("alert-1", "cleared"),
        ("alert-2", "raised"),
    ]
    assert len(told) == 2


def test_what_flickers_for_long_does_not_fill_the_log() -> None:
    """A thousand times in one event."""
    watch, told = watch_of(Above())
    records = watch.look(rows_of([2.0, 0.0, 0.0, 0.0] * 1000))
    assert len(told) == 1
    assert len([entry for entry in said(records) if entry[1] == "context"]) < 12
    assert [entry[1:] for entry in said(watch.end())] == [("cleared", 3999)]


def test_detectors_of_a_family_see_one_event() -> None:
    """The first raises the alert, the other adds to it; it is over when both are quiet."""
    watch, told = watch_of(Above("a", family="f"), Above("b", family="f"))
    low, high = 0.0, 2.0
    values = [{"a": high, "b": low}, {"a": high, "b": high}, *[{"a": low, "b": high}] * 3, *[{"a": low, "b": low}] * 3]
    records = watch.look(rows_of(values)) + watch.end()
    assert said(records)[:2] == [("alert-1", "raised", 1), ("alert-1", "context", 2)]
    assert records[1].values["message"] == "also: b is 2.0"
    assert said(records)[-1] == ("alert-1", "cleared", 7)
    assert len(told) == 1


def test_an_alert_has_the_ids_of_its_step_and_of_the_one_before() -> None:
    """Those from before and after it become records, each once, with their steps."""
    watch, told = watch_of(Above(), ring=BatchRing(before=3, after=2))
    items: list[Any] = []
    for step, row in enumerate(rows_of([0.0] * 9 + [2.0] + [0.0] * 9), start=1):
        items += [StepIds(step, 0, (step, f"doc {step}"), step * 2), row]
    records = watch.look(items)
    assert told[0]["batch_ids"] == ["10", "doc 10", "9", "doc 9"]
    batches = [record.values for record in records if record.table == "batches"]
    assert [row["step"] for row in batches] == [7, 8, 9, 10, 11, 12]
    assert batches[3]["batch_hash"] == told[0]["batch_hash"]
    assert (batches[3]["position"], batches[3]["tokens"], batches[3]["rank"]) == (20, 100, None)


def test_sparse_rows_have_the_batches_of_their_whole_window() -> None:
    """A loss logged every 50 steps is the mean over all of them."""
    watch, told = watch_of(Above(), ring=BatchRing(before=3, after=1))
    items: list[Any] = []
    for step in range(1, 201):
        items.append(StepIds(step, step, (step,)))
        if step % 50 == 0:
            items.append((step, step, step * 10, {"a": 2.0 if step == 150 else 0.0}))
    records = watch.look(items)
    assert told[0]["batch_ids"] == ["150", "149"]
    assert [record.values["step"] for record in records if record.table == "batches"] == list(range(100, 152))


def test_the_ring_is_bounded_by_ids_and_by_steps() -> None:
    """The last two steps stay whatever they have; a step given in parts is one."""
    ring = BatchRing()
    for step in range(5000):
        ring.put(StepIds(step, step, (step,)))
    assert len(ring) <= 1024
    for step in range(5000, 5010):
        ring.put(StepIds(step, step, tuple(range(100_000))))
    assert len(ring) == 2
    ring.put(StepIds(6000, 0, ("a",), 7))
    ring.put(StepIds(6000, 0, ("b",), 8))
    ring.put(StepIds(6001, 0, ("c" * 1000,)))
    digest, ids = ring.around(6000)
    assert ids[:2] == ["a", "b"]
    assert digest == hash_of(["b", "a"])
    assert len(ring.around(6001)[1][0]) == 200


@pytest.mark.parametrize(
    "given, taken",
    [
        (None, ()),
        ("doc", ("doc",)),
        (7, (7,)),
        (["a", 7], ("a", 7)),
        (range(3), (0, 1, 2)),
        ((name for name in "ab"), ("a", "b")),
        ([], ()),
    ],
)
def test_ids_are_taken_in_any_form(given: object, taken: tuple[object, ...]) -> None:
    """One or many."""
    assert take_ids(given) == taken


def test_ids_in_arrays_are_taken_flat() -> None:
    """NumPy is what data loaders have."""
    np = pytest.importorskip("numpy", reason="arrays of NumPy are given where NumPy is")
    assert take_ids(np.arange(4).reshape(2, 2)) == (0, 1, 2, 3)
    assert take_ids(np.array(["a", "b"])) == ("a", "b")


@pytest.mark.parametrize("given", [3.5, b"doc", [3.5], [None], object()])
def test_what_are_no_ids_is_refused(given: object) -> None:
    """With what to give instead."""
    with pytest.raises(UsageError, match="give a list of strings or integers"):
        take_ids(given)


class Exits(Above):
    """Ends the process, as it thinks."""

    rule = "custom"

    def update(self, values: Mapping[str, float]) -> Finding | None:
        """Exit."""
        raise SystemExit(len(values))


@pytest.mark.parametrize("make", [Broken, Exits])
def test_a_detector_that_raises_is_left_out_and_the_others_go_on(
    make: Callable[[], Detector], caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; `sys.exit` would end the thread that writes the log."""
    watch, told = watch_of(make(), Above())
    watch.look(rows_of([2.0, 2.0, 2.0]))
    assert len(told) == 1
    assert caplog.text.count("the detector custom:a failed") == 1


@pytest.mark.parametrize("value", [None, "x", object()])
def test_a_detector_that_finds_no_number_is_left_out(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And one that finds an integer is as good as any."""

    class Odd(Above):
        def update(self, values: Mapping[str, float]) -> Finding | None:
            found = 3 if values["a"] > 1 else value
            return Finding("a", found, None, found, "odd") if values["a"] else None

    watch, told = watch_of(Odd(), Above("b"))
    watch.look(rows_of([{"a": 2.0}, {"a": 0.5}, {"a": 2.0, "b": 2.0}]))
    assert [(alert["metric"], alert["value"]) for alert in told] == [("a", 3.0), ("b", 2.0)]
    assert caplog.text.count("failed") == 1


def test_what_is_no_number_is_not_looked_at() -> None:
    """It is the encoder's to refuse it."""
    detector = Above()
    watch, told = watch_of(detector)
    strange: list[Any] = [{"a": "x"}, {"a": None}, {"a": object()}, {"b": 2.0}, {}, {"a": 2}, {"a": True}]
    watch.look(rows_of(strange))
    assert detector.seen == 2
    assert len(told) == 1


def test_a_pause_is_told_to_every_detector() -> None:
    """In its place among the rows."""
    detector = Above()
    watch, _ = watch_of(detector)
    watch.look([*rows_of([0.0]), Pause(), *rows_of([0.0], 2)])
    assert detector.paused == 1


def test_a_state_goes_through_json_and_is_taken_over_before_the_next_row() -> None:
    """By detectors of the same name; others keep what they have."""
    first, _ = watch_of(Above(), Above("b"), recipe_hash="r")
    first.look(rows_of([{"a": 0.0, "b": 0.0}] * 7))
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["step"], state["tokens"]) == (7, 70)
    again, other = Above(), Above("c")
    second, _ = watch_of(again, other, recipe_hash="r")
    second.load_state_dict(state)
    second.look(rows_of([0.0]))
    assert (again.seen, other.seen) == (8, 0)


def test_a_state_of_another_recipe_is_of_no_use() -> None:
    """Nor is one of another version."""
    first, _ = watch_of(Above(), recipe_hash="r")
    first.look(rows_of([0.0] * 7))
    for recipe_hash, change in (("other", {}), ("r", {"version": 99})):
        detector = Above()
        watch, _ = watch_of(detector, recipe_hash=recipe_hash)
        watch.load_state_dict({**first.state_dict(), **change})
        watch.look([])
        assert detector.seen == 0


@pytest.mark.parametrize("strange", [7, [], "x", {"a": 1}, {"detectors": 3}, {"detectors": {}, "tokens": "x"}])
def test_what_is_no_state_is_refused(strange: Any) -> None:
    """At once, on the thread that loads it."""
    watch, _ = watch_of(Above())
    with pytest.raises(UsageError, match="no state"):
        watch.load_state_dict(strange)


@pytest.mark.parametrize("strange", [5, None, "x", [3]])
def test_a_state_whose_open_events_are_none_is_refused(strange: Any) -> None:
    """At once: taken over later, it would end all looking."""
    watch, _ = watch_of(Above())
    with pytest.raises(UsageError, match="open is"):
        watch.load_state_dict({**watch.state_dict(), "open": strange})


def test_a_state_with_a_broken_detector_is_refused_as_a_whole() -> None:
    """Before anything is taken over."""
    watch, _ = watch_of(Above(), LossSpike())
    state = watch.state_dict()
    state["detectors"]["above:a"]["seen"] = 5
    state["detectors"]["loss_spike:train/loss"]["mean"] = math.nan
    with pytest.raises(UsageError, match="mean is nan"):
        watch.load_state_dict(state)
    watch.look([])
    assert watch.state_dict()["detectors"]["above:a"] == {"seen": 0}


def test_an_event_that_goes_on_after_a_restart_is_not_raised_again() -> None:
    """The process before has said so; the next event is."""
    first, _ = watch_of(Above())
    first.look(rows_of([0.0, 2.0]))
    second, told = watch_of(Above())
    second.load_state_dict(first.state_dict())
    records = second.look(rows_of([2.0, 2.0, 0.0, 0.0, 0.0]))
    assert records == []
    assert said(second.look(rows_of([2.0]))) == [("alert-1", "raised", 1)]
    assert len(told) == 1


def test_rows_wait_for_the_history_but_not_what_is_no_number() -> None:
    """They are looked at in order once it is there, with what it teaches."""
    spike = LossSpike()
    watch, told = watch_of(NonFinite(), spike)
    take = watch.wait_for_history()
    values = [{"train/loss": value} for value in (2.0, 3.0, math.nan, 2.0)]
    first = watch.look(rows_of(values))
    assert [record.values["rule"] for record in first] == ["nonfinite"]
    take([(step, {"train/loss": 2.0 + 0.01 * (step % 7)}) for step in range(100)])
    second = watch.look([])
    assert said(second)[0] == ("alert-2", "raised", 2)
    assert [alert["rule"] for alert in told] == ["nonfinite", "loss_spike"]
    assert spike.seen == 103


def test_of_a_history_only_what_the_state_has_not_seen_is_learned() -> None:
    """The state may be half a second older than the checkpoint."""
    first, _ = watch_of(Above())
    first.look(rows_of([0.0] * 7))
    detector = Above()
    watch, _ = watch_of(detector)
    take = watch.wait_for_history()
    watch.load_state_dict(first.state_dict())
    take([(tokens, {"a": 0.0}) for tokens in range(10, 110, 10)])
    watch.look([])
    assert detector.seen == 10


def test_a_history_that_ends_in_an_event_raises_nothing() -> None:
    """Nor does one with spikes in it."""
    watch, told = watch_of(Above())
    take = watch.wait_for_history()
    take([(step, {"a": 2.0 if step in {3, 9} else 0.0}) for step in range(10)])
    assert watch.look(rows_of([2.0, 0.0, 0.0])) == []
    assert told == []


def test_when_the_run_ends_what_waits_is_looked_at() -> None:
    """With the history if it comes in time, without it if not."""
    watch, told = watch_of(Above())
    take = watch.wait_for_history()
    watch.look(rows_of([2.0]))
    take([])
    assert said(watch.end()) == [("alert-1", "raised", 1)]
    assert len(told) == 1


def test_alerts_of_the_caller_get_their_batches() -> None:
    """But not those of detectors once more."""
    watch, _ = watch_of()
    watch.look([StepIds(4, 0, ("x",)), StepIds(5, 0, ("y",))])
    record = Record("alerts", {"time": 1, "step": 5, "tokens": 50, "phase": "raised"})
    more = watch.note(record)
    assert record.values["batch_ids"] == ["y", "x"]
    assert [one.values["step"] for one in more] == [4, 5]
    assert watch.note(record) == []
    assert watch.note(Record("alerts", {"time": 1, "step": 5, "tokens": 50, "phase": "context"})) == []


def test_detectors_are_a_flag_or_a_list() -> None:
    """Anything else is refused at once."""
    assert len(check_detectors(None, 8)) == len(check_detectors(True, 8)) == len(default(8))
    assert check_detectors(False, 8) == check_detectors([], 8) == []
    mine = Above()
    assert check_detectors((mine,), 8) == [mine]
    text = Above()
    text.metrics = "train/loss"  # type: ignore[assignment]  # ty: ignore[invalid-assignment]
    for strange in ("all", 7, [LossSpike], [Detector()], {"a": mine}, [text]):
        with pytest.raises(UsageError, match="alerts="):
            check_detectors(strange, 8)


def test_the_start_record_has_the_thresholds() -> None:
    """As JSON, by name."""
    watch, _ = watch_of(*default(8))
    (spike,) = [one for one in json.loads(watch.describe()) if one["rule"] == "loss_spike"]
    assert spike["metrics"] == ["train/loss"]
    assert spike["thresholds"] == LossSpike().thresholds()
