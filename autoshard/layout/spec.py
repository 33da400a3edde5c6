"""Specs of values: for each dimension the mesh axes it is split over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    entries: list[Any] = []
    for dim, axes in enumerate(spec):
        if axes:
            entries.append(axes[0] if len(axes) == 1 else axes)
        elif dim in unconstrained:
            entries.append(PartitionSpec.UNCONSTRAINED)
        else:
            entries.append(None)
    return trimmed(entries)


def trimmed(entries: Sequence[Any]) -> PartitionSpec:
    """A PartitionSpec of these entries without trailing Nones, which `==` would tell apart."""
    rank = len(entries)
    while rank and entries[rank - 1] is None:
        rank -= 1
    return PartitionSpec(*entries[:rank])


def shard_count(spec: Spec, mesh_axes: Mapping[str, int]) -> int:
    """Number of distinct shards of a value of this spec.

    >>> shard_count((("data",), ("model",)), {"data": 4, "model": 2})
    8
    """
    shards = 1
    for axes in spec:
        for axis in axes:
            shards *= mesh_axes[axis]
    return shards
