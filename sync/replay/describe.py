"""What a run is called in a tracker, and everything that is said of it there beside its points."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from llmtrack.sync.kinds import CANONICAL, PROVISIONAL, REPLACED, SUPERSEDED
from llmtrack.sync.sink import RunSpec
from llmtrack.sync.story import Alert, Story, Unknown

from .classify import LoggedRun, Segment, Stretch

_NOTE_CHARS: Final = 4800  # a note has room for 5000 characters in every version of MLflow, and 8000 in newer ones
_NOTE_ROWS: Final = 20  # of each table in a note
_VALUE_CHARS: Final = 80  # of a changed value in a note; the whole is in the tags, and in the table of configurations
_FACT_CHARS: Final = 1000
_CHANGES: Final = 50  # facts about changed settings; a configuration in which more changes is better read as a whole
_SHOWN: Final = 5
_LARGE_TOKENS: Final = 10_000_000  # from here on nobody counts digits


class Change(NamedTuple):
    """A setting that is another one from a segment on; `before` and `after` are for people."""

    key: str
    segment: int
    before: str
    after: str


def canonical_spec(run: LoggedRun, story: Story, generation: int, parent: str | None) -> RunSpec:
    """Return what the run with the settled points is to be.

    Args:
        run: The run of the log.
        story: Its story.
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
        facts=_lineage(run) | _state(run) | _origin(story) | _alert_facts(story) | _change_facts(run, story),
        config=merged([setting.config for setting in story.settings]) or run.config,
        recipe=merged([setting.recipe for setting in story.settings]) or run.recipe,
        note=_note(run, story),
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
        by = [str(n) for n in stretch.superseded_by]
        facts |= {"first_tokens": str(first), "superseded_by": ", ".join(by)}
        name = (
            f"segment {stretch.segment}: superseded by {' and '.join(by)},"
            f" {tokens(first)}\N{EN DASH}{tokens(stretch.last_tokens)} tokens"
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


def held_evaluations(unknown: Sequence[Unknown]) -> str:
    """Return why evaluations are not in the tracker as points; nothing when there are none."""
    if not unknown:
        return ""
    ids = sorted({found.ckpt_id for found in unknown})
    shown = ", ".join(ids[:_SHOWN]) + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")
    return (
        f"{len(unknown)} evaluation{'s' * (len(unknown) > 1)} held back: no run has recorded the"
        f" checkpoint{'s' * (len(ids) > 1)} {shown}"
    )


def merged(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one configuration for all segments: of each key the first value, because a parameter never changes."""
    whole: dict[str, Any] = {}
    for setting in settings:
        for key, value in setting.items():
            if key not in whole:
                whole[key] = value
            elif isinstance(value, Mapping) and isinstance(whole[key], Mapping):
                whole[key] = merged([whole[key], value])
    return whole


def changes(story: Story) -> list[Change]:
    """Return what was set otherwise on the way, by segment and key; the recipe's keys begin with ``recipe.``."""
    found: list[Change] = []
    before: dict[str, Any] | None = None
    for setting in story.settings:
        after = dict(_flat("", {**setting.config, **({"recipe": setting.recipe} if setting.recipe else {})}))
        if before is not None:
            found += [
                Change(key, setting.segment, _shown(before, key), _shown(after, key))
                for key in sorted({*before, *after})
                if before.get(key, _GONE) != after.get(key, _GONE)
            ]
        before = after
    return found


_GONE: Final = object()


def _shown(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return "(not set)"
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def _lineage(run: LoggedRun) -> dict[str, str]:
    facts = {f"fork_{key}": value for key, value in run.fork.items()}
    return facts | ({"parent_run": run.parent_run} if run.parent_run else {})


def _origin(story: Story) -> dict[str, str]:
    """Return where the newest segment came from: code, job, host. Those of all segments are in their table."""
    facts = {"segments": str(len(story.segments))} if story.segments else {}
    for row in story.segments:
        job = _mapping(row.get("scheduler"))
        known = {
            "git_commit": row.get("git_commit"),
            "git_dirty": None if row.get("git_dirty") is None else str(row["git_dirty"]).lower(),
            "host": row.get("host"),
            "image_digest": row.get("image_digest"),
            "job_id": job.get("job_id"),
            "job_name": job.get("job_name"),
        }
        facts |= {key: str(value) for key, value in known.items() if value}
    return facts


def _state(run: LoggedRun) -> dict[str, str]:
    # No tracker has a status for a run that hangs, and none tells a killed run from a lost one.
    return {"state": run.state} if run.state else {}


def _alert_facts(story: Story) -> dict[str, str]:
    raised = [alert for alert in story.alerts if alert.is_raised]
    if not raised:
        return {}
    last = max(raised, key=lambda alert: (alert.segment, alert.tokens, alert.time_ms))
    return {"alerts": str(len(raised)), "last_alert": _told(last)[:_FACT_CHARS]}


def _told(alert: Alert) -> str:
    about = " ".join(filter(None, (alert.level, alert.rule, alert.metric)))
    if alert.value is not None:
        about += f" = {alert.value:.6g}"
    text = f"{about} at {tokens(alert.tokens)} tokens (segment {alert.segment})"
    return f"{text}: {alert.message}" if alert.message else text


def _change_facts(run: LoggedRun, story: Story) -> dict[str, str]:
    """Return by key what is otherwise than in the parent, and what was set otherwise on the way."""
    facts: dict[str, list[str]] = {}
    for key, before, after in _fork_changes(run):
        facts.setdefault(f"changed.recipe.{key}", []).append(f"{before} \N{RIGHTWARDS ARROW} {after} (since the fork)")
    for change in changes(story):
        text = f"{change.before} \N{RIGHTWARDS ARROW} {change.after} (segment {change.segment})"
        facts.setdefault(f"changed.{change.key}", []).append(text)
    kept = dict(sorted(facts.items())[:_CHANGES])
    told = {key: "; ".join(texts) for key, texts in kept.items()}
    return told | ({"changed": f"{len(facts)} settings, {len(kept)} of them as tags"} if len(facts) > len(kept) else {})


def _fork_changes(run: LoggedRun) -> list[tuple[str, str, str]]:
    difference = _mapping(run.fork.get("recipe_diff"))
    found = []
    for key, pair in sorted(difference.items()):
        if isinstance(pair, list) and len(pair) == 2:  # noqa: PLR2004 - before and after
            before, after = (value if isinstance(value, str) else json.dumps(value) for value in pair)
            found.append((key, before, after))
    return found


def _mapping(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(run: LoggedRun, story: Story) -> str:
    """Return what a person reads first; every table ends where there is no more room, and says so."""
    lines = [f"Run `{run.run_id}`, replayed from its log by llmtrack. The x-axis (step) is **tokens seen**."]
    if run.parent_run:
        lines.append(
            f"Forked from `{run.parent_run}`"
            + (f", segment {run.fork['segment']}" if "segment" in run.fork else "")
            + (f", at {tokens(int(run.fork['tokens']))} tokens" if "tokens" in run.fork else "")
            + (f" ({run.fork['reason']})" if "reason" in run.fork else "")
            + "."
        )
        difference = [(f"recipe.{key}", before, after) for key, before, after in _fork_changes(run)]
        if difference:
            lines += ["**Changed at the fork**", _table(("setting", "before", "after"), difference)]
        elif "recipe_diff" in run.fork:
            lines.append("Changed: see the tag `llmtrack.fork_recipe_diff`.")
    raised = [alert for alert in story.alerts if alert.is_raised]
    if raised:
        rows = [(tokens(a.tokens), a.segment, a.level, a.rule, a.metric, a.message) for a in reversed(raised)]
        titles = ("tokens", "segment", "level", "rule", "metric", "message")
        lines += [f"**{len(raised)} alert{'s' * (len(raised) > 1)}**, the newest first", _table(titles, rows)]
    changed = changes(story)
    if changed:
        rows_of_changes = [(change.key, change.segment, change.before, change.after) for change in changed]
        settings = _table(("setting", "since segment", "before", "after"), rows_of_changes)
        lines += ["**Changed on the way**; parameters show the first values", settings]
    segments = [_row(segment) for segment in reversed(run.segments)]
    count = f"**{len(segments)} segment{'s' * (len(segments) != 1)}**, the newest first"
    lines += [count, _table(("segment", "from tokens", "ended", "host", "ranks"), segments)]
    lines.append("Whole tables: artifacts, folder `llmtrack`. Superseded and provisional stretches: nested runs.")
    return _fitting(lines)


def _fitting(lines: list[str]) -> str:
    """Return paragraphs as one text, the longest table shortened until there is room for all."""
    while len(text := "\n\n".join(lines)) > _NOTE_CHARS:
        longest = max(range(len(lines)), key=lambda number: len(lines[number]))
        rows = [row for row in lines[longest].split("\n") if not row.startswith("| \N{HORIZONTAL ELLIPSIS}")]
        lines[longest] = "\n".join([*rows[:-1], "| \N{HORIZONTAL ELLIPSIS} and more, see the artifacts |"])
    return text


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [" | ".join(_cell(value) for value in row) for row in rows[:_NOTE_ROWS]]
    if len(rows) > _NOTE_ROWS:
        cells.append(f"\N{HORIZONTAL ELLIPSIS} and {len(rows) - _NOTE_ROWS} more, see the artifacts")
    return "\n".join(f"| {row} |" for row in (" | ".join(titles), " | ".join("---" for _ in titles), *cells))


def _cell(value: object) -> str:
    text = "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _row(segment: Segment) -> tuple[object, ...]:
    start = None if segment.start_tokens is None else tokens(segment.start_tokens)
    return segment.segment, start, segment.exit, segment.host, segment.world_size
