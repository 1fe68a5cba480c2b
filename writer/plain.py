"""Whatever a caller configures a run with, as plain JSON values that are the same in every process.

`docs/LINEAGE.md` lists what becomes what.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from typing import Any, Final, TypeAlias, cast

from .errors import UsageError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_DEPTH_LIMIT: Final = 32  # no configuration is deeper, and what seems to be refers to itself
_VALUES_LIMIT: Final = 100_000  # a trainer that is to start must not turn a data set into text first
_ARRAY_LIMIT: Final = 1_000  # elements; a longer array is data and not configuration
_INTEGER_LIMIT_BITS: Final = 1_024  # the largest float; Python refuses to print much longer ones
_TEXT_LIMIT: Final = 1_000  # characters of an object's description of itself

_ADDRESS: Final = re.compile(r"\bat 0x[0-9A-Fa-f]+")
# Where an object's text depends on its value and on nothing else, as far as it holds no address.
_STEADY_MODULES: Final = sys.stdlib_module_names | {"torch", "numpy"}
_NAMESPACES: Final = (argparse.Namespace, types.SimpleNamespace)
_FUNCTIONS: Final = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_EXPORTS: Final = ("model_dump", "to_dict", "_asdict")  # pydantic, Transformers and ml_collections, named tuples


def plain(value: object, *, strict: bool = False) -> Json:
    """Return a value as JSON values that never depend on the process: no address, no order of a set.

    NaN and infinities become the strings ``NaN``, ``Infinity`` and ``-Infinity``, which JSON lacks.

    Args:
        value: Anything.
        strict: Refuse what has no lasting description, where otherwise the name of its type stands in for it.

    Raises:
        UsageError: Only if strict.
    """
    reader = _Reader(strict=strict)
    return reader.read(lambda: value, "")


def type_name(value: object) -> str:
    """Return the full name of a value's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Reader:
    """Reads one configuration: bounded in depth and size, and an object that raises costs only itself."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._values = 0
        self._open: set[int] = set()  # ids of the containers that are being read, against those that hold themselves

    def read(self, get: Callable[[], object], key: str) -> Json:
        try:
            return self._plain(get(), key)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  # the object is the caller's, and asking it may raise anything
            return self._opaque(f"unreadable: {type(error).__name__}", key)

    def _plain(self, value: object, key: str) -> Json:  # noqa: PLR0911  # a line for each kind
        self._values += 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum) and not isinstance(value, (str, int)):
            return value.name
        if isinstance(value, str):
            return _text(value.value if isinstance(value, Enum) else value)
        if isinstance(value, Integral):
            whole = int(value)
            return whole if whole.bit_length() <= _INTEGER_LIMIT_BITS else hex(whole)
        if isinstance(value, (Real, Decimal)):
            return _number(float(value))
        if id(value) in self._open:
            return self._opaque("refers to itself", key)
        if len(self._open) >= _DEPTH_LIMIT or self._values >= _VALUES_LIMIT:
            return self._opaque("too much", key)
        self._open.add(id(value))
        try:
            return self._compound(value, key)
        finally:
            self._open.discard(id(value))

    def _compound(self, value: object, key: str) -> Json:  # noqa: C901, PLR0911  # a line for each kind
        if isinstance(value, Mapping) or _answers(value, "keys", "__getitem__"):
            items = cast("Mapping[object, object]", value)
            return self._mapping(list(items.keys()), items.__getitem__, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self._mapping(names, functools.partial(getattr, value), key)
        if isinstance(value, _NAMESPACES):
            return self._mapping(list(vars(value)), vars(value).__getitem__, key)
        if isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return self._mapping(list(parts), parts.__getitem__, key)
        for export in _EXPORTS:
            if _answers(value, export):
                return self._plain(getattr(value, export)(), key)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _text(bytes(value).decode("utf-8", "backslashreplace"))
        if isinstance(value, (Sequence, ValuesView)):
            return self._list(value, key)
        if isinstance(value, AbstractSet):
            return sorted(self._list(value, key), key=_sortable)
        if _answers(value, "tolist") and hasattr(value, "shape"):
            return self._array(value, key)
        return self._described(value, key)

    def _mapping(self, names: Sequence[object], get: Callable[..., object], key: str) -> Json:
        result: dict[str, Json] = {}
        for name in names:
            if self._values >= _VALUES_LIMIT:
                result["..."] = self._opaque("too much", key)
                break
            label = self._label(name, key)
            if label in result:  # 1 beside "1"
                self._opaque(f"two keys {label}", key)
                label = f"{label} ({type_name(name)})"
            result[label] = self.read(functools.partial(get, name), f"{key}.{label}" if key else label)
        return result

    def _label(self, name: object, key: str) -> str:
        label = self.read(lambda: name, f"a key of {key}")
        if isinstance(label, str):
            return label
        return json.dumps(int(label) if isinstance(label, float) and label.is_integer() else label)

    def _list(self, values: Iterable[object], key: str) -> list[Json]:
        result: list[Json] = []
        for index, value in enumerate(values):
            if self._values >= _VALUES_LIMIT:
                result.append(self._opaque("too much", key))
                break
            result.append(self.read(functools.partial(_same, value), f"{key}.{index}" if key else str(index)))
        return result

    def _array(self, value: Any, key: str) -> Json:
        shape, dtype = tuple(value.shape), getattr(value, "dtype", "")
        if math.prod(shape) > _ARRAY_LIMIT:
            return self._opaque(f"{type_name(value)} of {dtype}, shape {list(shape)}", key)
        return self._plain(value.tolist(), key)

    def _described(self, value: object, key: str) -> Json:
        if isinstance(value, _FUNCTIONS):
            name = f"{value.__module__}.{value.__qualname__}"
            return self._opaque(name, key) if "<" in name else name  # a lambda or closure: its name is not all of it
        described = type(value).__repr__ is not object.__repr__ or type(value).__str__ is not object.__str__
        text = _text(str(value)) if described else ""
        if text and not _ADDRESS.search(text):
            if type(value).__module__.partition(".")[0] in _STEADY_MODULES:
                return text
            if not self._strict:
                return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT] + "..."
        public = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
        if public:
            return self._mapping(public, functools.partial(getattr, value), key)
        return self._opaque(type_name(value), key)

    def _opaque(self, description: str, key: str) -> Json:
        if self._strict:
            raise UsageError(
                f"the recipe's {key or 'value'} ({description}) can't be compared with that of another process",
                hint="put numbers, strings, lists and mappings into the recipe, and leave out what they describe",
            )
        return f"<{description}>"


def _answers(value: object, *methods: str) -> bool:
    """Return whether the type has these methods; the value itself may claim to have any, as mocks do."""
    return not isinstance(value, type) and all(callable(getattr(type(value), method, None)) for method in methods)


def _same(value: object) -> object:
    return value


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(value: str) -> str:
    """Return a string that UTF-8 can hold: a lone surrogate (an undecodable file name) becomes a question mark."""
    return str(value).encode("utf-8", "replace").decode()


def _sortable(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
