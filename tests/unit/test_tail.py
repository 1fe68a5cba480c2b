"""A run followed while it is written: each row and each event once, whatever happens to the files meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrack import __main__ as program
from llmtrack import open_run, query
from llmtrack.query.runs import tail
from llmtrack.writer.format import segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import encode_head
from tests.handmade import write_part, write_segment
from tests.oracle import Point, Segment
from tests.pictures import odd_root

Wait = Callable[[], object]
Call = Callable[..., tuple[int, str, str]]


def follow(root: Path, run_id: str, actions: list[Wait], **more: Any) -> list[dict[str, Any]]:
    """Follow a run; between two looks the next action happens, and the last one finishes the run."""
    steps = iter(actions)

    def wait() -> None:
        next(steps)()

    with query.connect(root, runs=[run_id], check=False) as con:
        follower = tail.Follower(con, run_id, more.pop("metrics", ()))
        return list(tail.follow(follower, wait=wait, **more))


def rows_of(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return segment and step of the rows among events."""
    return [(event["segment"], event["step"]) for event in events if event["kind"] == "row"]


def test_every_row_of_a_real_run_is_told_once_and_in_order(tmp_path: Path) -> None:
    """Before and after a look, through alerts, a checkpoint and the end."""
    run = open_run(tmp_path, run_id="a", project="p")
    checkpoint = tmp_path / "model.bin"
    checkpoint.write_bytes(b"weights")

    def log(first: int, last: int) -> None:
        for step in range(first, last):
            run.log({"train/loss": 1.0 / step, "train/lr": 0.1}, step=step, tokens=step * 10)
        assert run.flush(timeout=30)

    def act() -> None:
        run.alert("data", "odd batch", step=9, tokens=90)
        run.checkpoint(checkpoint, step=9, tokens=90)
        assert run.flush(timeout=30)

    log(1, 5)
    events = follow(tmp_path, "a", [str, lambda: log(5, 10), act, lambda: log(10, 12), run.finish], lines=2)
    assert rows_of(events) == [(1, step) for step in (3, 4, 5, 6, 7, 8, 9, 10, 11)]
    kinds = [event["kind"] for event in events if event["kind"] != "row"]
    assert kinds == ["status", "alert", "checkpoint", "end", "status"]
    assert [event.get("message") for event in events if event["kind"] == "alert"] == ["odd batch"]
    assert events[-1]["status"] == "finished"
    row = next(event for event in events if event["kind"] == "row" and event["step"] == 5)
    assert row["values"] == {"train/loss": 0.2, "train/lr": 0.1}


def test_a_restart_is_announced_and_followed(tmp_path: Path) -> None:
    """The next segment, where it starts from, and its rows."""

    def points(first: int, last: int) -> list[Point]:
        return [Point(tokens, "loss", float(tokens)) for tokens in range(first, last, 10)]

    write_segment(tmp_path, Segment("a", 1, points=points(10, 60), checkpoints=[30]))
    again = Segment("a", 2, 30, ("a", 1), points=points(40, 80), exit="finished")
    events = follow(tmp_path, "a", [lambda: write_segment(tmp_path, again, host="n7")], lines=1)
    assert rows_of(events) == [(1, 5), (2, 4), (2, 5), (2, 6), (2, 7)]
    (start,) = [event for event in events if event["kind"] == "start"]
    assert tail.line(start) == "--- 2025-03-01 02:00:00  segment 2: restarts from segment 1 at 30 tokens on n7, 8 ranks"


def test_rows_that_were_sealed_between_two_looks_are_told_once(tmp_path: Path) -> None:
    """Whether they were told before they moved into Parquet, or not."""
    folder = write_segment(tmp_path, Segment("a", 1, points=[Point(10, "loss", 1.0)]))
    part = folder / "metrics-00001.arrows"
    rows = [{"seq": 10 + index, "tokens": 20 + index, "name": "loss", "value": 2.0} for index in range(3)]

    def seal() -> None:
        seal_part(part)

    def add_and_seal() -> None:
        seal_part(write_part(folder, "metrics", rows, part=2))

    def finish() -> None:
        write_part(folder, "segments", [{"seq": 99, "tokens": 30, "phase": "end", "exit": "finished"}], part=2)

    events = follow(tmp_path, "a", [seal, add_and_seal, finish])
    assert [event["tokens"] for event in events if event["kind"] == "row"] == [10, 20, 21, 22]


def test_looking_again_reads_only_what_is_new(tmp_path: Path) -> None:
    """What was read once may be gone: nobody looks there again."""
    run = open_run(tmp_path, run_id="a", project="p")
    for step in range(1, 200):
        run.log({"loss": 1.0}, step=step, tokens=step)
    run.flush(timeout=30)
    with run, query.connect(tmp_path, runs=["a"], check=False) as con:
        follower = tail.Follower(con, "a")
        assert len(list(follower.last(5))) == 5
        assert list(follower.news()) == []
        part = segment_folder(tmp_path, "a", 1) / "metrics-00001.arrows"
        begin = len(encode_head("metrics"))
        with part.open("r+b") as file:
            file.seek(begin)
            file.write(bytes(part.stat().st_size - begin))
        run.log({"loss": 1.0}, step=200, tokens=200)
        run.flush(timeout=30)
        assert [(event["kind"], event["step"]) for event in follower.news()] == [("row", 200)]


def test_the_last_rows_go_back_through_restarts_and_parents(tmp_path: Path) -> None:
    """As many as were asked for, on the run's path."""
    odd_root(tmp_path)
    with query.connect(tmp_path, runs=["pretrain-7b-recipe-1"]) as con:
        rows = list(tail.Follower(con, "pretrain-7b-recipe-1", ["train/loss"]).last(402))
    assert [(row["run_id"], row["step"]) for row in rows[:3]] == [
        ("pretrain-7b", 999),
        ("pretrain-7b", 1000),
        ("pretrain-7b-recipe-1", 1001),
    ]
    assert len(rows) == 402
    assert all(list(row["values"]) == ["train/loss"] for row in rows)


def test_lines_say_what_happened() -> None:
    """One line each, the loss first, whatever is in a message."""
    place = {"run_id": "a", "segment": 3, "time": None, "step": 7, "tokens": 7_000_000}
    row = {"kind": "row", **place, "values": {"aa": 1.0, "train/loss": 2.5, "zz": 3.0}}
    assert tail.line(row, shown=2).strip() == "step 7  7M  train/loss=2.5  aa=1  +1"
    alert = {"kind": "alert", **place, "phase": "raised", "level": "warn", "rule": "spike", "message": "two\nlines"}
    assert tail.line(alert) == "--- segment 3: alert raised: warn spike: two lines"
    gap = {"first_tokens": 1000, "last_tokens": 2000, "points": 1234, "reason": "io_error", "errno": 28}
    assert tail.line({"kind": "gap", **place, **gap}) == (
        "--- segment 3: gap: 1,234 points lost at 1k to 2k (io_error, No space left on device)"
    )
    end = {"kind": "end", **place, "exit": "failed", "detail": "CUDA\nerror", "dropped": 0}
    assert tail.line(end) == "--- segment 3: failed at 7M tokens: CUDA error"
    damage = {"kind": "damage", **place, "path": "x", "first_byte": 1, "end_byte": 2, "reason": "fails its checksum"}
    assert tail.line(damage) == "--- segment 3: damaged: x: bytes 1 to 2: fails its checksum"
    assert tail.line({"kind": "status", **place, "status": "stalled"}) == "--- a is stalled"


@pytest.fixture
def llmtrack(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the command line, in this process."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Make a run that has finished."""
    points = [Point(tokens, "train/loss", 5.0 - tokens / 100) for tokens in range(10, 301, 10)]
    write_segment(tmp_path, Segment("a", 1, points=points, exit="finished"))
    return tmp_path


def command(*args: str | Path) -> list[str]:
    """Return the command line of the program."""
    return [sys.executable, "-m", "llmtrack", "tail", *map(str, args)]


def test_the_command_prints_rows_as_lines_or_json(finished: Path, llmtrack: Call) -> None:
    """An array; with -f an object a line, and it ends by itself when the run has."""
    status, out, _ = llmtrack("tail", "a", "-n", "2", "--root", finished)
    assert status == 0
    assert [line.split("  ")[1:] for line in out.splitlines()] == [
        ["step 29", "290", "train/loss=2.1"],
        ["step 30", "300", "train/loss=2"],
    ]
    _, out, _ = llmtrack("tail", "a", "-n", "2", "--json", "--root", finished)
    assert [row["values"] for row in json.loads(out)] == [{"train/loss": 2.1}, {"train/loss": 2.0}]
    _, out, _ = llmtrack("tail", "-f", "a", "-n", "2", "--json", "--root", finished)
    assert [json.loads(line)["kind"] for line in out.splitlines()] == ["row", "row", "status"]


def test_ctrl_c_and_a_closed_pipe_end_it_cleanly(tmp_path: Path) -> None:
    """Status 130 and one word; and nothing at all when whoever read has seen enough."""
    run = open_run(tmp_path, run_id="a", project="p")
    run.log({"loss": 1.0}, step=1, tokens=1)
    run.flush(timeout=30)
    with run, following(tmp_path) as process:
        assert process.stdout is not None
        assert "loss=1" in process.stdout.readline()
        assert process.stdout.readline() == "--- a is running\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "error: interrupted\n")
        assert out == ""
    with open_run(tmp_path, run_id="b", project="p") as run:
        run.log({"loss": 1.0}, step=1, tokens=1)
        run.flush(timeout=30)
        shell = " ".join([*command("-f", "b", "--root", tmp_path, "--poll", "0.05"), "| head -1"])
        piped = subprocess.Popen(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert piped.stdout is not None
        assert "loss=1" in piped.stdout.readline()
        run.log({"loss": 1.0}, step=2, tokens=2)
        run.flush(timeout=30)
        _, err = piped.communicate(timeout=60)
        assert (piped.returncode, err) == (0, "")


class following:  # noqa: N801 - used as a context
    """A process that follows run a; killed when a test fails before it ended."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command("-f", "a", "--root", root),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        """Return the process."""
        return self._process

    def __exit__(self, *_: object) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def test_a_typo_is_told_what_was_meant(finished: Path, llmtrack: Call) -> None:
    """Status 1, nothing on stdout."""
    status, out, err = llmtrack("tail", "b", "--root", finished)
    assert (status, out) == (1, "")
    assert "there is no run 'b'" in err
    status, out, err = llmtrack("tail", "a", "--metric", "train/los", "--root", finished)
    assert (status, out) == (1, "")
    assert "has no metric 'train/los'\n  try: one of train/loss" in err


def test_a_changed_byte_is_damage_and_no_value(tmp_path: Path, llmtrack: Call) -> None:
    """DuckDB takes it for a value: a sealed part is compared with its checksum, however large, before it is shown."""
    with open_run(tmp_path, run_id="a") as run:
        for step in range(1, 1501):
            chance = random.Random(step)
            run.log({f"m{index}": chance.random() for index in range(10)}, step=step, tokens=step * 10)
    (part,) = segment_folder(tmp_path, "a", 1).glob("metrics-*.parquet")
    content = bytearray(part.read_bytes())
    assert len(content) > 64 << 10, "a small one is read whole in any case"
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    status, out, err = llmtrack("tail", "a", "--root", tmp_path)
    assert (status, out) == (4, "")
    assert f"{part}" in err
    assert "fails its checksum" in err


def test_a_row_is_one_line_whatever_its_metrics_are_called() -> None:
    """And does nothing to the terminal."""
    event = {"kind": "row", "time": None, "step": 1, "tokens": 10, "values": {"a\nb": 1.0, "\x1b[2Jc": 2.0}}
    assert tail.line(event) == "  step 1  10  �[2Jc=2  a b=1"
