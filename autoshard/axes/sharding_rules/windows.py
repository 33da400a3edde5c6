"""Windows that slide: convolution, reduce_window and its gradients.

A sliding dimension is PERMUTATION (a split needs a halo), unless its windows do not overlap and fill
it exactly: then a split between windows is local, and it passes (patch embeddings, 2x2 pooling, 1x1
convolutions).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
    """Whether `windows` windows, `stride` apart, divide a dimension of `size` among them without
    sharing an element.

    >>> tiles_exactly(size=8, windows=4, window=2, stride=2)
    True
    >>> tiles_exactly(size=8, windows=6, window=3, stride=1)
    False
    """
    reach = (window - 1) * window_dilation + 1
    return (
        base_dilation == 1
        and tuple(padding) == (0, 0)
        and reach <= stride
        and size == windows * stride
    )


def conv_general_dilated(eqn: Eqn) -> ShardingRule:
    """Batch and output features pass, input features are reduced, space is PERMUTATION or passes (see
    `tiles_exactly`).

    With groups (of features or of the batch) the group is the major factor of three dimensions:
    input features (or batch) of the left operand, output features of the kernel, output features of
    the result; they share a PASS_THROUGH loop, which is exact for splits that divide the number of groups.
    What is left inside a group is NEED_REPLICATION.

    A kernel as large as the image, without padding, is a contraction over space: REDUCTION.
    """
    factors = RuleBuilder.of(eqn)
    params = eqn.params
    numbers = params["dimension_numbers"]
    image, kernel, out = ints(numbers.lhs_spec), ints(numbers.rhs_spec), ints(numbers.out_spec)
    feature_groups, batch_groups = (
        int(params["feature_group_count"]),
        int(params["batch_group_count"]),
    )

    out_features: list[Place] = [(1, kernel[0])]
    if batch_groups > 1:
        out_features.append((0, image[0]))
    else:
        factors.add(FactorKind.PASS_THROUGH, [(0, image[0])], [(0, out[0])])
    if feature_groups > 1:
        out_features.append((0, image[1]))
    else:
        factors.add(FactorKind.REDUCTION, [(0, image[1]), (1, kernel[1])])
    factors.add(FactorKind.PASS_THROUGH, out_features, [(0, out[1])])

    for axis in range(len(image) - 2):
        i, k, o = image[axis + 2], kernel[axis + 2], out[axis + 2]
        padding = ints(params["padding"][axis])
        size, window, windows = (
            factors.operands[0][i],
            factors.operands[1][k],
            factors.results[0][o],
        )
        dilations = int(params["lhs_dilation"][axis]), int(params["rhs_dilation"][axis])
        stride = int(params["window_strides"][axis])
        if size == window > 1 and windows == 1 and dilations == (1, 1) and padding == (0, 0):
            factors.add(FactorKind.REDUCTION, [(0, i), (1, k)])
        elif tiles_exactly(size, windows, window, stride, (padding[0], padding[1]), *dilations):
            factors.add(FactorKind.PASS_THROUGH, [(0, i)], [(0, o)])
        else:
            factors.add(FactorKind.PERMUTATION, [(0, i)], [(0, o)])
    return factors.rule()


def _slides(eqn: Eqn, operands: tuple[int, ...], windowed: tuple[int, int]) -> ShardingRule:
    """The rule of a primitive whose listed operands and results all have one rank, one window for
    all.

    Args:
        eqn: With the parameters of `reduce_window`.
        operands: Positions of operands that have dimensions.
        windowed: Shapes (position among operands then results) of which the first is divided into
            windows, and of which the second has an element per window.
    """
    factors = RuleBuilder.of(eqn)
    shapes = factors.operands + factors.results
    params = eqn.params
    rank = len(shapes[windowed[0]])
    ones = (1,) * rank
    for dim in range(rank):
        low, high = ints(params["padding"][dim])
        exact = tiles_exactly(
            size=shapes[windowed[0]][dim],
            windows=shapes[windowed[1]][dim],
            window=int(params["window_dimensions"][dim]),
            stride=int(params["window_strides"][dim]),
            padding=(low, high),
            base_dilation=int(params.get("base_dilation", ones)[dim]),
            window_dilation=int(params.get("window_dilation", ones)[dim]),
        )
        kind = FactorKind.PASS_THROUGH if exact else FactorKind.PERMUTATION
        factors.add(
            kind, [(i, dim) for i in operands], [(i, dim) for i in range(len(factors.results))]
        )
    return factors.rule()


def reduce_window(eqn: Eqn) -> ShardingRule:
    """Operands (and, in the general form, as many scalar initial values) -> as many results."""
    return _slides(eqn, tuple(range(len(eqn.outputs))), windowed=(0, len(eqn.inputs)))


def select_and_scatter(eqn: Eqn) -> ShardingRule:
    """(operand, source, initial value) -> a result of the operand's shape; the source has an
    element per window.
    """
    return _slides(eqn, (0, 1), windowed=(0, 1))


def select_and_scatter_add(eqn: Eqn) -> ShardingRule:
    """(source, operand) -> a result of the operand's shape; the source has an element per
    window.
    """
    return _slides(eqn, (0, 1), windowed=(1, 0))


def select_and_gather_add(eqn: Eqn) -> ShardingRule:
    """(tangents, operand) -> an element per window."""
    return _slides(eqn, (0, 1), windowed=(0, 2))


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
