"""One run as a tree, for a person at a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from rich.text import Text
from rich.tree import Tree

from llmtrack.query.text.layout import moment, span, tokens, visible

from .describe import Row, RunDescription, changed_keys

_GOOD: Final = "green"
_PALE: Final = "dim"
_BAD: Final = "red"
_ODD: Final = "yellow"
_STYLES: Final = {"running": _GOOD, "finished": "", "failed": _BAD, "lost": _BAD, "stalled": _ODD, "preempted": _ODD}


def run_tree(described: RunDescription) -> Tree:
    """Return the run, what it was forked from, its segments in order, and what became of each."""
    run = described.run
    title = Text(run["run_id"], style="bold")
    title.append(f"  {run['status']}", style=_STYLES.get(run["status"], ""))
    if run.get("tokens") is not None:
        title.append(f"  {tokens(run['tokens'])} tokens, step {run['step']}")
    title.append(f"  {_count(len(described.segments), 'segment')}")
    for key in ("project", "run_name"):
        if run.get(key):
            title.append(f"  {visible(run[key])}", style=_PALE)
    tree = Tree(title)
    if run.get("parent_run"):
        forked = next((row for row in described.segments if row["from_run"] == run["parent_run"]), None)
        _add_fork(tree, "forked from", run["parent_run"], run, forked["recipe_diff"] if forked else None)
    for row in described.segments:
        _add_segment(tree, row, run["run_id"], is_last=row is described.segments[-1], status=run["status"])
    for child in described.children:
        _add_fork(tree, "forked into", child["run_id"], child, child["recipe_diff"])
    for damage in described.damages:
        tree.add(_damage(damage))
    return tree


def _add_segment(tree: Tree, row: Row, run_id: str, *, is_last: bool, status: str) -> None:
    line = Text(f"segment {row['segment']}", style="bold")
    if not row["started"]:
        line.append("  its start was not written, or cannot be read: on no path", style=_ODD)
        branch = tree.add(line)
    else:
        line.append(f"  {tokens(row['start_tokens'])} to {tokens(row['last_tokens'])} tokens")
        end = row["exit"] or (status if is_last else "no end: killed, or lost")
        line.append(f"  {end}", style=_STYLES.get(end, _ODD if row["exit"] is None else ""))
        seconds = (row["last_time"] - row["start_time"]).total_seconds()
        line.append(f"  {moment(row['start_time'])}, {span(seconds)}", style=_PALE)
        hardware = [text for text in (row["host"], _count(row["world_size"], "rank")) if text]
        if hardware:
            line.append(f"  {', '.join(hardware)}", style=_PALE)
        if row["checkpoints"]:
            line.append(f"  {_count(row['checkpoints'], 'checkpoint')} up to {tokens(row['last_checkpoint'])}", _PALE)
        branch = tree.add(line)
        if (row["from_run"], row["from_segment"]) != (run_id, row["segment"] - 1):  # where one would look for it
            branch.add(Text(_origin(row, run_id)))
    for note in _notes(row):
        branch.add(note)
    for child in row["children"]:
        _add_fork(branch, "forked into", child["run_id"], child, child["recipe_diff"])


def _notes(row: Row) -> Iterator[Text]:
    """Yield what became of a segment: superseded, at odds with another, gaps, damage, the error it ended with."""
    for lost in row["superseded"]:
        where = f"{tokens(lost['from_tokens'])} to {tokens(lost['to_tokens'])}"
        yield Text(f"{where} superseded by segment {lost['superseded_by']}", style=_PALE)
    for other in row["at_once_with"]:
        yield Text(f"went on while segment {other} was running: two writers at once; the path decides", style=_ODD)
    for gap in row["gaps"]:
        where = f"{tokens(gap['first_tokens'])} to {tokens(gap['last_tokens'])}"
        why = gap["reason"] + (f", {os.strerror(gap['errno'])}" if gap["errno"] else "")
        yield Text(f"gap at {where}: {_count(gap['points'], 'point')} lost ({why})", style=_ODD)
    for damage in row["damages"]:
        yield _damage(damage)
    if row["detail"]:
        yield Text(visible(row["detail"].splitlines()[0]), style=_PALE)


def _origin(row: Row, run_id: str) -> str:
    if row["from_run"] is None or row["from_segment"] is None:
        return "from nothing"
    place = f"segment {row['from_segment']} at {tokens(row['start_tokens'])}"
    return f"from {place}" if row["from_run"] == run_id else f"from {row['from_run']}, {place}"


def _add_fork(tree: Tree, verb: str, run_id: str, row: Row, recipe_diff: str | None) -> None:
    reason = f" ({row['fork_reason']})" if row["fork_reason"] else ""
    branch = tree.add(Text(f"{verb} {run_id} at {tokens(row['fork_tokens'])}{reason}", style="cyan"))
    for change in changed_keys(recipe_diff):
        branch.add(Text(visible(change)))


def _damage(row: Row) -> Text:
    name = os.path.basename(row["path"])  # noqa: PTH119 - a name out of a text
    return Text(f"damaged: {name}, bytes {row['first_byte']} to {row['end_byte']}: {row['reason']}", style=_BAD)


def _count(number: int | None, noun: str) -> str:
    return "" if number is None else f"{number:,} {noun}{'' if number == 1 else 's'}"
