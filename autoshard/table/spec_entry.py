"""Specs as JSON and as Python source.

In the file a spec is written as MaxText's golden shardings and orbax write it: for each dimension
`null`, `"axis"`, or `["axis", "axis"]`, trailing nulls left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax.sharding import PartitionSpec

from autoshard.layout.spec import Spec

SpecEntry = list[str | list[str] | None]


def spec_to_entry(spec: Spec) -> SpecEntry:
    """A canonical spec as JSON.

    >>> spec_to_entry((("data",), (), ("fsdp", "model"), ()))
    ['data', None, ['fsdp', 'model']]
    """
    entry: SpecEntry = []
    for axes in spec:
        if len(axes) > 1:
            entry.append(list(axes))
        else:
            entry.append(axes[0] if axes else None)
    while entry and entry[-1] is None:
        entry.pop()
    return entry


def mesh_axes_by_dim(entry: SpecEntry) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension.

    >>> mesh_axes_by_dim(["data", None, ["fsdp", "model"]])
    [('data',), (), ('fsdp', 'model')]
    """
    by_dim: list[tuple[str, ...]] = []
    for axes in entry:
        if isinstance(axes, str):
            by_dim.append((axes,))
        else:
            by_dim.append(tuple(axes or ()))
    return by_dim


def spec_from_entry(entry: SpecEntry) -> PartitionSpec:
    """The PartitionSpec of a JSON entry."""
    return PartitionSpec(*_with_tuples(entry))


def spec_text(entry: SpecEntry) -> str:
    """A spec as Python writes it.

    >>> spec_text(["data", None, ["fsdp", "model"]])
    "P('data', None, ('fsdp', 'model'))"
    """
    return f"P({', '.join(map(repr, _with_tuples(entry)))})"


def partition_spec_text(spec: PartitionSpec) -> str:
    """A PartitionSpec as Python that needs nothing but `P`; the same on every jax.

    >>> partition_spec_text(PartitionSpec(PartitionSpec.UNCONSTRAINED, ("data", "model"), None))
    "P(P.UNCONSTRAINED, ('data', 'model'), None)"
    """
    entries = [
        "P.UNCONSTRAINED" if entry is PartitionSpec.UNCONSTRAINED else repr(entry) for entry in spec
    ]
    return f"P({', '.join(entries)})"


def _with_tuples(entry: SpecEntry) -> Iterable[str | tuple[str, ...] | None]:
    return [tuple(axes) if isinstance(axes, list) else axes for axes in entry]
