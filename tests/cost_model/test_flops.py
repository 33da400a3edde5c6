"""Flops counted from shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.axes.sharding_rules import known_primitives, rule_of
from autoshard.cost_model.program.flops import flops
from autoshard.tracing.primitives import EXPENSIVE, FUSED, REDUCTIONS
from tests.stages import array, traced


def flops_of(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Flops of one run of each equation, summed by primitive."""
    counts: dict[str, float] = {}
    for eqn in traced(fn, *args).program.eqns:
        counts[eqn.primitive] = counts.get(eqn.primitive, 0.0) + flops(eqn, rule_of(eqn))
    return counts


@pytest.mark.parametrize(
    ("subscripts", "shapes", "points"),
    [
        ("mk,kn->mn", [(8, 4), (4, 6)], 8 * 4 * 6),
        ("bqhk,bshk->bhqs", [(2, 8, 4, 16), (2, 5, 4, 16)], 2 * 8 * 5 * 4 * 16),
        ("i,i->", [(7,), (7,)], 7),
        ("i,j->ij", [(3,), (5,)], 15),
        ("bmk,bkn->bmn", [(3, 8, 1), (3, 1, 6)], 3 * 8 * 6),
    ],
)
def test_a_contraction_does_two_per_point_of_its_loops(
    subscripts: str, shapes: Any, points: int
) -> None:
    counts = flops_of(
        lambda x, y: jnp.einsum(subscripts, x, y), *(array(*shape) for shape in shapes)
    )
    assert sum(counts[name] for name in counts if name in ("dot_general", "mul")) in (
        2 * points,
        points,
    )
    if "dot_general" in counts:
        assert counts["dot_general"] == 2 * points


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_per_output_kernel_element_and_channel_of_a_group(groups: int) -> None:
    batch, channels, filters, size, kernel = 2, 4, 8, 10, 3

    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=groups)

    counts = flops_of(
        conv, array(batch, channels, size, size), array(filters, channels // groups, kernel, kernel)
    )
    assert (
        counts["conv_general_dilated"]
        == 2 * batch * filters * size**2 * kernel**2 * channels // groups
    )


def test_everything_else_does_one_per_element_read_or_written() -> None:
    assert flops_of(lambda x: jnp.sin(x).sum(), array(8, 4)) == {"sin": 32, "reduce_sum": 32}


def test_an_equation_with_a_body_does_nothing_itself() -> None:
    counts = flops_of(lambda x: jax.lax.scan(lambda c, r: (c + r, None), x[0], x)[0], array(8, 4))
    assert counts["scan"] == 0
    assert counts["add"] == 4


def test_the_families_name_primitives_that_exist() -> None:
    registered = set(known_primitives())
    assert registered >= EXPENSIVE
    assert registered >= REDUCTIONS
    assert registered >= FUSED - {"copy_p"}
    assert not FUSED & REDUCTIONS
