"""The best checkpoints by one evaluated metric, and whether they were measured alike."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from llmtrack.writer.errors import UsageError

_COLUMNS: Final = (
    *("value", "stderr", "run_id", "tokens", "step", "ckpt_id", "path", "task", "metric"),
    *("harness", "harness_version", "prompt_hash", "time", "superseded_by", "matched"),
)
# NaN is greater than every number in DuckDB, and better than none. What cannot be loaded by its path is not the best.
_RANKED: Final = """
    SELECT e.*, p.path, e.details
    FROM evals e
    LEFT JOIN (SELECT ckpt_id, run_id, max(path) AS path FROM checkpoints GROUP BY ckpt_id, run_id) p
           ON p.ckpt_id = e.ckpt_id AND p.run_id = e.run_id
    WHERE e.task || '/' || e.metric IN ($name, $logged_name)
    ORDER BY NOT e.matched, isnan(e.value), CASE WHEN $lower THEN e.value ELSE -e.value END, e.tokens, e.ckpt_id,
             e.time, e.seq
"""
_NAMES: Final = "SELECT DISTINCT task || '/' || metric FROM evals ORDER BY 1"
_SHOWN_NAMES: Final = 8
_NO_EVALS: Final = (
    "add some with `llmtrack eval import FILE` or llmtrack.log_eval; what run.log logged is a metric, which "
    "`llmtrack plot` and `compare` show"
)


@dataclass(frozen=True)
class Ranking:
    """Values of one metric, best first.

    Attributes:
        rows: One for each value, with the columns of the view `evals` and the checkpoint's `path`.
        warnings: Why the values may not be comparable, one sentence each.
        superseded: How many values were left out because their checkpoint is superseded.
    """

    rows: list[dict[str, Any]]
    warnings: list[str]
    superseded: int


def best(
    con: duckdb.DuckDBPyConnection,
    name: str,
    *,
    runs: Collection[str] = (),
    lower_is_better: bool = False,
    superseded: bool = False,
) -> Ranking:
    """Rank every evaluation of one metric: NaN last, and behind them those of checkpoints that no run has recorded.

    Args:
        con: Made by `connect`.
        name: Task and metric, as in ``hellaswag/acc``; ``eval/`` in front does not matter.
        runs: Only checkpoints of these runs; none given: all, those included that no run has recorded.
        lower_is_better: For perplexities and losses.
        superseded: Rank evaluations of superseded checkpoints too.

    Raises:
        UsageError: There is no evaluation of that name.
    """
    cursor = con.execute(_RANKED, {"name": name, "logged_name": name.removeprefix("eval/"), "lower": lower_is_better})
    columns = [column[0] for column in cursor.description or ()]
    found = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    candidates = [row for row in found if not runs or row["run_id"] in runs]
    if not candidates:
        raise _no_such_name(con, name, elsewhere=bool(found))
    kept = [row for row in candidates if superseded or row["superseded_by"] is None]
    return Ranking(
        [{column: row[column] for column in _COLUMNS} for row in kept],
        list(_doubts(kept, lower_is_better=lower_is_better)),
        len(candidates) - len(kept),
    )


def _no_such_name(con: duckdb.DuckDBPyConnection, name: str, *, elsewhere: bool) -> UsageError:
    if elsewhere:
        return UsageError(f"none of these runs has an evaluation {name}", hint="leave the runs out to see all")
    names = [str(row[0]) for row in con.execute(_NAMES).fetchall()]
    if not names:
        return UsageError("there are no evaluations in this root", hint=_NO_EVALS)
    shown = difflib.get_close_matches(name, names, _SHOWN_NAMES, 0.3) or names[:_SHOWN_NAMES]
    return UsageError(f"there is no evaluation {name}", hint=f"one of {', '.join(shown)}")


def _doubts(rows: Sequence[Mapping[str, Any]], *, lower_is_better: bool) -> Iterator[str]:
    """Say why values may not be comparable; what is unknown for some is a difference, unknown for all is none."""
    harnesses = {" ".join(filter(None, (row["harness"], row["harness_version"]))) or "unknown" for row in rows}
    if len(harnesses) > 1:
        yield f"measured with different harnesses, which need not agree: {', '.join(sorted(harnesses))}"
    prompts = {str(row["prompt_hash"] or "unknown") for row in rows}
    if len(prompts) > 1:
        yield f"{len(prompts)} different prompt hashes: not every checkpoint was asked the same"
    if any(_higher_is_better(row["details"]) is lower_is_better for row in rows):
        better, option = ("higher", "without") if lower_is_better else ("lower", "with")
        yield f"the harness says that {better} is better here: rank {option} --lower-is-better"


def _higher_is_better(details: str | None) -> bool | None:
    """Return what an imported result says of its metric; details of other origin say nothing."""
    try:
        task = json.loads(details or "{}").get("task")
    except (ValueError, AttributeError):
        return None
    said = task.get("higher_is_better") if isinstance(task, dict) else None
    return said if isinstance(said, bool) else None
