"""Rows of `log` calls whose values are not known yet: they are on their way from a GPU or from other ranks."""

from __future__ import annotations

from collections.abc import Mapping

from .tensors import PendingValue


class PendingRow:
    """A row that the drain thread asks again and again, and never waits for: a rank or a GPU may be gone.

    Attributes:
        lost_points: Points of a row that was resolved which could not be kept.
    """

    lost_points = 0

    def __len__(self) -> int:
        """Return how many points it has at most."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether its values have arrived, or never will; does not wait."""
        raise NotImplementedError

    def resolve(self) -> dict[str, float]:
        """Return the values, once it is ready; a metric that nobody had a value for is left out.

        Raises:
            RuntimeError: They never arrive: a rank or a device is gone.
        """
        raise NotImplementedError


class DeviceRow(PendingRow):
    """A row with values on their way from a device.

    Args:
        values: Name -> number, some of them pending.
    """

    def __init__(self, values: Mapping[str, float | PendingValue]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def is_ready(self) -> bool:
        """Return whether all values have arrived."""
        return all(value.is_ready() for value in self._values.values() if isinstance(value, PendingValue))

    def resolve(self) -> dict[str, float]:
        """Return the values."""
        return {name: float(value) for name, value in self._values.items()}
