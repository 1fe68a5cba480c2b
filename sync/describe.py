"""What a run is called in a tracker, and everything that is said of it there beside its points."""

from __future__ import annotations

from typing import Final

from .classify import LoggedRun, Segment, Stretch
from .sink import CANONICAL, PROVISIONAL, REPLACED, SUPERSEDED, RunSpec

_NOTE_SEGMENTS: Final = 30  # a note has room for 8000 characters in MLflow
_NOTE_TEXT_CHARS: Final = 2000
_LARGE_TOKENS: Final = 10_000_000  # from here on nobody counts digits


def canonical_spec(run: LoggedRun, generation: int, parent: str | None) -> RunSpec:
    """Return what the run with the settled points is to be.

    Args:
        run: The run of the log.
        generation: From 1.
        parent: The tracker's id of the parent's canonical run, if the tracker has it.
    """
    return RunSpec(
        run_id=run.run_id,
        kind=CANONICAL,
        segment=None,
        generation=generation,
        project=run.project,
        name=run.name,
        status=run.status,
        start_ms=run.start_ms,
        end_ms=run.end_ms,
        parent=parent,
        facts=_lineage(run) | ({"git_commit": run.git_commit} if run.git_commit else {}),
        config=run.config,
        recipe=run.recipe,
        note=_note(run),
    )


def side_spec(run: LoggedRun, kind: str, stretch: Stretch, generation: int, canonical: str) -> RunSpec:
    """Return what the run with one segment's provisional or superseded points is to be.

    Args:
        run: The run of the log.
        kind: `PROVISIONAL` or `SUPERSEDED`.
        stretch: Its points.
        generation: That of the canonical run.
        canonical: The tracker's id of the canonical run.
    """
    segments = {segment.segment: segment for segment in run.segments}
    own = segments.get(stretch.segment)
    facts = _lineage(run) | {"last_tokens": str(stretch.last_tokens)}
    if kind == SUPERSEDED:
        starts = [segments[n].start_tokens for n in stretch.superseded_by if n in segments]
        first = min([stretch.first_tokens, *(start for start in starts if start is not None)])
        by = ", ".join(map(str, stretch.superseded_by))
        facts |= {"first_tokens": str(first), "superseded_by": by}
        name = (
            f"segment {stretch.segment}: superseded {tokens(first)}\N{EN DASH}{tokens(stretch.last_tokens)} tokens"
            f" by segment {by}"
        )
    else:
        first = run.settled_to if run.settled_to is not None else stretch.first_tokens
        facts |= {"first_tokens": str(first)}
        name = f"segment {stretch.segment}: provisional beyond {tokens(first)} tokens"
    status = "killed" if kind == SUPERSEDED else run.status
    return RunSpec(
        run_id=run.run_id,
        kind=kind,
        segment=stretch.segment,
        generation=generation,
        project=run.project,
        name=name,
        status=status,
        start_ms=(own.start_ms if own else None) or run.start_ms,
        end_ms=None if status == "running" else stretch.last_ms,
        parent=canonical,
        facts=facts,
    )


def replaced_spec(
    run: LoggedRun, segment: int | None, generation: int, parent: str | None, end_ms: int | None = None
) -> RunSpec:
    """Return what a run becomes in the tracker whose points are not what it says they are any more.

    Args:
        run: The run of the log.
        segment: That of a side run; None for a canonical run.
        generation: The one it is of.
        parent: The tracker's id of the canonical run that took its place, once there is one.
        end_ms: When it ended, milliseconds since the epoch; None leaves that as it is.
    """
    return RunSpec(
        run_id=run.run_id,
        kind=REPLACED,
        segment=segment,
        generation=generation,
        project=run.project,
        name=f"{run.name} (replaced: generation {generation})" if segment is None else f"segment {segment}: replaced",
        status="killed",
        start_ms=run.start_ms,
        end_ms=end_ms,
        parent=parent,
        facts=_lineage(run),
    )


def tokens(number: int) -> str:
    """Return a number of tokens for people: exact while that can be read, else with four digits."""
    if number < _LARGE_TOKENS:
        return str(number)
    size, unit = next((s, u) for s, u in ((10**15, "P"), (10**12, "T"), (10**9, "B"), (10**6, "M")) if number >= s)
    return f"{number / size:.4g}{unit}"


def held_reason(run: LoggedRun, kind: str) -> str:
    """Return why points of a kind are not sent when the options leave them out."""
    if kind == PROVISIONAL:
        where = "no checkpoint yet" if run.settled_to is None else f"beyond {tokens(run.settled_to)} tokens"
        return f"provisional, {where}: --tail hold"
    return "superseded: --superseded drop"


def _lineage(run: LoggedRun) -> dict[str, str]:
    facts = {f"fork_{key}": value for key, value in run.fork.items()}
    return facts | ({"parent_run": run.parent_run} if run.parent_run else {})


def _note(run: LoggedRun) -> str:
    lines = [f"Run `{run.run_id}`, replayed from its log by llmtrack. The x-axis (step) is **tokens seen**."]
    if run.parent_run:
        lines.append(
            f"Forked from `{run.parent_run}`"
            + (f", segment {run.fork['segment']}" if "segment" in run.fork else "")
            + (f", at {run.fork['tokens']} tokens" if "tokens" in run.fork else "")
            + (f" ({run.fork['reason']})" if "reason" in run.fork else "")
            + "."
        )
        if "recipe_diff" in run.fork:
            lines.append(_in_a_note("Changed", run.fork["recipe_diff"]))
    shown = run.segments[-_NOTE_SEGMENTS:]
    lines.append(
        "| segment | from tokens | ended | host | ranks |\n|---|---|---|---|---|\n"
        + "\n".join(_row(segment) for segment in shown)
    )
    if len(shown) < len(run.segments):
        lines.append(f"Earlier segments: {len(run.segments) - len(shown)}.")
    return "\n\n".join(lines)


def _in_a_note(title: str, text: str) -> str:
    return f"{title}: `{text}`" if len(text) <= _NOTE_TEXT_CHARS else f"{title}: {len(text)} characters, see the tags."


def _row(segment: Segment) -> str:
    cells = (segment.segment, segment.start_tokens, segment.exit, segment.host, segment.world_size)
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"
