"""What a tracker is told of a run beside its points, read from files through the views."""

from __future__ import annotations

import datetime as dt
import json
import math
from pathlib import Path

import pytest

from llmtrack.query import connect
from llmtrack.sync.kinds import CANONICAL, PROVISIONAL, SUPERSEDED
from llmtrack.sync.story import Stories, Story, read_stories
from llmtrack.writer.checkpoints.evals import log_eval
from tests.handmade import DAY, write_part, write_segment
from tests.oracle import Point, Segment


def segment(number: int, start: int, last: int, origin: int | None = None) -> Segment:
    """Return a segment of the run with a point every hundred tokens, and no checkpoint."""
    points = [Point(tokens, "loss", 1.0 / tokens) for tokens in range(start + 100, last + 1, 100)]
    return Segment("run", number, start, None if origin is None else ("run", origin), points)


def read(root: Path) -> Stories:
    """Read the stories of a root."""
    with connect(root) as con:
        return read_stories(con)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run whose first segment was left behind beyond 400, and whose second has a tail beyond 700."""
    first = write_segment(tmp_path, segment(1, 0, 600), config='{"lr": 1}', recipe="{}")
    second = write_segment(tmp_path, segment(2, 400, 900, origin=1), config='{"lr": 2}', recipe="{}")
    write_part(first, "checkpoints", [{"tokens": tokens, "ckpt_id": f"c1-{tokens}"} for tokens in (400, 600)])
    write_part(second, "checkpoints", [{"tokens": 700, "ckpt_id": "c2-700"}])
    write_part(first, "alerts", [alert(n) for n in (300, 500)])
    write_part(second, "alerts", [alert(600), alert(600, phase="cleared"), alert(800, rule="node", metric=None)])
    for number, tokens, value in ((1, 400, 0.25), (1, 600, 0.5), (2, 700, math.nan)):
        log_eval(tmp_path, f"c{number}-{tokens}", "mmlu", {"acc": value})
    return tmp_path


def alert(tokens: int, **more: object) -> dict[str, object]:
    """Return an alert's record."""
    known = {"tokens": tokens, "rule": "spike", "metric": "loss", "value": 9.0, "phase": "raised"}
    return {**known, "batch_ids": ["b1", "b2"], **more}


def names(story: Story) -> list[tuple[str, int]]:
    """Return names and tokens of what becomes points."""
    return [(point.name, point.tokens) for point in story.points()]


def test_alerts_and_evaluations_belong_where_their_tokens_belong(root: Path) -> None:
    """What is settled to the canonical run, the others to the side run of their segment, and nothing to two."""
    story = read(root).of_run("run")
    assert sorted(names(story)) == [
        ("alert/spike/loss", 300), ("alert/spike/loss", 600), ("eval/mmlu/acc", 400), ("eval/mmlu/acc", 700),
    ]  # fmt: skip
    assert names(story.of_side(SUPERSEDED, 1)) == [("alert/spike/loss", 500), ("eval/mmlu/acc", 600)]
    assert names(story.of_side(PROVISIONAL, 2)) == [("alert/node", 800)]
    assert [point.tokens for point in story.points_elsewhere()] == [800, 500, 600]
    assert story.of_side(SUPERSEDED, 2).is_empty
    assert story.digest == read(root).of_run("run").digest  # NaN is the same NaN


def test_an_alert_without_a_value_is_a_point_all_the_same(tmp_path: Path) -> None:
    """It has the value 1, and what came after it was raised is no second point."""
    folder = write_segment(tmp_path, segment(1, 0, 600))
    write_part(folder, "alerts", [alert(300, value=None), alert(300, phase="context"), alert(400, phase="cleared")])
    story = read(tmp_path).of_run("run").of_side(PROVISIONAL, 1)
    assert [(point.tokens, point.value) for point in story.points()] == [(300, 1.0)]
    assert [record.batch_ids for record in story.alerts] == [("b1", "b2")] * 3


def test_evaluations_are_gathered_by_checkpoint(tmp_path: Path) -> None:
    """Several of one checkpoint by time, the same one twice once, and each where its checkpoint is."""
    folder = write_segment(tmp_path, segment(1, 0, 600))
    write_part(folder, "checkpoints", [{"tokens": n, "ckpt_id": f"c{n}", "path": f"/x/{n}"} for n in (400, 600)])
    write_segment(tmp_path, segment(2, 400, 500, origin=1))
    for ckpt_id, value in (("c400", 0.25), ("c400", 0.75), ("c600", 0.5), ("nobody", 0.1)):
        log_eval(tmp_path, ckpt_id, "mmlu", {"acc": value}, tokens=400 if ckpt_id == "nobody" else None)
    stories = read(tmp_path)
    story = stories.of_run("run")
    assert [(c.ckpt_id, c.path, c.superseded_by) for c in story.checkpoints] == [
        ("c400", "/x/400", None),
        ("c600", "/x/600", 2),
    ]
    assert sorted(e.value for e in story.checkpoints[0].evaluations) == [0.25, 0.75]
    assert sorted(point.value for point in story.points()) == [0.25, 0.75]
    assert [point.ckpt_id for point in story.of_side(SUPERSEDED, 1).points()] == ["c600"]
    assert [unknown.ckpt_id for unknown in stories.unplaced] == ["nobody"]


def test_only_settings_that_differ_from_those_before_are_told(tmp_path: Path) -> None:
    """A hundred restarts with one configuration are one setting."""
    for number, config in enumerate(('{"lr": 1}', '{"lr": 1.0}', '{"lr": 2}', '{"lr": 2}'), start=1):
        write_segment(tmp_path, segment(number, 0, 100), config=config, recipe='{"mix": "a"}')
    settings = read(tmp_path).of_run("run").settings
    assert [(setting.segment, setting.config) for setting in settings] == [(1, {"lr": 1}), (3, {"lr": 2})]
    assert settings[0].recipe == {"mix": "a"}


def test_a_story_is_the_same_while_a_segment_only_gets_points(tmp_path: Path) -> None:
    """Its digest changes with an alert, an evaluation and a restart, and not with every row that is logged."""
    folder = write_segment(tmp_path, segment(1, 0, 600))
    before = read(tmp_path).of_run("run").digest
    rows = [{"tokens": n, "name": "loss", "value": 1.0, "time": DAY + dt.timedelta(days=1)} for n in (700, 800)]
    write_part(folder, "metrics", rows, part=2)
    assert read(tmp_path).of_run("run").digest == before
    write_part(folder, "alerts", [alert(500)])
    told = read(tmp_path).of_run("run").digest
    assert told != before
    write_segment(tmp_path, segment(2, 400, 500, origin=1))
    assert read(tmp_path).of_run("run").digest not in {before, told}


def test_the_rows_of_segments_can_be_told_as_json(root: Path) -> None:
    """One for each lifetime; where one that is over has ended although nobody wrote that down."""
    rows = read(root).of_run("run").segments
    assert [(row["segment"], row["start_tokens"], row["end_tokens"]) for row in rows] == [(1, 0, 600), (2, 400, None)]
    assert json.dumps(rows)


def test_a_run_that_is_not_there_has_an_empty_story(tmp_path: Path) -> None:
    """Nothing is told of it."""
    write_segment(tmp_path, segment(1, 0, 100))
    story = read(tmp_path).of_run("other")
    assert (story.kind, story.is_empty, story.points()) == (CANONICAL, True, [])
