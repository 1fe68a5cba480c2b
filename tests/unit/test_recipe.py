"""Two recipes are one exactly when nothing that the caller said differs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.errors import UsageError
from llmtrack.writer.lineage.recipe import canonical_json, hash_of, recipe_diff, recipe_hash, recipe_json
from llmtrack.writer.plain import Json

_LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
_RECIPES = st.recursive(
    st.dictionaries(st.text(max_size=4), _LEAVES, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=4), inner | _LEAVES | st.lists(inner | _LEAVES, max_size=3)),
    max_leaves=12,
)


def _retold(value: Json) -> Json:
    """Say the same in another order and with other numbers."""
    if isinstance(value, dict):
        return {key: _retold(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return [_retold(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


@given(_RECIPES)
def test_neither_the_order_of_keys_nor_the_kind_of_a_whole_number_matters(recipe: dict[str, Json]) -> None:
    """Nor does writing it as JSON and reading it again."""
    assert recipe_hash(_retold(recipe)) == recipe_hash(recipe)
    assert recipe_diff(_retold(recipe), recipe) == {}
    assert recipe_hash(json.loads(json.dumps(recipe))) == recipe_hash(recipe)


@given(_RECIPES, _RECIPES)
def test_there_is_a_difference_to_show_exactly_when_the_hashes_differ(old: Json, new: Json) -> None:
    """A fork without a difference could not be explained, and a difference without a fork would be missed."""
    assert (canonical_json(old) != canonical_json(new)) == bool(recipe_diff(old, new))


def test_the_hash_is_short_and_the_same_for_ever() -> None:
    """Checkpoints hold it: a new release must not make it another."""
    recipe = {"lr": 3e-4, "warmup": 2000.0, "betas": (0.9, 0.95), "mix": {"web": 0.7, "code": 0.3}, "name": "é"}
    assert recipe_json(recipe) == (
        '{"betas":[0.9,0.95],"lr":0.0003,"mix":{"code":0.3,"web":0.7},"name":"é","warmup":2000}'
    )
    assert recipe_hash(recipe) == hash_of(str(recipe_json(recipe))) == "8624510cbc8582fd"


def test_no_recipe_has_no_hash_and_an_empty_one_has() -> None:
    """None says nothing about the training; an empty recipe says that nothing matters."""
    assert recipe_hash(None) is None
    assert recipe_hash({}) is not None


def test_true_is_not_one() -> None:
    """Python says they are equal; in a recipe a switch is no number."""
    assert recipe_hash({"a": True}) != recipe_hash({"a": 1})
    assert recipe_diff({"a": True}, {"a": 1}) == {"a": [True, 1]}


def test_a_difference_is_told_by_dotted_keys() -> None:
    """Down to the value that changed, in lists by index."""
    old = {"optimizer": {"lr": 1, "eps": 1e-8}, "data": [{"name": "web", "weight": 0.7}, {"name": "code"}], "a.b": 1}
    new = {"optimizer": {"lr": 2, "eps": 1e-8}, "data": [{"name": "web", "weight": 0.8}, {"name": "code"}], "a.b": 2}
    assert recipe_diff(old, new) == {"optimizer.lr": [1, 2], "data.0.weight": [0.7, 0.8], '"a.b"': [1, 2]}
    assert recipe_diff({"a": [1]}, {"a": [1, 2], "b": {"c": 1}}) == {"a": [[1], [1, 2]], "b": [None, {"c": 1}]}
    assert recipe_diff("cosine", "linear") == {"recipe": ["cosine", "linear"]}


def test_a_key_with_a_point_is_not_taken_for_two_keys() -> None:
    """Both differences are there."""
    assert recipe_diff({"a.b": 1, "a": {"b": 1}}, {"a.b": 2, "a": {"b": 3}}) == {'"a.b"': [1, 2], "a.b": [1, 3]}


def test_a_secret_is_no_part_of_a_recipe() -> None:
    """A new password is no new recipe, and no difference shows one."""
    assert recipe_hash({"lr": 1, "api_key": "a"}) == recipe_hash({"lr": 1, "api_key": "b"})
    assert "hunter2" not in str(recipe_json({"url": "https://me:hunter2@host"}))


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    """The caller learns which value, before the training starts."""
    with pytest.raises(UsageError, match=r"the recipe's model\.init .*can't be compared") as refused:
        recipe_hash({"model": {"init": object()}})
    assert "leave out" in refused.value.hint
