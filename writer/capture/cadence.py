"""How often each group of metrics is due: a table in TOML, anchored to the run's step, and denser after an alert."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

from llmtrack.writer.errors import UsageError

DEFAULT_FILE: Final = Path(__file__).with_name("cadence.toml")
_BURST_STEPS: Final = 100


@dataclass(frozen=True)
class Group:
    """Metrics that are looked at together.

    Attributes:
        name: For `Cadence.due`.
        every: Steps between two points; due at steps that it divides.
        purpose: The question that these metrics answer.
        metrics: Patterns of their names, with ``*`` and ``?``.
        points: How many metrics it has, for a plan.
        points_per_layer: As many more for each layer.
        burst: Due at every step for a while after an alert.
        monitoring: Better collected by the cluster's monitoring than by the trainer.
    """

    name: str
    every: int
    purpose: str = ""
    metrics: tuple[str, ...] = ()
    points: int = 0
    points_per_layer: int = 0
    burst: bool = False
    monitoring: bool = False

    def takes(self, metric: str) -> bool:
        """Return whether a metric belongs here."""
        return any(fnmatchcase(metric, pattern) for pattern in self.metrics)


class Cadence:
    """Says which groups of metrics are due at a step, on all ranks alike.

    Steps are those of the run: a segment that starts at step 12,345 logs at the same steps as one that came by there.
    In a burst, the groups that are marked for it are due at every step. It begins when `Reducer.step` has brought the
    wish for it to all ranks, so that no rank computes per-layer norms that the others do not.

    Args:
        groups: In order: the first that fits a metric's name takes it.
        burst_steps: Length of a burst.

    Attributes:
        burst_until_step: Last step of the newest burst; 0 before the first.

    Raises:
        UsageError: Two groups of one name, or an interval or a length below 1.
    """

    def __init__(self, groups: Sequence[Group], burst_steps: int = _BURST_STEPS) -> None:
        self.groups: Final = {group.name: group for group in groups}
        self.burst_steps: Final = burst_steps
        self.burst_until_step = 0
        self._is_asked = False
        if len(self.groups) < len(groups):
            raise UsageError(f"two groups of one name among {[group.name for group in groups]}")
        for what, number in (("burst_steps", burst_steps), *((f"every of {g.name}", g.every) for g in groups)):
            if number < 1:
                raise UsageError(f"{what} is {number}", hint="give a number of steps from 1 on")

    @classmethod
    def default(cls) -> Self:
        """Return the table that comes along, for a dense decoder-only transformer."""
        return cls.load(DEFAULT_FILE)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a table from a TOML file.

        Raises:
            UsageError: It cannot be read, is no TOML, or has a group, key or value that makes no sense.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot read {path}: {why}", hint="`llmtrack plan --default` prints a table") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "the cadence table") -> Self:
        """Read a table from TOML; `source` is what errors call it.

        Raises:
            UsageError: As `load`.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{source} is no TOML: {error}") from error
        _check_keys(table, {"burst_steps": int, "groups": dict}, source)
        groups = table.get("groups", {})
        if not groups:
            raise UsageError(f"{source} has no groups", hint="begin one with [groups.optimisation] and every = 10")
        return cls(
            [_group(name, keys, f"{source}, groups.{name}") for name, keys in groups.items()],
            table.get("burst_steps", _BURST_STEPS),
        )

    def group_of(self, metric: str) -> str | None:
        """Return the name of the group that a metric belongs to; None when no pattern fits."""
        return next((group.name for group in self.groups.values() if group.takes(metric)), None)

    def due(self, group: str, step: int) -> bool:
        """Return whether a group is due at a step; the same on every rank.

        Raises:
            UsageError: There is no such group.
        """
        known = self.groups.get(group)
        if known is None:
            raise UsageError(f"no group is called {group!r}", hint=f"there are {', '.join(self.groups)}")
        return step % known.every == 0 or (known.burst and step <= self.burst_until_step)

    def ask_for_burst(self) -> None:
        """Want a burst, on any thread of rank 0: the reducer passes that on with the next values it sends."""
        self._is_asked = True

    def take_request(self) -> bool:
        """Return whether somebody wanted a burst since this was last called."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def begin_burst(self, step: int) -> None:
        """Make the groups that are marked for it due at every step from the next one on."""
        self.burst_until_step = step + self.burst_steps


def _group(name: str, keys: Any, source: str) -> Group:
    if not isinstance(keys, dict):
        raise UsageError(f"{source} is {keys!r}", hint=f"write it as a table: [groups.{name}]")
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(Group) if field.name != "name"}
    _check_keys(keys, kinds, source)
    if "every" not in keys:
        raise UsageError(f"{source} has no every", hint="say after how many steps it is due, as in every = 10")
    for key in ("points", "points_per_layer"):
        if keys.get(key, 0) < 0:
            raise UsageError(f"{source}: {key} is {keys[key]}", hint="give a number of metrics from 0 on")
    patterns = keys.get("metrics", [])
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"{source}: metrics is {patterns}", hint='give patterns of names, as in ["train/*"]')
    given: dict[str, Any] = {**keys, "metrics": tuple(patterns)}
    return Group(name, **given)


_KINDS: Final[dict[str, type]] = {"int": int, "str": str, "bool": bool, "tuple[str, ...]": list}
_WORDS: Final[dict[type, str]] = {
    int: "a whole number",
    str: "text in quotes",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def _check_keys(table: Mapping[str, Any], kinds: Mapping[str, type], source: str) -> None:
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{source} has {key!r}, which means nothing", hint=f"it may have {', '.join(kinds)}")
        kind = kinds[key]
        if type(value) is not kind:
            raise UsageError(f"{source}: {key} is {value!r}", hint=f"it is {_WORDS[kind]}")
