"""``LLMTRACK_MODE``: whether anything is recorded at all."""

from __future__ import annotations

import os

from .errors import UsageError


def is_disabled() -> bool:
    """Return whether ``LLMTRACK_MODE`` is ``disabled``, in whatever case.

    Raises:
        UsageError: It is another word: a run that was not to be recorded must not be because of a typing error.
    """
    mode = os.environ.get("LLMTRACK_MODE", "").strip().lower()
    if mode not in {"", "enabled", "disabled"}:
        raise UsageError(f"LLMTRACK_MODE is {mode!r}", hint="set it to 'disabled' or 'enabled', or unset it")
    return mode == "disabled"
