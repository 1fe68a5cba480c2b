"""A picture in characters: lines in Braille dots, two columns and four rows of them in each character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column, as Unicode numbers them
_BRAILLE: Final = 0x2800
_RESET: Final = "\x1b[0m"

COLUMNS: Final = 2  # dots in a character
ROWS: Final = 4


class Canvas:
    """Characters to draw on; what is drawn with dots lies over what is drawn with whole characters.

    Args:
        width: In characters.
        height: In characters.
        colours: ANSI codes of the styles, e.g. ``{"pale": "2"}``; empty for none.
    """

    def __init__(self, width: int, height: int, colours: Mapping[str, str]) -> None:
        self.width = width
        self.height = height
        self._colours = colours
        self._dots: dict[tuple[int, int], int] = {}
        self._characters: dict[tuple[int, int], tuple[str, str]] = {}

    def dot(self, x: int, y: int) -> None:
        """Set one dot, counted from the upper left; outside the canvas nothing happens."""
        if 0 <= x < self.width * COLUMNS and 0 <= y < self.height * ROWS:
            place = x // COLUMNS, y // ROWS
            self._dots[place] = self._dots.get(place, 0) | _DOTS[y % ROWS][x % COLUMNS]

    def line(self, x: int, y: int, to_x: int, to_y: int) -> None:
        """Set the dots of a straight line, both ends included."""
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            self.dot(x + round((to_x - x) * step / steps), y + round((to_y - y) * step / steps))

    def character(self, x: int, y: int, character: str, style: str) -> None:
        """Put a character at the place of a dot; the first one there stays."""
        if 0 <= x < self.width * COLUMNS and 0 <= y < self.height * ROWS:
            self._characters.setdefault((x // COLUMNS, y // ROWS), (character, style))

    def rows(self) -> list[str]:
        """Return the picture, a text for each row of characters."""
        return ["".join(self._cell(column, row) for column in range(self.width)).rstrip() for row in range(self.height)]

    def painted(self, text: str, style: str) -> str:
        """Return a text in the colours of a style."""
        code = self._colours.get(style)
        return f"\x1b[{code}m{text}{_RESET}" if code and text else text

    def _cell(self, column: int, row: int) -> str:
        dots = self._dots.get((column, row))
        if dots:
            return self.painted(chr(_BRAILLE + dots), "line")
        character, style = self._characters.get((column, row), (" ", ""))
        return self.painted(character, style)
