"""What is built from this checkout: the wheel, the source archive, and the refusal where the links are gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
LINKS = ("writer", "query", "sync", "examples")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of everything that a build looks at, with the links as links."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", ".gitignore"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, copy)
    for name in ("llmtrack", *LINKS):
        shutil.copytree(CHECKOUT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build(checkout: Path, target: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel or an sdist into dist/ of the checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", "dist"]
    return subprocess.run(command, check=False, cwd=checkout, capture_output=True, text=True, timeout=120)


def sources() -> set[str]:
    """Return the files of the package in this checkout, as they are called inside it."""
    found = {"llmtrack/__init__.py", "llmtrack/py.typed"}
    for link in LINKS:
        for file in (CHECKOUT / link).rglob("*"):
            if file.is_file() and file.suffix in {".py", ".sql", ".html", ".css", ".js"}:
                found.add(f"llmtrack/{file.relative_to(CHECKOUT)}")
    return found


def test_the_wheel_has_every_file_of_every_part(checkout: Path) -> None:
    """The wheel holds the folders behind the links, under llmtrack/, and nothing beside it."""
    result = build(checkout, "wheel")
    assert result.returncode == 0, result.stderr
    (wheel,) = (checkout / "dist").glob("llmtrack_log-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources() <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"llmtrack", "llmtrack_log"}


def test_a_wheel_can_be_built_from_the_source_archive(checkout: Path, tmp_path: Path) -> None:
    """The source archive has folders where the checkout has links, each file once, and builds the same wheel."""
    assert build(checkout, "sdist").returncode == 0
    (archive,) = (checkout / "dist").glob("llmtrack_log-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not [name for name in LINKS if (unpacked / name).exists()]
    assert not [name for name in LINKS if (unpacked / "llmtrack" / name).is_symlink()]
    result = build(unpacked, "wheel")
    assert result.returncode == 0, result.stderr
    (wheel,) = (unpacked / "dist").glob("*.whl")
    assert sources() <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_a_checkout_without_its_links_is_not_built(checkout: Path, target: str) -> None:
    """Where a link became a text file, as in a zip, the build stops with what is missing and what to do."""
    link = checkout / "llmtrack" / "sync"
    link.unlink()
    link.write_text("../sync")
    result = build(checkout, target)
    assert result.returncode != 0
    assert "llmtrack/sync must be a folder" in result.stderr
    assert "try: git clone" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((checkout / "dist").glob("*")) if (checkout / "dist").exists() else True
