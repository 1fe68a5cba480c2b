"""Read the log: one SQL definition of what is live, superseded and settled, and commands to look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrack.writer.errors import explained

if TYPE_CHECKING:
    from .sql.views import connect, refresh, save_catalog

__all__ = ["connect", "refresh", "save_catalog"]


def __getattr__(name: str) -> object:
    # DuckDB takes a fifth of a second to import: a command that only shows its help does without.
    if name in __all__:
        try:
            from .sql import views
        except ModuleNotFoundError as error:
            raise explained(error) from error
        return getattr(views, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
