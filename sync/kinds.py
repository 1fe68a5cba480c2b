"""What a run in a tracker holds of a run of the log."""

from __future__ import annotations

from typing import Final

CANONICAL: Final = "canonical"
PROVISIONAL: Final = "provisional"
SUPERSEDED: Final = "superseded"
REPLACED: Final = "replaced"  # a canonical run of an earlier generation, or a side run about to be deleted

# The kind of run that a row of the view `metrics` belongs to.
PART_SQL: Final = (
    f"CASE WHEN superseded_by IS NOT NULL THEN '{SUPERSEDED}' WHEN settled THEN '{CANONICAL}' ELSE '{PROVISIONAL}' END"
)
