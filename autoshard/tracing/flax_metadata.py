"""Axis class names that a model carries already: Flax NNX variables and Linen boxes. Used as
names of roles.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.tracing.signature import Call

Names = tuple[str | tuple[str, ...] | None, ...]


def dimension_names(call: Call) -> dict[int, Names]:
    """By argument leaf, what the model calls its dimensions; leaves without names are left out."""
    tree = jax.tree.unflatten(call.treedef, range(call.treedef.num_leaves))
    leaf_of = {position: leaf for leaf, position in enumerate(call.array_positions)}
    found: dict[int, Names] = {}
    for box in jax.tree.leaves(tree, is_leaf=lambda x: _names_of(x) is not None):
        names = _names_of(box)
        for position in jax.tree.leaves(box) if names is not None else ():
            leaf = leaf_of.get(position)
            if names is not None and leaf is not None and len(names) == len(call.avals[leaf].shape):
                found[leaf] = names
    return found


def logical_axis_names(call: Call) -> dict[tuple[int, int], str]:
    """By (argument leaf, dimension), the one name that the model gives it."""
    return {
        (leaf, dim): name
        for leaf, names in dimension_names(call).items()
        for dim, name in enumerate(names)
        if isinstance(name, str)
    }


def specs_from_names(
    call: Call, mesh_axes: tuple[str, ...]
) -> dict[str | re.Pattern[str], PartitionSpec]:
    """By leaf path, the spec of each leaf whose names are all mesh axes: what `pins="metadata"`
    keeps.
    """
    found: dict[str | re.Pattern[str], PartitionSpec] = {}
    for leaf, names in dimension_names(call).items():
        flat = [
            axis
            for name in names
            if name is not None
            for axis in ([name] if isinstance(name, str) else name)
        ]
        if flat and set(flat) <= set(mesh_axes):
            found[call.paths[leaf]] = PartitionSpec(*names)
    return found


def _names_of(value: Any) -> Names | None:
    """The names in a box, None for anything else."""
    meta, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    names: Any = None
    if nnx is not None and isinstance(value, nnx.Variable):
        metadata = value.get_metadata()
        names = (
            metadata.get("out_sharding")
            or metadata.get("sharding_names")
            or metadata.get("sharding")
        )
    elif meta is not None and isinstance(value, meta.AxisMetadata):
        names = getattr(value, "names", None)
    if not isinstance(names, tuple):
        return None
    return tuple(
        name if isinstance(name, str) else tuple(name) if isinstance(name, tuple) else None
        for name in names
    )
