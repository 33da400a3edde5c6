"""Arithmetic of one equation: flops counted from shapes, and which results ever reach memory.

XLA's own `cost_analysis` counts loop bodies once and differs between backends, so flops are counted
from the jaxpr.
"""

from __future__ import annotations

import math

from autoshard.axes.sharding_rules import ShardingRule
from autoshard.tracing.program import Eqn

FUSED = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
        "copy_p", "cos", "div", "eq", "erf", "erf_inv", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt",
        "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
        "not", "or", "pad", "pow", "real", "imag", "reduce_precision", "rem", "reshape", "rev", "round", "rsqrt",
        "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "sqrt",
        "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor",
    }
)  # fmt: skip
"""Primitives that XLA fuses into their consumers: a result that only such primitives read is never
stored."""

EXPENSIVE = frozenset(
    {
        "atan2", "cbrt", "cos", "div", "erf", "erf_inv", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow",
        "rem", "rsqrt", "sin", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
"""The ones XLA does not compute twice: with two readers the result is stored
(InstructionFusion::IsExpensive)."""

REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "reduce_and"}
)
"""They fuse what they read; their own result is stored."""


def flops(eqn: Eqn, rule: ShardingRule) -> float:
    """Floating point operations of one run of an equation, unsharded.

    Contractions do one multiply and one add per point of their loop nest; a convolution per output
    element, kernel element and input channel of a group; everything else one operation per element
    read or written. Equations with bodies do nothing themselves.
    """
    if eqn.bodies:
        return 0.0
    if eqn.primitive in ("dot_general", "ragged_dot", "ragged_dot_general"):
        sizes = [1] * len(rule.kinds)
        for values, maps in ((eqn.inputs, rule.operands), (eqn.outputs, rule.results)):
            for value, factors in zip(values, maps, strict=True):
                for factor, size in zip(factors, value.shape, strict=True):
                    sizes[factor] = max(sizes[factor], size)
        return 2.0 * math.prod(sizes)
    if eqn.primitive == "conv_general_dilated":
        kernel = eqn.inputs[1].shape
        out_channels: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(eqn.outputs[0].shape) * math.prod(kernel) / max(out_channels, 1)
    elements = [math.prod(v.shape) for v in (*eqn.inputs, *eqn.outputs)]
    return float(max(elements, default=0))
