"""What a run will log, worked out before it is started, against runs that were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import llmtrack
from llmtrack.writer.capture.cadence import DEFAULT_FILE, Cadence, Group
from llmtrack.writer.capture.plan import Plan, estimate_layers, make_plan
from llmtrack.writer.cli import COMMANDS
from llmtrack.writer.cli import plan as plan_command
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings

CADENCE = Cadence(
    (
        Group("optimisation", 2, metrics=("train/*",), points=5),
        Group("per_layer", 3, metrics=("layers/*",), points_per_layer=4, burst=True),
        Group("system", 30, metrics=("system/*",), points=2, monitoring=True),
    ),
    burst_steps=60,
)


def plan(cadence: Cadence = CADENCE, **given: Any) -> Plan:
    """Make a plan of a hundred steps of a model with ten layers."""
    usual: dict[str, Any] = {"steps": 100, "layers": 10, "step_time_s": 1.0}
    return make_plan(cadence, **{**usual, **given})


def test_points_are_counted_by_group() -> None:
    """The largest first; what is due at the same step is one row."""
    made = plan()
    assert [(group.name, group.metrics, group.rows, group.points) for group in made.groups] == [
        ("per_layer", 40, 33, 1320),
        ("optimisation", 5, 50, 250),
        ("system", 2, 3, 6),
    ]
    assert (made.points, made.metrics) == (1576, 47)
    assert made.rows == len([step for step in range(1, 101) if step % 2 == 0 or step % 3 == 0])


@pytest.mark.parametrize("intervals", [[1], [7], [2, 3, 5], [4, 6, 10, 15], [10, 10, 100], [2, 4, 8], [1000]])
def test_rows_are_counted_as_steps_are(intervals: list[int]) -> None:
    """By a formula, because a run has a million steps."""
    cadence = Cadence([Group(f"g{index}", every, points=1) for index, every in enumerate(intervals)])
    assert plan(cadence, steps=500).rows == sum(any(step % every == 0 for every in intervals) for step in range(1, 501))


def test_the_figures_are_those_of_a_real_run(tmp_path: Path) -> None:
    """Points to the last one, files but for one, bytes within a third: a part ends when no fsync is under way."""
    settings = Settings(part_batches=20, flush_interval_s=0.5)
    run = llmtrack.open_run(tmp_path, settings=settings)
    assert isinstance(run, RecordingRun)
    logged = 0
    for step in range(1, 101):
        due = [group for group in CADENCE.groups.values() if CADENCE.due(group.name, step)]
        row = {
            f"{group.name}/{index}": step / (index + 3)
            for group in due
            for index in range(group.points + 10 * group.points_per_layer)
        }
        if row:
            run.log(row, step, step * 4_194_304)
            logged += len(row)
            assert run.flush(30.0)  # a batch for each row, as in a run whose steps take a second
    run.checkpoint(tmp_path, 100, 100 * 4_194_304)
    run.alert("test", "for its file", 100, 100 * 4_194_304)
    run.finish()
    made = plan(settings=settings)
    parts = list(run.folder.glob("metrics-*.parquet"))
    assert made.points == logged
    # There is no batches file, because nothing watches this run.
    assert len(list(run.folder.iterdir())) == pytest.approx(made.files - 1, abs=1)
    assert sum(part.stat().st_size for part in parts) == pytest.approx(made.disk_bytes, rel=1 / 3)


def test_a_month_stays_below_a_thousand_files() -> None:
    """Logging every second, with a restart every three hours."""
    month = make_plan(Cadence.default(), steps=30 * 86_400, layers=80, step_time_s=1.0, segments=240 // 3)
    assert month.files < 1_000


def test_a_tracker_takes_what_its_limits_allow() -> None:
    """MLflow so many metrics a request, W&B so many rows and values a minute."""
    many = Cadence([Group("layers", 1, points_per_layer=100)])
    mlflow, wandb = plan(many, steps=1_000_000, layers=100).trackers
    assert (mlflow.name, wandb.name) == ("mlflow", "wandb")
    assert mlflow.requests == 10_000_000_000 / 1000 + 1_000_000 / 1000  # each row's step is a metric, too
    assert wandb.hours == pytest.approx((10_000_000_000 + 3_000_000) / 100_000 / 60)
    assert any("500,000" in problem for problem in wandb.problems)
    assert mlflow.problems
    few = Cadence([Group("loss", 1, points=1)])
    assert plan(few, steps=300_000).trackers[1].hours == pytest.approx(300_000 / 1_000 / 60)
    assert not plan(few, steps=300_000).trackers[1].problems


def test_an_alert_adds_the_steps_that_were_not_due() -> None:
    """Of the groups that are marked for a burst."""
    assert plan().burst_points == 40 * (60 - 20)


def test_the_advice_names_what_dominates_and_what_belongs_elsewhere() -> None:
    """With the figure that it would save."""
    system, largest = plan().advice
    assert system.startswith("move system")
    assert "per_layer dominates with 84%" in largest
    assert "every = 6 would save 660" in largest


@pytest.mark.parametrize(("parameters", "layers"), [(1.2e9, 18), (7e9, 33), (70e9, 71), (405e9, 127)])
def test_layers_are_guessed_from_the_size(parameters: float, layers: int) -> None:
    """Close to those of the Llama family: 16, 32, 80, 126."""
    assert estimate_layers(parameters) == layers


@pytest.mark.parametrize("given", [{"steps": 0}, {"layers": 0}, {"step_time_s": 0.0}, {"segments": 0}])
def test_a_plan_of_nothing_is_refused(given: dict[str, Any]) -> None:
    """At once."""
    with pytest.raises(llmtrack.UsageError):
        plan(**given)


def call(*arguments: str | Path) -> Result:
    """Run ``llmtrack plan``."""
    main = click.Group("llmtrack", commands={command.name or "": command for command in COMMANDS})
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_the_command_prints_a_table_with_everything() -> None:
    """For the table that comes along, too."""
    text = call("--steps", "500k", "--params", "7B").stdout
    for word in (
        "per_layer",
        "the run",
        "on disk in",
        "hours of training",
        "each alert adds",
        "mlflow:",
        "wandb:",
        "advice:",
    ):
        assert word in text


def test_the_command_prints_rows(tmp_path: Path) -> None:
    """One for each group and tracker, one for the run, one for each advice."""
    path = tmp_path / "cadence.toml"
    path.write_text("[groups.loss]\nevery = 10\npoints = 2\n", encoding="utf-8")
    result = call(path, "--steps", "1e3", "--layers", "3", "--json")
    rows = json.loads(result.stdout)
    assert [row["kind"] for row in rows] == ["group", "run", "tracker", "tracker", "advice"]
    assert (rows[0]["name"], rows[0]["points"], rows[1]["points"]) == ("loss", 200, 200)
    assert result.exit_code == 0


@pytest.mark.parametrize("budget", ["--max-points", "--max-bytes", "--max-files", "--max-hours"])
def test_a_budget_is_kept_or_the_status_is_one(budget: str) -> None:
    """With what is over it."""
    options = ("--steps", "500k", "--params", "7B", budget)
    kept, broken = call(*options, "1T"), call(*options, "0.01")
    assert (kept.exit_code, broken.exit_code) == (0, 1)
    assert "over budget" in broken.stderr
    assert broken.stdout == kept.stdout


def test_the_table_that_comes_along_can_be_had() -> None:
    """To begin with."""
    assert call("--default").stdout == DEFAULT_FILE.read_text(encoding="utf-8")


def test_a_file_that_is_not_there_is_said_first() -> None:
    """With its name."""
    error = call("nothing.toml", "--steps", "10").exception
    assert isinstance(error, llmtrack.UsageError)
    assert "nothing.toml" in str(error)


@pytest.mark.parametrize(
    "option", [option for option in plan_command.params if option.name != "prints_default"], ids=lambda one: one.name
)
def test_the_table_that_comes_along_is_printed_alone(option: click.Parameter) -> None:
    """Whatever is said beside it would be without effect: it is refused, not ignored."""
    name = [] if isinstance(option, click.Argument) else [option.opts[0]]
    value = [] if isinstance(option, click.Option) and option.is_flag else ["5"]
    error = call("--default", *name, *value).exception
    assert isinstance(error, llmtrack.UsageError)
    assert f"{(name or ['[CADENCE]'])[0]}' has no say" in str(error)


@pytest.mark.parametrize("options", [(), ("--steps", "5"), ("--params", "7B")])
def test_what_a_plan_needs_is_asked_for(options: tuple[str, ...]) -> None:
    """With an example."""
    error = call(*options).exception
    assert isinstance(error, llmtrack.UsageError)
    assert "--steps 500k" in error.hint


@pytest.mark.parametrize("count", ["5x", "-1", "0", "nan", "inf", "", "k"])
def test_a_count_is_a_positive_number(count: str) -> None:
    """As people write large ones."""
    result = call("--steps", count, "--params", "7B")
    assert result.exit_code != 0
    assert "no count" in result.stderr
