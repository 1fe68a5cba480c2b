"""How rows and configurations are said in W&B; no wandb is imported here. `docs/WANDB.md` tells users the same."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.sync.replay.figures import Figures
from llmtrack.sync.sink import Record
from llmtrack.sync.story import StoryPoint

KEY: Final = "rows"  # the one key of our records: W&B is given rows, and gives back rows
TOKENS: Final = "tokens_seen"
STEP: Final = "step"
SEGMENT: Final = "segment"
CHECKPOINT: Final = "checkpoint"
TIME: Final = "_timestamp"
OURS: Final = "llmtrack"  # our dictionary in the configuration
_RECIPE: Final = "recipe"
_NONFINITE: Final = "_nonfinite"

_W_AND_B: Final = ("_step", "_runtime", TIME, TOKENS)  # of a row; what they say is no part of its digest
# What we or W&B use; a name that begins with an underscore is hidden by W&B's pages.
_RESERVED: Final = re.compile(rf"|_.*|{TOKENS}|{STEP}|{SEGMENT}|{CHECKPOINT}|.*{_NONFINITE}", re.DOTALL)
_NAME_CHARS: Final = 1000
_DIGEST_BITS: Final = (1 << 52) - 1  # what a double holds exactly
_HEAD: Final = struct.Struct("<qq")

_LOWER: Final = re.compile(
    r"(^|[/_.-])(loss|nll|ppl|perplexity|bpb|bits_per_byte|error|err|wer|cer|mse|mae|rmse)($|[/_.-])"
)
_HIGHER: Final = re.compile(
    r"(^|[/_.-])(acc|accuracy|acc_norm|f1|em|exact_match|bleu|rouge[a-z0-9]*|mfu|hfu|tokens_per_s|reward|score|pass@[0-9]+)"
    r"($|[/_.-])"
)


def key_of(name: str) -> str:
    """Return what a metric is called in W&B: its own name, unless W&B hides or drops that or we use it."""
    if not _RESERVED.fullmatch(name) and len(name) <= _NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{name.lstrip('_')[: _NAME_CHARS - 13] or 'unnamed'}.{digest}"


class _Plan(NamedTuple):
    """What rows with the same keys have in common."""

    order: tuple[int, ...]
    text: bytes
    packed: struct.Struct


class WandbEncoder:
    """Turns the points of a log call into one row, whose record carries it.

    - a row has ``tokens_seen``, ``step``, ``segment`` and ``_timestamp`` beside its metrics;
    - NaN, +Inf and -Inf become 0, 1 and -1 under ``<name>_nonfinite``;
    - rows that are equal in everything are numbered, so that each of them is looked for.

    Args:
        segment: Of the rows.
    """

    def __init__(self, segment: int) -> None:
        self._segment = segment
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._copies = Copies()

    def encode(self, rows: pa.RecordBatch) -> list[Record]:
        """Return one record for each row; `Encoder` has the contract."""
        if not rows.num_rows:
            return []
        ends = pc.run_end_encode(rows.column("seq")).run_ends.to_pylist()
        begins = [0, *ends[:-1]]
        at = pa.array(begins)
        places = zip(*(rows.column(name).take(at).to_pylist() for name in ("tokens", "step", "time_ms")), strict=True)
        seqs = rows.column("seq").take(at).to_pylist()
        names, values = rows.column("name").to_pylist(), rows.column("value").to_pylist()
        return [
            self._record(seq, place, keys, some)
            for seq, place, begin, end in zip(seqs, places, begins, ends, strict=True)
            for keys, some in self._rows(tuple(names[begin:end]), values[begin:end])
        ]

    def _rows(self, names: tuple[str, ...], values: list[float]) -> list[tuple[tuple[str, ...], list[float]]]:
        """Return the values of one log call as rows: one, unless a name is there twice."""
        if len(set(names)) < len(names):
            first: dict[str, float] = {}
            rest: list[tuple[str, float]] = []
            for name, value in zip(names, values, strict=True):
                if name in first:
                    rest.append((name, value))
                else:
                    first[name] = value
            others, left = zip(*rest, strict=True)
            return [*self._rows(tuple(first), list(first.values())), *self._rows(others, list(left))]
        keys = self._keys.get(names)
        if keys is None:
            keys = self._keys[names] = tuple(map(key_of, names))
        if math.isfinite(sum(values)) or all(map(math.isfinite, values)):
            return [(keys, values)]
        pairs = [finite(key, value) for key, value in zip(keys, values, strict=True)]
        return [(tuple(key for key, _ in pairs), [value for _, value in pairs])]

    def _record(self, seq: int, place: tuple[int, int, int], keys: tuple[str, ...], values: list[float]) -> Record:
        plan = self._plans.get(keys)
        if plan is None:
            plan = self._plans[keys] = _plan(keys)
        tokens, step, time_ms = place
        ordered = [values[at] + 0.0 for at in plan.order]
        head = _HEAD.pack(step, self._segment)
        digest = hashlib.blake2b(head + plan.text + plan.packed.pack(*ordered), digest_size=8).digest()
        content: dict[str, Any] = {TIME: time_ms / 1000, TOKENS: tokens, STEP: step, SEGMENT: self._segment}
        content.update(zip(keys, values, strict=True))
        value = self._copies.number(tokens, time_ms, digest)
        return Record(KEY, tokens, time_ms, value, seq, len(values), content)


def finite(key: str, value: float) -> tuple[str, float]:
    """Return what is said of a value: itself, or that it is none."""
    if math.isfinite(value):
        return key, value
    return key + _NONFINITE, 0.0 if math.isnan(value) else math.copysign(1.0, value)


def _plan(keys: tuple[str, ...]) -> _Plan:
    order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    return _Plan(order, _text(keys[at] for at in order), struct.Struct(f"<{len(keys)}d"))


def _text(keys: Iterable[str]) -> bytes:
    return b"".join(key.encode("utf-8", "surrogatepass") + b"\0" for key in keys)


class Copies:
    """Numbers rows that are equal in everything, within one tokens count; W&B keeps all of them."""

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._seen: dict[tuple[int, bytes], int] = {}

    def number(self, tokens: int, time_ms: int, digest: bytes) -> float:
        """Return the value of the record of a row with this digest: an integer of 52 bits."""
        if tokens != self._tokens:
            self._tokens = tokens
            self._seen.clear()
        copies = self._seen[time_ms, digest] = self._seen.get((time_ms, digest), 0) + 1
        return float((int.from_bytes(digest, "little") + copies - 1) & _DIGEST_BITS)


class RowReader:
    """Makes records of rows as W&B gives them back, equal to those that they were written from."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._plans: dict[frozenset[str], tuple[tuple[str, ...], bytes, struct.Struct]] = {}

    def record(self, row: Mapping[str, Any]) -> Record:
        """Return the record of one row; one that is not ours is a record that equals none of ours."""
        names = frozenset(row)  # W&B's client writes each row in another order
        plan = self._plans.get(names)
        if plan is None:
            keys = tuple(sorted(names - {*_W_AND_B, STEP, SEGMENT}))
            plan = self._plans[names] = (keys, _text(keys), struct.Struct(f"<{len(keys)}d"))
        keys, text, packed = plan
        try:
            tokens, time_ms = int(row[TOKENS]), round(row[TIME] * 1000)
            head = _HEAD.pack(int(row[STEP]), int(row[SEGMENT]))
            body = packed.pack(*[row[key] + 0.0 for key in keys])
        except (KeyError, TypeError, ValueError, struct.error):
            return self._odd(row, keys)
        digest = hashlib.blake2b(head + text + body, digest_size=8).digest()
        return Record(KEY, tokens, time_ms, self._copies.number(tokens, time_ms, digest))

    def _odd(self, row: Mapping[str, Any], keys: Sequence[str]) -> Record:
        """Return the record of a row that has more than numbers: an evaluation names its checkpoint."""
        try:
            tokens, time_ms = int(row[TOKENS]), round(row[TIME] * 1000)
        except (KeyError, TypeError, ValueError):
            tokens, time_ms = -1, 0
        return Record(KEY, tokens, time_ms, self._copies.number(tokens, time_ms, _odd_digest(row, keys)))


def _odd_digest(row: Mapping[str, Any], keys: Sequence[str]) -> bytes:
    shown = [row.get(STEP), row.get(SEGMENT)]
    shown += [[key, float(v) + 0.0 if isinstance(v := row[key], int | float) else v] for key in sorted(keys)]
    return hashlib.blake2b(json.dumps(shown, sort_keys=True, default=str).encode(), digest_size=8).digest()


def told_records(points: Iterable[StoryPoint]) -> list[Record]:
    """Return the rows of evaluations and alerts: what was measured of one checkpoint at one time is one row."""
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for point in points:
        place = (point.tokens, point.time_ms, point.step, point.segment, point.ckpt_id)
        row = rows.setdefault(place, {})
        key, value = finite(key_of(point.name), point.value)
        number = 1
        while key in row:  # the same task measured twice at one time
            number += 1
            row = rows.setdefault((*place, number), {})
        row[key] = value
    reader = RowReader()
    records = []
    for place, metrics in rows.items():
        tokens, time_ms, step, segment, ckpt_id, *_ = place
        content: dict[str, Any] = {TIME: time_ms / 1000, TOKENS: tokens, STEP: step, SEGMENT: segment, **metrics}
        if ckpt_id is not None:
            content[CHECKPOINT] = ckpt_id
        records.append(reader.record(content)._replace(points=0, content=content))
    return records


def config_of(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration and a recipe as W&B's configuration; keys that are ours or W&B's get a line below them."""
    taken = {OURS, "_wandb", "wandb_version", ""} | ({_RECIPE} if recipe else set())
    shown: dict[str, Any] = {}
    for key, value in config.items():
        name = key
        while name in taken or (name != key and name in config):
            name += "_"
        shown[name] = value
    return shown | ({_RECIPE: dict(recipe)} if recipe else {})


def summary_of(figures: Iterable[Figures]) -> dict[str, dict[str, float]]:
    """Return what W&B is to show of each metric: last, min, max and, where a name says which is better, best."""
    summary: dict[str, dict[str, float]] = {}
    for name, last, low, high in figures:
        if last is None or low is None or high is None:
            continue
        shown = {"last": last, "min": low, "max": high}
        if _LOWER.search(name.lower()):
            shown["best"] = low
        elif _HIGHER.search(name.lower()):
            shown["best"] = high
        summary[key_of(name)] = shown
    return summary


def figures_of(points: Sequence[StoryPoint]) -> list[Figures]:
    """Return the figures of evaluations and alerts; the last one is that with the most tokens."""
    by_name: dict[str, list[float]] = {}
    for point in sorted(points, key=lambda point: (point.tokens, point.time_ms)):
        if math.isfinite(point.value):
            by_name.setdefault(point.name, []).append(point.value)
    return [Figures(name, values[-1], min(values), max(values)) for name, values in by_name.items()]
