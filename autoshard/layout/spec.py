"""Specs of values: for each dimension the mesh axes it is split over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax.sharding import PartitionSpec

Spec = tuple[tuple[str, ...], ...]
"""Canonical spec of a value: for each dimension the mesh axes it is split over, major first; full
rank."""


Disallowed = tuple[tuple[str, ...], ...]
"""For each dimension of a value the mesh axes that may not split it; () where all may."""


def to_partition_spec(spec: Spec, open_dims: Iterable[int] = ()) -> PartitionSpec:
    """The PartitionSpec of a canonical spec, without trailing Nones.

    >>> to_partition_spec((("data",), (), ("fsdp", "model"), ()))
    P('data', None, ('fsdp', 'model'))
    """
    unconstrained = frozenset(open_dims)
    entries = [
        PartitionSpec.UNCONSTRAINED
        if d in unconstrained and not axes
        else axes[0]
        if len(axes) == 1
        else axes or None
        for d, axes in enumerate(spec)
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def shard_count(spec: Spec, mesh_axes: Mapping[str, int]) -> int:
    """Number of pieces a value of this spec is cut into."""
    pieces = 1
    for axes in spec:
        for axis in axes:
            pieces *= mesh_axes[axis]
    return pieces
