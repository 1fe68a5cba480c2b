"""What a root should look like in MLflow, worked out with pyarrow and the rules in plain Python, and what it does."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from tests.oracle import Oracle, Point, Segment
from tests.reading import read_segment

Key = tuple[str, str, int | None]  # run, kind, segment of a side run
Value = tuple[str, int, int, float]  # name, tokens, milliseconds, value
Curves = dict[Key, Counter[Value]]


class _Still(Oracle):
    """An oracle of a log as it is now: a horizon is worked out once, and not for each of a hundred thousand points."""

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__(segments)
        self._horizons: dict[str, float] = {}

    def horizon(self, run_id: str) -> float:
        """Return what the oracle says."""
        if run_id not in self._horizons:
            self._horizons[run_id] = super().horizon(run_id)
        return self._horizons[run_id]


def expected(root: Path) -> Curves:
    """Return every run that a tracker should hold, with its points, from the files of a log."""
    segments: list[Segment] = []
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for folder in sorted(root.glob("run_id=*/segment=*")):
        run_id, number = folder.parent.name.removeprefix("run_id="), int(folder.name.removeprefix("segment="))
        content = read_segment(folder)
        records = {record["phase"]: record for record in content["segments"]}
        start, end = records.get("start"), records.get("end")
        origin = None
        if start is not None and start["from_run"] is not None and start["from_segment"] is not None:
            origin = (start["from_run"], start["from_segment"])
        rows[run_id, number] = content["metrics"]
        segments.append(
            Segment(
                run_id,
                number,
                start["tokens"] if start is not None else 0,
                origin,
                [Point(row["tokens"], row["name"], row["value"]) for row in content["metrics"]],
                [checkpoint["tokens"] for checkpoint in content["checkpoints"]],
                None if end is None else end["exit"],
                start is not None,
            )
        )
    oracle = _Still(segments)
    horizons = {run_id: oracle.horizon(run_id) for run_id in oracle.runs()}
    curves: Curves = {(run_id, "canonical", None): Counter() for run_id in horizons}
    for segment in segments:
        kinds: dict[tuple[int, str], tuple[str, int | None]] = {}
        for row in rows[segment.key]:
            place = row["tokens"], row["name"] if row["tokens"] == segment.start else ""
            if place not in kinds:
                point = Point(row["tokens"], row["name"], row["value"])
                if oracle.superseded_by(segment, point) is not None:
                    kinds[place] = "superseded", segment.number
                elif oracle.settled(segment, point):
                    kinds[place] = "canonical", None
                else:
                    kinds[place] = "provisional", segment.number
            value = row["name"], row["tokens"], row["time"], row["value"]
            curves.setdefault((segment.run_id, *kinds[place]), Counter())[value] += 1
    return curves


def _reading(database: Path) -> contextlib.closing[sqlite3.Connection]:
    uri = f"file:{database}?mode=ro"
    return contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60))


def stored(database: Path) -> Curves:
    """Return what MLflow's database holds of runs that count, without what sync adds to their points."""
    curves: Curves = {}
    with _reading(database) as con:
        con.execute("BEGIN")  # a run may be deleted between two statements
        for (ref,) in con.execute("SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active'").fetchall():
            tags = dict(con.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [ref]))
            kind = tags["llmtrack.kind"]
            if kind == "replaced":
                continue
            number = int(tags["llmtrack.segment"]) if "llmtrack.segment" in tags else None
            found = con.execute("SELECT key, step, timestamp, value FROM metrics WHERE run_uuid = ?", [ref]).fetchall()
            points = Counter(point for point in found if point[0] != "step" and not point[0].startswith("alert/"))
            key = tags["llmtrack.run_id"], kind, number
            assert key not in curves, f"twice there: {key}"
            curves[key] = points
    return curves


def statuses(database: Path) -> dict[str, str]:
    """Return the status of each canonical run in MLflow."""
    with _reading(database) as con:
        return dict(
            con.execute(
                "SELECT i.value, status FROM runs JOIN tags k ON k.run_uuid = runs.run_uuid AND k.key = 'llmtrack.kind'"
                " AND k.value = 'canonical' JOIN tags i ON i.run_uuid = runs.run_uuid AND i.key = 'llmtrack.run_id'"
            ).fetchall()
        )


def states(database: Path) -> dict[str, str]:
    """Return what each canonical run in MLflow is said to be, more exactly than MLflow's own status can."""
    with _reading(database) as con:
        return dict(
            con.execute(
                "SELECT i.value, s.value FROM tags s JOIN tags i USING (run_uuid)"
                " WHERE s.key = 'llmtrack.state' AND i.key = 'llmtrack.run_id'"
            ).fetchall()
        )


def difference(wanted: Curves, there: Curves) -> dict[Key, tuple[int, int]]:
    """Return for each run that is not as it should be how many points it lacks, and how many it has too many."""
    empty: Counter[Value] = Counter()
    found = {}
    for key in wanted.keys() | there.keys():
        want, has = wanted.get(key, empty), there.get(key, empty)
        if want != has or (key not in there) != (key not in wanted):
            found[key] = ((want - has).total(), (has - want).total())
    return found
