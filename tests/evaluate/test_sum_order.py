"""Other orders of sums: the same numbers but for rounding, and rounding that moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.evaluate.verification.interpret import each_alone
from autoshard.evaluate.verification.sum_order import SUMS, _steps

RNG = np.random.default_rng(0)
SEEDS = range(1, 9)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*shape: int) -> np.ndarray:
    """Whole numbers in floats: their sums are exact in any order."""
    return RNG.integers(-8, 9, shape).astype(np.float32)


def conv(groups: int = 1, batch_groups: int = 1) -> Callable[..., jax.Array]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1,), "SAME", feature_group_count=groups, batch_group_count=batch_groups
    )


ROWS = jnp.array([3, 0, 3, 2, 1, 0, 3, 3, 1, 2, 0, 0, 1, 3, 2, 3, 3, 0, 1, 2])

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "sum": (lambda x: x.sum((0, 2)), ((20, 3, 9),), "reduce_sum"),
    "sum of all": (jnp.sum, ((37, 5),), "reduce_sum"),
    "dot": (jnp.dot, ((4, 33), (33, 5)), "dot_general"),
    "dot of two": (
        lambda a, b: jnp.einsum("bxik,bkxj->bij", a, b),
        ((2, 17, 3, 5), (2, 5, 17, 4)),
        "dot_general",
    ),
    "outer product": (
        lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))),
        ((3,), (4,)),
        "dot_general",
    ),
    "convolution": (conv(), ((2, 18, 8), (4, 18, 3)), "conv_general_dilated"),
    "grouped": (conv(2), ((2, 4, 8), (4, 2, 3)), "conv_general_dilated"),
    "batch grouped": (conv(1, 2), ((4, 18, 8), (4, 18, 3)), "conv_general_dilated"),
    "scatter": (lambda x, u: jnp.asarray(x).at[ROWS].add(u), ((4, 3), (20, 3)), "scatter-add"),
    "batched scatter": (
        jax.vmap(lambda x, u: x.at[ROWS].add(u)),
        ((2, 4), (2, 20)),
        "scatter-add",
    ),
    "elements": (lambda x, u: jnp.asarray(x).at[ROWS, ROWS].add(u), ((4, 4), (20,)), "scatter-add"),
    "running": (lambda x: jnp.cumsum(x, 1), ((3, 20),), "cumsum"),
    "running back": (lambda x: lax.cumsum(x, 0, reverse=True), ((20, 3),), "cumsum"),
    "in a loop": (
        lambda x: lax.scan(lambda c, r: (c + r.sum(), r @ r), 0.0, x),
        ((3, 40),),
        "scan",
    ),
}


def runs(fn: Callable[..., Any], *args: np.ndarray) -> list[list[np.ndarray]]:
    """The outputs for seed 0, and for the others."""
    run = jax.jit(each_alone(jax.make_jaxpr(fn)(*args)))
    return [[np.asarray(leaf) for leaf in run(np.uint32(s), *args)] for s in (0, *SEEDS)]


@pytest.mark.parametrize("name", CASES)
def test_another_order_is_the_same_sum(name: str) -> None:
    fn, shapes, primitive = CASES[name]
    args = [whole(*shape) for shape in shapes]
    assert primitive in str(jax.make_jaxpr(fn)(*args))
    wanted = jax.tree.leaves(fn(*args))
    for outputs in runs(fn, *args):
        for output, leaf in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(output, np.asarray(leaf))


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("outer product", "grouped")]
)
def test_another_order_rounds_differently_and_not_much(name: str) -> None:
    fn, shapes, _ = CASES[name]
    first, *others = runs(fn, *[floats(*shape) for shape in shapes])
    wanted = np.concatenate([leaf.ravel() for leaf in first])
    moved = np.array([np.concatenate([leaf.ravel() for leaf in other]) for other in others])
    assert (moved != wanted).any()
    np.testing.assert_allclose(moved, np.broadcast_to(wanted, moved.shape), atol=2e-5)


def test_a_product_is_permuted_too() -> None:
    (first,), *others = runs(jnp.prod, 1 + 0.01 * floats(50))
    assert any(other[0] != first for other in others)
    np.testing.assert_allclose([other[0] for other in others], first, rtol=1e-5)


def test_a_sum_of_equal_terms_rounds_in_one_direction_and_is_moved_by_parts() -> None:
    (first,), *others = runs(jnp.sum, np.full(8192, 0.6931472, np.float32))
    assert any(other[0] != first for other in others)


def test_a_sum_of_nothing_but_noise_changes_its_sign() -> None:
    x = floats(512)
    outputs = runs(jnp.sum, np.concatenate([x, -x])[RNG.permutation(1024)])
    signs = {float(np.sign(one[0])) for one in outputs}
    assert {-1.0, 1.0} <= signs


def test_low_precision_rounds_partial_sums() -> None:
    a, b = (jnp.asarray(floats(*shape), jnp.bfloat16) for shape in ((8, 64), (64, 8)))
    first, *others = runs(jnp.dot, a, b)
    moved = np.array([other[0].astype(np.float32) for other in others])
    assert (moved != first[0].astype(np.float32)).any(axis=(1, 2)).all(), "in every run"


def test_integers_are_left_alone() -> None:
    plain = str(
        jax.make_jaxpr(each_alone(jax.make_jaxpr(jnp.sum)(np.arange(64))))(
            np.uint32(1), np.arange(64)
        )
    )
    assert "gather" not in plain


@pytest.mark.parametrize("size", [2, 3, 16, 97, 4096, 65536, 1_000_003, 2**24, 2**31])
def test_every_step_visits_every_index_without_overflow(size: int) -> None:
    steps = _steps(size)
    assert len(steps)
    for step in map(int, steps):
        assert math.gcd(step, size) == 1
        assert step * (size - 1) + size - 1 < 2**32


def test_all_sums_have_a_case() -> None:
    assert set(SUMS) == {case[2] for case in CASES.values() if case[2] in SUMS} | {"reduce_prod"}
