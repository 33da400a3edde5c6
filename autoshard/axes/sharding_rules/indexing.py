"""Gather and scatter.

The last dimension of the indices is the index vector: NEED_REPLICATION. Splitting an indexed
dimension of a table leaves each device with its own rows: a gather looks up those that are its own
and has zeros elsewhere (a partial sum); a scatter writes those that are its own. Both shift the
indices by the start of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autoshard.axes.sharding_rules.builder import Place, Rule, RuleBuilder, ints, other_dims
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def _batching_pairs(numbers: Any, of_indices: str) -> dict[int, int]:
    """By batching dimension of the indices, that of the operand; none in an older jax.

    Args:
        numbers: The dimension numbers of a gather or scatter.
        of_indices: What the batching dimensions of the indices are called there.
    """
    indices = ints(getattr(numbers, of_indices, ()))
    operand = ints(getattr(numbers, "operand_batching_dims", ()))
    return dict(zip(indices, operand, strict=True))


def gather(eqn: Eqn) -> ShardingRule:
    """Whole windows pass, indexed dimensions of slice size 1 are reduced.

    Other windows are NEED_REPLICATION. Batch dimensions of the indices pass to the result (and, if
    they are batching dimensions, from the operand too).
    """
    builder = RuleBuilder.of(eqn)
    numbers = eqn.params["dimension_numbers"]
    slice_sizes = ints(eqn.params["slice_sizes"])
    operand, indices = builder.operands[:2]
    offset_dims = ints(numbers.offset_dims)
    collapsed = ints(numbers.collapsed_slice_dims)
    operand_batching = _batching_pairs(numbers, "start_indices_batching_dims")

    batch_positions = other_dims(len(builder.results[0]), offset_dims)
    for dim, position in zip(range(len(indices) - 1), batch_positions, strict=True):
        places: list[Place] = [(1, dim)]
        if dim in operand_batching:
            places.append((0, operand_batching[dim]))
        builder.add_factor(FactorKind.PASS_THROUGH, places, [(0, position)])

    # A window of several rows, but not all, may lie across shards: it gets no factor.
    windows = other_dims(len(operand), collapsed, operand_batching.values())
    for dim, position in zip(windows, offset_dims, strict=True):
        if slice_sizes[dim] == operand[dim]:
            builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
        elif slice_sizes[dim] == 1:
            builder.add_factor(FactorKind.REDUCTION, [(0, dim)])

    for dim in collapsed:
        builder.add_factor(FactorKind.REDUCTION, [(0, dim)])
    return builder.build()


_COMBINE = {
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}


def scatter(eqn: Eqn) -> ShardingRule:
    """The operand continues in the result; the updates join where they are as large.

    Where they are not, they are NEED_REPLICATION. The batch dimensions of the indices and of the
    updates are REDUCTION for the variants that combine: each device scatters its own updates, and
    the partial results are combined. *The operand counts once*: on all devices but one it stands
    for the identity of the operator (0 for add and sub, 1 for mul; itself for min and max). For
    plain `scatter` they are NEED_REPLICATION, since the last update of an element wins.
    """
    builder = RuleBuilder.of(eqn)
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = builder.operands[:3]
    update_windows = ints(numbers.update_window_dims)
    inserted = ints(numbers.inserted_window_dims)
    operand_batching = _batching_pairs(numbers, "scatter_indices_batching_dims")
    combine = _COMBINE.get(eqn.primitive)

    # By operand dimension, what else runs over its factor.
    joined: dict[int, list[Place]] = {dim: [] for dim in range(len(operand))}
    windows = other_dims(len(operand), inserted, operand_batching.values())
    for dim, position in zip(windows, update_windows, strict=True):
        if operand[dim] == updates[position]:
            joined[dim].append((2, position))

    batch_kind = FactorKind.NEED_REPLICATION if combine is None else FactorKind.REDUCTION
    batch_positions = other_dims(len(updates), update_windows)
    for dim, position in zip(range(len(indices) - 1), batch_positions, strict=True):
        places: list[Place] = [(1, dim), (2, position)]
        if dim in operand_batching:
            joined[operand_batching[dim]] += places
        else:
            builder.add_factor(batch_kind, places)

    for dim, places in joined.items():
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim), *places], [(0, dim)])
    return builder.build(combine or "add")


RULES: Mapping[str, Rule] = MappingProxyType(
    {"gather": gather, "scatter": scatter} | dict.fromkeys(_COMBINE, scatter)
)
