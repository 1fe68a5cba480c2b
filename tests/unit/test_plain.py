"""Any configuration becomes plain JSON values that another process would have made too."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import json
import os
import subprocess
import sys
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.errors import UsageError
from llmtrack.writer.plain import plain


class _Schedule(Enum):
    COSINE = 1


class _Level(IntEnum):
    HIGH = 3


class _Optimizer(StrEnum):
    ADAMW = "adamw"


class _Window(NamedTuple):
    size: int
    stride: int


@dataclasses.dataclass
class _Model:
    layers: int
    betas: tuple[float, float]
    extra: dict[str, object] = dataclasses.field(default_factory=dict)


class _Settings:
    """A plain class, as small training scripts have it."""

    def __init__(self) -> None:
        self.lr = 0.1
        self.names = {"b", "a"}
        self._handle = object()


class _Interpolated(UserDict[str, object]):
    """Like OmegaConf: a key that is there and whose value cannot be had."""

    def __getitem__(self, key: str) -> object:
        if key == "missing":
            raise ValueError(key)
        return super().__getitem__(key)


class _Hostile:
    """Raises whatever one asks."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def keys(self) -> Iterator[str]:
        raise MemoryError

    def __getitem__(self, key: str) -> str:
        raise KeyError(key)


class _Exported:
    """Like the configuration of a Transformers model."""

    def to_dict(self) -> dict[str, object]:
        return {"hidden_size": 64, "torch_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (Decimal("0.5"), 0.5),
        ((1, (2, 3)), [1, [2, 3]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (deque([1]), [1]),
        (range(3), [0, 1, 2]),
        ({"a": 1}.values(), [1]),
        ({1: "a", None: "b", 2.0: "c", False: "d"}, {"1": "a", "null": "b", "2": "c", "false": "d"}),
        ({(1, 2): 3}, {"[1, 2]": 3}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (argparse.Namespace(lr=0.1, sub=argparse.Namespace(b=1)), {"lr": 0.1, "sub": {"b": 1}}),
        (SimpleNamespace(a=1), {"a": 1}),
        (_Model(2, (0.9, 0.95)), {"layers": 2, "betas": [0.9, 0.95], "extra": {}}),
        (_Window(4, 2), {"size": 4, "stride": 2}),
        (_Settings(), {"lr": 0.1, "names": ["a", "b"]}),
        (_Exported(), {"hidden_size": 64, "torch_dtype": "torch.bfloat16"}),
        (_Schedule.COSINE, "COSINE"),
        (_Level.HIGH, 3),
        (_Optimizer.ADAMW, "adamw"),
        (Path("/data/mix"), "/data/mix"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"ab\xff", "ab\\xff"),
        ("\udcff", "?"),
        (10**400, hex(10**400)),
        (np.float32(0.5), 0.5),
        (np.int64(2**62 + 1), 2**62 + 1),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (np.dtype("float32"), "float32"),
        (torch.tensor(3), 3),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (torch.Size([2, 3]), [2, 3]),
        (json.dumps, "json.dumps"),
        (functools.partial(json.dumps, indent=2), {"func": "json.dumps", "args": [], "keywords": {"indent": 2}}),
    ],
)
def test_a_value_that_means_something_is_kept_as_what_it_means(value: object, expected: object) -> None:
    """The same with and without strictness, and it is JSON."""
    assert plain(value) == expected
    assert plain(value, strict=True) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected


@pytest.mark.parametrize(
    ("value", "stands_in"),
    [
        (object(), "<builtins.object>"),
        (lambda: 1, "<test_plain.<lambda>>"),
        (iter(()), "<builtins.tuple_iterator>"),
        (np.zeros((100, 100)), "<numpy.ndarray of float64, shape [100, 100]>"),
        (_Hostile(), "<unreadable: MemoryError>"),
    ],
)
def test_what_no_other_process_could_describe_is_its_type_in_a_config_and_refused_in_a_recipe(
    value: object, stands_in: str
) -> None:
    """No address and no content that changes by itself gets into the log."""
    described = json.loads(json.dumps(plain({"a": [value]})))["a"][0]
    assert described.replace("tests.unit.", "").replace("unit.", "") == stands_in
    with pytest.raises(UsageError, match=r"the recipe's a\.0"):
        plain({"a": [value]}, strict=True)


def test_an_object_that_describes_itself_is_its_text_in_a_config_and_refused_in_a_recipe() -> None:
    """Its text is for people: nobody promises that it is the same tomorrow."""

    class Sampler:
        def __repr__(self) -> str:
            return f"Sampler({'x' * 2000})"

    assert plain(torch.nn.Linear(2, 3)) == "Linear(in_features=2, out_features=3, bias=True)"
    assert plain(Sampler()) == "Sampler(" + "x" * 992 + "..."
    with pytest.raises(UsageError, match="can't be compared"):
        plain(Sampler(), strict=True)


def test_a_value_that_cannot_be_read_costs_only_itself() -> None:
    """As with a missing value or a broken interpolation of OmegaConf."""
    config = _Interpolated(lr=0.1, missing=None)
    assert plain(config) == {"lr": 0.1, "missing": "<unreadable: ValueError>"}


def test_a_config_that_holds_itself_ends() -> None:
    """Directly, or by way of new objects without end."""

    class Endless:
        def to_dict(self) -> dict[str, object]:
            return {"next": Endless()}

    config: dict[str, Any] = {"a": 1}
    config["self"] = [config]
    assert plain(config) == {"a": 1, "self": ["<refers to itself>"]}
    assert "<too much>" in json.dumps(plain(Endless()))


def test_a_config_without_bounds_is_cut() -> None:
    """A data set that got into the configuration must not keep the trainer waiting."""
    assert len(json.dumps(plain({"ids": range(10**9), "more": dict.fromkeys(range(300_000), 0)}))) < 1_000_000


def test_two_keys_of_one_name_are_both_kept_in_a_config_and_refused_in_a_recipe() -> None:
    """1 beside "1"."""
    assert plain({"1": "a", 1: "b"}) == {"1": "a", "1 (builtins.int)": "b"}
    with pytest.raises(UsageError, match="two keys 1"):
        plain({"1": "a", 1: "b"}, strict=True)


def test_a_set_is_the_same_in_processes_that_hash_strings_differently() -> None:
    """Python's order of a set depends on a random seed of the process."""
    code = (
        "from llmtrack.writer.lineage.recipe import recipe_hash;print(recipe_hash({'langs': {'en', 'de', 'fr', 'ja'}}))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(hashes) == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.tuples(inner)
            | st.builds(_Model, inner, inner)
        ),
    )
)
def test_whatever_is_configured_becomes_json(value: object) -> None:
    """And once it is plain it stays as it is."""
    once = plain(value)
    json.dumps(once, allow_nan=False).encode()
    assert plain(once) == once
