"""Decisions about single rules, each as an example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.axes.sharding_rules import FactorKind, ShardingRule, reshape_rule, rule_of
from autoshard.axes.sharding_rules.reshaping import groups_of_equal_size
from autoshard.axes.sharding_rules.windows import tiles_exactly
from autoshard.tracing.program import Eqn, Value

PASS, REDUCED, PERMUTED, WHOLE = (
    FactorKind.PASS_THROUGH,
    FactorKind.REDUCTION,
    FactorKind.PERMUTATION,
    FactorKind.NEED_REPLICATION,
)
Shape = tuple[int, ...]


def rule_on(
    primitive: str, operands: list[Shape], results: list[Shape], **params: Any
) -> ShardingRule:
    """Rule of a primitive on shapes alone."""
    shapes = [*operands, *results]
    values = tuple(Value(i, shape, "float32", 4) for i, shape in enumerate(shapes))
    return rule_of(Eqn(0, primitive, params, values[: len(operands)], values[len(operands) :]))


def linked(rule: ShardingRule) -> set[tuple[int, int]]:
    """(operand dimension, result dimension) pairs of a reshape that are one PASS_THROUGH factor."""
    return {
        (i, j)
        for i, a in enumerate(rule.operands[0])
        for j, b in enumerate(rule.results[0])
        if a == b and rule.kinds[a] is PASS
    }


@pytest.mark.parametrize(
    ("in_shape", "out_shape", "expected"),
    [
        ((8, 5), (4, 2, 5), {(0, 0), (1, 2)}),
        ((4, 2, 5), (8, 5), {(0, 0), (2, 1)}),
        ((2, 6, 8), (12, 2, 4), {(0, 0), (2, 1)}),
        ((4, 3), (2, 6), {(0, 0)}),
        ((6, 2), (4, 3), set()),
        ((6, 4), (4, 6), set()),
        ((8,), (8, 1), {(0, 0)}),
        ((1, 8), (8,), {(1, 0)}),
        ((1,), (1, 1), set()),
        ((), (1,), set()),
        ((0, 4), (0, 2, 2), {(0, 0)}),
        ((4, 0), (4, 3, 0), {(0, 0)}),
    ],
)
def test_reshape_joins_the_major_dimensions(
    in_shape: Shape, out_shape: Shape, expected: set[tuple[int, int]]
) -> None:
    assert linked(reshape_rule(in_shape, out_shape)) == expected


@pytest.mark.parametrize(
    ("in_shape", "out_shape", "skip_in", "skip_out", "expected"),
    [
        ((8, 5), (4, 2, 5), set(), {0}, {(0, 1), (1, 2)}),
        ((4, 2, 5), (8, 5), {0}, set(), {(1, 0), (2, 1)}),
        ((8, 5), (4, 2, 5), {0}, set(), {(1, 2)}),
        ((4, 2), (8,), set(), {0}, set()),
        ((8, 6), (8, 2, 3), {0}, {0}, {(0, 0), (1, 1)}),
        ((24,), (2, 3, 4), set(), {0}, {(0, 1)}),
        ((24,), (2, 3, 4), set(), {0, 1}, {(0, 2)}),
    ],
)
def test_a_scanned_dimension_leaves_the_factor_to_the_next(
    in_shape: Shape,
    out_shape: Shape,
    skip_in: set[int],
    skip_out: set[int],
    expected: set[tuple[int, int]],
) -> None:
    """An unchanged dimension passes even if it is scanned: it is the same dimension."""
    assert (
        linked(reshape_rule(in_shape, out_shape, frozenset(skip_in), frozenset(skip_out)))
        == expected
    )


def test_groups_are_the_shortest() -> None:
    assert list(groups_of_equal_size((2, 3, 4), (6, 2, 2))) == [([0, 1], [0]), ([2], [1, 2])]


def test_update_of_a_whole_dimension_joins_and_of_a_part_does_not() -> None:
    rule = rule_on("dynamic_update_slice", [(4, 6), (4, 2), (), ()], [(4, 6)])
    assert rule.operands[0] == rule.results[0]
    assert rule.operands[1][0] == rule.operands[0][0]
    assert rule.kinds[rule.operands[1][1]] is WHOLE


def test_changed_dimensions_of_a_slice_correspond_without_being_one_axis() -> None:
    rule = rule_on("dynamic_slice", [(4, 6), (), ()], [(4, 2)], slice_sizes=(4, 2))
    assert rule.operands[0] == rule.results[0]
    assert [rule.kinds[factor] for factor in rule.operands[0]] == [PASS, PERMUTED]


def test_every_other_element_passes() -> None:
    """Rotary embeddings that interleave take x[..., ::2] and x[..., 1::2]."""
    for start in (0, 1):
        rule = rule_on(
            "slice", [(8,)], [(4,)], start_indices=(start,), limit_indices=(8,), strides=(2,)
        )
        assert rule.kinds == (PASS,)


def _gather_numbers(**numbers: Any) -> SimpleNamespace:
    return SimpleNamespace(operand_batching_dims=(), start_indices_batching_dims=(), **numbers)


def test_embedding_look_up() -> None:
    """(vocabulary, features)[tokens]: a split vocabulary leaves a partial sum, features and tokens
    pass."""
    numbers = _gather_numbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    rule = rule_on(
        "gather",
        [(64, 8), (2, 6, 1)],
        [(2, 6, 8)],
        dimension_numbers=numbers,
        slice_sizes=(1, 8),
        mode="clip",
    )
    vocabulary, features = rule.operands[0]
    assert (rule.kinds[vocabulary], rule.kinds[features]) == (REDUCED, PASS)
    assert rule.results[0] == (*rule.operands[1][:2], features)
    assert rule.kinds[rule.operands[1][2]] is WHOLE


@pytest.mark.parametrize(
    ("primitive", "batch"), [("scatter-add", REDUCED), ("scatter-max", REDUCED), ("scatter", WHOLE)]
)
def test_scatter_into_rows(primitive: str, batch: FactorKind) -> None:
    numbers = SimpleNamespace(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        operand_batching_dims=(),
        scatter_indices_batching_dims=(),
    )
    rule = rule_on(primitive, [(64, 8), (6, 1), (6, 8)], [(64, 8)], dimension_numbers=numbers)
    assert rule.operands[0] == rule.results[0]
    assert [rule.kinds[factor] for factor in rule.operands[0]] == [PASS, PASS]
    assert rule.operands[2] == (rule.operands[1][0], rule.operands[0][1])
    assert rule.kinds[rule.operands[1][0]] is batch
    assert rule.combine == ("max" if primitive == "scatter-max" else "add")


def _conv(lhs: Shape, rhs: Shape, out: Shape, **params: Any) -> ShardingRule:
    one = (1,) * (len(lhs) - 2)
    numbers = SimpleNamespace(
        **dict.fromkeys(("lhs_spec", "rhs_spec", "out_spec"), tuple(range(len(lhs))))
    )
    defaults: dict[str, Any] = {
        "window_strides": one,
        "padding": ((0, 0),) * len(one),
        "lhs_dilation": one,
        "rhs_dilation": one,
        "feature_group_count": 1,
        "batch_group_count": 1,
    }
    return rule_on(
        "conv_general_dilated", [lhs, rhs], [out], dimension_numbers=numbers, **(defaults | params)
    )


def test_convolution_with_a_halo() -> None:
    rule = _conv((2, 4, 8), (6, 4, 3), (2, 6, 8), padding=((1, 1),))
    (batch, features, space), kernel = rule.operands
    assert rule.results[0] == (batch, kernel[0], space)
    assert kernel[1] == features
    assert [rule.kinds[factor] for factor in (batch, features, space)] == [PASS, REDUCED, PERMUTED]
    assert [rule.kinds[factor] for factor in kernel] == [PASS, REDUCED, WHOLE]


def test_patches_of_a_vision_transformer_pass() -> None:
    rule = _conv((2, 3, 8), (6, 3, 2), (2, 6, 4), window_strides=(2,))
    assert rule.kinds[rule.operands[0][2]] is PASS
    assert rule.results[0][2] == rule.operands[0][2]


@pytest.mark.parametrize("groups", ["feature_group_count", "batch_group_count"])
def test_groups_of_a_convolution_are_one_factor(groups: str) -> None:
    lhs, rhs, out = {
        "feature_group_count": ((2, 8, 6), (8, 1, 3), (2, 8, 4)),
        "batch_group_count": ((8, 2, 6), (8, 2, 3), (1, 8, 4)),
    }[groups]
    rule = _conv(lhs, rhs, out, **{groups: 8})
    grouped = 1 if groups == "feature_group_count" else 0
    assert rule.operands[0][grouped] == rule.operands[1][0] == rule.results[0][1]
    assert rule.kinds[rule.operands[1][0]] is PASS


def test_windows_that_share_or_leave_out_elements_do_not_tile() -> None:
    assert tiles_exactly(6, 3, window=1, stride=2)
    assert not tiles_exactly(7, 3, window=2, stride=2)
    assert not tiles_exactly(6, 3, window=2, stride=2, padding=(1, 0))
    assert not tiles_exactly(8, 4, window=2, stride=2, window_dilation=2)


def test_broadcast_makes_new_dimensions_on_each_device() -> None:
    rule = rule_on(
        "broadcast_in_dim", [(1, 6)], [(4, 3, 6)], shape=(4, 3, 6), broadcast_dimensions=(1, 2)
    )
    assert [rule.kinds[factor] for factor in rule.results[0]] == [PASS, PASS, PASS]
    assert rule.kinds[rule.operands[0][0]] is WHOLE
    assert rule.operands[0][1] == rule.results[0][2]


def test_scalar_predicates_and_bounds_have_no_dimension() -> None:
    rule = rule_on("select_n", [(), (4, 6), (4, 6)], [(4, 6)])
    assert rule.operands == ((), (0, 1), (0, 1))
    rule = rule_on("clamp", [(), (4, 6), ()], [(4, 6)])
    assert rule.operands == ((), (0, 1), ())


def test_barrier_operands_stay_apart() -> None:
    rule = rule_on("optimization_barrier", [(4,), (4,)], [(4,), (4,)])
    assert rule.operands == rule.results == ((0,), (1,))


def test_bit_casts_keep_the_parts_of_an_element_together() -> None:
    wider = rule_on("bitcast_convert_type", [(4, 6)], [(4, 6, 4)])
    assert wider.results[0][:2] == wider.operands[0]
    assert wider.kinds[wider.results[0][2]] is WHOLE


def test_what_is_made_from_nothing_passes() -> None:
    assert rule_on("iota", [], [(4, 6)], shape=(4, 6), dimension=0).kinds == (PASS, PASS)
    bits = rule_on("random_bits", [()], [(4, 6)], shape=(4, 6), bit_width=32)
    assert (bits.kinds, bits.results) == ((PASS, PASS), ((0, 1),))


def test_sorted_dimension_is_whole_for_every_operand() -> None:
    rule = rule_on("sort", [(4, 6)] * 2, [(4, 6)] * 2, dimension=1, num_keys=1)
    assert rule.kinds == (PASS, WHOLE)
    assert rule.operands == rule.results == ((0, 1), (0, 1))
