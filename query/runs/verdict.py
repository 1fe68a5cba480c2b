"""What alerts have in common over restarts and forks: the data, the optimiser's state or the hardware, or one node.

The rules, for alerts about loss and gradient norm:

* `same_batch`: a later segment of the lineage that went over the place again raised one at the same batch, or at the
  same position in the order of the data. The data is the suspect.
* `moved`: it raised one, at another batch, no farther from the place than twice the way it went back. The optimiser's
  state or the hardware is the suspect.
* `gone`: it passed the place, and nothing happened. Hardware or chance; or the batch was skipped.
* `no_batches`: it came again, and no batches were logged to compare.

And for a slow rank:

* `same_node`: in several segments the slowest rank was on one node, or had one number where nodes are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import duckdb

Row = dict[str, Any]
Suspect = Literal["data", "state or hardware", "hardware or chance", "node", "unknown"]

_UNSTABLE: Final = frozenset({"loss_spike", "grad_norm_spike", "nonfinite", "divergence"})
_SLOW_RANK: Final = "slow_rank"
_SHOWN_IDS: Final = 5
_NEAR: Final = 2  # times the way that was gone back: what is farther away is another event

_ALERTS: Final = """
    SELECT a.*, e.cleared_time, e.cleared_step, coalesce(e.stays, false) AS stays, coalesce(e.context, []) AS context,
           b.positions
    FROM alerts a
    LEFT JOIN (
        SELECT run_id, segment, alert_id, max(time) FILTER (phase = 'cleared') AS cleared_time,
               max(step) FILTER (phase = 'cleared') AS cleared_step,
               bool_or(starts_with(message, 'stays so')) FILTER (phase = 'cleared') AS stays,
               list(message ORDER BY seq) FILTER (phase = 'context') AS context
        FROM alerts
        WHERE phase <> 'raised'
        GROUP BY run_id, segment, alert_id
    ) e ON e.run_id = a.run_id AND e.segment = a.segment AND e.alert_id = a.alert_id
    LEFT JOIN (
        SELECT run_id, segment, step, list(DISTINCT position ORDER BY position) AS positions
        FROM batches
        WHERE position IS NOT NULL
        GROUP BY run_id, segment, step
    ) b ON b.run_id = a.run_id AND b.segment = a.segment AND b.step = a.step
    WHERE a.phase = 'raised'
    ORDER BY a.time, a.run_id, a.segment, a.seq
"""
_SEGMENTS: Final = """
    SELECT run_id, segment, from_run, start_tokens, last_tokens, start_time, nodes, world_size
    FROM segments
    WHERE started
    ORDER BY start_time, run_id, segment
"""


@dataclass(frozen=True)
class Verdict:
    """What some alerts of one lineage say together.

    Attributes:
        suspect: What is to be looked at.
        rule: By which of the rules of this module.
        summary: The same as a sentence.
        evidence: What it stands on, a line each.
        alerts: Ids of the alerts.
        lineage: The run that all others of the lineage come from.
    """

    suspect: Suspect
    rule: str
    summary: str
    evidence: list[str]
    alerts: list[str]
    lineage: str


@dataclass
class _Lineage:
    """Runs that were forked from one another."""

    root: str
    segments: list[Row] = field(default_factory=list)
    alerts: list[Row] = field(default_factory=list)


def list_alerts(con: duckdb.DuckDBPyConnection) -> list[Row]:
    """Return every alert that was raised, the oldest first: the columns of the view `alerts`, and what came of it.

    The further columns: `cleared_time`, `cleared_step` (null while it goes on, or when the process ended), `stays` (it
    was cleared because it has stayed so, and is told no more), `context` (messages), `positions` (in the order of the
    data, of the batch of its step).
    """
    return _fetch(con, _ALERTS)


def find_verdicts(con: duckdb.DuckDBPyConnection, alerts: Sequence[Row]) -> list[Verdict]:
    """Return what alerts have in common, over the segments and children of each lineage.

    Args:
        con: Made by `connect`.
        alerts: From `list_alerts`; all of a lineage, or some.
    """
    verdicts: list[Verdict] = []
    for lineage in _lineages(_fetch(con, _SEGMENTS), alerts):
        verdicts += _of_batches(lineage)
        verdicts += _of_nodes(lineage)
    return verdicts


def _lineages(segments: Sequence[Row], alerts: Sequence[Row]) -> Iterator[_Lineage]:
    parent = {row["run_id"]: row["run_id"] for row in segments}
    for row in segments:
        if row["from_run"] in parent:
            parent[_root(parent, row["run_id"])] = _root(parent, row["from_run"])
    found: dict[str, _Lineage] = {}
    for row in segments:
        root = _root(parent, row["run_id"])
        found.setdefault(root, _Lineage(root)).segments.append(row)
    for row in alerts:
        if row["run_id"] in parent:
            found[_root(parent, row["run_id"])].alerts.append(row)
    yield from found.values()


def _root(parent: dict[str, str], run_id: str) -> str:
    while parent[run_id] != run_id:
        run_id = parent[run_id]
    return run_id


def _of_batches(lineage: _Lineage) -> Iterator[Verdict]:
    """Yield a verdict for each place of an instability that a later segment came by again."""
    unstable = [row for row in lineage.alerts if row["rule"] in _UNSTABLE]
    told: set[str] = set()
    for alert in unstable:
        later = [row for row in lineage.segments if _comes_by_again(row, alert)]
        if not later or alert["alert_id"] in told:
            continue
        back = {_key(row): alert["tokens"] - row["start_tokens"] for row in later}
        again = [row for row in unstable if _key(row) in back]
        same = [row for row in again if _shared(alert, row)]
        after = [row for row in again if abs(row["tokens"] - alert["tokens"]) <= _NEAR * back[_key(row)]]
        if same:
            told |= {row["alert_id"] for row in same}
            yield _same_batch(lineage, alert, same)
        elif after and any(_has_batches(row) for row in after) and _has_batches(alert):
            told |= {row["alert_id"] for row in after}
            yield Verdict(
                "state or hardware",
                "moved",
                "after going back it came at another batch: look at the optimiser's state and at the hardware",
                [_place(alert), *map(_place, after), "no batch and no position in common"],
                _ids([alert, *after]),
                lineage.root,
            )
        elif after:
            yield Verdict(
                "unknown",
                "no_batches",
                "after going back it came again, and nobody knows at which batch: log batch_ids",
                [_place(alert), *map(_place, after)],
                _ids([alert, *after]),
                lineage.root,
            )
        elif passed := [row for row in later if row["last_tokens"] > alert["tokens"]]:
            yield Verdict(
                "hardware or chance",
                "gone",
                "after going back it did not come again: hardware or chance, unless its batch was skipped",
                [_place(alert), *(f"{_name(row)} passed {alert['tokens']:,} tokens without one" for row in passed)],
                _ids([alert]),
                lineage.root,
            )


def _comes_by_again(segment: Row, alert: Row) -> bool:
    """Return whether a segment began later, and before the place; of one run by their numbers: clocks differ."""
    if segment["run_id"] == alert["run_id"]:
        is_later = segment["segment"] > alert["segment"]
    else:
        is_later = segment["start_time"] > alert["time"]
    return bool(is_later and segment["start_tokens"] < alert["tokens"])


def _same_batch(lineage: _Lineage, alert: Row, same: list[Row]) -> Verdict:
    shared = set().union(*(_shared(alert, row) for row in same))
    ids = [text for text in alert["batch_ids"] or () if ("id", text) in shared]  # those of its own step first
    positions = sorted(int(text) for kind, text in shared if kind == "position")
    evidence = [_place(alert), *map(_place, same)]
    if ids:
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        evidence.append(f"the same batch: {', '.join(ids[:_SHOWN_IDS])}{more}")
    if positions:
        evidence.append(f"the same position in the data: {', '.join(map(str, positions))}")
    return Verdict(
        "data",
        "same_batch",
        "after going back it came at the same batch again: look at the data, or skip it",
        evidence,
        _ids([alert, *same]),
        lineage.root,
    )


def _shared(one: Row, other: Row) -> set[tuple[str, str]]:
    """Return the ids and positions that two alerts have in common."""
    return _suspects(one) & _suspects(other)


def _suspects(alert: Row) -> set[tuple[str, str]]:
    ids = {("id", text) for text in alert["batch_ids"] or ()}
    return ids | {("position", str(position)) for position in alert["positions"] or ()}


def _has_batches(alert: Row) -> bool:
    return bool(_suspects(alert))


def _of_nodes(lineage: _Lineage) -> Iterator[Verdict]:
    """Yield a verdict for each node, or rank, that was the slowest in several segments."""
    by_key = {_key(row): row for row in lineage.segments}
    found: dict[str, list[Row]] = defaultdict(list)
    for alert in lineage.alerts:
        if alert["rule"] == _SLOW_RANK and alert["value"] is not None and alert["value"] == alert["value"]:
            found[_node(by_key.get(_key(alert)), int(alert["value"]))].append(alert)
    for node, alerts in found.items():
        if len({_key(alert) for alert in alerts}) > 1:
            yield Verdict(
                "node",
                "same_node",
                f"{node} was the slowest in {len({_key(alert) for alert in alerts})} segments: take it out",
                [f"{_place(alert)}" for alert in alerts],
                _ids(alerts),
                lineage.root,
            )


def place_of_rank(con: duckdb.DuckDBPyConnection, alert: Row) -> str:
    """Return where the rank is that an alert about a slow one names: its node, or its number where that is unknown."""
    segments = {_key(row): row for row in _fetch(con, _SEGMENTS)}
    rank = alert["value"]
    return _node(segments.get(_key(alert)), int(rank)) if rank is not None and rank - rank == 0 else "one rank"


def _node(segment: Row | None, rank: int) -> str:
    """Return the node that a rank was on, ranks being dealt out node by node; the rank where that cannot be said."""
    nodes = (segment or {}).get("nodes") or []
    ranks = (segment or {}).get("world_size") or 0
    if len(nodes) > 1 and ranks % len(nodes) == 0 and rank < ranks:
        return f"node {nodes[rank // (ranks // len(nodes))]}"
    return f"rank {rank}"


def _place(alert: Row) -> str:
    return f"{_name(alert)} at step {alert['step']}, {alert['tokens']:,} tokens: {alert['message']}"


def _name(row: Row) -> str:
    return f"{row['run_id']} segment {row['segment']}"


def _key(row: Row) -> tuple[str, int]:
    return row["run_id"], row["segment"]


def _ids(alerts: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["alert_id"] for row in alerts))


def _fetch(con: duckdb.DuckDBPyConnection, query: str, *parameters: object) -> list[Row]:
    cursor = con.execute(query, list(parameters))
    columns = [column[0] for column in cursor.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
