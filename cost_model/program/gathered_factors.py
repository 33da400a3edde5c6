"""Factors that the partitioner gathers, though the layout splits them and nothing in the equation
forbids it: what does not run by pieces (`axes.pieces`), and that XLA does not split either.

Its operands are brought together along the mesh axes of such a factor, the computation is whole
over them, and its results are sliced, which is free. Each fact was read from compiled programs of
jax 0.10.2 and 0.12.0.1 (CPU; `tests/golden/compiled_bytes.json` has them) and of XLA:TPU (v5e:2x2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import ints, other_dims
from autoshard.cost_model.hardware.backend import ACCELERATOR, CPU, Backend
from autoshard.tracing.program import Eqn

_EVERY = frozenset({CPU.name, ACCELERATOR.name})


@dataclass(frozen=True, slots=True)
class _Fact:
    """What the partitioners of some backends gather.

    Attributes:
        primitive: Of the equation.
        kind: Of the factor.
        backends: Names of the backends.
        concerns: Of an equation and its rule, whether it is true of a factor of that kind.
    """

    primitive: str
    kind: FactorKind
    backends: frozenset[str]
    concerns: Callable[[Eqn, ShardingRule, int], bool]


def gathered_factors(eqn: Eqn, rule: ShardingRule, backend: Backend) -> frozenset[int]:
    """The factors of an equation along which its operands are gathered if a layout splits them."""
    facts = [fact for fact in _FACTS.get(eqn.primitive, ()) if backend.name in fact.backends]
    gathered = set()
    for fact in facts:
        for factor, kind in enumerate(rule.kinds):
            if kind is fact.kind and fact.concerns(eqn, rule, factor):
                gathered.add(factor)
    return frozenset(gathered)


def _always(eqn: Eqn, rule: ShardingRule, factor: int) -> bool:
    return True


def _in_groups(eqn: Eqn, rule: ShardingRule, factor: int) -> bool:
    """Whether a convolution is in groups of features."""
    return int(eqn.params["feature_group_count"]) > 1


def _writes_window(eqn: Eqn, rule: ShardingRule, factor: int) -> bool:
    """Whether a window of several elements, but not all, is written at a computed position.

    A single element is in one shard, and a position that the compiler knows is cut like a slice.
    """
    if factor not in rule.operands[0]:
        return False
    dim = rule.operands[0].index(factor)
    update, start = eqn.inputs[1].shape[dim], eqn.inputs[2 + dim]
    return 1 < update < eqn.inputs[0].shape[dim] and not start.literal


def _scatters_windows(eqn: Eqn, rule: ShardingRule, factor: int) -> bool:
    """Whether windows of several elements, but not all, are scattered along a factor."""
    if factor not in rule.operands[0]:
        return False
    dim = rule.operands[0].index(factor)
    numbers = eqn.params["dimension_numbers"]
    batching = ints(getattr(numbers, "operand_batching_dims", ()))
    windows = other_dims(len(eqn.inputs[0].shape), ints(numbers.inserted_window_dims), batching)
    if dim not in windows:
        return False
    update = eqn.inputs[2].shape[ints(numbers.update_window_dims)[windows.index(dim)]]
    return 1 < update < eqn.inputs[0].shape[dim]


_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")

_ALL_FACTS = (
    _Fact("dynamic_update_slice", FactorKind.PASS_THROUGH, _EVERY, _writes_window),
    *(_Fact(name, FactorKind.PASS_THROUGH, _EVERY, _scatters_windows) for name in _SCATTERS),
    # it combines partial results of sums, products and extremes only
    _Fact("scatter-sub", FactorKind.REDUCTION, _EVERY, _always),
    _Fact("conv_general_dilated", FactorKind.PERMUTATION, frozenset({CPU.name}), _in_groups),
)

_FACTS = {
    name: tuple(fact for fact in _ALL_FACTS if fact.primitive == name)
    for name in {fact.primitive for fact in _ALL_FACTS}
}
"""By primitive."""
