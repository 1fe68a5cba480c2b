"""What MLflow says of a run beside its points: models, alerts, tables, settings; read from its database and its API."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import pytest
from mlflow import MlflowClient

from llmtrack.sync.cli import main
from tests.contract.conftest import Bench, Log, Model, Stored, Tracker, evaluate
from tests.faultproxy import Fault, Request, proxy


@pytest.fixture(params=["embedded", "server"])
def bench(request: pytest.FixtureRequest, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The log, and MLflow in both of its ways."""
    return Bench(log, request.getfixturevalue(request.param), tmp_path / "state", capsys)


def models(bench: Bench) -> dict[str, Model]:
    """Return the models by their checkpoint; there is one for each."""
    found = bench.tracker.models(bench.log.project)
    by_ckpt = {str(model.tag("ckpt_id")): model for model in found}
    assert len(by_ckpt) == len(found)
    return by_ckpt


def under(run: Stored, prefix: str) -> dict[tuple[str, int, int, float], int]:
    """Return a run's metrics whose names begin in a way, with the number of times each is there."""
    return {point: count for point, count in run.metrics.items() if point[0].startswith(prefix)}


def content(bench: Bench) -> Any:
    """Return all that the tracker holds of the project, to compare it with itself later."""
    return bench.tracker.runs(bench.log.project), bench.tracker.models(bench.log.project)


@contextlib.contextmanager
def mlflow_client(bench: Bench) -> Iterator[MlflowClient]:
    """Yield MlflowClient itself, and close its database."""
    client = MlflowClient(bench.tracker.uri)
    try:
        yield client
    finally:
        engine = getattr(client._tracking_client.store, "engine", None)
        if engine is not None:
            engine.dispose()


def table(bench: Bench, run: Stored, name: str) -> list[dict[str, Any]]:
    """Return the rows of one of a run's tables."""
    uri = run.artifact_uri
    if uri.startswith("mlflow-artifacts:"):
        path = urlencode({"run_uuid": run.ref, "path": f"llmtrack/{name}"})
        with urllib.request.urlopen(f"{bench.tracker.uri}/get-artifact?{path}") as answer:  # noqa: S310 - our server
            read = json.load(answer)
    else:
        read = json.loads(Path(unquote(urlsplit(uri).path), "llmtrack", name).read_text())
    return [dict(zip(read["columns"], row, strict=True)) for row in read["data"]]


def test_an_evaluated_checkpoint_is_a_model_with_its_values(bench: Bench) -> None:
    """It is linked to the run at its tokens, and its value is on the model and on the run, at the time of the eval."""
    bench.log.segment().train(0, 1000).checkpoint(400).checkpoint(800)
    time = evaluate(bench.log, "ckpt-1-400", 0.25)
    bench.sync()
    run = bench.only("canonical")
    ms = int(time.timestamp() * 1000)
    assert under(run, "eval/") == {("eval/mmlu/acc", 400, ms, 0.25): 1}
    (model,) = models(bench).values()
    assert model.is_ready
    assert (model.source, dict(model.outputs)) == (run.ref, {(run.ref, 400): 1})
    assert dict(model.metrics) == {("eval/mmlu/acc", 400, ms, 0.25, run.ref): 1}
    assert {"ckpt_id": "ckpt-1-400", "tokens": "400", "step": "40", "segment": "1"}.items() <= model.params.items()
    assert (model.tag("kind"), model.tag("run_id")) == ("live", "run")


def test_mlflow_itself_answers_which_checkpoint_is_best(bench: Bench) -> None:
    """Its own search, ordered by a metric, puts the best checkpoint of the run first."""
    bench.log.segment().train(0, 1000).checkpoint(200).checkpoint(400).checkpoint(600)
    for tokens, value in ((200, 0.3), (400, 0.9), (600, 0.5)):
        evaluate(bench.log, f"ckpt-1-{tokens}", value, ms=tokens)
    bench.sync()
    with mlflow_client(bench) as client:
        experiment = client.get_experiment_by_name(bench.log.project)
        assert experiment is not None
        best = client.search_logged_models(
            [experiment.experiment_id],
            "tags.`llmtrack.kind` = 'live' AND tags.`llmtrack.run_id` = 'run'",
            order_by=[{"field_name": "metrics.eval/mmlu/acc", "ascending": False}],
        )
    assert [model.params["tokens"] for model in best] == ["400", "600", "200"]
    assert best[0].name == "checkpoint at 400 tokens"


def test_an_evaluation_that_comes_later_or_again_is_added(local: Bench) -> None:
    """A new value goes beside the old one, on the run and on the one model; what was there is not sent again."""
    local.log.segment().train(0, 1000).checkpoint(400)
    local.sync()
    assert local.tracker.models(local.log.project) == []
    evaluate(local.log, "ckpt-1-400", 0.25)
    local.sync()
    evaluate(local.log, "ckpt-1-400", 0.5, ms=60_000)
    local.sync()
    (model,) = models(local).values()
    assert sorted(value for _, _, _, value, _ in model.metrics.elements()) == [0.25, 0.5]
    assert sorted(point[3] for point in under(local.only("canonical"), "eval/")) == [0.25, 0.5]
    before = content(local)
    (row,) = local.sync()
    assert (row["points_sent"], content(local)) == (0, before)


def test_values_of_one_millisecond_are_all_there(bench: Bench) -> None:
    """MLflow has room for one value of a metric in a millisecond of a model: the others move to the next free one."""
    bench.log.segment().train(0, 500).checkpoint(400)
    for value in (0.5, 0.25, 0.5):
        evaluate(bench.log, "ckpt-1-400", value, harness_version=str(value))
    bench.sync()
    evaluate(bench.log, "ckpt-1-400", 0.125)
    shutil.rmtree(bench.state)
    bench.sync()
    shutil.rmtree(bench.state)
    assert not bench.sync()[0]["notes"]
    (model,) = models(bench).values()
    values = sorted(value for _, _, _, value, _ in model.metrics.elements())
    assert values == sorted(point[3] for point in under(bench.only("canonical"), "eval/")) == [0.125, 0.25, 0.5]


def test_values_that_are_not_finite_are_no_values_of_a_model(local: Bench) -> None:
    """MLflow would make 0.0 of a NaN in a model, which then might be the best: a tag says what it is."""
    local.log.segment().train(0, 500).checkpoint(200).checkpoint(400)
    evaluate(local.log, "ckpt-1-200", math.nan)
    evaluate(local.log, "ckpt-1-400", -math.inf)
    local.sync()
    held = {(key, tokens): value for key, tokens, _, value in under(local.only("canonical"), "eval/")}
    assert held == {("eval/mmlu/acc_nonfinite", 200): 0.0, ("eval/mmlu/acc_nonfinite", 400): -1.0}
    said = {ckpt: (model.tag("nonfinite.eval/mmlu/acc"), len(model.metrics)) for ckpt, model in models(local).items()}
    assert said == {"ckpt-1-200": ("nan", 0), "ckpt-1-400": ("-inf", 0)}


def test_a_superseded_checkpoint_is_not_on_the_live_curve(local: Bench) -> None:
    """Its model says so, and its value is on the side run of its segment."""
    segment = local.log.segment().train(0, 1000).checkpoint(400)
    evaluate(local.log, "ckpt-1-400", 0.25)
    evaluate(local.log, "ckpt-1-800", 0.75)
    local.sync()
    segment.checkpoint(800)
    local.log.segment(after=("run", 1, 400)).train(400, 600)
    local.sync()
    assert [point[3] for point in under(local.only("canonical"), "eval/")] == [0.25]
    assert [point[3] for point in under(local.only("superseded"), "eval/")] == [0.75]
    found = models(local)
    assert {ckpt: (m.tag("kind"), m.tag("superseded_by")) for ckpt, m in found.items()} == {
        "ckpt-1-400": ("live", None),
        "ckpt-1-800": ("superseded", "2"),
    }
    assert found["ckpt-1-800"].source == local.only("superseded").ref


def test_a_checkpoint_that_a_forced_rollback_left_behind_is_marked(local: Bench) -> None:
    """The models stay, the new generation of the run has the live ones, and the others say what became of them."""
    local.log.segment().train(0, 1000).checkpoint(400).checkpoint(800)
    for tokens in (400, 800):
        evaluate(local.log, f"ckpt-1-{tokens}", tokens / 1000)
    local.sync()
    local.log.segment(after=("run", 1, 400), fork_reason="rollback").train(400, 600).checkpoint(600)
    local.sync()
    run = local.only("canonical")
    assert run.tag("generation") == "2"
    assert [point[3] for point in under(run, "eval/")] == [0.4]
    found = models(local)
    assert (found["ckpt-1-400"].tag("kind"), found["ckpt-1-800"].tag("kind")) == ("live", "superseded")
    assert found["ckpt-1-400"].outputs[run.ref, 400] == 1
    assert found["ckpt-1-800"].outputs[run.ref, 800] == 0


def test_an_evaluation_of_an_unknown_checkpoint_is_held_and_said(local: Bench) -> None:
    """It is in the table, nowhere else, and goes to its model once the checkpoint is recorded."""
    segment = local.log.segment().train(0, 500).checkpoint(400)
    evaluate(local.log, "ckpt-1-450", 0.5)
    (row,) = local.sync()
    assert any("ckpt-1-450" in note for note in row["notes"])
    assert models(local) == {}
    (said,) = table(local, local.only("canonical"), "evaluations.json")
    assert (said["ckpt_id"], said["state"], said["value"]) == ("ckpt-1-450", "checkpoint not recorded", 0.5)
    segment.checkpoint(450)
    assert not local.sync()[0]["notes"]
    assert list(models(local)) == ["ckpt-1-450"]


def test_an_evaluation_in_no_runs_folder_goes_to_the_run_of_its_checkpoint(local: Bench) -> None:
    """Where the file lies does not matter once a run has recorded the checkpoint."""
    local.log.segment().train(0, 500).checkpoint(400)
    evaluate(local.log, "ckpt-1-400", 0.5, run_id=None)
    local.sync()
    assert [point[3] for point in under(local.only("canonical"), "eval/")] == [0.5]


def test_an_evaluation_that_nobody_can_place_is_said(local: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """In no run's folder and of no run's checkpoint: people get to know, and nothing else happens."""
    local.log.segment().train(0, 100).checkpoint(100)
    evaluate(local.log, "nobody", 0.5, run_id=None)
    with pytest.raises(SystemExit) as ended:
        main(local.arguments)
    said = capsys.readouterr()
    assert (ended.value.code, "1 evaluation held back" in said.err, "nobody" in said.err) == (0, True, True)


def test_a_damaged_evaluation_costs_itself_alone(local: Bench) -> None:
    """Points and the other evaluations arrive, and the status says that something was damaged."""
    local.log.segment().train(0, 500).checkpoint(200).checkpoint(400)
    evaluate(local.log, "ckpt-1-200", 0.25)
    good = set(local.log.root.glob("run_id=run/evals/*"))
    evaluate(local.log, "ckpt-1-400", 0.5)
    (bad,) = set(local.log.root.glob("run_id=run/evals/*")) - good
    content = bytearray(bad.read_bytes())
    content[10:40] = bytes(30)
    bad.write_bytes(content)
    local.sync(expect=4)
    assert [point[3] for point in under(local.only("canonical"), "eval/")] == [0.25]
    assert len(local.only("canonical").points) == 2 * 40 + 1


def test_alerts_are_points_tags_and_a_table(bench: Bench) -> None:
    """A chart samples its points, so an alert is one of its own, with the value that raised it."""
    segment = bench.log.segment().train(0, 1000).alert(300, metric="train/loss", value=9.5, message="loss | spike")
    segment.alert(300, metric="train/loss", value=9.5, phase="cleared").alert(350, "data", value=math.inf)
    segment.checkpoint(800).alert(900, "node", message="gone")
    bench.sync()
    run = bench.only("canonical")
    held = {(key, tokens): value for key, tokens, _, value in under(run, "alert/")}
    assert held == {("alert/spike/train/loss", 300): 9.5, ("alert/data_nonfinite", 350): 1.0}
    assert {point[:2]: point[3] for point in under(bench.only("provisional"), "alert/")} == {("alert/node", 900): 1.0}
    assert run.tag("alerts") == "3"
    assert "node" in str(run.tag("last_alert"))
    rows = table(bench, run, "alerts.json")
    assert [(row["tokens"], row["phase"], row["state"]) for row in rows] == [
        (300, "raised", "live"), (300, "cleared", "live"), (350, "raised", "live"), (900, "raised", "provisional"),
    ]  # fmt: skip
    assert "loss \\| spike" in run.tags["mlflow.note.content"]


def test_a_provisional_alert_moves_with_its_stretch(local: Bench) -> None:
    """It is on the canonical run once it is settled, and on the superseded run when a restart left it behind."""
    segment = local.log.segment().train(0, 1000).alert(450, "early").alert(900, "late").checkpoint(400)
    local.sync()
    assert {point[0] for point in under(local.only("provisional"), "alert/")} == {"alert/early", "alert/late"}
    segment.checkpoint(500)
    local.sync()
    assert {point[0] for point in under(local.only("canonical"), "alert/")} == {"alert/early"}
    assert {point[0] for point in under(local.only("provisional"), "alert/")} == {"alert/late"}
    local.log.segment(after=("run", 1, 500)).train(500, 600)
    local.sync()
    assert {point[0] for point in under(local.only("superseded"), "alert/")} == {"alert/late"}
    assert under(local.only("provisional"), "alert/") == {}


def test_the_settings_of_every_segment_are_there(local: Bench) -> None:
    """A parameter has its first value, later keys are added, and what changed is a tag, in the note and in a table."""
    local.log.segment(config={"lr": 0.1, "data": {"path": "a"}}).train(0, 500).checkpoint(400)
    local.sync()
    local.log.segment(after=("run", 1, 400), config={"lr": 0.2, "data": {"path": "a", "seed": 3}}).train(400, 500)
    local.sync()
    run = local.only("canonical")
    assert run.params == {"lr": "0.1", "data.path": "a", "data.seed": "3"}
    assert run.tag("changed.lr") == "0.1 \u2192 0.2 (segment 2)"
    assert run.tag("changed.data.seed") == "(not set) \u2192 3 (segment 2)"
    assert "| lr | 2 | 0.1 | 0.2 |" in run.tags["mlflow.note.content"]


def test_segments_are_a_table_with_their_origin(local: Bench) -> None:
    """Where and with which code each ran, how it ended; the newest commit is where MLflow's pages show it."""
    job = json.dumps({"scheduler": "slurm", "job_id": "77", "job_name": "pretrain"})
    local.log.segment(git_commit="a" * 40).train(0, 500).checkpoint(400).end("preempted", 500)
    local.log.segment(after=("run", 1, 400), git_commit="b" * 40, git_dirty=True, scheduler=job).train(400, 500)
    local.sync()
    run = local.only("canonical")
    rows = table(local, run, "segments.json")
    assert [(row["segment"], row["start_tokens"], row["exit"], row["git_commit"]) for row in rows] == [
        (1, 0, "preempted", "a" * 40),
        (2, 400, None, "b" * 40),
    ]
    assert rows[0]["start_time"].startswith("2026-01-01T")
    assert (run.tags["mlflow.source.git.commit"], run.tags["mlflow.source.git.dirty"]) == ("b" * 40, "true")
    assert (run.tags["mlflow.source.name"], run.tags["mlflow.source.type"]) == ("pretrain", "JOB")
    assert run.tag("job_id") == "77"
    shown = json.loads(run.tags["mlflow.loggedArtifacts"])
    assert {"path": "llmtrack/segments.json", "type": "table"} in shown


def test_tables_of_a_local_database_lie_beside_it(local: Bench) -> None:
    """Not in the folder that the command was started in, where nobody looks for them."""
    local.log.segment().train(0, 500).checkpoint(400)
    local.sync()
    ((location,),) = local.tracker.query("SELECT artifact_location FROM experiments WHERE name = ?", local.log.project)
    folder = Path(unquote(urlsplit(location).path))
    assert folder.parent.parent == local.tracker.database.parent
    assert list(folder.glob("*/artifacts/llmtrack/segments.json"))


def test_tables_that_cannot_be_stored_cost_a_note_and_nothing_else(local: Bench) -> None:
    """Points and tags are there, the sync succeeds, and says what is missing."""
    (local.tracker.database.parent / "mlartifacts").write_text("no folder")
    local.log.segment().train(0, 500).checkpoint(400)
    (row,) = local.sync()
    assert any("segments.json" in note for note in row["notes"])
    run = local.only("canonical")
    assert run.tag("tables_not_stored")
    assert len(run.points) == 2 * 40
    (local.tracker.database.parent / "mlartifacts").unlink()
    shutil.rmtree(local.state)
    local.sync()
    assert local.only("canonical").tag("tables_not_stored") is None


def test_an_unchanged_story_is_not_told_again(local: Bench) -> None:
    """The second sync changes nothing, with its cursor and without."""
    segment = local.log.segment(config={"a": 1}).train(0, 1000).checkpoint(400).checkpoint(800).alert(300)
    evaluate(local.log, "ckpt-1-400", 0.25)
    segment.alive()
    local.sync()
    before = content(local)
    local.sync()
    assert content(local) == before
    shutil.rmtree(local.state)
    (row,) = local.sync()
    assert (content(local), row["points_sent"], row["notes"]) == (before, 0, [])


def test_a_log_may_use_the_names_of_evaluations(local: Bench) -> None:
    """Points of the log under ``eval/mmlu/acc`` and evaluations lie side by side, and both are checked."""
    segment = local.log.segment().train(0, 800, names=("eval/mmlu/acc",)).checkpoint(400)
    evaluate(local.log, "ckpt-1-400", 0.25)
    local.sync()
    assert sum(under(local.only("canonical"), "eval/").values()) == 40 + 1
    segment.checkpoint(800)
    (row,) = local.sync()
    assert sum(under(local.only("canonical"), "eval/").values()) == 80 + 1
    assert row["notes"] == []
    shutil.rmtree(local.state)
    (row,) = local.sync()
    assert (row["points_sent"], row["notes"]) == (0, [])


def test_what_was_half_told_is_completed(local: Bench) -> None:
    """A kill between two requests leaves a model without its link, its values or its end: the next sync adds them."""
    local.log.segment().train(0, 1000).checkpoint(400)
    evaluate(local.log, "ckpt-1-400", 0.25)
    local.sync()
    before = content(local)
    for loss in (
        "DELETE FROM inputs",
        "DELETE FROM logged_model_metrics",
        "UPDATE logged_models SET status = 1",
        "DELETE FROM metrics WHERE key LIKE 'eval/%'",
        "DELETE FROM logged_model_tags WHERE tag_key = 'llmtrack.kind'",
    ):
        local.tracker.execute(loss)
        shutil.rmtree(local.state)
        local.sync()
        assert content(local) == before, loss


def test_a_model_that_was_made_twice_becomes_one(local: Bench) -> None:
    """Two hosts, or an answer that was lost: the second one with our tags is deleted."""
    local.log.segment().train(0, 1000).checkpoint(400)
    evaluate(local.log, "ckpt-1-400", 0.25)
    local.sync()
    (model,) = models(local).values()
    of_model = "experiment_id, name, artifact_location, creation_timestamp_ms + 1, last_updated_timestamp_ms, status"
    of_model += ", lifecycle_stage, model_type, source_run_id, status_message"
    for name, columns in (("logged_models", of_model), ("logged_model_tags", "experiment_id, tag_key, tag_value")):
        into = columns.replace(" + 1", "")
        local.tracker.execute(
            f"INSERT INTO {name} (model_id, {into}) SELECT 'm-2', {columns} FROM {name} WHERE model_id = ?", model.ref
        )
    shutil.rmtree(local.state)
    local.sync()
    assert [found.ref for found in models(local).values()] == [model.ref]


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_a_sync_killed_while_it_tells_is_completed(bench: Bench, kills: int) -> None:
    """SIGKILL while models, links and values are made: each is there once in the end."""
    segment = bench.log.segment().train(0, 200)
    for tokens in range(20, 201, 20):
        segment.checkpoint(tokens)
        evaluate(bench.log, f"ckpt-1-{tokens}", tokens / 1000, ms=tokens)

    def count() -> int:
        found = bench.tracker.models(bench.log.project)
        return len(found) + sum(len(model.metrics) + len(model.outputs) for model in found)

    for wanted in sorted(random.Random(3).sample(range(30), kills)):
        process = subprocess.Popen(
            [sys.executable, "-c", "from llmtrack.sync.cli import main; main()", *bench.arguments],
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and count() < wanted:
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        process.wait()
    bench.sync()
    found = models(bench)
    assert len(found) == 10
    run = bench.only("canonical")
    for tokens in range(20, 201, 20):
        model = found[f"ckpt-1-{tokens}"]
        assert model.is_ready
        assert dict(model.outputs) == {(run.ref, tokens): 1}
        assert [(key, step, value) for key, step, _, value, _ in model.metrics.elements()] == [
            ("eval/mmlu/acc", tokens, tokens / 1000)
        ]
    assert len(under(run, "eval/")) == sum(under(run, "eval/").values()) == 10


def test_rows_of_a_thousand_metrics_arrive_whole(bench: Bench) -> None:
    """MLflow takes a thousand metrics in a request, and with the optimiser step these rows have more."""
    names = [f"layer/{n:04d}/grad_norm" for n in range(1000)]
    bench.log.segment().log([(10 * k, {name: k + n / 1000 for n, name in enumerate(names)}) for k in (1, 2)])
    bench.log.segment(after=("run", 1, 20)).checkpoint(20)
    bench.sync()
    run = bench.only("canonical")
    assert set(run.points.values()) == {1}
    assert sorted(run.points) == sorted(row.point for row in bench.rows())
    assert len(run.steps) == 2


def test_the_latest_values_are_those_of_the_live_curve(local: Bench) -> None:
    """What MLflow lists beside a run is never a value that a restart or a rollback left behind."""

    def latest() -> dict[str, tuple[int, float]]:
        ref = local.only("canonical").ref
        rows = local.tracker.query("SELECT key, step, value FROM latest_metrics WHERE run_uuid = ?", ref)
        return {key: (tokens, value) for key, tokens, value in rows if key != "step"}

    def live(segment: int, tokens: int) -> dict[str, tuple[int, float]]:
        found = [row for row in local.rows() if (row.segment, row.tokens) == (segment, tokens)]
        return {row.name: (row.tokens, row.value) for row in found}

    local.log.segment().train(0, 1000).checkpoint(400)
    local.sync()
    assert latest() == live(1, 400)
    local.log.segment(after=("run", 1, 400)).train(400, 600).checkpoint(600)
    local.sync()
    assert latest() == live(2, 600)
    local.log.segment(after=("run", 1, 200), fork_reason="rollback").train(200, 300).checkpoint(300)
    local.sync()
    assert latest() == live(3, 300)


def test_a_settled_stretch_leaves_no_run_behind_in_a_local_database(bench: Bench) -> None:
    """There is one for every checkpoint: a local database forgets it, a server keeps it until it is told otherwise."""
    segment = bench.log.segment().train(0, 1000)
    for tokens in (200, 400, 600):
        segment.checkpoint(tokens)
        bench.sync()
    query = (
        "SELECT count(*) FROM runs JOIN experiments e USING (experiment_id) WHERE e.name = ? AND runs.lifecycle_stage"
    )
    ((deleted,),) = bench.tracker.query(f"{query} = 'deleted'", bench.log.project)
    assert deleted == (2 if bench.tracker.uri.startswith("http") else 0)
    assert len(bench.runs("provisional")) == 1


def test_more_settings_than_a_page_can_show_are_in_the_table_of_settings(local: Bench) -> None:
    """A thousand become parameters, and the sync and a tag say how many did not."""
    config = {f"key{n}": n for n in range(1200)}
    local.log.segment(config=config).train(0, 50).checkpoint(50)
    (row,) = local.sync()
    run = local.only("canonical")
    assert len(run.params) == 1000
    assert "1000 of 1200" in str(run.tag("params_left_out"))
    assert any("1000 of 1200" in note for note in row["notes"])
    folder = Path(unquote(urlsplit(run.artifact_uri).path), "llmtrack", "config.json")
    assert json.loads(folder.read_text())[0]["config"] == config


def test_a_server_without_models_gets_points_and_tables(
    server: Tracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before MLflow 3 there were none: the sync says so, and leaves nothing else out."""
    log.segment().train(0, 500).checkpoint(400)
    evaluate(log, "ckpt-1-400", 0.25)
    with proxy(
        server.uri, lambda request: Fault("old", 404, b"no") if "logged-models" in request.path else None
    ) as old:
        bench = Bench(log, Tracker(old.uri, server.database), tmp_path / "state", capsys)
        (row,) = bench.sync()
    assert any("no models" in note for note in row["notes"])
    assert bench.tracker.models(log.project) == []
    run = bench.only("canonical")
    assert [point[3] for point in under(run, "eval/")] == [0.25]


def test_answers_that_are_lost_while_it_tells_make_nothing_twice(
    server: Tracker,
    log: Log,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server did what it was asked for, and nobody heard: it is found before it is made again."""
    monkeypatch.setattr("llmtrack.sync.replay.patience._FIRST_WAIT_S", 0.02)
    log.segment().train(0, 300).checkpoint(100).checkpoint(200).checkpoint(300).alert(150)
    for tokens in (100, 200, 300):
        evaluate(log, f"ckpt-1-{tokens}", tokens / 1000, ms=tokens)
    lost: set[tuple[str, bytes]] = set()

    def lose(request: Request) -> Fault | None:
        """Lose the first answer to everything that makes something, points and runs excepted."""
        what = request.path.partition("?")[0], request.body
        is_telling = "logged-models" in what[0] or "outputs" in what[0] or b"model_id" in request.body
        if request.method == "GET" or not is_telling or what in lost:
            return None
        lost.add(what)
        return Fault("lost", taken=True)

    with proxy(server.uri, lose) as before:
        bench = Bench(log, Tracker(before.uri, server.database), tmp_path / "state", capsys)
        bench.sync()
    assert len(lost) > 3
    run = bench.only("canonical")
    for tokens in (100, 200, 300):
        model = models(bench)[f"ckpt-1-{tokens}"]
        assert (model.is_ready, dict(model.outputs)) == (True, {(run.ref, tokens): 1})
        assert [value for _, _, _, value, _ in model.metrics.elements()] == [tokens / 1000]
    assert sum(under(run, "eval/").values()) == 3


@pytest.mark.soak
def test_a_run_without_evaluations_needs_no_mlflow_on_the_way_to_a_server(
    server: Tracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its import takes two seconds and 100 MB: points, alerts and tables arrive without it."""
    bench = Bench(log, server, tmp_path / "state", capsys)
    log.segment(config={"lr": 0.1}).train(0, 300).alert(200, metric="train/loss", value=9.5).checkpoint(300)
    code = (
        "import sys\ntry:\n from llmtrack.sync.cli import main; main()\n"
        "finally:\n print('mlflow' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *bench.arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.split()[-1] == "False"
    assert json.loads(done.stdout)[0]["notes"] == []
    run = bench.only("canonical")
    assert [row["rule"] for row in table(bench, run, "alerts.json")] == ["spike"]
    assert [point[:2] for point in under(run, "alert/")] == [("alert/spike/train/loss", 200)]


def test_a_server_needs_no_more_than_skinny(
    server: Tracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the extra ``mlflow-http`` alone all of a run arrives; a database is refused with the remedy."""
    project = Path(__file__).parents[2]
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", f"{project}[mlflow-http]"], check=True)
    bench = Bench(log, server, tmp_path / "state", capsys)
    bench.log.segment(config={"a": 1}).train(0, 1000).alert(300).checkpoint(400)
    evaluate(bench.log, "ckpt-1-400", 0.25)

    def sync(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-c", "from llmtrack.sync.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    done = sync(*bench.arguments)
    assert (done.returncode, done.stderr) == (0, "")
    before = content(bench)
    assert len(models(bench)) == 1
    assert bench.only("canonical").tag("tables") is not None
    shutil.rmtree(bench.state)
    assert bench.sync()[0]["points_sent"] == 0  # the whole of MLflow finds nothing lacking
    assert content(bench) == before
    refused = sync(str(log.root), "--to", "mlflow", "--tracking-uri", f"sqlite:///{tmp_path}/x.db")
    assert refused.returncode == 1
    assert "llmtrack-log[mlflow]" in refused.stderr


def test_a_users_own_colour_and_description_stay(local: Bench) -> None:
    """What a person changed on MLflow's pages is theirs."""
    segment = local.log.segment().train(0, 500).checkpoint(400)
    local.sync()
    ref = local.only("canonical").ref
    with mlflow_client(local) as client:
        client.set_tag(ref, "mlflow.runColor", "#123456")
        client.set_tag(ref, "mlflow.note.content", "mine")
    segment.checkpoint(500).alert(450)
    local.sync()
    tags = local.only("canonical").tags
    assert (tags["mlflow.runColor"], tags["mlflow.note.content"]) == ("#123456", "mine")
