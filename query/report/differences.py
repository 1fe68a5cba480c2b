"""What was different: configuration, recipe and surroundings of segments and runs, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

Flat = dict[str, Any]

# Of a segment's start record: what may change at a restart and explain what one sees.
_SURROUNDINGS: Final = ("world_size", "host", "git_commit", "git_dirty", "image_digest")
_JSON_COLUMNS: Final = ("config", "recipe", "versions", "flops")
ABSENT: Final = "(absent)"


class Change(NamedTuple):
    """A key and its two values; `ABSENT` where it was not there."""

    key: str
    before: str
    after: str


def flatten(text: str | None) -> Flat:
    """Return a JSON object with its keys joined by dots; lists stay whole, and what is no object is one value."""
    if not text:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {"(not JSON)": text}
    return dict(_leaves(content, ""))


def settings(segment: Mapping[str, Any]) -> Flat:
    """Return all that a segment says of how it was started, the names of the columns in front of the keys."""
    found = {name: segment[name] for name in _SURROUNDINGS if segment.get(name) is not None}
    for column in _JSON_COLUMNS:
        found |= {f"{column}.{key}" if key else column: value for key, value in flatten(segment.get(column)).items()}
    return found


def changes(before: Flat, after: Flat) -> list[Change]:
    """Return what is not the same, in the order of the keys before, and then what is new."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        Change(key, shown(before, key), shown(after, key))
        for key in keys
        if key not in before or key not in after or not _are_same(before[key], after[key])
    ]


def differing(all_settings: Sequence[Flat]) -> list[tuple[str, list[str]]]:
    """Return each key that not all have with the same value, and every one's value."""
    keys = dict.fromkeys(key for one in all_settings for key in one)
    return [
        (key, [shown(one, key) for one in all_settings])
        for key in keys
        if any(key not in one or not _are_same(one[key], all_settings[0].get(key)) for one in all_settings)
    ]


def shown(found: Flat, key: str) -> str:
    """Return a value as text."""
    if key not in found:
        return ABSENT
    value = found[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _leaves(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, content


def _are_same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
