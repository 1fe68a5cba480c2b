"""How rows look to a person: aligned columns, short numbers, times in UTC; and the other formats of `llmtrack sql`."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .console import plain, to_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FORMATS: Final = ("table", "csv", "json", "markdown")

_UNITS: Final = ((10**15, "P"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_BYTE_UNITS: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_UNBOUNDED: Final = 10_000  # columns: what goes into a file or a pipe is not cut to the width of a screen
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400
_DIGITS: Final = 4
_MOST_DIGITS: Final = 17  # that a float has
# What moves the cursor, colours what comes after it, or turns the direction of a line.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """Return a text on one line, without what would do something to a terminal."""
    if text.isprintable():
        return text
    return _CONTROL.sub("�", " ".join(text.splitlines()).replace("\t", " "))


def tokens(count: int | None, digits: int = _DIGITS) -> str:
    """Return a number of tokens in three or four digits, or more, and a unit."""
    if count is None:
        return ""
    for size, unit in _UNITS:
        if abs(count) >= size:
            return f"{count / size:.{digits}g}{unit}"
    return str(count)


def digits_between(first: float, last: float) -> int:
    """Return how many digits numbers of tokens between two ends need, so that they can be told apart."""
    span_ = abs(last - first)
    far = max(abs(first), abs(last))
    return _DIGITS if not span_ else min(_DIGITS + int(math.log10(max(far / span_, 1.0))), _MOST_DIGITS)


def tokens_apart(counts: Sequence[int]) -> list[str]:
    """Return numbers of tokens with as many digits as it takes to tell them apart, four at least."""
    for digits in range(_DIGITS, _MOST_DIGITS + 1):
        texts = [tokens(count, digits) for count in counts]
        if len(set(texts)) == len(set(counts)):
            return texts
    return list(map(str, counts))


def size(count_bytes: int) -> str:
    """Return a number of bytes in three or four digits and a unit."""
    unit = next((unit for unit in _BYTE_UNITS if count_bytes >= unit[0]), (1, "B"))
    return f"{count_bytes / unit[0]:.3g} {unit[1]}" if unit[0] > 1 else f"{count_bytes} B"


def moment(time: dt.datetime | None) -> str:
    """Return a time in UTC, to the minute."""
    return "" if time is None else time.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M")


def span(seconds: float | None) -> str:
    """Return a length of time in its two largest units."""
    if seconds is None:
        return ""
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    if seconds < _DAY_S:
        return f"{int(seconds // _HOUR_S)} h {int(seconds % _HOUR_S // _MINUTE_S)} min"
    return f"{int(seconds // _DAY_S)} d {int(seconds % _DAY_S // _HOUR_S)} h"


def cell(value: Any) -> str:
    """Return a value as it stands in a table of any query."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case dt.datetime():
            return str(plain(value))
        case dict() | list() | tuple():
            return json.dumps(plain(value), ensure_ascii=False)
        case _:
            return str(value)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], kind: str) -> None:
    """Print the rows of a query to stdout, in one of `FORMATS`."""
    if kind == "json":
        sys.stdout.write(to_json(dict(zip(columns, row, strict=True)) for row in rows) + "\n")
        return
    if kind == "csv":
        for line in _csv_lines(columns, rows):
            sys.stdout.write(line)
        return
    if kind == "markdown":
        sys.stdout.write(_markdown_line(columns) + _markdown_line(["---"] * len(columns)))
        for row in rows:
            sys.stdout.write(_markdown_line([cell(value) for value in row]))
        return
    print_table(columns, [[cell(value) for value in row] for row in rows])


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print aligned columns to stdout; numbers stand to the right.

    Args:
        columns: Their heads.
        rows: Texts, as long as the columns each.
        styles: ANSI codes for whole cells, by their text, e.g. ``{"failed": "31"}``; used on a terminal only.
    """
    columns, rows = [visible(name) for name in columns], [[visible(text) for text in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    is_number = [
        all(_is_number(row[index]) for row in rows if row[index]) and any(row[index] for row in rows)
        for index in range(len(columns))
    ]
    colours = dict(styles or {}) if has_colours() else {}

    def line(texts: Sequence[str], fill: str = " ") -> str:
        cells = zip(texts, widths, is_number, strict=True)
        aligned = [text.rjust(width, fill) if right else text.ljust(width, fill) for text, width, right in cells]
        painted = [
            f"\x1b[{colours[text]}m{cell}\x1b[0m" if text in colours else cell
            for text, cell in zip(texts, aligned, strict=True)
        ]
        return (2 * fill + fill).join(painted).rstrip() + "\n"

    sys.stdout.write(line(columns) + line([""] * len(columns), "─"))
    for row in rows:
        sys.stdout.write(line(row))


def show(*parts: RenderableType) -> None:
    """Print to stdout what rich can lay out; colours only on a terminal, nothing cut anywhere else."""
    console = terminal()
    for part in parts:
        console.print(part)


def terminal() -> Console:
    """Return a console on stdout as it is now."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _UNBOUNDED
    return Console(
        file=sys.stdout, width=width, soft_wrap=width is not None, highlight=False, markup=False, emoji=False
    )


def screen() -> tuple[int, int]:
    """Return columns and rows of the terminal, or of one that is good to read where there is none."""
    size = shutil.get_terminal_size((100, 30))
    return size.columns, size.lines


def has_colours() -> bool:
    """Return whether stdout is a terminal whose user wants colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("".join(unit for _, unit in _UNITS)))
    except ValueError:
        return False
    return True


def _csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([cell(value) for value in row])
        yield line.getvalue()
        line.seek(0)
        line.truncate()
    yield line.getvalue()


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |\n"
