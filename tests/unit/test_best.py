"""The best checkpoint by an evaluation, from real runs, and what makes values incomparable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pytest

from llmtrack import __main__ as program
from llmtrack.query.runs.best import Ranking, best
from llmtrack.query.sql.views import connect, refresh
from llmtrack.writer.checkpoints.checkpoint import checkpoint_id
from llmtrack.writer.checkpoints.evals import log_eval
from llmtrack.writer.errors import UsageError
from llmtrack.writer.run import open_run


@dataclass(frozen=True)
class Root:
    """Run `a` saved at 100, 200 and 300 tokens and went back from 300 to 200; run `b` saved at 100."""

    path: Path
    ids: dict[tuple[str, int], str]
    con: duckdb.DuckDBPyConnection

    def log(self, run: str, tokens: int, value: float, **more: Any) -> None:
        """Evaluate one checkpoint."""
        log_eval(self.path, self.ids[run, tokens], "hellaswag", {"acc": value}, **more)

    def best(self, name: str = "hellaswag/acc", **how: Any) -> Ranking:
        """Rank what is there now."""
        refresh(self.con)
        return best(self.con, name, **how)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    """Make the runs with the writer itself, and open them as SQL."""
    runs, ids = tmp_path / "runs", {}

    def train(run_id: str, to_tokens: list[int], meta: dict[str, Any] | None = None) -> dict[int, dict[str, Any]]:
        metas: dict[int, dict[str, Any]] = {}
        with open_run(runs, run_id=run_id, project="p", checkpoint=meta, on_rollback="continue") as run:
            for tokens in to_tokens:
                run.log({"train/loss": 2.0}, step=tokens // 10, tokens=tokens)
                saved = tmp_path / f"{run_id}-{tokens}.pt"
                saved.write_bytes(f"{run_id} {run.segment} {tokens}".encode())
                run.checkpoint(saved, step=tokens // 10, tokens=tokens)
                ids[run_id, tokens] = checkpoint_id(saved, tokens, full=False)
                metas[tokens] = dict(run.meta(step=tokens // 10, tokens=tokens))
            assert run.flush()
        return metas

    metas = train("a", [100, 200, 300])
    train("a", [250], metas[200])
    train("b", [100])
    con = connect(runs, points=False)
    yield Root(runs, ids, con)
    con.close()


def test_the_best_is_first(root: Root) -> None:
    """Value, error, run, place and path of each checkpoint, in order."""
    for run, tokens, value in (("a", 100, 0.5), ("b", 100, 0.7), ("a", 250, 0.6)):
        root.log(run, tokens, value, stderr={"acc": 0.01}, harness="mine", harness_version="1", prompt_hash="f00")
    ranking = root.best()
    assert [(row["run_id"], row["tokens"], row["value"]) for row in ranking.rows] == [
        ("b", 100, 0.7),
        ("a", 250, 0.6),
        ("a", 100, 0.5),
    ]
    assert ranking.warnings == []
    first = ranking.rows[0]
    assert (first["stderr"], first["harness"], first["prompt_hash"], first["step"]) == (0.01, "mine", "f00", 10)
    assert first["path"].endswith("b-100.pt")
    assert first["ckpt_id"] == root.ids["b", 100]
    assert first["matched"]


def test_lower_can_be_better_and_nan_never_is(root: Root) -> None:
    """Either way NaN comes last."""
    for tokens, value in ((100, 0.5), (200, math.nan), (250, -math.inf)):
        root.log("a", tokens, value)
    assert [row["tokens"] for row in root.best().rows] == [100, 250, 200]
    assert [row["tokens"] for row in root.best(lower_is_better=True).rows] == [250, 100, 200]


def test_a_superseded_checkpoint_is_left_out_and_counted(root: Root) -> None:
    """The weights of a stretch that was left behind are ranked only on request."""
    root.log("a", 300, 0.9)
    root.log("a", 200, 0.5)
    ranking = root.best()
    assert [row["tokens"] for row in ranking.rows] == [200]
    assert ranking.superseded == 1
    everything = root.best(superseded=True)
    assert [(row["tokens"], row["superseded_by"]) for row in everything.rows] == [(300, 2), (200, None)]
    assert everything.superseded == 0


def test_unmatched_evaluations_come_last_unless_runs_are_named(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """The best checkpoint is one that can be found; naming runs leaves out what belongs to none."""
    log_eval(root.path, "full-elsewhere", "hellaswag", {"acc": 0.9}, tokens=7)
    log_eval(root.path, "full-other", "hellaswag", {"acc": 0.95}, run_id="b")
    root.log("a", 100, 0.5)
    root.log("b", 100, math.nan)
    expected = [("a", True), ("b", True), ("b", False), (None, False)]
    assert [(row["run_id"], row["matched"]) for row in root.best().rows] == expected
    assert [row["value"] for row in root.best(lower_is_better=True).rows[2:]] == [0.9, 0.95]
    assert [row["run_id"] for row in root.best(runs=["b"]).rows] == ["b", "b"]
    with pytest.raises(SystemExit):
        program.main(["best", "hellaswag/acc", "--root", str(root.path)])
    shown = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [words[:1] for words in shown[:2]] == [["a"], ["b"]]
    assert shown[2] == ["b", "(not", "recorded)"]
    assert shown[3][:2] == ["(not", "recorded)"]


def test_different_harnesses_and_prompts_are_said(root: Root) -> None:
    """A missing version or prompt hash among known ones is a difference too."""
    root.log("a", 100, 0.5, harness="lm-eval", harness_version="0.4.9", prompt_hash="f00")
    assert root.best().warnings == []
    root.log("a", 200, 0.6, harness="lm-eval", harness_version="0.4.13", prompt_hash="f00")
    (warning,) = root.best().warnings
    assert "lm-eval 0.4.13, lm-eval 0.4.9" in warning
    root.log("b", 100, 0.6, harness="lm-eval", harness_version="0.4.9")
    assert len(root.best().warnings) == 2
    assert "2 different prompt hashes" in root.best().warnings[1]
    assert root.best(runs=["b"]).warnings == []


def test_the_wrong_direction_is_said(root: Root) -> None:
    """An imported result knows whether higher is better."""
    root.log("a", 100, 12.5, details={"task": {"higher_is_better": False}})
    assert root.best().warnings == ["the harness says that lower is better here: rank with --lower-is-better"]
    assert root.best(lower_is_better=True).warnings == []


@pytest.mark.parametrize("details", [None, {}, {"task": "x"}, {"task": {"higher_is_better": "yes"}}, [1], "x"])
def test_details_of_any_shape_are_no_trouble(root: Root, details: Any) -> None:
    """What says nothing of the direction is not asked."""
    root.log("a", 100, 12.5, details=details)
    assert root.best(lower_is_better=True).warnings == []


def test_an_unknown_name_gets_the_known_ones(root: Root) -> None:
    """The closest first; without any evaluation, how to add one."""
    with pytest.raises(UsageError, match="no evaluations") as caught:
        root.best()
    assert "llmtrack eval import" in caught.value.hint
    root.log("a", 100, 0.5)
    with pytest.raises(UsageError, match="there is no evaluation hellaswag/accuracy") as caught:
        root.best("hellaswag/accuracy")
    assert "hellaswag/acc" in caught.value.hint
    with pytest.raises(UsageError, match="none of these runs"):
        root.best(runs=["b"])


def test_the_name_it_has_as_a_metric_will_do(root: Root) -> None:
    """In a tracker an evaluation is called eval/<task>/<metric>."""
    root.log("a", 100, 0.5)
    assert len(root.best("eval/hellaswag/acc").rows) == 1


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run `llmtrack best`, and return its exit status and what it printed."""
    with pytest.raises(SystemExit) as ended:
        program.main(["best", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_command_prints_a_table_and_its_doubts(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """The best first, with a checkpoint id to paste; doubts and what was left out are on standard error."""
    root.log("a", 100, 0.5, harness="lm-eval", harness_version="0.4.9", prompt_hash="config-0123456789abcdef")
    root.log("b", 100, 0.625, harness="lm-eval", harness_version="0.4.13", stderr={"acc": 0.0123})
    root.log("a", 300, 0.9)
    status, out, err = call(capsys, "hellaswag/acc", "--root", root.path)
    head, _, first, second = (line.split() for line in out.strip().splitlines())
    assert status == 0
    assert head[:5] == ["VALUE", "RUN", "TOKENS", "STEP", "CHECKPOINT"]
    assert first[:6] == ["0.625", "b", "100", "10", root.ids["b", 100], "0.012"]
    assert second[:5] == ["0.5", "a", "100", "10", root.ids["a", 100]]
    assert "config-0123456" in second
    assert "warning: measured with different harnesses" in err
    assert "left out: 1 of superseded checkpoints" in err
    _, out, err = call(capsys, "hellaswag/acc", "--root", root.path, "--superseded")
    assert "left out" not in err
    assert out.strip().splitlines()[2].split()[:3] == ["0.9", "a", "300"]


def test_the_command_prints_rows(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the rows have the names of the view's columns."""
    root.log("a", 100, math.nan)
    status, out, _ = call(capsys, "hellaswag/acc", "a", "--root", root.path, "--lower-is-better", "--json")
    (row,) = json.loads(out)
    assert status == 0
    assert (row["run_id"], row["value"], row["task"], row["metric"]) == ("a", "NaN", "hellaswag", "acc")
    assert row.keys() >= {"stderr", "tokens", "step", "ckpt_id", "harness", "prompt_hash", "superseded_by", "matched"}


def test_the_command_says_when_nothing_is_left(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """Only superseded checkpoints: no table, and how to see them; an unknown name or run is wrong usage."""
    root.log("a", 300, 0.9)
    status, out, err = call(capsys, "hellaswag/acc", "--root", root.path)
    assert (status, out) == (0, "")
    assert "--superseded ranks them" in err
    for arguments in (("nothing/acc",), ("hellaswag/acc", "nobody")):
        status, out, err = call(capsys, *arguments, "--root", root.path)
        assert (status, out) == (1, "")
        assert "try:" in err
