"""Every error that llmtrack raises, with what went wrong, where, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_LONG: Final = re.compile(r"[0-9]{60,}|[^\s/'\"]{300,}")  # a file name has 255 bytes at most
_SHOWN: Final = 20  # characters
_EXTRAS: Final = {  # what brings each library
    **dict.fromkeys(("duckdb", "pytz", "click", "rich"), "query"),
    "torch": "torch",
    "matplotlib": "plot",
    "watchdog": "sync",
    "mlflow": "mlflow",
    "wandb": "wandb",
}


def shortened(message: str) -> str:
    """Cut what is longer than anybody reads: a number of a thousand digits, a name of a thousand letters."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}… ({len(word[0]):,} characters)", message)


class LlmtrackError(Exception):
    """Base of every error that llmtrack raises.

    Attributes:
        hint: The remedy in one sentence, printed by the command line after ``try:``; may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(shortened(message))
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  try: {self.hint}" if self.hint else message


class UsageError(LlmtrackError, ValueError):
    """The caller's mistake: a bad run id, a value that is no number, tokens that go backwards. Raised at once."""


class NotInstalledError(LlmtrackError, ModuleNotFoundError):
    """A library that an optional part of llmtrack needs is not there; the hint names the extra that brings it.

    Attributes:
        name: The library.
    """

    def __init__(self, library: str, *, extra: str) -> None:
        super().__init__(f"{library} is not installed", hint=install_hint(extra))
        self.name = library


def install_hint(extra: str) -> str:
    """Return how to install what an extra brings, from the package index or from a checkout."""
    return f"pip install 'llmtrack-log[{extra}]', or in a checkout: pip install -e '.[{extra}]'"


def explained(error: ModuleNotFoundError, *, else_extra: str | None = None) -> ModuleNotFoundError:
    """Return the error that says how to install what is missing, where an extra brings it; else the error itself.

    Args:
        error: As Python raised it.
        else_extra: The extra to name for a library that none is known for.
    """
    library = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(library, else_extra)
    return error if extra is None else NotInstalledError(library, extra=extra)


class FormatError(LlmtrackError):
    """A file of the log that cannot be read as it should.

    Attributes:
        path: The file.
        offset: The first byte that is not as it should be.
        reason: What is wrong there.
    """

    def __init__(self, path: Path, reason: str, *, offset: int = 0, hint: str = "") -> None:
        super().__init__(f"{path}: {reason} (at byte {offset})", hint=hint)
        self.path = path
        self.offset = offset
        self.reason = reason


class CorruptSegmentError(FormatError):
    """A part whose content fails its check; everything intact in it can still be read."""


class VersionError(FormatError):
    """A file written by a newer llmtrack than this one."""


class SinkError(LlmtrackError):
    """A tracker did not take what sync sent.

    Attributes:
        sink: Name of the sink, e.g. ``mlflow``.
        run_id: The run that was being replayed; None when it concerns the tracker as a whole.
    """

    def __init__(self, message: str, *, sink: str, run_id: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.sink = sink
        self.run_id = run_id


class RetryableSinkError(SinkError):
    """The tracker is down, slow or busy: the same request may succeed later.

    Attributes:
        retry_after_s: Seconds after which the tracker wants to be asked again; None when it does not say.
    """

    retry_after_s: float | None = None


class RejectedError(SinkError):
    """The tracker refused for good (bad credentials, not found, too large): trying again changes nothing."""


class TooLargeError(RejectedError):
    """The tracker, or something on the way to it, refused a request for its size: smaller ones may pass."""
