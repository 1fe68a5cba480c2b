"""Whatever is logged, detectors stay finite, bounded and quick to restore, and an event is one alert."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrack.alerts import default
from llmtrack.writer.alerts.watch import Watch
from llmtrack.writer.log.ids import Mark, Pause, StepIds

_NAMES: list[str] = [
    "train/loss",
    "train/grad_norm",
    "throughput/tokens_per_s",
    "throughput/tokens_per_s_min",
    "throughput/tokens_per_s_min_rank",
    "throughput/data_wait_s",
    "throughput/data_wait_s_rank",
    "throughput/step_time_s",
    "throughput/mfu",
    "other",
]

values = st.one_of(
    st.floats(),
    st.floats(1.9, 2.1),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308, 2.0, 1e150]),
)
stretches = st.tuples(st.dictionaries(st.sampled_from(_NAMES), values, min_size=1), st.integers(1, 80))
ids = st.lists(st.one_of(st.text(max_size=5), st.integers()), max_size=4)

Item = tuple[int, int, int, dict[str, float]] | Mark


@st.composite
def logged(draw: st.DrawFn) -> list[Item]:
    """Stretches of equal rows, with ids and pauses between them."""
    items: list[Item] = []
    step = 0
    for row, times in draw(st.lists(stretches, min_size=1, max_size=8)):
        for _ in range(times):
            step += 1
            items.append((step * 1_000_000, step, step * 10, row))
        items.append(StepIds(step + 1, step * 10, tuple(draw(ids))))
        if draw(st.booleans()):
            items.append(Pause())
    return items


def watch_of() -> tuple[Watch, list[Any]]:
    """Return a watch with the default detectors, and where it tells of alerts."""
    told: list[Any] = []
    numbers = count(1)
    return Watch(default(8), lambda: f"alert-{next(numbers)}", told.append), told


@settings(max_examples=50)
@given(logged())
def test_every_event_is_raised_once_and_over_once_at_most(items: list[Item]) -> None:
    """In that order, with what came between; and no detector fails."""
    watch, told = watch_of()
    records = watch.look(items) + watch.end()
    assert not any(watched.is_broken for watched in watch._watched)
    alerts = [record.values for record in records if record.table == "alerts"]
    assert [alert["alert_id"] for alert in alerts if alert["phase"] == "raised"] == [one["alert_id"] for one in told]
    for alert in told:
        phases = [row["phase"] for row in alerts if row["alert_id"] == alert["alert_id"]]
        assert phases[0] == "raised"
        assert phases.count("raised") == 1
        assert phases.count("cleared") == (phases[-1] == "cleared")
        assert len(phases) < 20


@settings(max_examples=50)
@given(logged(), st.data())
def test_however_rows_come_the_same_is_found(items: list[Item], data: st.DataObject) -> None:
    """All at once, or in turns of the thread that writes the log."""
    at_once, _ = watch_of()
    in_turns, _ = watch_of()
    expected = at_once.look(items)
    found = []
    left = items
    while left:
        size = data.draw(st.integers(1, len(left)))
        found += in_turns.look(left[:size])
        left = left[size:]
    strip = [{**record.values, "time": 0} for record in expected]
    assert repr([{**record.values, "time": 0} for record in found]) == repr(strip)


@settings(max_examples=50)
@given(logged())
def test_a_state_is_plain_json_and_is_what_it_was(items: list[Item]) -> None:
    """Whatever the detectors have seen: finite numbers, a few hundred of them at most."""
    watch, _ = watch_of()
    watch.look(items)
    state = watch.state_dict()
    text = json.dumps(state, allow_nan=False)
    assert len(text) < 20_000
    again, _ = watch_of()
    again.load_state_dict(json.loads(text))
    again.look([])
    assert again.state_dict()["detectors"] == state["detectors"]


@settings(max_examples=25)
@given(logged())
def test_detectors_come_back_from_anything(items: list[Item]) -> None:
    """A few hundred ordinary rows later nothing is wrong any more."""
    watch, told = watch_of()
    watch.look(items)
    row = {"train/loss": 2.0, "train/grad_norm": 0.5, "throughput/tokens_per_s": 100.0, "throughput/mfu": 0.4}
    first = len(items) + 1
    watch.look([(step, step, step * 10, row) for step in range(first, first + 1000)])
    so_far = len(told)
    watch.look([(step, step, step * 10, row) for step in range(first + 1000, first + 1500)])
    assert len(told) == so_far
