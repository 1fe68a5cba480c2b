"""What every detector is: a small object that looks at rows of metrics, and says while something is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from llmtrack.writer.errors import UsageError

Level = Literal["info", "warn", "error"]
Values = Mapping[str, float]

LOSS: Final = "train/loss"
GRAD_NORM: Final = "train/grad_norm"
LARGEST: Final = 1e150  # beyond it a square is infinite
_THOUSAND: Final = 1e4
_LONG: Final = 1e12
_WRITTEN_OUT: Final = 1e6  # factors that are written with all their digits


@dataclass(frozen=True, slots=True)
class Finding:
    """What a detector says of a row.

    Attributes:
        metric: The metric that is wrong.
        value: Its value.
        baseline: What was to be expected; None where nothing was.
        score: How far off it is, in the detector's own measure; alerts begin at its threshold.
        message: What a person on call should read.
        level: How bad it is; None for the detector's own.
    """

    metric: str
    value: float
    baseline: float | None
    score: float | None
    message: str
    level: Level | None = None


class Detector:
    """Looks at one or a few metrics, row after row; a detector of your own is a subclass with an `update`.

    It is called on one thread at a time, for every row that has one of its metrics. What it keeps must be bounded.

    Attributes:
        rule: Short name of what it finds.
        metrics: The metrics that it looks at: it is shown the rows that have one of them.
        beside: What it wants to see of these rows beside them.
        level: How bad that is.
        family: Detectors of one family see the same event: the first raises the alert, the others add to it.
        clear_after: Rows without a finding after which an event is over.
        cooldown: Rows after an event in which another finding counts to the same one.
        stays: The last event is over only because what was found has stayed, and is what is usual now.
        carries: What it learned holds for the next process of the run, too: on other nodes.
        at_once: It needs to know nothing of the past, and looks at rows before the past was read.
    """

    rule: str = "custom"
    metrics: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    level: Level = "warn"
    family: str | None = None
    clear_after: int = 2
    cooldown: int = 20
    carries: bool = True
    at_once: bool = False
    stays: bool = False  # the last event ended because what was found has stayed, and is what is usual now

    THRESHOLDS: ClassVar[tuple[str, ...]] = ()  # attributes that say when it alerts
    STATE: ClassVar[tuple[str, ...]] = ()  # attributes that it learns: numbers, or lists of numbers
    ADDED: ClassVar[
        tuple[str, ...]
    ] = ()  # those of them that a state of an older llmtrack lacks: they are learned anew

    def update(self, values: Values) -> Finding | None:
        """Look at a row, and return what is wrong with it; None when nothing is.

        Args:
            values: Name -> value, with at least one of `metrics`.
        """
        raise NotImplementedError  # each detector has its own

    def pause(self) -> None:
        """Take note that the trainer did something else before the next row: an evaluation, a checkpoint."""

    def thresholds(self) -> dict[str, float | int]:
        """Return what it goes by, by name; this is stored with the run."""
        return {name: getattr(self, name) for name in self.THRESHOLDS}

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain JSON."""
        return {name: _copy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another one of its kind has learned, also in an older llmtrack.

        Raises:
            UsageError: That is not such a state; nothing is changed.
        """
        named: Collection[str] = state if isinstance(state, Mapping) else ()
        wanted = [name for name in self.STATE if name in named or name not in self.ADDED]
        taken = {name: _same_kind(self, name, state) for name in wanted}
        for name, value in taken.items():
            setattr(self, name, value)


def short(factor: float) -> str:
    """Return how many times something is, as a person reads it."""
    return f"{factor:.1f}" if abs(factor) < _WRITTEN_OUT else f"{factor:.2g}"


def written(value: float) -> str:
    """Return a number as a person reads it: with its thousands, where it has some."""
    return f"{value:,.0f}" if _THOUSAND <= abs(value) < _LONG else f"{value:.4g}"


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _same_kind(detector: Detector, name: str, state: Mapping[str, Any]) -> Any:
    """Return a value of a state, if it is of the kind that the detector has there."""
    own: Any = getattr(detector, name)
    given: Any = state.get(name) if isinstance(state, Mapping) else None
    if isinstance(own, list):
        if isinstance(given, list | tuple) and all(map(_is_number, given)):
            return [float(item) for item in given]
    elif _is_number(given) and (isinstance(own, float) or isinstance(given, int)):
        return type(own)(given)
    raise UsageError(
        f"this is no state of the detector {detector.rule}: {name} is {given!r}", hint="load what state_dict() returned"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value - value == 0  # not NaN, not infinite
