"""Refuse to build from a checkout whose links are gone, before half a package is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("writer", "query", "sync", "examples")


class LinkCheck(BuildHookInterface[Any]):
    """Checks, before anything is packed, that every part of the package is a folder under ``llmtrack/``.

    In a checkout the parts are relative links to the folders at the top; in a source archive they are folders.
    A zip, or git with ``core.symlinks=false``, turns a link into a small text file, and the wheel would lack
    that part in silence.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  hatchling's signature
        """Stop the build if a part is missing."""
        missing = [f"llmtrack/{part}" for part in PARTS if not (Path(self.root) / "llmtrack" / part).is_dir()]
        if missing:
            # SystemExit, because pip prints its text alone where it would print an exception's traceback.
            raise SystemExit(
                f"llmtrack: {', '.join(missing)} must be a folder or a link to one, and is not.\n"
                "The links of this checkout were lost, as in a zip or on a file system without symbolic links.\n"
                "  try: git clone the repository (with core.symlinks=true), or pip install llmtrack-log"
            )
