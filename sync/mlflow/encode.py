"""How rows and configurations are said in MLflow; no MLflow is imported here. `docs/SYNC.md` tells users the same."""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from llmtrack.sync.sink import Record
from llmtrack.sync.story import StoryPoint

STEP_KEY: Final = "step"
_NONFINITE: Final = "_nonfinite"
_COPY: Final = "_copy"

_ALLOWED: Final = re.compile(r"[/\w.\- :]+")
_NOT_ALLOWED: Final = re.compile(r"[^/\w.\- :]")
_RESERVED: Final = re.compile(rf"{STEP_KEY}|.*({_NONFINITE}|{_COPY}[0-9]+)")  # what the encoder makes by itself
_KEY_CHARS: Final = 250  # MLflow's limit
_NAME_CHARS: Final = 200  # leaves room for our endings, and for our prefix where a name is part of a tag's
_PARAMS: Final = 1000  # of a run; what a page can show
_PARAM_CHARS: Final = 6000  # beyond it MLflow cuts with a warning that nobody sees
_TAG_CHARS: Final = 5000  # 8000 since MLflow 2.14, 5000 before


def key_of(name: str) -> str:
    """Return what a metric or parameter is called in MLflow: its own name, unless MLflow refuses that or we use it.

    A refused name becomes a readable rest and twelve digits of the SHA-256 of the name, so that no two names meet; the
    tag ``llmtrack.name.<key>`` has the original.
    """
    if (
        _ALLOWED.fullmatch(name)
        and len(name) <= _NAME_CHARS
        and posixpath.normpath(name) == name
        and not name.startswith(("/", ".."))
        and name != "."
        and not _RESERVED.fullmatch(name)
    ):
        return name
    rest = posixpath.normpath(_NOT_ALLOWED.sub("_", name)).lstrip("./")[: _NAME_CHARS - 13]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{rest or 'unnamed'}.{digest}"


class MlflowEncoder:
    """Turns rows into MLflow's metrics, each point into exactly one that equals no other.

    - tokens are MLflow's step; the optimiser step is the metric ``step``, once per tokens count and step;
    - NaN, +Inf and -Inf become 0, 1 and -1 under ``<name>_nonfinite``;
    - of points that are equal in name, tokens, time and value MLflow keeps one: the second goes to ``<name>_copy2``.
    """

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._tokens: int | None = None
        self._time_ms: int | None = None
        self._steps: set[int] = set()
        self._seen: dict[tuple[str, float], int] = {}

    def encode(self, rows: pa.RecordBatch) -> list[Record]:
        """Return the records of the next rows; `Encoder` has the contract."""
        columns = ("seq", "time_ms", "step", "tokens", "name", "value")
        records: list[Record] = []
        for seq, time_ms, step, tokens, name, value in zip(
            *(rows.column(column).to_pylist() for column in columns), strict=True
        ):
            if tokens != self._tokens:
                self._steps.clear()
            if tokens != self._tokens or time_ms != self._time_ms:
                self._seen.clear()
                self._tokens, self._time_ms = tokens, time_ms
            if step not in self._steps:
                self._steps.add(step)
                records.append(Record(STEP_KEY, tokens, time_ms, float(step), seq, points=0))
            key = self._keys.get(name)
            if key is None:
                key = self._keys[name] = key_of(name)
            if not math.isfinite(value):
                key, value = finite(key, value)  # noqa: PLW2901
            copies = self._seen[key, value] = self._seen.get((key, value), 0) + 1
            if copies > 1:
                key = f"{key}{_COPY}{copies}"
            records.append(Record(key, tokens, time_ms, value, seq))
        return records


def told_records(points: Iterable[StoryPoint]) -> list[Record]:
    """Return every record under which a story's points may lie in a run, those moved by `shifted_ms` included."""
    found = list(points)
    values: dict[tuple[str, int, str | None], set[float]] = {}
    for point in found:
        if point.ckpt_id is not None:
            values.setdefault((point.name, point.tokens, point.ckpt_id), set()).add(point.value)
    records: dict[Record, None] = {}
    for point in found:
        key, held = finite(key_of(point.name), point.value)
        for later in range(len(values.get((point.name, point.tokens, point.ckpt_id), "1"))):
            records[Record(key, point.tokens, point.time_ms + later, held, points=0)] = None
    return list(records)


def shifted_ms(time_ms: int, value: float, taken: Collection[int], held: Collection[tuple[int, float]]) -> int:
    """Return the millisecond at which a model has, or is to get, a value of one metric.

    It is the value's own, unless another value of this metric has it: MLflow would refuse the second. Then it is the
    next one that is free.

    Args:
        time_ms: The value's own.
        value: The value.
        taken: By other values of the same checkpoint.
        held: Times and values that MLflow holds under this key at these tokens.
    """
    occupied = {at for at, _ in held}
    while time_ms in taken or (time_ms in occupied and (time_ms, value) not in held):
        time_ms += 1
    return time_ms


def finite(key: str, value: float) -> tuple[str, float]:
    """Return key and value as MLflow can hold them: NaN, +Inf and -Inf are 0, 1 and -1 under another key."""
    if math.isfinite(value):
        return key, value
    return key + _NONFINITE, 0.0 if math.isnan(value) else math.copysign(1.0, value)


def params_of(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return a configuration as MLflow's parameters, and the tags that hold what does not fit into them.

    Nested keys are joined by dots, lists are JSON, and the recipe's keys begin with ``recipe.``.
    """
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    settings = [*_flat((), config), *_flat(("recipe",), recipe)]
    if len(settings) > _PARAMS:
        tags["llmtrack.params_left_out"] = _left_out(len(settings))
    for path, value in settings[:_PARAMS]:
        name = ".".join(path)
        key = key_of(name)
        if key in params:  # {"a.b": 1, "a": {"b": 2}}
            key = key_of(json.dumps(path))
        if key != name:
            tags.update(text_tags(f"llmtrack.name.{key}", name))
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > _PARAM_CHARS:
            tags.update(text_tags(f"llmtrack.param.{key}", text))
            text = f"({len(text)} characters: see the tags llmtrack.param.{key}.1, .2, ...)"
        params[key] = text
    return params, tags


def left_out(settings: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return how many settings are no parameters, as a sentence; nothing when all are."""
    paths = {path for config, recipe in settings for path, _ in [*_flat((), config), *_flat(("recipe",), recipe)]}
    return _left_out(len(paths)) if len(paths) > _PARAMS else ""


def _left_out(settings: int) -> str:
    return f"{_PARAMS} of {settings} settings are parameters; all are in the artifact llmtrack/config.json"


def text_tags(key: str, text: str) -> dict[str, str]:
    """Return a text as one tag or, where MLflow would cut it, as several: ``key.1``, ``key.2``, ..."""
    if len(text) <= _TAG_CHARS:
        return {key: text}
    return {
        f"{key}.{number}": text[at : at + _TAG_CHARS]
        for number, at in enumerate(range(0, len(text), _TAG_CHARS), start=1)
    }


def _flat(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _flat((*path, str(key)), inner)
    elif not isinstance(value, Mapping) or path != ("recipe",):
        yield path, value
