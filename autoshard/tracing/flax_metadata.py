"""Names of dimensions that a model carries already: Flax NNX variables and Linen boxes.

They become the names of logical axes, or specs where they are mesh axes. Flax is not imported here:
without it there are no such boxes.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.tracing.signature import Call

Names = tuple[str | tuple[str, ...] | None, ...]
"""By dimension, its name; several where it is split over several mesh axes."""


def dimension_names(call: Call) -> dict[int, Names]:
    """By argument leaf, what the model calls its dimensions; leaves without names are left out."""
    tree = jax.tree.unflatten(call.treedef, range(call.treedef.num_leaves))
    leaf_of = {position: leaf for leaf, position in enumerate(call.array_positions)}
    names_of: dict[int, Names] = {}
    for box in jax.tree.leaves(tree, is_leaf=lambda node: _names_in(node) is not None):
        names = _names_in(box)
        if names is None:
            continue
        for position in jax.tree.leaves(box):
            leaf = leaf_of.get(position)
            if leaf is not None and len(names) == len(call.avals[leaf].shape):
                names_of[leaf] = names
    return names_of


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
    """By leaf path, the spec of each leaf whose names are all mesh axes (`pins="metadata"`)."""
    specs: dict[str | re.Pattern[str], PartitionSpec] = {}
    for leaf, names in dimension_names(call).items():
        axes = {axis for name in names for axis in _mesh_axes(name)}
        if axes and axes <= set(mesh_axes):
            specs[call.paths[leaf]] = PartitionSpec(*names)
    return specs


def _mesh_axes(name: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if name is None:
        return ()
    return (name,) if isinstance(name, str) else name


def _names_in(box: Any) -> Names | None:
    """The names in a box, None for anything else."""
    names = _metadata(box)
    if not isinstance(names, tuple):
        return None
    return tuple(map(_normalised, names))


def _metadata(box: Any) -> Any:
    """Whatever a box holds as its names."""
    linen, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(box, nnx.Variable):
        metadata = box.get_metadata()
        keys = ("out_sharding", "sharding_names", "sharding")  # by release of Flax, newest first
        return next((metadata[key] for key in keys if metadata.get(key)), None)
    if linen is not None and isinstance(box, linen.AxisMetadata):
        return getattr(box, "names", None)
    return None


def _normalised(name: Any) -> str | tuple[str, ...] | None:
    if isinstance(name, str):
        return name
    return tuple(name) if isinstance(name, tuple) else None
