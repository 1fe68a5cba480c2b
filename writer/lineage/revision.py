"""The commit of the code that runs, and whether the checkout differs from it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

_TIMEOUT_S: Final = 3.0  # a big checkout on a cold parallel file system takes minutes, and training does not wait
_KILL_S: Final = 0.5  # how long to wait for a killed git; one that hangs in the kernel is left to it
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SURROUNDINGS: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")  # another repository's


def find_checkout() -> Path | None:
    """Return the top of the checkout that the main script, or else the working directory, lies in."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path.cwd()]
    if script is not None and not Path(script).resolve().is_relative_to(Path(sys.prefix).resolve()):
        folders.insert(0, Path(script).resolve().parent)  # not a launcher that came with an installed package
    candidates = (above for folder in folders for above in (folder, *folder.parents))
    return next((folder for folder in candidates if (folder / ".git").exists()), None)


def read_commit(checkout: Path) -> str | None:
    """Return the commit that is checked out, or None.

    Reads git's files: many containers have no git, and git refuses a checkout that another user owns. Where the files
    are of a newer kind, git is asked.
    """
    dot_git = checkout / ".git"
    own = dot_git if dot_git.is_dir() else checkout / dot_git.read_text().removeprefix("gitdir:").strip()
    shared = own / (own / "commondir").read_text().strip() if (own / "commondir").exists() else own
    head = (own / "HEAD").read_text().strip()
    if head.startswith("ref:"):
        head = _read_ref(own, shared, head.removeprefix("ref:").strip()) or _git(checkout, "rev-parse", "HEAD") or ""
    return head.strip() if _COMMIT.fullmatch(head.strip()) else None


def is_dirty(checkout: Path) -> bool | None:
    """Return whether a tracked file differs from the commit; None when git does not say so in time."""
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    return None if changes is None else bool(changes)


def _read_ref(own: Path, shared: Path, ref: str) -> str | None:
    for folder in (own, shared):
        if (folder / ref).is_file():
            return (folder / ref).read_text().strip()
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {ref}")), None)


def _git(checkout: Path, *command: str) -> str | None:
    """Return what git says within `_TIMEOUT_S`; it takes no lock and starts no daemon."""
    environment = {name: value for name, value in os.environ.items() if name not in _SURROUNDINGS}
    process = subprocess.Popen(
        ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", checkout, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        return None
    return said if process.returncode == 0 else None
