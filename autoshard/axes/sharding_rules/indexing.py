"""Gather and scatter.

The last dimension of the indices is the index vector: NEED_REPLICATION. Splitting an indexed dimension of a
table leaves each device with its own rows: a gather looks up those that are its own and has zeros
elsewhere (a partial sum); a scatter writes those that are its own. Both shift the indices by the
start of the piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Place, Rule, RuleBuilder, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def gather(eqn: Eqn) -> ShardingRule:
    """Window dimensions taken whole pass, indexed dimensions of slice size 1 are reduced, other
    windows are NEED_REPLICATION.

    Batch dimensions of the indices pass to the result (and, if they are batching dimensions, from
    the operand too).
    """
    factors = RuleBuilder.of(eqn)
    numbers = eqn.params["dimension_numbers"]
    slice_sizes = ints(eqn.params["slice_sizes"])
    operand, indices = factors.operands[:2]
    offset_dims = ints(numbers.offset_dims)
    collapsed = ints(numbers.collapsed_slice_dims)
    batching = ints(getattr(numbers, "operand_batching_dims", ()))
    batching_of_indices = ints(getattr(numbers, "start_indices_batching_dims", ()))
    batch_positions = [dim for dim in range(len(factors.results[0])) if dim not in offset_dims]

    batch_operand = dict(zip(batching_of_indices, batching, strict=True))
    for dim, position in zip(range(len(indices) - 1), batch_positions, strict=True):
        places: list[Place] = [(1, dim)]
        if dim in batch_operand:
            places.append((0, batch_operand[dim]))
        factors.add(FactorKind.PASS_THROUGH, places, [(0, position)])

    window = [dim for dim in range(len(operand)) if dim not in collapsed and dim not in batching]
    for dim, position in zip(window, offset_dims, strict=True):
        if slice_sizes[dim] == operand[dim]:
            factors.add(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
        elif slice_sizes[dim] == 1:
            factors.add(FactorKind.REDUCTION, [(0, dim)])
    for dim in collapsed:
        factors.add(FactorKind.REDUCTION, [(0, dim)])
    return factors.rule()


_COMBINE = {
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}


def scatter(eqn: Eqn) -> ShardingRule:
    """Every dimension of the operand continues in the result; the updates join where they are as
    large, else NEED_REPLICATION.

    The batch dimensions of the indices and of the updates are REDUCTION for the variants that
    combine: each device scatters its own updates, and the partial results are combined. *The
    operand counts once*: on all devices but one it stands for the identity of the operator (0 for
    add and sub, 1 for mul; itself for min and max). For plain `scatter` they are NEED_REPLICATION, since the
    last update of an element wins.
    """
    factors = RuleBuilder.of(eqn)
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = factors.operands[:3]
    update_windows = ints(numbers.update_window_dims)
    inserted = ints(numbers.inserted_window_dims)
    batching = ints(getattr(numbers, "operand_batching_dims", ()))
    batching_of_indices = ints(getattr(numbers, "scatter_indices_batching_dims", ()))

    window = [dim for dim in range(len(operand)) if dim not in inserted and dim not in batching]
    joined: dict[int, list[Place]] = {dim: [] for dim in range(len(operand))}
    for dim, position in zip(window, update_windows, strict=True):
        if operand[dim] == updates[position]:
            joined[dim].append((2, position))

    combine = _COMBINE.get(eqn.primitive)
    batch_operand = dict(zip(batching_of_indices, batching, strict=True))
    batch_positions = [dim for dim in range(len(updates)) if dim not in update_windows]
    for dim, position in zip(range(len(indices) - 1), batch_positions, strict=True):
        places: list[Place] = [(1, dim), (2, position)]
        if dim in batch_operand:
            joined[batch_operand[dim]] += places
        else:
            factors.add(
                FactorKind.NEED_REPLICATION if combine is None else FactorKind.REDUCTION, places
            )
    for dim in range(len(operand)):
        factors.add(FactorKind.PASS_THROUGH, [(0, dim), *joined[dim]], [(0, dim)])
    return factors.rule(combine or "add")


RULES: Mapping[str, Rule] = MappingProxyType(
    {"gather": gather, "scatter": scatter} | dict.fromkeys(_COMBINE, scatter)
)
