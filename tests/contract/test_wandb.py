"""What only the W&B sink must do: the real client and its wandb-core against a server on loopback, with faults."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrack.sync.wandb.encode import told_records
from llmtrack.sync.wandb.sink import WandbSink
from tests.contract.conftest import Bench, Log, Row, WandbTracker, evaluate
from tests.wandb_server import Run, WandbServer

wandb = pytest.importorskip("wandb", reason="the W&B client is not installed")

RECENT_MS = 60_000


@pytest.fixture
def web(wandb_tracker: WandbTracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The log, and W&B."""
    return Bench(log, wandb_tracker, tmp_path / "state", capsys)


def run_of(server: WandbServer, bench: Bench, **about: Any) -> Run:
    """Return the one run with these entries in our dictionary."""
    (run,) = server.find(bench.log.project, **about)
    return run


def assert_exact(server: WandbServer, bench: Bench, kind: str, rows: list[Row], run_id: str = "run") -> None:
    """See that each log call is one row: content, times and numbers, with nothing beside and nothing overwritten."""
    run = run_of(server, bench, kind=kind, run_id=run_id)
    wanted: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        call = wanted.setdefault(
            (row.segment, row.seq),
            {"tokens_seen": row.tokens, "step": row.step, "segment": row.segment, "_timestamp": row.ms / 1000},
        )
        call[row.name] = row.value
    held = [{k: v for k, v in row.items() if k not in {"_step", "_runtime"}} for row in run.rows]
    assert Counter(map(_comparable, held)) == Counter(map(_comparable, wanted.values()))
    assert [row["_step"] for row in run.rows] == list(range(len(wanted)))
    assert (run.overwritten, run.holes) == (0, 0)


def _comparable(row: dict[str, Any]) -> str:
    """Return a row as a text in which 5 and 5.0 are the same."""
    return str(sorted((k, int(v) if isinstance(v, float) and v.is_integer() else v) for k, v in row.items()))


def services() -> list[psutil.Process]:
    """Return the wandb-core processes that this process has started."""
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "wandb-core"]


def test_a_log_call_is_one_row_with_its_place_and_time(web: Bench, wandb_server: WandbServer) -> None:
    """`tokens_seen`, `step`, `segment` and the time of the log are in each row, and rows are numbered without gaps."""
    web.log.segment().train(0, 500, names=("train/loss", "a.b", "lr", "n@m")).checkpoint(300)
    web.log.segment(after=("run", 1, 300)).train(300, 700).checkpoint(600)
    web.sync()
    rows = web.rows()
    settled = [r for r in rows if (r.segment == 1 and r.tokens <= 300) or (r.segment == 2 and r.tokens <= 600)]
    assert_exact(wandb_server, web, "canonical", settled)
    assert_exact(wandb_server, web, "superseded", [r for r in rows if r.segment == 1 and r.tokens > 300])
    assert_exact(wandb_server, web, "provisional", [r for r in rows if r.segment == 2 and r.tokens > 600])


def test_runs_are_named_tagged_and_grouped_so_that_a_person_sees_what_they_are(
    web: Bench, wandb_server: WandbServer
) -> None:
    """The id is the run's; side runs have a job type, and a child and all side runs are in the root's group."""
    web.log.segment("root").train(0, 500).checkpoint(300)
    web.log.segment("root", after=("root", 1, 300)).train(300, 700).checkpoint(600)
    fork = {"fork_reason": "recipe", "from_ckpt": "ckpt-2-600", "recipe_diff": json.dumps({"lr": [1, 2]})}
    web.log.segment("child", after=("root", 2, 600), **fork).train(600, 700).end("finished", 700)
    web.log.segment("grandchild", after=("child", 1, 650), **fork).train(650, 700).end("finished", 700)
    web.sync()
    canonical = run_of(wandb_server, web, run_id="root", kind="canonical")
    left = run_of(wandb_server, web, run_id="root", kind="superseded")
    tail = run_of(wandb_server, web, run_id="root", kind="provisional")
    child = run_of(wandb_server, web, run_id="child")
    grandchild = run_of(wandb_server, web, run_id="grandchild")
    assert (canonical.name, canonical.job_type, child.name) == ("root", None, "child")
    assert {run.group for run in (canonical, left, tail, child, grandchild)} == {"root"}
    assert (left.job_type, tail.job_type) == ("superseded", "provisional")
    assert all(word in left.display_name for word in ("segment 1", "superseded", "by", "2", "300\N{EN DASH}500 tokens"))
    assert (set(left.tags), set(tail.tags)) == ({"llmtrack", "superseded"}, {"llmtrack", "provisional"})
    assert (child.about["parent_run"], child.about["fork_tokens"], child.about["fork_ckpt"]) == (
        "root", "600", "ckpt-2-600",
    )  # fmt: skip
    assert "Forked from `root`" in str(child.notes)
    assert {run.state for run in (child, grandchild)} == {"finished"}


def test_the_summary_is_of_the_whole_run_and_not_of_one_connection(web: Bench, wandb_server: WandbServer) -> None:
    """Best, last, min and max are those of all syncs together, and the x-axis is set again by each."""
    segment = web.log.segment().log([(10, {"loss": 5.0, "acc": 0.1}), (20, {"loss": 1.0, "acc": 0.9})]).checkpoint(20)
    web.sync()
    segment.log([(30, {"loss": 3.0, "acc": 0.5})]).checkpoint(30)
    web.sync()
    run = run_of(wandb_server, web)
    assert run.summary["loss"] == {"last": 3, "min": 1, "max": 5, "best": 1}
    assert run.summary["acc"] == {"last": 0.5, "min": 0.1, "max": 0.9, "best": 0.9}
    metrics = run.config["_wandb"]["value"]["m"]
    axis = 1 + next(n for n, metric in enumerate(metrics) if metric.get("1") == "tokens_seen")
    # wandb 0.31 keeps the star as such, 0.30 names the metrics
    assert next(metric["5"] for metric in metrics if metric.get("2") == "*" or metric.get("1") == "loss") == axis


def test_the_configuration_goes_once_and_whole(web: Bench, wandb_server: WandbServer) -> None:
    """Nested, long, odd and reserved keys arrive as they are, and what a user changed there stays."""
    config = {
        "model": {"d": 128, "rope": None, "layers": [1, {"a": 2.5}]}, "note": "x" * 50_000, "lr@peak": 1e-4,
        "a.b": 1, "llmtrack": "mine", "recipe": "theirs", "big": 2**53 + 1, "flag": True,
    }  # fmt: skip
    segment = web.log.segment(config=config, recipe=json.dumps({"lr": 0.1})).train(0, 50).checkpoint(50)
    web.sync()
    run = run_of(wandb_server, web)
    assert {key: run.values[key] for key in config if key not in {"llmtrack", "recipe"}} == {
        key: value for key, value in config.items() if key not in {"llmtrack", "recipe"}
    }
    assert (run.values["llmtrack_"], run.values["recipe_"], run.values["recipe"]) == ("mine", "theirs", {"lr": 0.1})
    run.config["flag"]["value"] = "changed by a person"
    segment.train(50, 100).checkpoint(100)
    web.sync()
    assert run.values["flag"] == "changed by a person"
    assert run.values["model"] == config["model"]


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "times": 1},
        {"status": 429, "times": 2, "retry_after": 0.05},
        {"cut": "before", "times": 1},
        {"cut": "after", "times": 1},
        {"delay_s": 0.5, "times": 1},
    ],
    ids=["500", "429", "reset before", "reset after", "slow"],
)
def test_a_fault_that_passes_costs_no_row_and_doubles_none(
    web: Bench, wandb_server: WandbServer, fault: dict[str, Any]
) -> None:
    """The client's own retries get through, or the next sync does; either way each row is there once."""
    web.log.segment().train(0, 1000).checkpoint(1000)
    wandb_server.fail("file_stream", **fault)
    web.sync()
    assert_exact(wandb_server, web, "canonical", web.rows())


@pytest.mark.parametrize("status", [404, *(pytest.param(s, marks=pytest.mark.soak) for s in (400, 403, 409, 413, 422))])
def test_an_upload_that_died_in_silence_is_found_out_and_mended(
    web: Bench, wandb_server: WandbServer, status: int
) -> None:
    """The client ends as if all were well: the sync says that rows are not there, and the next one sends them."""
    web.log.segment().train(0, 1000).checkpoint(1000)
    wandb_server.fail("file_stream", status, times=-1)
    (row,) = web.sync("--timeout", "1", expect=2)
    assert "rows are not there" in row["error"]
    wandb_server.heal()
    web.sync()
    assert_exact(wandb_server, web, "canonical", web.rows())
    assert web.sync()[0]["points_sent"] == 0


def test_a_key_that_is_refused_is_status_1(web: Bench, wandb_server: WandbServer) -> None:
    """No other run will fare better, so the sync ends, with what to do."""
    web.log.segment().train(0, 100).checkpoint(100)
    wandb_server.key = "z" * 40
    web.sync(expect=1)


def test_a_server_that_is_down_is_status_3_and_the_next_sync_completes(web: Bench, wandb_server: WandbServer) -> None:
    """Nothing of the client is left running meanwhile."""
    web.log.segment().train(0, 1000).checkpoint(1000)
    wandb_server.down()
    web.sync("--timeout", "2", expect=3)
    assert services() == []
    wandb_server.up()
    web.sync()
    assert_exact(wandb_server, web, "canonical", web.rows())


def test_a_server_that_goes_down_in_the_middle_is_status_3(web: Bench, wandb_server: WandbServer) -> None:
    """The end of the client is bounded: what arrived is kept, and what did not is sent by the next sync."""
    web.log.segment().train(0, 1000).checkpoint(1000)
    wandb_server.fail("file_stream", 503, times=-1, skip=1)
    web.sync("--timeout", "2", expect=3)
    assert services() == []
    wandb_server.heal()
    web.sync()
    assert_exact(wandb_server, web, "canonical", web.rows())


def test_a_stale_answer_about_the_end_of_a_run_overwrites_nothing(
    web: Bench, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B answers from a cache: a run is not continued where the answer says it ends, but where our rows end."""
    monkeypatch.setattr("llmtrack.sync.replay.replay._MOVED_S", (0.0, 0.1, 0.2, 0.4))
    segment = web.log.segment().train(0, 500).checkpoint(500)
    web.sync()
    stale = wandb_server.snapshot()
    segment.train(500, 1000).checkpoint(1000)
    web.sync()
    segment.train(1000, 1500).checkpoint(1500)
    wandb_server.freeze(stale, answers=5)  # then the client is told one thing, and numbers its lines by another
    web.sync(expect=3)
    wandb_server.heal()
    web.sync()
    assert_exact(wandb_server, web, "canonical", web.rows())


def test_a_run_that_was_deleted_there_is_made_again_under_another_id(web: Bench, wandb_server: WandbServer) -> None:
    """W&B never gives the id of a deleted run out again."""
    web.log.segment().train(0, 500).checkpoint(500)
    web.sync()
    place = (web.log.project, "run")
    del wandb_server.runs[place]
    wandb_server.deleted.add(place)
    (row,) = web.sync("--timeout", "2")
    assert row["tracker_run"] == "run-2"
    assert_exact(wandb_server, web, "canonical", web.rows())
    assert web.sync()[0]["points_sent"] == 0


def test_a_run_of_somebody_else_is_never_touched(web: Bench, wandb_server: WandbServer) -> None:
    """An id that is taken is said, with the way out."""
    with WandbServer() as _:
        wandb_server.graphql("UpsertBucket", {"project": web.log.project, "name": "run", "displayName": "precious"})
    web.log.segment().train(0, 100).checkpoint(100)
    (row,) = web.sync(expect=2)
    assert "--wandb-id-prefix" in row["error"]
    (theirs,) = wandb_server.runs.values()
    assert (theirs.display_name, theirs.config, theirs.history) == ("precious", {}, [])


def test_evaluations_lie_at_the_tokens_of_their_checkpoint_once(web: Bench, wandb_server: WandbServer) -> None:
    """They come weeks later and are a row at the checkpoint's tokens, whatever was logged since."""
    segment = web.log.segment().train(0, 500).checkpoint(300).checkpoint(500)
    web.sync()
    time_of = evaluate(web.log, "ckpt-1-300", 0.25)
    web.sync()
    run = run_of(wandb_server, web)
    (row,) = [row for row in run.rows if "eval/mmlu/acc" in row]
    assert (row["tokens_seen"], row["step"], row["segment"]) == (300, 30, 1)
    assert (row["eval/mmlu/acc"], row["_timestamp"]) == (0.25, time_of.timestamp())
    assert run.summary["eval/mmlu/acc"] == {"last": 0.25, "min": 0.25, "max": 0.25, "best": 0.25}
    segment.train(500, 700).checkpoint(700)
    web.sync()
    evaluate(web.log, "ckpt-1-700", 0.5)
    web.sync()
    assert web.sync()[0]["notes"] == []
    assert [row["tokens_seen"] for row in run.rows if "eval/mmlu/acc" in row] == [300, 700]
    assert len(run.rows) == 72
    assert run.summary["eval/mmlu/acc"]["max"] == 0.5


def test_a_fresh_alert_wakes_people_up_once_and_an_old_one_nobody(web: Bench, wandb_server: WandbServer) -> None:
    """`run.alert` is called for what was raised in the last hour; all alerts are points."""
    segment = web.log.segment().train(0, 500)
    alert = {"rule": "spike", "level": "warn", "metric": "train/loss", "value": 9.5, "message": "loss is 9.5"}
    segment._write("alerts", [{"tokens": 300, "step": 30, "alert_id": "old", "phase": "raised", **alert}])
    segment.time = dt.datetime.now(dt.UTC)
    segment._write("alerts", [{"tokens": 400, "step": 40, "alert_id": "new", "phase": "raised", **alert}])
    segment.checkpoint(500)
    web.sync()
    web.sync()
    run = run_of(wandb_server, web)
    assert [(sent["title"], sent["severity"]) for sent in run.alerts] == [("spike train/loss", "WARN")]
    assert "loss is 9.5" in run.alerts[0]["text"]
    assert [row["tokens_seen"] for row in run.rows if "alert/spike/train/loss" in row] == [300, 400]


def test_nothing_about_this_machine_leaves_it(web: Bench, wandb_server: WandbServer, tmp_path: Path) -> None:
    """No host name, path, user, program, command line or secret; only what is in the log, the client's key apart."""
    web.log.segment(config={"lr": 0.1}).train(0, 500).checkpoint(300)
    web.sync()
    sent = b"\n".join(
        request.path.encode() + json.dumps({k: v for k, v in request.headers.items() if k != "Authorization"}).encode()
        + request.body
        for request in wandb_server.requests
    )  # fmt: skip
    secrets = [socket.gethostname(), str(tmp_path), str(Path.cwd()), str(Path.home()), sys.executable, wandb_server.key]
    secrets += ["node-1", "pytest", psutil.Process().username() + "@"]
    assert [secret for secret in secrets if len(secret) > 2 and secret.encode() in sent] == []
    assert {request.operation for request in wandb_server.requests} <= {
        "CreateRunFiles", "GetDefaultEntity", "HistoryPage", "Run", "RunHistoryKeys", "RunParquetHistory",
        "RunResumeStatus", "Runs", "ServerFeaturesQuery", "UpsertBucket", "Viewer", "file_stream", "upload",
    }  # fmt: skip
    names = {name for run in wandb_server.runs.values() for name in run.files}
    assert names <= {"config.yaml", "wandb-summary.json"}


def test_nothing_is_left_among_temporary_files(web: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client makes a folder for every run that it is asked about, named after project and run."""
    web.log.segment().train(0, 500).checkpoint(300)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    web.sync()
    web.sync()
    assert list(temporary.iterdir()) == []
    assert "WANDB_DIR" not in os.environ


def test_several_runs_at_once_get_their_own_rows_and_leave_no_process(web: Bench, wandb_server: WandbServer) -> None:
    """One process, one service of the client, six runs with a side run each."""
    for n in range(6):
        web.log.segment(f"run{n}").train(0, 1000).checkpoint(700)
    web.sync("--jobs", "4")
    assert services() == []
    for n in range(6):
        assert_exact(wandb_server, web, "canonical", [r for r in web.rows(f"run{n}") if r.tokens <= 700], f"run{n}")
        assert_exact(wandb_server, web, "provisional", [r for r in web.rows(f"run{n}") if r.tokens > 700], f"run{n}")


def test_a_row_that_somebody_logged_there_is_left_alone(web: Bench, wandb_server: WandbServer) -> None:
    """It is said, it is no reason to send anything, and what comes later follows it."""
    segment = web.log.segment().train(0, 100).checkpoint(100)
    web.sync()
    run = run_of(wandb_server, web)
    run.history.append(json.dumps({"_step": 10, "mine": 1.0}))
    (row,) = web.sync()
    assert (row["points_sent"], row["error"]) == (0, "")
    segment.train(100, 200).checkpoint(200)
    web.sync()
    assert len(run.rows) == 21
    assert [row["tokens_seen"] for row in run.rows if "tokens_seen" in row] == list(range(10, 201, 10))


def test_rows_that_the_server_lost_are_sent_again_and_no_others(web: Bench, wandb_server: WandbServer) -> None:
    """A server that was put back to an older state is noticed although the cursor says that all was accepted."""
    web.log.segment().train(0, 1000).checkpoint(1000)
    web.sync()
    run = run_of(wandb_server, web)
    del run.history[70:]
    run.summary["_step"] = 69
    (row,) = web.sync()
    assert row["points_sent"] == 2 * 30
    assert_exact(wandb_server, web, "canonical", web.rows())


@pytest.mark.parametrize("verify", ["full", "fast"])
def test_what_is_new_is_read_back_and_nothing_else(web: Bench, wandb_server: WandbServer, verify: str) -> None:
    """``--verify fast`` is as good as ``full``: W&B has no figures per metric to look at instead."""
    segment = web.log.segment().train(0, 500).checkpoint(500)
    web.sync("--verify", verify)
    wandb_server.requests.clear()
    segment.train(500, 700).checkpoint(700)
    web.sync("--verify", verify)
    asked = [json.loads(r.body)["variables"] for r in wandb_server.requests if r.operation == "HistoryPage"]
    assert [(page["minStep"], page["maxStep"]) for page in asked] == [(50, 70)]
    wandb_server.requests.clear()
    web.sync("--verify", verify)
    assert [r for r in wandb_server.requests if r.operation in {"HistoryPage", "file_stream"}] == []
    assert_exact(wandb_server, web, "canonical", web.rows())


def test_the_rows_of_a_story_are_the_same_each_time(wandb_server: WandbServer) -> None:
    """What was told is found again, whatever else is told with it."""
    assert WandbSink(wandb_server.url, timeout_s=5).told([]) == told_records([]) == []


def test_a_thinned_run_keeps_extremes_and_last_values_and_says_so(web: Bench, wandb_server: WandbServer) -> None:
    """Whatever the number of syncs: the same rows, once each, and the summary is of all points."""
    values = random.Random(5).choices(range(1000), k=1000)
    rows = [(10 * n, {"loss": float(v), "lr": 1.0 / n}) for n, v in enumerate(values, start=1)]
    segment = web.log.segment().log(rows[:430]).checkpoint(2000).checkpoint(4300)
    (row,) = web.sync("--every", "100", "--tail", "hold")
    assert "thinned out" in " ".join(row["notes"])
    segment.log(rows[430:]).checkpoint(7777)
    web.sync("--tail", "hold")  # what the run was made with stays
    segment.end("finished", 10_000)
    web.sync()
    run = run_of(wandb_server, web)
    assert (run.about["every"], "of each 100 steps" in run.about["thinned"]) == (100, True)
    wanted = set()
    cuts = [2000, 4300, 7777]
    windows: dict[tuple[int, int], list[tuple[int, dict[str, float]]]] = {}
    for tokens, metrics in rows:
        windows.setdefault((tokens // 10 // 100, sum(cut < tokens for cut in cuts)), []).append((tokens, metrics))
    for window in windows.values():
        for name in ("loss", "lr"):
            by_value = sorted((metrics[name], tokens) for tokens, metrics in window)
            wanted |= {by_value[0][1], by_value[-1][1]}
        wanted.add(window[-1][0])
    assert [r["tokens_seen"] for r in run.rows] == sorted(wanted)
    assert (run.summary["loss"]["min"], run.summary["loss"]["max"]) == (min(values), max(values))
    assert web.sync("--every", "7")[0]["points_sent"] == 0
    shutil.rmtree(web.state)
    assert web.sync()[0]["points_sent"] == 0


@pytest.mark.soak
def test_syncs_killed_at_random_with_faults_leave_every_row_once(web: Bench, wandb_server: WandbServer) -> None:
    """SIGKILL and every fault of the network, again and again, while the run goes on."""
    _kill_and_fault(web, wandb_server, rounds=25, rows=2_000, seed=1)


def test_a_sync_killed_among_faults_leaves_every_row_once(web: Bench, wandb_server: WandbServer) -> None:
    """The short form."""
    _kill_and_fault(web, wandb_server, rounds=2, rows=200, seed=2)


def _kill_and_fault(bench: Bench, server: WandbServer, *, rounds: int, rows: int, seed: int) -> None:
    generator = random.Random(seed)
    segment = bench.log.segment()
    tokens = 0
    faults: list[dict[str, Any]] = [
        {"status": 500}, {"status": 429, "retry_after": 0.05}, {"status": 404}, {"status": 413}, {"cut": "before"},
        {"cut": "after"}, {"delay_s": 0.3},
    ]  # fmt: skip
    for _ in range(rounds):
        segment.train(tokens, tokens + 10 * rows).checkpoint(tokens + 10 * generator.randrange(rows // 2, rows))
        tokens += 10 * rows
        for where in ("file_stream", "UpsertBucket", "HistoryPage"):
            if generator.random() < 0.5:
                server.fail(
                    where, skip=generator.randrange(4), times=generator.randrange(1, 3), **generator.choice(faults)
                )
        process = subprocess.Popen(
            [sys.executable, "-c", "from llmtrack.sync.cli import main; main()", *bench.arguments, "--timeout", "5"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wanted = server.counts.total() + generator.randrange(5, 40)
        until = time.monotonic() + 60
        while process.poll() is None and server.counts.total() < wanted and time.monotonic() < until:
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        process.wait()
    server.heal()
    bench.sync()
    everything = bench.rows()
    settled = max(run.about.get("tokens", 0) for run in server.runs.values())
    canonical = run_of(server, bench, kind="canonical")
    newest = max(row["tokens_seen"] for row in canonical.rows)
    assert settled == 0
    assert_exact(server, bench, "canonical", [row for row in everything if row.tokens <= newest])
    assert_exact(server, bench, "provisional", [row for row in everything if row.tokens > newest])
    assert bench.sync()[0]["points_sent"] == 0


def test_what_is_set_for_a_persons_own_run_is_said_of_none(
    web: Bench, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in which W&B is switched off, or that names a run and a group, makes no difference."""
    for name, value in {
        "MODE": "disabled",
        "NAME": "mine",
        "RUN_GROUP": "mine",
        "TAGS": "mine",
        "NOTES": "mine",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    segment = web.log.segment().train(0, 100).checkpoint(100)
    web.sync()
    segment.train(100, 200).checkpoint(200)
    web.sync()
    run = run_of(wandb_server, web)
    assert (run.display_name, run.group, run.tags) == ("run", "run", ["llmtrack", "canonical"])
    assert_exact(wandb_server, web, "canonical", web.rows())
