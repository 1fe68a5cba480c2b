"""Each detector finds what it is for, within two points, and nothing else, whatever it is given."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llmtrack.alerts import (
    Detector,
    Divergence,
    GradientSpike,
    ImpossibleMfu,
    LossSpike,
    NonFinite,
    SlowRank,
    ThroughputDrop,
    default,
)
from tests import curves

LOSS = "train/loss"
SPEED = "throughput/tokens_per_s"
SLOWEST = "throughput/tokens_per_s_min"


def total(make: Callable[[], Detector], many: Iterator[curves.Curve]) -> curves.Score:
    """Return how a detector does on many curves, a new one for each."""
    scores = (curves.score(curve, curves.raised(make(), curve.values.tolist())) for curve in many)
    return sum(scores, curves.Score())


def flat(points: int, seed: int = 0, level: float = 2.0, sigma: float = 0.01) -> list[float]:
    """Return a loss on which nothing happens."""
    values: list[float] = (level + sigma * np.random.default_rng(seed).standard_normal(points)).tolist()
    return values


def test_clear_spikes_are_found_at_once_and_nothing_else_is() -> None:
    """On curves with a steep fall, batch ramps, shifts and wandering: recall, false alerts and delay as promised."""
    result = total(LossSpike, (curves.loss(seed, 10_000, spikes=20) for seed in range(1000, 1010)))
    assert result.clear > 80
    assert result.recall >= 0.95
    assert result.false_alerts <= 1
    assert result.late() <= 0.02 * result.found
    assert result.repeated == 0


@pytest.mark.parametrize(
    "more, least", [({}, 0.95), ({"warmup": 2000}, 0.95), ({"every": 10}, 0.85)], ids=["dense", "warm-up", "sparse"]
)
def test_spikes_on_the_steep_fall_are_found(more: dict[str, Any], least: float) -> None:
    """In the first six hundred points; between sparse log steps the fall is too steep for the smallest of them."""
    many = (curves.loss(seed, 600, spikes=3, first_spike=80, shifts=0, **more) for seed in range(2000, 2040))
    result = total(LossSpike, many)
    assert result.clear > 40
    assert result.recall >= least
    assert result.false_alerts == 0


def test_spikes_of_just_eight_deviations_are_found() -> None:
    """Between eight and sixteen, whatever the noise."""
    many = (curves.loss(seed, 10_000, spikes=40, deviations=(8, 16)) for seed in range(3000, 3008))
    result = total(LossSpike, many)
    assert result.clear > 150
    assert result.recall >= 0.95
    assert result.late() <= 0.02 * result.found


def test_one_point_alone_is_found_where_the_noise_is_gaussian() -> None:
    """At eight deviations most of them, with the noise of the point itself on top; at ten nearly all."""
    found = {8: 0, 10: 0}
    for seed in range(20):
        quiet = curves.loss(seed, 6000, sigma=0.02, ramp=False, spikes=0, shifts=0).values
        places = [2000 + seed, 4000 + seed]
        for height in found:
            values = quiet.copy()
            values[places] += height * 0.02
            found[height] += len(set(places) & set(curves.raised(LossSpike(), values.tolist())))
    assert found[8] >= 22
    assert found[10] >= 37


def test_noise_with_heavy_tails_raises_the_threshold_by_itself() -> None:
    """One point in a hundred with three times the noise: some alerts at the beginning, not hundreds."""
    many = (curves.loss(seed, 20_000, spikes=0, shifts=0, tail=0.01) for seed in range(4000, 4005))
    assert total(LossSpike, many).false_alerts <= 4


def test_a_tail_as_long_as_real_noise_has_it_is_learned_and_spikes_are_found_in_it() -> None:
    """Student's t of three degrees of freedom: one point in a few thousand is more than eight deviations off."""
    result = total(LossSpike, (curves.loss(seed, 60_000, freedom=3, spikes=20, shifts=0) for seed in range(7000, 7003)))
    assert result.clear > 50
    assert result.recall >= 0.95
    assert result.false_alerts <= 4


@pytest.mark.parametrize(
    "make, curve", [(LossSpike, curves.loss), (GradientSpike, curves.grad_norm)], ids=["loss", "gradient norm"]
)
def test_what_is_left_of_one_outlier_in_the_next_point_is_no_second_one(
    make: Callable[[], Detector], curve: Callable[..., curves.Curve]
) -> None:
    """Half of every point's noise, which has heavy tails, is in the next one: some alerts, not dozens."""
    many = [curve(seed, 20_000, freedom=4, memory=2, spikes=20) for seed in range(7100, 7106)]
    result = total(make, iter(many))
    assert result.clear > 50
    assert result.recall >= 0.9
    assert result.false_alerts <= 6


def test_a_spike_is_one_event_and_teaches_nothing() -> None:
    """Thirty points at a height of five; ten points later the next one is found."""
    values = flat(500) + [7.0] * 30 + flat(40, 1) + [2.2] * 3 + flat(100, 2)
    assert curves.raised(LossSpike(), values) == [500, 570]


def test_a_level_that_shifted_is_one_alert_and_then_the_new_level() -> None:
    """It comes back from any height, finds spikes there, and does not mind a fall."""
    values = flat(500) + flat(500, 1, level=2.5) + [3.0] + flat(500, 2, level=2.5) + flat(200, 3) + [2.4] + flat(20, 4)
    assert curves.raised(LossSpike(), values) == [500, 1000, 1701]


@pytest.mark.parametrize(
    "values",
    [
        [2.0] * 5000,
        [0.0] * 5000,
        [2.0 + 1e-12 * (step % 7) for step in range(5000)],
        [2.0 if step % 1000 else 2.015625 for step in range(5000)],  # a loss in bfloat16, which is mostly the same
        [-1.0 - 0.001 * step for step in range(5000)],
        [1e-30] * 5000,
        flat(2000, sigma=1e-4) + flat(20_000, 1, sigma=1e-4),
        [11.0 * 0.99**step for step in range(3000)],
    ],
    ids=["constant", "zero", "rounding", "bfloat16", "negative", "tiny", "quiet", "falling"],
)
@pytest.mark.parametrize("make", [LossSpike, GradientSpike, Divergence])
def test_what_hardly_moves_or_falls_is_no_alert(make: Callable[[], Detector], values: list[float]) -> None:
    """However small the deviation is that it shows."""
    assert curves.raised(make(), values) == []


@pytest.mark.parametrize("make", [LossSpike, GradientSpike, Divergence, ThroughputDrop])
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0])
def test_what_is_no_number_teaches_nothing(make: Callable[[], Detector], strange: float) -> None:
    """After a run of it, the detector is what it was before."""
    values = [abs(value) for value in flat(400)]
    with_strange, without = make(), make()
    assert curves.raised(with_strange, values[:300] + ([] if strange == 0.0 else [strange] * 50) + values[300:]) == []
    assert curves.raised(without, values) == []
    assert with_strange.state_dict() == without.state_dict() or strange == 0.0


def test_a_spike_after_a_run_of_nan_is_found() -> None:
    """An overflow, and then another."""
    values = flat(300) + [math.nan] * 20 + flat(20, 1) + [2.3]
    assert curves.raised(LossSpike(), values) == [340]


def test_noise_that_becomes_larger_for_good_is_noise_soon() -> None:
    """Five times as large: a few alerts, and then none."""
    raised = curves.raised(LossSpike(), flat(2000) + flat(20_000, 1, sigma=0.05))
    assert len(raised) <= 3
    assert max(raised, default=0) < 2200


def test_heavy_tails_of_a_gradient_norm_are_no_alerts_and_its_spikes_are() -> None:
    """Single points far out mean nothing; what lasts or grows does."""
    result = total(GradientSpike, (curves.grad_norm(seed, 10_000) for seed in range(5000, 5010)))
    assert result.clear > 80
    assert result.recall >= 0.95
    assert result.false_alerts <= 1
    assert result.late() <= 0.02 * result.found


def test_a_gradient_norm_that_grows_over_five_steps_is_found_before_it_is_there() -> None:
    """At the second of the five points that are far out."""
    rng = np.random.default_rng(0)
    values = np.exp(0.15 * rng.standard_normal(600)) * 0.4
    values[500:505] *= [2.0, 3.0, 5.0, 8.0, 12.0]
    (at,) = curves.raised(GradientSpike(), values.tolist())
    assert at <= 502


def test_a_slow_rise_that_no_point_gives_away_is_a_divergence() -> None:
    """No spike is found, and the divergence is, before half of the rise is over."""
    for seed in range(5):
        curve = curves.loss(seed, 10_000, sigma=0.02, spikes=0, shifts=0, rise=0.5)
        values = curve.values.tolist()
        assert curves.raised(LossSpike(), values) == []
        (at,) = curves.raised(Divergence(), values)
        assert 8000 < at < 9000


def test_what_is_no_divergence_is_none() -> None:
    """Spikes, shifts of the level and wandering, on many curves."""
    result = total(Divergence, (curves.loss(seed, 10_000) for seed in range(6000, 6020)))
    assert result.false_alerts + result.shift_alerts <= 2


def test_a_loss_that_wanders_is_no_divergence_and_one_that_rises_in_it_is() -> None:
    """Noise of one percent of the loss that is correlated over 150 points; what rises by half of the loss is found."""
    many = (curves.loss(seed, memory=150, sigma=0.03, ramp=False, spikes=0, shifts=0) for seed in range(7300, 7306))
    assert total(Divergence, many).false_alerts <= 1
    for seed in range(5):
        curve = curves.loss(seed, sigma=0.02, memory=50, wander=0, spikes=0, shifts=0, rise=0.5)
        at = curves.raised(Divergence(), curve.values.tolist())[0]
        assert 16_000 < at < 18_000


def test_a_lasting_drop_of_five_percent_is_found_within_twenty_points() -> None:
    """In one percent of noise, with pauses in between, once."""
    for seed in range(40):
        curve = curves.throughput(seed, 900, drop=0.05)
        (at,) = curves.raised(ThroughputDrop(), curve.values[:700].tolist())
        assert 600 <= at < 620


def test_a_lasting_drop_of_three_percent_is_found_within_some_tens_of_points() -> None:
    """As a single slow GPU causes; nearly always, whatever the wandering."""
    found = 0
    for seed in range(40):
        curve = curves.throughput(seed, 900, drop=0.03)
        found += any(600 <= at < 650 for at in curves.raised(ThroughputDrop(), curve.values.tolist()))
    assert found >= 36


def test_a_sudden_drop_is_found_at_its_third_point_and_is_an_error() -> None:
    """By then it is no pause."""
    values = [*(100.0 + value for value in flat(100, level=0.0, sigma=1.0)), 70.0, 70.5, 69.5]
    detector = ThroughputDrop()
    findings = [detector.update({SPEED: value}) for value in values]
    assert [index for index, finding in enumerate(findings) if finding] == [102]
    assert findings[-1] is not None
    assert findings[-1].level == "error"


@pytest.mark.parametrize("pauses", [{"pauses": 0.02}, {"every_pause": 10}, {"every_pause": 3, "pauses": 0.0}])
def test_pauses_that_nobody_marked_are_no_drop(pauses: dict[str, Any]) -> None:
    """Evaluations and checkpoints, also regular ones."""
    many = (curves.throughput(seed, 5000, **pauses) for seed in range(10))
    assert total(ThroughputDrop, many).false_alerts == 0


@pytest.mark.parametrize("memory", [3, 10, 30, 100])
def test_a_throughput_whose_noise_is_correlated_is_no_drop(memory: int) -> None:
    """One percent, over a few rows or a hundred: nothing; and a drop of five percent is found in it, later."""
    many = (curves.throughput(seed, 20_000, memory=memory) for seed in range(7400, 7404))
    assert total(ThroughputDrop, many).false_alerts == 0
    found = 0
    for seed in range(10):
        curve = curves.throughput(seed, 3000, memory=memory, drop=0.05)
        found += any(2000 <= at < 2400 for at in curves.raised(ThroughputDrop(), curve.values.tolist()))
    assert found >= 9


@pytest.mark.parametrize("drop, decline", [(0.05, 300), (0.05, 1000), (0.2, 1000), (0.2, 3000)])
def test_a_throughput_that_declines_slowly_is_found_before_it_is_at_its_end(drop: float, decline: int) -> None:
    """The baseline does not follow it down; one event for each bit of it that stays."""
    for seed in range(5):
        curve = curves.throughput(seed, 9000, drop=drop, decline=decline)
        at = curves.raised(ThroughputDrop(), curve.values.tolist())
        assert 6000 < at[0] < 6000 + decline


def test_a_pause_that_was_marked_is_not_looked_at() -> None:
    """However long they are: each of three in a row is marked."""
    detector = ThroughputDrop()
    for value in [100.0] * 100:
        assert detector.update({SPEED: value}) is None
    for _ in range(5):
        detector.pause()
        assert detector.update({SPEED: 30.0}) is None
    assert detector.update({SPEED: 100.0}) is None


def test_a_throughput_that_rose_or_stayed_down_is_the_new_baseline() -> None:
    """A batch-size ramp: no alert; a drop for good: one, and later another one from there."""
    values = [100.0] * 100 + [150.0] * 100 + [140.0] * 400 + [130.0] * 50
    first, second = curves.raised(ThroughputDrop(), values)
    assert 200 < first < 220
    assert 600 < second < 620


def slow(ranks: list[int], gap: float, count: int = 8) -> list[int]:
    """Return the log steps at which the detector says that a rank is slow."""
    detector = SlowRank(ranks=count)
    rows = [{f"{SLOWEST}_rank": float(rank), SLOWEST: 100.0 * (1 - gap), SPEED: 100.0 * count} for rank in ranks]
    return [index for index, row in enumerate(rows) if detector.update(row)]


def test_a_rank_that_is_the_slowest_for_long_is_named() -> None:
    """Also when another one is now and then; not when chance decides, nor when it hardly matters."""
    rng = np.random.default_rng(0)
    chance = rng.integers(0, 8, 2000).tolist()
    mostly = [3 if index % 20 else 5 for index in range(200)]
    assert slow(chance, 0.05) == []
    assert slow(mostly, 0.0) == []
    assert slow(mostly, 0.05)[0] < 80
    assert slow([0] * 200, 0.05, count=1) == []


def test_only_the_name_of_a_slow_rank_is_enough() -> None:
    """A trainer may log no more than that."""
    detector = SlowRank()
    findings = [detector.update({f"{SLOWEST}_rank": 3.0}) for _ in range(60)]
    assert findings[48:50] == [None, findings[49]]
    assert findings[49] is not None
    assert "rank 3 has been the slowest" in findings[49].message


def test_a_rank_that_waits_for_data_is_slow_when_it_waits_long() -> None:
    """A fifth of the step is long, a hundredth is not."""
    for wait, is_slow in ((0.2, True), (0.01, False)):
        detector = SlowRank("throughput/data_wait_s", "throughput/step_time_s", gap=0.05)
        row = {"throughput/data_wait_s_rank": 1.0, "throughput/data_wait_s": wait, "throughput/step_time_s": 1.0}
        findings = [detector.update(row) for _ in range(100)]
        assert any(findings) is is_slow


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_found_in_the_first_row(value: float) -> None:
    """Without any warm-up; an infinite gradient norm is a warning, for it may be the loss scale."""
    loss = NonFinite().update({LOSS: value})
    norm = NonFinite().update({"train/grad_norm": value, LOSS: 2.0})
    assert loss is not None
    assert norm is not None
    assert (loss.metric, loss.level) == (LOSS, "error")
    assert norm.level == ("error" if math.isnan(value) else "warn")
    assert NonFinite().update({LOSS: 2.0, "train/grad_norm": 0.5}) is None


def test_a_utilisation_above_everything_is_found() -> None:
    """At 100 % it may be true."""
    assert ImpossibleMfu().update({"throughput/mfu": 1.0}) is None
    assert ImpossibleMfu().update({"throughput/mfu": math.nan}) is None
    found = ImpossibleMfu().update({"throughput/mfu": 1.52})
    assert found is not None
    assert "152%" in found.message


@pytest.mark.parametrize("detector", default(8), ids=lambda detector: detector.rule)
def test_a_detector_goes_on_from_a_state_as_if_nothing_had_been(detector: Detector) -> None:
    """The state is plain JSON; two halves find what the whole finds."""
    rng = np.random.default_rng(7)
    rows = [
        {
            LOSS: 2.0 + 0.01 * rng.standard_normal() + (0.5 if 700 < step < 710 else 0.0),
            "train/grad_norm": math.exp(0.2 * rng.standard_normal()) * (9.0 if 700 < step < 710 else 1.0),
            SPEED: 800.0 * (1 + 0.01 * rng.standard_normal()) * (0.9 if step > 600 else 1.0),
            SLOWEST: 95.0,
            f"{SLOWEST}_rank": 3.0,
            "throughput/mfu": 1.2,
        }
        for step in range(900)
    ]
    whole, first, second = (type(detector)() for _ in range(3))
    expected = [whole.update(row) for row in rows]
    for cut in (0, 10, 450, 705):
        first, second = type(detector)(), type(detector)()
        found = [first.update(row) for row in rows[:cut]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += [second.update(row) for row in rows[cut:]]
        if not isinstance(detector, Divergence | ThroughputDrop):  # what they last said comes with the next block
            assert found == expected
        assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("detector", default(8), ids=lambda detector: detector.rule)
def test_every_threshold_is_a_number_with_a_name(detector: Detector) -> None:
    """And can be set, by that name."""
    thresholds = detector.thresholds()
    assert all(isinstance(value, int | float) for value in thresholds.values())
    assert type(detector)(**thresholds).thresholds() == thresholds


def test_what_is_no_state_is_refused_and_changes_nothing() -> None:
    """A state of another detector, of a later version, or of nothing at all."""
    many: list[Any] = [{"seen": "x"}, {}, {"seen": math.nan}, {"seen": 1.5}, 7]
    for given, strange in itertools.product(default(8), many):
        before = given.state_dict()
        if given.STATE:
            with pytest.raises(ValueError, match="no state of the detector"):
                given.load_state_dict(strange)
        assert given.state_dict() == before


def test_a_state_of_before_the_noise_was_learned_is_taken_over() -> None:
    """As llmtrack wrote it until then: what it lacks is learned anew, and a spike is found at once."""
    spike = {"seen": 900, "last": 2.0, "quantum": 1e-5, "mean": 2.0, "trend": 0.0, "variance": 1e-4}
    loss = LossSpike()
    loss.load_state_dict({**spike, "tail": 3.6, "last_score": 0.1, "high_for": 0, "recent": []})
    assert not any(loss.update({LOSS: value}) for value in flat(100))
    assert loss.update({LOSS: 2.2}) is not None
    norm = GradientSpike()
    norm.load_state_dict(
        {
            "seen": 900,
            "mean": 0.0,
            "trend": 0.0,
            "scale": 0.1,
            "high": 4.0,
            "tail": 5.0,
            "last_score": 0.1,
            "high_for": 0,
        }
    )
    assert [norm.update({"train/grad_norm": value}) is not None for value in (1.0, 1.1, 3.0, 4.0)] == [False] * 3 + [
        True
    ]
    slow = Divergence()
    slow.load_state_dict(
        {"seen": 90, "values": [], "last": 2.0, "lowest": 1.99, "deviation": 0.002, "above": 0, "high_for": 0}
    )
    assert curves.raised(slow, flat(2000) + [2.0 + 0.0001 * step for step in range(2000)])
    with pytest.raises(ValueError, match="no state of the detector"):
        loss.load_state_dict({**spike, "points": "many"})


def test_a_spike_on_a_curve_that_never_changed_is_found() -> None:
    """However long it was constant; the first step of a value in bfloat16 is none."""
    for points in (40, 200, 20_000):
        detector = LossSpike()
        assert not any(detector.update({LOSS: 2.0}) for _ in range(points))
        assert detector.update({LOSS: 2.1}) is not None
    detector = LossSpike()
    assert not any(detector.update({LOSS: value}) for value in [2.0] * 100 + [2.015625] + [2.0] * 100)


def test_a_loss_beyond_any_that_is_computed_with_is_as_good_as_infinite() -> None:
    """No detector can square it, and it is no number that a training comes back from."""
    finding = NonFinite().update({LOSS: 1e300})
    assert finding is not None
    assert finding.message == "train/loss is 1e+300"


def test_infinite_gradient_norms_of_loss_scaling_are_told_some_times() -> None:
    """Then only those that do not stand alone, and NaN."""
    detector = NonFinite()
    norms = [0.5] * 20_000
    norms[300::300] = [math.inf] * len(norms[300::300])
    found = [step for step, norm in enumerate(norms) if detector.update({LOSS: 2.0, "train/grad_norm": norm})]
    assert found == [300, 600, 900]
    rows = [(2.0, math.inf), (2.0, math.inf), (2.0, 0.5), (2.0, math.inf), (2.0, math.nan), (math.nan, math.inf)]
    told = [detector.update({LOSS: loss, "train/grad_norm": norm}) for loss, norm in rows]
    assert [finding and finding.level for finding in told] == [None, "warn", None, "warn", "error", "error"]


def test_a_loss_that_overflows_is_told_in_few_digits() -> None:
    """Of what a person is to read on a phone."""
    detector = LossSpike()
    for step in range(100):
        detector.update({LOSS: 2.0 + 0.01 * (step * 7919 % 13)})
    finding = detector.update({LOSS: 1e30})
    assert finding is not None
    assert len(finding.message) < 80
