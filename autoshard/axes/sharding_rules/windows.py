"""Windows that slide: convolution, reduce_window and its gradients.

A sliding dimension is PERMUTATION (a split needs a halo exchange), unless its windows do not
overlap and fill it exactly: then a split between windows is local, and it passes (patch embeddings,
2x2 pooling, 1x1 convolutions).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autoshard.axes.sharding_rules.builder import Place, Rule, RuleBuilder, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def tiles_exactly(
    size: int,
    windows: int,
    window: int,
    stride: int,
    padding: tuple[int, int] = (0, 0),
    base_dilation: int = 1,
    window_dilation: int = 1,
) -> bool:
    """Whether windows, a stride apart, divide a dimension among them without sharing an element.

    >>> tiles_exactly(size=8, windows=4, window=2, stride=2)
    True
    >>> tiles_exactly(size=8, windows=6, window=3, stride=1)
    False
    """
    reach = (window - 1) * window_dilation + 1
    moved = base_dilation != 1 or tuple(padding) != (0, 0)
    return not moved and reach <= stride and size == windows * stride


def conv_general_dilated(eqn: Eqn) -> ShardingRule:
    """Batch and output features pass, input features are reduced; space see `_add_space`.

    With groups (of features or of the batch) the group is the major part of three dimensions: input
    features (or batch) of the left operand, output features of the kernel, output features of the
    result; they share a PASS_THROUGH factor, which is exact for splits that divide the number of
    groups. What is left inside a group is NEED_REPLICATION.
    """
    builder = RuleBuilder.of(eqn)
    numbers = eqn.params["dimension_numbers"]
    # Each: the dimension of batch (kernel: output features), of features, then those of space.
    image, kernel, out = ints(numbers.lhs_spec), ints(numbers.rhs_spec), ints(numbers.out_spec)

    out_features: list[Place] = [(1, kernel[0])]
    groups = None
    if int(eqn.params["batch_group_count"]) > 1:
        out_features.append((0, image[0]))
        groups = int(eqn.params["batch_group_count"])
    else:
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, image[0])], [(0, out[0])])
    if int(eqn.params["feature_group_count"]) > 1:
        out_features.append((0, image[1]))
        groups = int(eqn.params["feature_group_count"])
    else:
        builder.add_factor(FactorKind.REDUCTION, [(0, image[1]), (1, kernel[1])])
    builder.add_factor(FactorKind.PASS_THROUGH, out_features, [(0, out[1])], max_shards=groups)

    space = zip(image[2:], kernel[2:], out[2:], strict=True)
    for axis, (image_dim, kernel_dim, out_dim) in enumerate(space):
        _add_space(builder, eqn.params, axis, (image_dim, kernel_dim, out_dim))
    return builder.build()


def _add_space(
    builder: RuleBuilder, params: Mapping[str, Any], axis: int, dims: tuple[int, int, int]
) -> None:
    """Adds the factor of one dimension of space: PERMUTATION, unless windows tile it exactly.

    A kernel as large as the image, without padding, is a contraction over space: REDUCTION.

    Args:
        builder: Of the convolution.
        params: Its parameters.
        axis: Number of the dimension among those of space.
        dims: The dimension in the image, in the kernel and in the result.
    """
    image_dim, kernel_dim, out_dim = dims
    size = builder.operands[0][image_dim]
    window = builder.operands[1][kernel_dim]
    windows = builder.results[0][out_dim]
    low, high = ints(params["padding"][axis])
    stride = int(params["window_strides"][axis])
    dilations = int(params["lhs_dilation"][axis]), int(params["rhs_dilation"][axis])

    # The only window is the whole image: partial sums over space add up to it.
    plain = dilations == (1, 1) and (low, high) == (0, 0)
    if plain and size == window > 1 and windows == 1:
        builder.add_factor(FactorKind.REDUCTION, [(0, image_dim), (1, kernel_dim)])
        return
    tiled = tiles_exactly(size, windows, window, stride, (low, high), *dilations)
    kind = FactorKind.PASS_THROUGH if tiled else FactorKind.PERMUTATION
    builder.add_factor(kind, [(0, image_dim)], [(0, out_dim)])


def _sliding_rule(eqn: Eqn, operands: tuple[int, ...], windowed: tuple[int, int]) -> ShardingRule:
    """The rule of a primitive whose listed operands and results have one rank and one window.

    Args:
        eqn: With the parameters of `reduce_window`.
        operands: Positions of operands that have dimensions.
        windowed: Shapes (position among operands then results) of which the first is divided into
            windows, and of which the second has an element per window.
    """
    builder = RuleBuilder.of(eqn)
    shapes = builder.operands + builder.results
    sizes, counts = shapes[windowed[0]], shapes[windowed[1]]
    params = eqn.params
    ones = (1,) * len(sizes)
    for dim in range(len(sizes)):
        low, high = ints(params["padding"][dim])
        exact = tiles_exactly(
            size=sizes[dim],
            windows=counts[dim],
            window=int(params["window_dimensions"][dim]),
            stride=int(params["window_strides"][dim]),
            padding=(low, high),
            base_dilation=int(params.get("base_dilation", ones)[dim]),
            window_dilation=int(params.get("window_dilation", ones)[dim]),
        )
        kind = FactorKind.PASS_THROUGH if exact else FactorKind.PERMUTATION
        builder.add_shared_dim(kind, dim, operands, builder.all_results)
    return builder.build()


def reduce_window(eqn: Eqn) -> ShardingRule:
    """Operands (and, in the general form, as many scalar initial values) -> as many results."""
    return _sliding_rule(eqn, tuple(range(len(eqn.outputs))), windowed=(0, len(eqn.inputs)))


def select_and_scatter(eqn: Eqn) -> ShardingRule:
    """(operand, source, initial value) -> the operand's shape; an element of source per window."""
    return _sliding_rule(eqn, (0, 1), windowed=(0, 1))


def select_and_scatter_add(eqn: Eqn) -> ShardingRule:
    """(source, operand) -> the operand's shape; the source has an element per window."""
    return _sliding_rule(eqn, (0, 1), windowed=(1, 0))


def select_and_gather_add(eqn: Eqn) -> ShardingRule:
    """(tangents, operand) -> an element per window."""
    return _sliding_rule(eqn, (0, 1), windowed=(0, 2))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "conv_general_dilated": conv_general_dilated,
        "reduce_window": reduce_window,
        "reduce_window_max": reduce_window,
        "reduce_window_min": reduce_window,
        "reduce_window_sum": reduce_window,
        "select_and_gather_add": select_and_gather_add,
        "select_and_scatter": select_and_scatter,
        "select_and_scatter_add": select_and_scatter_add,
    }
)
