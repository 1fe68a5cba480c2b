"""What a run is called in W&B, and what our dictionary in its configuration says."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from typing import Any, Final

from llmtrack.sync.kinds import CANONICAL, PROVISIONAL, REPLACED, SUPERSEDED
from llmtrack.sync.sink import RunSpec

_NAME_CHARS: Final = 128
_TAG: Final = "llmtrack"
_HOST_COLUMN: Final = 3  # of the table of segments in a note
_PRIVATE: Final = frozenset({"host"})  # facts that say something about machines

_PROJECT_CHARS: Final = 128
_NOT_IN_PROJECTS: Final = re.compile(r"[/\\#?%:\x00-\x1f]")  # the client refuses these but for the last
_WORD_IN_PATHS: Final = "sweeps"  # the client leaves it out of the path of a run

OUR_TAGS: Final = frozenset({_TAG, CANONICAL, PROVISIONAL, SUPERSEDED, REPLACED})
EXIT: Final = {"finished": 0, "failed": 1, "killed": 1}  # what the client is to say; W&B has no end but these two


def project_of(project: str) -> str:
    """Return what a project is called in W&B: its own name, unless W&B refuses that.

    A refused name becomes a readable rest and twelve digits of the SHA-256 of the name, so that no two names meet; our
    dictionary in the configuration of each run has the original.
    """
    name = _NOT_IN_PROJECTS.sub("-", project)
    if name.strip() == project and len(name) <= _PROJECT_CHARS and name not in {"", _WORD_IN_PATHS}:
        return project
    rest = name.strip()[: _PROJECT_CHARS - 13]
    return f"{rest or 'unnamed'}.{hashlib.sha256(project.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def id_of(spec: RunSpec) -> str:
    """Return the id: the run's own for the curve itself; a side run's says where it begins, so none comes twice."""
    generation = f"-g{spec.generation}" if spec.generation > 1 else ""
    if spec.segment is None:
        return spec.run_id + generation
    first = spec.facts.get("first_tokens", "0")
    return f"{spec.run_id}-s{spec.segment}-{'x' if spec.kind == SUPERSEDED else 'p'}{first}{generation}"


def name_of(spec: RunSpec) -> str:
    """Return the name that people see."""
    return spec.name if len(spec.name) <= _NAME_CHARS else f"{spec.name[: _NAME_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"


def tags_of(spec: RunSpec) -> list[str]:
    """Return our tags."""
    return [_TAG, spec.kind]


def note_of(note: str) -> str:
    """Return a note without host names, and without pointing to what only MLflow has."""
    lines = []
    within = False
    for line in note.split("\n"):
        if line.startswith("| segment | from tokens |"):
            within = True
        elif not line.startswith("|"):
            within = False
        if within and line.count(" | ") > _HOST_COLUMN:
            cells = line.split(" | ")
            line = " | ".join([*cells[:_HOST_COLUMN], *cells[_HOST_COLUMN + 1 :]])  # noqa: PLW2901
        if "artifacts" not in line or line.startswith("|"):
            lines.append(line)
    return "\n".join(lines).replace("The x-axis (step) is", "The x-axis (`tokens_seen`) is").strip()


def about_of(spec: RunSpec, prefix: str) -> dict[str, Any]:
    """Return our dictionary.

    Args:
        spec: The run.
        prefix: Of all ids.
    """
    about: dict[str, Any] = {
        "run_id": spec.run_id,
        "kind": spec.kind,
        "generation": spec.generation,
        "status": spec.status,
        "start_time": _iso(spec.start_ms),
    }
    if spec.segment is not None:
        about["segment"] = spec.segment
    if spec.end_ms is not None:
        about["end_time"] = _iso(spec.end_ms)
    if prefix:
        about["prefix"] = prefix
    if project_of(spec.project) != spec.project:
        about["project"] = spec.project
    if spec.parent is not None:
        about["parent_ref"] = spec.parent
    about |= {name: value for name, value in spec.facts.items() if name not in _PRIVATE}
    if spec.kind == CANONICAL:
        about["described"] = digest(json.dumps([spec.config, spec.recipe], sort_keys=True))
        about["note"] = digest(note_of(spec.note))
    return about


def every_of(spec: RunSpec, every: int) -> dict[str, Any]:
    """Return what our dictionary says of thinning; a provisional stretch is short and its end moves: it stays whole."""
    if every == 1 or spec.kind == PROVISIONAL:
        return {}
    return {"every": every, "thinned": f"of each {every} steps the rows with a least, greatest or last value"}


def digest(text: str) -> str:
    """Return sixteen hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _iso(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="milliseconds")
