"""The package as a user gets it: light to import, complete, and typed."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import llmtrack
from llmtrack.writer.errors import explained

HEAVY = {"torch", "duckdb", "mlflow", "wandb", "numpy", "pandas", "click", "rich", "watchdog", "pyarrow"}


def modules_loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after running the code."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_package_loads_no_library() -> None:
    """A trainer that imports llmtrack pays for pyarrow when it opens a run, and for nothing else ever."""
    assert not modules_loaded_by("import llmtrack") & HEAVY


def test_every_public_name_but_the_reducer_needs_only_pyarrow() -> None:
    """With every other name resolved, only pyarrow is loaded, and NumPy if pyarrow finds it."""
    others = "for name in {*llmtrack.__all__} - {'Reducer'}: getattr(llmtrack, name)"
    loaded = modules_loaded_by(f"import llmtrack\n{others}")
    assert loaded & HEAVY <= {"pyarrow", "numpy"}


@pytest.mark.parametrize(
    ("library", "code", "extra"),
    [
        ("torch", "import llmtrack; llmtrack.Reducer", "torch"),
        ("torch", "from llmtrack import Reducer", "torch"),
        ("duckdb", "import llmtrack.query; llmtrack.query.connect", "query"),
        ("duckdb", "from llmtrack.query import refresh", "query"),
        ("duckdb", "from llmtrack.query import save_catalog", "query"),
    ],
)
def test_an_optional_part_says_what_brings_it(library: str, code: str, extra: str) -> None:
    """A library that is not there is an ImportError, and one of ours, and names the extra that has it."""
    script = f"import sys\nsys.modules[{library!r}] = None\ntry:\n    exec({code!r})\nexcept ImportError as error:\n"
    script += "    import llmtrack\n    assert isinstance(error, llmtrack.LlmtrackError)\n    print(error.name, error)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout.startswith(f"{library} {library} is not installed\n  try: pip install 'llmtrack-log[{extra}]'")


def test_what_no_extra_brings_is_left_as_it_is() -> None:
    """An installation that is broken in another way must not be explained away."""
    error = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    assert explained(error) is error


@pytest.mark.parametrize("name", llmtrack.__all__)
def test_a_public_name_is_there(name: str) -> None:
    """What __all__ promises can be had, and dir() shows it."""
    if name == "Reducer":
        pytest.importorskip("torch", reason="the Reducer works on torch's tensors")
    assert getattr(llmtrack, name) is not None
    assert name in dir(llmtrack)


def test_all_is_sorted() -> None:
    """The public names stand in order, so that a change to them is one line."""
    assert list(llmtrack.__all__) == sorted(llmtrack.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="no attribute 'open_runn'"):
        getattr(llmtrack, "open_runn")  # noqa: B009  the plain form is a type error, as it should be


def test_the_version_is_the_distributions() -> None:
    """There is one version, that of the distribution llmtrack-log."""
    assert llmtrack.__version__ == importlib.metadata.version("llmtrack-log")


def test_the_package_is_typed_and_has_all_its_parts() -> None:
    """The marker of PEP 561, the three parts and the example are found inside the package, installed or linked."""
    folder = Path(llmtrack.__file__).parent
    assert (folder / "py.typed").is_file()
    assert [part for part in ("writer", "query", "sync") if not (folder / part / "__init__.py").is_file()] == []
    assert (folder / "examples" / "pretrain_gpt.py").is_file()


@pytest.mark.parametrize("group", ["console_scripts", "llmtrack.sinks"])
def test_every_entry_point_leads_somewhere(group: str) -> None:
    """Each command and each sink that the distribution names can be imported."""
    points = [point for point in importlib.metadata.distribution("llmtrack-log").entry_points if point.group == group]
    assert points
    for point in points:
        assert callable(point.load())


def test_each_part_is_a_package_with_a_docstring() -> None:
    """help() on a part says what it is for."""
    for part in ("writer", "query", "sync"):
        assert importlib.import_module(f"llmtrack.{part}").__doc__
