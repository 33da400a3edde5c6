"""Arithmetic of one equation: flops counted from shapes.

XLA's own `cost_analysis` counts loop bodies once and differs between backends, so flops are counted
from the jaxpr.
"""

from __future__ import annotations

import math

from autoshard.axes.sharding_rules import ShardingRule
from autoshard.tracing.program import Eqn


def flops(eqn: Eqn, rule: ShardingRule) -> float:
    """Floating point operations of one run of an equation, unsharded.

    Contractions do one multiply and one add per point of their factors; a convolution per output
    element, kernel element and input channel of a group; everything else one operation per element
    read or written. Equations with bodies do nothing themselves.
    """
    if eqn.bodies:
        return 0.0
    if eqn.primitive in ("dot_general", "ragged_dot_general"):
        return _contraction_flops(eqn, rule)
    if eqn.primitive == "conv_general_dilated":
        return _convolution_flops(eqn)
    elements = [math.prod(v.shape) for v in (*eqn.inputs, *eqn.outputs)]
    return float(max(elements, default=0))


def _contraction_flops(eqn: Eqn, rule: ShardingRule) -> float:
    sizes = [1] * len(rule.kinds)
    for value, factors in rule.places(eqn):
        for factor, size in zip(factors, value.shape, strict=True):
            sizes[factor] = max(sizes[factor], size)
    return 2.0 * math.prod(sizes)


def _convolution_flops(eqn: Eqn) -> float:
    kernel = eqn.inputs[1].shape
    out_channels: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    points = math.prod(eqn.outputs[0].shape) * math.prod(kernel)
    # The output's channels are those of the kernel: they count once.
    return 2.0 * points / max(out_channels, 1)
