"""HTML out of texts that nobody has looked at: every one of them goes through `text`."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

LONG: Final = 300  # characters of one text in a table
_ONE_LINE: Final = 18  # characters of a text that is not broken: a time, a span of time

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_PICTURES: Final = 0x2400  # where Unicode has pictures of control characters


class Html(str):
    """A piece of HTML that is safe as it stands."""

    __slots__ = ()


def text(value: object, *, long: int = LONG) -> Html:
    """Return a text as HTML: escaped, its direction its own affair, its control characters visible."""
    whole = "" if value is None else str(value)
    cut = whole if len(whole) <= long else f"{whole[:long]}… ({len(whole):,} characters)"
    visible = html.escape(_CONTROL.sub(_picture, cut))
    return Html(f"<bdi>{visible}</bdi>") if not visible.isascii() else Html(visible)


def attribute(value: object, *, long: int = LONG) -> str:
    """Return a text for between the quotes of an attribute."""
    whole = str(value)
    return html.escape(_CONTROL.sub(_picture, whole if len(whole) <= long else f"{whole[:long]}…"))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = (), kind: str = ""
) -> Html:
    """Return a table that scrolls by itself where the window is narrow.

    Args:
        heads: Of the columns, ours and plain.
        rows: Cells: `Html` as it stands, everything else as text.
        numbers: The columns that stand to the right.
        kind: Its class.
    """
    right = set(numbers)
    classes = [' class="n"' if index in right else "" for index in range(len(heads))]
    head = "".join(
        f'<th scope="col"{kind_}>{html.escape(name)}</th>' for name, kind_ in zip(heads, classes, strict=True)
    )
    body = "\n".join(
        f"<tr>{''.join(_cell(one, kind_) for one, kind_ in zip(row, classes, strict=True))}</tr>" for row in rows
    )
    begin = f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
    return Html(f"{begin}\n<tbody>\n{body}\n</tbody></table></div>")


def _cell(value: object, kind: str) -> str:
    if not kind and not isinstance(value, Html) and len(str(value)) <= _ONE_LINE:
        kind = ' class="s"'
    return f"<td{kind}>{cell(value)}</td>"


def cell(value: object) -> Html:
    """Return a cell's content: HTML of ours as it stands, everything else as text."""
    return value if isinstance(value, Html) else text(value)


@functools.cache
def own(name: str) -> str:
    """Return a file of this package: a script, a style sheet, a piece of HTML."""
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8").rstrip()


def join(parts: Iterable[str]) -> Html:
    """Return pieces of HTML, one after the other."""
    return Html("\n".join(part for part in parts if part))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(_PICTURES + code) if code < 0x20 else "␡" if code == 0x7F else "�"  # noqa: PLR2004 - ASCII's own
