"""The recipe of a run, as what decides whether a resumed process goes on with the curve or starts another.

It is compared as canonical JSON: neither the order of keys nor 1 against 1.0 matters, and secrets are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from llmtrack.writer.plain import Json, plain
from llmtrack.writer.redact import redact

_HEX_DIGITS: Final = 16  # 64 bits: recipes of one lineage are compared, not those of the world


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: keys sorted, no spaces, whole numbers without a point."""
    return json.dumps(
        _canonical(plain(value)), sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )


def recipe_json(recipe: object) -> str | None:
    """Return the canonical JSON of a recipe, or None when there is none.

    Raises:
        UsageError: Something in it has no description that another process could compare.
    """
    return None if recipe is None else canonical_json(redact(plain(recipe, strict=True)))


def recipe_hash(recipe: object) -> str | None:
    """Return 16 hexadecimal digits that are equal for equal recipes, or None when there is none.

    Raises:
        UsageError: Something in it has no description that another process could compare.
    """
    text = recipe_json(recipe)
    return None if text is None else hash_of(text)


def hash_of(canonical: str) -> str:
    """Return the hash of a recipe that is canonical JSON already."""
    return hashlib.sha256(canonical.encode()).hexdigest()[:_HEX_DIGITS]


def recipe_diff(old: object, new: object) -> dict[str, list[Json]]:
    """Return what differs between two recipes as ``{"optimizer.lr": [before, after]}``; empty when nothing does.

    What is absent on one side is null there, and shown whole on the other. Lists of equal length are compared item by
    item (``data.0.weight``); a key that holds a point is in quotes. Recipes that are no mappings differ under
    ``recipe``.
    """
    differences: dict[str, list[Json]] = {}
    _compare(_canonical(plain(old)), _canonical(plain(new)), "", differences)
    return differences


def _compare(old: Json, new: Json, key: str, differences: dict[str, list[Json]]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            dotted = _join(key, name)
            if name in old and name in new:
                _compare(old[name], new[name], dotted, differences)
            else:
                differences[dotted] = [old.get(name), new.get(name)]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            _compare(before, after, _join(key, str(index)), differences)
    elif canonical_json(old) != canonical_json(new):  # not !=, to which True is 1
        differences[key or "recipe"] = [old, new]


def _join(key: str, name: str) -> str:
    quoted = name if name and "." not in name and not name.startswith('"') else json.dumps(name, ensure_ascii=False)
    return f"{key}.{quoted}" if key else quoted


def _canonical(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
