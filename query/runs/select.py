"""Which runs a person means: ids, beginnings of ids, or globs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from llmtrack.writer.errors import UsageError

_SHOWN: Final = 5


def select_runs(run_ids: Sequence[str], wanted: Iterable[str]) -> list[str]:
    """Return the runs that are meant, each once, in the order in which they were named.

    Args:
        run_ids: All there are.
        wanted: Ids, beginnings of one id only, or globs.

    Raises:
        UsageError: One of them is nobody's, or the beginning of several ids.
    """
    found: dict[str, None] = {}
    for name in wanted:
        found.update(dict.fromkeys(_matching(run_ids, name)))
    return list(found)


def select_run(run_ids: Sequence[str], name: str) -> str:
    """Return the one run that is meant.

    Raises:
        UsageError: It is nobody's name, or several are meant.
    """
    found = _matching(run_ids, name)
    if len(found) > 1:
        raise UsageError(f"{name!r} means {len(found)} runs", hint=f"name one of {_some(found)}")
    return found[0]


def _matching(run_ids: Sequence[str], name: str) -> list[str]:
    if name in run_ids:
        return [name]
    if any(character in name for character in "*?["):
        found = [run_id for run_id in run_ids if fnmatchcase(run_id, name)]
        if not found:
            raise UsageError(f"no run matches {name!r}", hint=_known(run_ids))
        return found
    found = [run_id for run_id in run_ids if run_id.startswith(name)]
    if len(found) > 1:
        raise UsageError(f"{name!r} is the beginning of {len(found)} runs", hint=f"name one of {_some(found)}")
    if not found:
        close = difflib.get_close_matches(name, run_ids, _SHOWN)
        raise UsageError(
            f"there is no run {name!r}", hint=f"did you mean {' or '.join(close)}?" if close else _known(run_ids)
        )
    return found


def _known(run_ids: Sequence[str]) -> str:
    return f"the runs are {_some(run_ids)}" if run_ids else "--root or LLMTRACK_DIR: there are no runs here"


def _some(run_ids: Sequence[str]) -> str:
    more = len(run_ids) - _SHOWN
    return ", ".join(run_ids[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
