"""`llmtrack alerts`: what was raised, what it has in common over restarts and forks, and which batches to skip."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import llmtrack
from llmtrack.__main__ import cli
from llmtrack.query import connect
from llmtrack.query.cli.alerts import parse_since
from llmtrack.query.runs.verdict import Verdict, find_verdicts, list_alerts
from llmtrack.writer.errors import UsageError
from tests.handmade import DAY, write_part, write_segment
from tests.oracle import Segment

STEP_TOKENS = 100


def train(
    root: Path,
    first: int,
    last: int,
    spikes: Iterable[int] = (),
    *,
    with_ids: bool = True,
    offset: int = 0,
    **given: Any,
) -> dict[str, Any]:
    """Train from the step after `first`; a step's batch is its number, or later by `offset` when some were skipped."""
    run = llmtrack.open_run(root, run_id=given.pop("run_id", "run"), **given)
    for step in range(first + 1, last + 1):
        ids: dict[str, Any] = {"batch_ids": [f"doc-{step + offset}"], "position": step + offset} if with_ids else {}
        loss = 5.0 if step in spikes else 2.0 + 0.01 * random.Random(step).gauss(0, 1)
        run.log({"train/loss": loss}, step, step * STEP_TOKENS, **ids)
    run.finish("failed")
    meta: dict[str, Any] = json.loads(json.dumps(run.meta(last, last * STEP_TOKENS)))
    return meta


def place(meta: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the checkpoint that a segment saved at a step."""
    return {**meta, "step": step, "tokens": step * STEP_TOKENS}


def verdicts(root: Path) -> list[Verdict]:
    """Return what the alerts of a root have in common."""
    with connect(root, points=False) as con:
        return find_verdicts(con, list_alerts(con))


def run_command(*args: str) -> tuple[int, str, str]:
    """Return the exit status, what was printed, and what was said."""
    result = CliRunner().invoke(cli, ["alerts", *args], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0), result.stdout, result.stderr


def test_the_same_batch_after_going_back_is_the_data(tmp_path: Path) -> None:
    """Also in a third segment; the shared ids and the position are the evidence."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    (verdict,) = verdicts(tmp_path)
    assert (verdict.suspect, verdict.rule) == ("data", "same_batch")
    assert verdict.alerts == ["run-1-1", "run-2-1", "run-3-1"]
    assert "the same batch: doc-160, doc-159" in verdict.evidence
    assert "the same position in the data: 160" in verdict.evidence
    assert verdict.evidence[1].startswith("run segment 2 at step 160, 16,000 tokens: train/loss is 5")


def test_another_batch_after_going_back_is_state_or_hardware(tmp_path: Path) -> None:
    """The batches were skipped, or shuffled, and it came all the same."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [161], checkpoint=place(meta, 120), offset=200)
    (verdict,) = verdicts(tmp_path)
    assert (verdict.suspect, verdict.rule) == ("state or hardware", "moved")
    assert verdict.alerts == ["run-1-1", "run-2-1"]


def test_what_does_not_come_again_is_hardware_or_chance(tmp_path: Path) -> None:
    """The place was passed; what comes much later is another event."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 140, 400, [390], checkpoint=place(meta, 140))
    (verdict,) = verdicts(tmp_path)
    assert (verdict.suspect, verdict.rule, verdict.alerts) == ("hardware or chance", "gone", ["run-1-1"])
    assert "run segment 2 passed 16,000 tokens without one" in verdict.evidence


def test_segments_of_one_run_are_in_order_whatever_the_clocks_say(tmp_path: Path) -> None:
    """The next segment runs on a node whose clock is behind."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    with connect(tmp_path, points=False) as con:
        found = list_alerts(con)
        for row in found:
            row["time"] += dt.timedelta(hours=1) if row["segment"] == 1 else dt.timedelta(0)
        (verdict,) = find_verdicts(con, sorted(found, key=lambda row: row["time"]))
    assert (verdict.rule, verdict.alerts) == ("same_batch", ["run-1-1", "run-2-1"])


def test_without_batches_nobody_knows(tmp_path: Path) -> None:
    """And the verdict says what to log."""
    meta = train(tmp_path, 0, 170, [160], with_ids=False)
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120), with_ids=False)
    (verdict,) = verdicts(tmp_path)
    assert (verdict.suspect, verdict.rule) == ("unknown", "no_batches")


def test_a_child_belongs_to_the_lineage_and_a_stranger_does_not(tmp_path: Path) -> None:
    """A fork that meets the same batch is evidence; another run with the same ids is none."""
    meta = train(tmp_path, 0, 170, [160], recipe={"lr": 1})
    train(tmp_path, 120, 170, [160], recipe={"lr": 2}, checkpoint=place(meta, 120))
    train(tmp_path, 0, 170, [160], run_id="stranger")
    (verdict,) = verdicts(tmp_path)
    assert (verdict.suspect, verdict.lineage, len(verdict.alerts)) == ("data", "run", 2)


def test_going_on_beyond_an_alert_says_nothing_of_it(tmp_path: Path) -> None:
    """Nothing was gone over again."""
    meta = train(tmp_path, 0, 200, [160])
    train(tmp_path, 200, 400, [300], checkpoint=meta)
    assert verdicts(tmp_path) == []


@pytest.mark.parametrize(
    "nodes, ranks, suspect",
    [
        ((["n1", "n2"], ["n2", "n3"]), (5.0, 2.0), "node n2"),  # eight ranks: four on each node
        ((["n1", "n2"], ["n3", "n4"]), (5.0, 5.0), None),
        (([], []), (5.0, 5.0), "rank 5"),
        (([], []), (5.0, 6.0), None),
    ],
)
def test_the_same_slow_node_in_several_segments_is_named(
    tmp_path: Path, nodes: tuple[list[str], list[str]], ranks: tuple[float, float], suspect: str | None
) -> None:
    """By its name, wherever its ranks are; by the rank's number where nodes are unknown."""
    for number in (1, 2):
        segment = Segment("run", number, start=0, origin=None if number == 1 else ("run", 1))
        folder = write_segment(tmp_path, segment, nodes=nodes[number - 1])
        alert = {"alert_id": f"a{number}", "rule": "slow_rank", "phase": "raised", "value": ranks[number - 1]}
        write_part(folder, "alerts", [{**alert, "tokens": 100, "message": "slow", "level": "warn"}])
    found = verdicts(tmp_path)
    assert [one.summary for one in found] == (
        [f"{suspect} was the slowest in 2 segments: take it out"] if suspect else []
    )


def test_the_command_lists_alerts_and_prints_the_verdict_with_rule_and_evidence(tmp_path: Path) -> None:
    """For a person: what, when, how bad, whether it is over, and what it has in common."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    status, out, _ = run_command("--root", str(tmp_path))
    assert status == 0
    assert "over at step 162, left behind by segment 2" in out
    assert "verdict on run: data" in out
    assert "rule: same_batch" in out
    assert "evidence: the same batch: doc-160, doc-159" in out


def test_json_has_the_columns_of_the_view_and_the_verdicts(tmp_path: Path) -> None:
    """An array of rows; an empty one is an array too."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    _, out, _ = run_command("--root", str(tmp_path), "--json")
    first, second = json.loads(out)
    with connect(tmp_path, points=False) as con:
        assert set(con.sql("FROM alerts").columns) <= set(first)
    assert (first["step"], first["cleared_step"], first["superseded_by"]) == (160, 162, 2)
    assert (second["superseded_by"], second["batch_ids"]) == (None, ["doc-160", "doc-159"])
    assert len(first["context"]) == 1
    assert first["verdicts"] == second["verdicts"]
    assert first["verdicts"][0]["suspect"] == "data"
    assert json.loads(run_command("--root", str(tmp_path), "--json", "--rule", "nothing")[1]) == []


def test_what_is_listed_can_be_chosen(tmp_path: Path) -> None:
    """By run, time, level, rule and id; a verdict is shown when it is about one of them."""
    train(tmp_path, 0, 120, [100])
    run = llmtrack.open_run(tmp_path, run_id="other")
    run.alert("data", "look", 1, 100, level="info")
    run.finish()

    def ids(*args: str) -> list[str]:
        return [row["alert_id"] for row in json.loads(run_command("--root", str(tmp_path), "--json", *args)[1])]

    assert ids() == ["run-1-1", "other-1-1"]
    assert ids("oth") == ["other-1-1"]
    assert ids("--level", "warn") == ["run-1-1"]
    assert ids("--rule", "data") == ["other-1-1"]
    assert ids("--alert", "run-1-1") == ["run-1-1"]
    assert ids("--since", "1h") == ["run-1-1", "other-1-1"]
    assert ids("--since", "2099-01-01") == []
    with pytest.raises(UsageError, match="no alert 'x'"):
        run_command("--root", str(tmp_path), "--alert", "x")


def test_what_to_do_next_is_said_of_each_run(tmp_path: Path) -> None:
    """Of the newest alert of a rule that was not left behind, the worst first, with the command that is to be typed."""
    meta = train(tmp_path, 0, 170, [160])
    train(tmp_path, 120, 170, [160], checkpoint=place(meta, 120))
    train(tmp_path, 0, 120, [100], run_id="over")
    with llmtrack.open_run(tmp_path, run_id="lost") as run:
        for step in range(1, 61):
            run.log({"train/loss": math.nan if step > 50 else 2.0}, step, step * STEP_TOKENS, batch_ids=[f"b-{step}"])
    with llmtrack.open_run(tmp_path, run_id="slow") as run:
        for step in range(1, 401):
            run.log({"throughput/tokens_per_s": 90_000.0 if step > 100 else 100_000.0}, step, step * STEP_TOKENS)
            run.log({"throughput/tokens_per_s_min_rank": 3.0}, step, step * STEP_TOKENS)
    _, text, _ = run_command("--root", str(tmp_path))
    skip = "llmtrack alerts lost --alert lost-1-1 --skip-batches skip.json"
    assert [line for line in text.splitlines() if line.startswith("next")] == [
        f"next, lost-1-1: it stays: see that its batches can be read, go back to a checkpoint and skip them: {skip}",
        (
            "next, run-2-1: the same batch did it again: look at that data, and go on without it: "
            "llmtrack alerts run --alert run-2-1 --skip-batches skip.json"
        ),
        "next, over-1-1: it came back by itself: nothing to do unless it comes again",
        "next, slow-1-1: rank 3 holds all others up: look at its clocks, heat and links, or take it out",
        "next, slow-1-2: look for a slow GPU, link or storage; an alert slow_rank names it where ranks are measured",
    ]
    assert "throughput/tokens_per_s is 90,000, 9.9% below 99,9" in text
    assert "stays so; told no more from step" in text
    _, text, _ = run_command("--root", str(tmp_path), "--alert", "lost-1-1")
    assert "batches of its step, then of the step before: b-51, b-50" in text
    assert "8 rows later: at worst train/loss was nan at step 51" in text


def test_an_empty_root_has_no_alerts(tmp_path: Path) -> None:
    """And says so."""
    assert run_command("--root", str(tmp_path)) == (0, "", f"there are no alerts in {tmp_path}\n")


def test_the_batches_around_an_alert_are_written_for_a_trainer_to_skip(tmp_path: Path) -> None:
    """All that were logged around it, or so many steps; the file is whole or not there."""
    train(tmp_path, 0, 200, [100, 180])
    file = tmp_path / "skip.json"
    run_command("--root", str(tmp_path), "--alert", "run-1-1", "--skip-batches", str(file), "--around", "2")
    skip = json.loads(file.read_text(encoding="utf-8"))
    assert skip["batch_ids"] == [f"doc-{step}" for step in range(98, 103)]
    assert skip["positions"] == [98, 99, 100, 101, 102]
    (alert,) = skip["alerts"]
    assert (alert["alert_id"], alert["step"], alert["rule"]) == ("run-1-1", 100, "loss_spike")
    assert alert["batches"][0] == {
        "step": 98,
        "tokens": 9800,
        "batch_ids": ["doc-98"],
        "position": 98,
        "rank": None,
        "batch_hash": alert["batches"][0]["batch_hash"],
    }
    run_command("--root", str(tmp_path), "--alert", "run-1-1", "--skip-batches", str(file))
    skip = json.loads(file.read_text(encoding="utf-8"))
    assert skip["positions"] == list(range(84, 109))  # not those of the other alert
    _, _, said = run_command("--root", str(tmp_path), "--skip-batches", str(file))
    assert len(json.loads(file.read_text(encoding="utf-8"))["batch_ids"]) == 50  # 16 before, 8 after, twice
    assert "50 ids and 50 positions around 2 alerts" in said
    with pytest.raises(UsageError, match="cannot write"):
        run_command("--root", str(tmp_path), "--skip-batches", str(tmp_path / "nowhere" / "skip.json"))


def test_a_moment_is_so_long_ago_or_a_time() -> None:
    """In UTC unless it says otherwise; anything else is refused."""
    now = DAY
    assert parse_since("90s", now) == DAY - dt.timedelta(seconds=90)
    assert parse_since("1.5h", now) == DAY - dt.timedelta(minutes=90)
    assert parse_since("2d", now) == DAY - dt.timedelta(days=2)
    assert parse_since("2025-03-01") == DAY
    assert parse_since("2025-03-01T01:00+01:00") == DAY
    for text in ("yesterday", "", "-1h", "5 parsecs", "99999999999w"):
        with pytest.raises(UsageError, match="is no time"):
            parse_since(text)


def test_batches_to_skip_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    """The storage takes ten bytes and no more: that is said, and no half-written file lies there."""
    train(tmp_path / "root", 0, 120, [100])
    folder = tmp_path / "out"
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot write"):
            run_command("--root", str(tmp_path / "root"), "--alert", "run-1-1", "--skip-batches", f"{folder}/skip.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
