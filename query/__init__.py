"""Read the log: one SQL definition of what is live, superseded and settled, and commands to look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sql.views import connect, refresh, save_catalog

__all__ = ["connect", "refresh", "save_catalog"]


def __getattr__(name: str) -> object:
    # DuckDB takes a fifth of a second to import: a command that only shows its help does without.
    if name in __all__:
        from .sql import views

        return getattr(views, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
