"""Flattening a call as `jax.jit` would: statics, donation, leaf paths, and back again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import ArgumentError, SignatureError
from autoshard.tracing.jit_options import options_for
from autoshard.tracing.signature import Call, leaf_paths
from tests.stages import array, call_of

X = np.ones((4, 2), np.float32)


def step(params: Any, x: Any, mode: str = "train", *, scale: float = 1.0) -> Any:
    return params, x, mode, scale


def many(first: Any, *rest: Any, **named: Any) -> Any:
    return first, rest, named


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        map(np.array_equal, *map(jax.tree.leaves, (a, b)))
    )


@pytest.mark.parametrize(
    "options", [{"static_argnums": 2}, {"static_argnames": "mode"}, {"static_argnums": (-1,)}]
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_static_argument_by_number_or_name(options: dict[str, Any], by_keyword: bool) -> None:
    args: tuple[Any, ...] = ({"w": X}, X) if by_keyword else ({"w": X}, X, "eval")
    kwargs = {"mode": "eval"} if by_keyword else {}
    call = call_of(step, args, kwargs, **options)
    assert call.paths == ("params/w", "x")
    again_args, again_kwargs = call.rebuild(call.leaves)
    assert step(*again_args, **again_kwargs)[2] == "eval"
    assert same((again_args[:2], again_kwargs), (args[:2], kwargs))


def test_statics_in_the_middle_keep_their_places() -> None:
    call = call_of(lambda a, b, c, d: None, (X, "b", X + 1, "d"), static_argnums=(1, 3))
    assert call.paths == ("a", "c")
    assert call.owners == (0, 2)
    (a, b, c, d), _ = call.rebuild(call.leaves)
    assert (b, d) == ("b", "d")
    assert same((a, c), (X, X + 1))


def test_keyword_only_arguments_and_keywords_of_any_name() -> None:
    call = call_of(step, ({}, X), {"scale": 2.0})
    assert call.paths == ("x", "scale")
    assert call.owners == (1, "scale")
    assert call.avals[1].weak_type
    call = call_of(many, (X,), {"b": {"c": X}, "a": X})
    assert call.paths == ("first", "a", "b/c")


def test_further_positional_arguments_are_numbered() -> None:
    call = call_of(many, (X, X, (X, X)), donate_argnums=2)
    assert call.paths == ("first", "rest/0", "rest/1/0", "rest/1/1")
    assert call.donated == (False, False, True, True)


def test_none_is_structure_and_functions_are_set_aside() -> None:
    tree = {"act": jnp.tanh, "b": None, "w": X}
    call = call_of(step, (tree, X))
    assert call.paths == ("params/w", "x")
    (params, _), _ = call.rebuild(["W", "X"])
    assert params == {"act": jnp.tanh, "b": None, "w": "W"}
    assert not call.same_as(call_of(step, ({**tree, "act": jnp.sin}, X)))


def test_abstract_leaves_are_leaves() -> None:
    call = call_of(step, ({"w": array(8, 3, dtype=jnp.bfloat16)}, array(2)))
    assert [(a.shape, a.dtype) for a in call.avals] == [((8, 3), jnp.bfloat16), ((2,), jnp.float32)]


def test_colliding_paths_are_written_in_full() -> None:
    call = call_of(step, ({"a/b": X, "a": {"b": X, "c": X}}, X))
    assert sorted(call.paths) == ["params/a/c", "params['a']['b']", "params['a/b']", "x"]


keys = st.text("ab/", min_size=1, max_size=3)
trees = st.recursive(
    st.just(0.0), lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=8
)


@given(st.lists(trees, min_size=1, max_size=3))
def test_paths_are_unique(arguments: list[Any]) -> None:
    prefixed = [
        (f"p{i}", path)
        for i, t in enumerate(arguments)
        for path, _ in jax.tree_util.tree_leaves_with_path(t)
    ]
    assert len(set(leaf_paths(prefixed))) == len(prefixed)


@pytest.mark.parametrize(
    "options",
    [{"donate_argnums": (0,)}, {"donate_argnames": "params"}, {"donate_argnames": ["params"]}],
)
def test_donation_by_number_or_name(options: dict[str, Any]) -> None:
    assert call_of(step, ({"a": X, "b": X}, X), **options).donated == (True, True, False)
    assert call_of(step, (), {"params": {"a": X}, "x": X}, **options).donated == (True, False)


def test_what_makes_two_calls_the_same() -> None:
    def call(x: Any, mode: str = "train") -> Call:
        return call_of(step, ({}, x, mode), static_argnums=2)

    assert call(X).same_as(call(X + 1))
    different = (call(X[:2]), call(X.astype(np.int32)), call({"x": X}), call(X, "eval"), call(None))
    assert not any(call(X).same_as(other) for other in different)
    assert not call(1.0).same_as(call(np.float32(1.0))), "a weak type is another signature"


def test_a_static_without_a_boolean_equality_is_only_the_same_as_itself() -> None:
    def call(static: Any) -> Call:
        return call_of(step, ({}, X, static), static_argnums=2)

    table = np.arange(3)
    assert call(table).same_as(call(table))
    assert not call(table).same_as(call(table.copy()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"static_argnums": 5}, r"static_argnums has 5, but step has 3 positional"),
        ({"static_argnames": "mod"}, r"static_argnames names \['mod'\].*mode"),
        ({"donate_argnums": -4}, r"donate_argnums has -4"),
        ({"donate_argnames": ("opt",)}, r"donate_argnames names \['opt'\].*params"),
    ],
)
def test_unknown_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        options_for(step, **options)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing"),
        ((1, 2, 3, 4), {}, "too many"),
        ((1, 2), {"scal": 1}, "unexpected keyword argument 'scal'"),
    ],
)
def test_arguments_that_do_not_bind_are_refused(args: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(
        SignatureError, match=rf"step cannot be called with {len(args)} positional.*{words}"
    ):
        call_of(step, args, kwargs)
