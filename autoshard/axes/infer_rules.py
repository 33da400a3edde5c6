"""Sharding rules of primitives that the registry does not know: a user's own, a call of foreign
code.

Two sources, in this order: the rules that the compiler *states* for the lowering of the primitive
(`stated_rules`), and what running it on small arrays *shows* (`discovered_rules`). Whatever goes
wrong, the dimensions stay unlinked: that costs a layout, never a result.

Nothing is run that has a side effect, calls back into Python, or is foreign code with an integer
among its parameters (which may be a size that its buffers must have).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax
import numpy as np

from autoshard.axes.discovered_rules import discovered_rule
from autoshard.axes.kernels import grid_rule
from autoshard.axes.sharding_rules import ShardingRule, known_primitives, rule_of
from autoshard.axes.sharding_rules.builder import replicated_rule
from autoshard.axes.stated_rules import stated_rule
from autoshard.jax_internals import executables, jaxprs
from autoshard.shardy.op_rules import LoweredOps, lowered_ops
from autoshard.tracing.primitives import OPENED
from autoshard.tracing.program import Eqn


class RuleFinder:
    """Finds the sharding rule of any equation.

    Inferred rules are remembered by primitive, parameters, shapes and dtypes.
    """

    def __init__(self) -> None:
        self._inferred: dict[object, ShardingRule] = {}
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """By primitive that the registry does not know, where its rule is from."""
        return tuple(self._notes.values())

    def rule_for(self, eqn: Eqn) -> ShardingRule:
        """The sharding rule of an equation; never raises."""
        if eqn.primitive == "pallas_call" and eqn.origin is not None:
            return grid_rule(eqn)
        registered = eqn.primitive in known_primitives() and eqn.primitive not in OPENED
        if registered or eqn.bodies or eqn.origin is None:
            return rule_of(eqn)
        key = _key(eqn)
        if key not in self._inferred:
            self._inferred[key], source = _infer(eqn)
            note = f"{eqn.primitive} has no sharding rule of its own: {source}"
            self._notes.setdefault(eqn.primitive, note)
        return self._inferred[key]


def _key(eqn: Eqn) -> object:
    """Equal for equations of one rule. Parameters that cannot be hashed differ by identity."""

    def hashable(value: object) -> object:
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    params = tuple(sorted((name, hashable(value)) for name, value in eqn.params.items()))
    values = tuple((v.shape, v.dtype, v.literal) for v in (*eqn.inputs, *eqn.outputs))
    return eqn.primitive, id(eqn.origin.primitive), params, values


def _infer(eqn: Eqn) -> tuple[ShardingRule, str]:
    """(rule, where it is from)."""
    shapes = [value.shape for value in (*eqn.inputs, *eqn.outputs)]
    if all(size <= 1 for shape in shapes for size in shape):
        return replicated_rule(eqn), "it has no dimension to link"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a program that nobody asked for
        try:
            return _stated_or_discovered(eqn)
        except Exception as error:
            # Only the beginning: an error of the compiler may hold a whole program.
            reason = str(error).strip().partition("\n")[0][:200]
            return replicated_rule(eqn), f"nothing is linked ({type(error).__name__}: {reason})"


def _stated_or_discovered(eqn: Eqn) -> tuple[ShardingRule, str]:
    """(rule, where it is from).

    Raises:
        Exception: Whatever jax raises if the equation cannot be lowered, or does not run at any
            size that is small enough.
    """
    lowered = _lowered(eqn)
    ops = lowered_ops(lowered)
    rule = stated_rule(eqn, ops)
    if rule is not None:
        return rule, "its dimensions are linked as the compiler states for its lowering"
    refusal = _may_not_run(eqn, lowered, ops)
    if refusal:
        note = f"nothing is linked, because it is not run to find out ({refusal})"
        return replicated_rule(eqn), note
    rule = discovered_rule(eqn, _is_foreign(ops))
    return rule, "its dimensions are linked as running it on small arrays shows"


def _lowered(eqn: Eqn) -> jax.stages.Lowered:
    """The equation lowered by itself, for one device."""
    call = jax.jit(jaxprs.as_call(eqn.origin), keep_unused=True)
    return call.lower(*jaxprs.operand_values(eqn.origin))


def _may_not_run(eqn: Eqn, lowered: jax.stages.Lowered, ops: LoweredOps) -> str:
    """Why an equation must not be run; empty where it may."""
    if jaxprs.has_effects(eqn.origin):
        return "it has a side effect"
    if executables.calls_python(lowered):
        return "it calls back into Python"
    # Of an `ffi_call` the other parameters are jax's own: avals, layouts, aliases.
    params = eqn.params.get("attributes", ()) if eqn.primitive == "ffi_call" else eqn.params
    if _is_foreign(ops) and _holds_integer(params):
        return "it is foreign code with an integer parameter, which may be a size"
    return ""


def _is_foreign(ops: LoweredOps) -> bool:
    """True for a call of code that the compiler does not know."""
    return any(op.name == "stablehlo.custom_call" for op in ops.ops)


def _holds_integer(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_integer, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_holds_integer, value))
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.integer))
    return isinstance(value, int | np.integer) and not isinstance(value, bool)  # a flag is no size
