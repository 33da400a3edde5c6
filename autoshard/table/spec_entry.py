"""Specs as JSON and as Python source.

In the file a spec is written as MaxText's golden shardings and orbax write it: for each dimension
`null`, `"axis"`, or `["axis", "axis"]`, trailing nulls left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jax.sharding import PartitionSpec

from autoshard.layout.spec import Spec

SpecEntry = list[str | list[str] | None]

_ESCAPE = r"""\\['"\\ntr]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U00(?:0[0-9a-f]|10)[0-9a-f]{4}"""
_NAME = rf"""(?:'(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*")"""
_ENTRY = re.compile(rf"None|P\.UNCONSTRAINED|\(\)|{_NAME}|\({_NAME}(?:,|(?:, {_NAME})+)\)")
_SPEC = re.compile(rf"P\((?:(?:{_ENTRY.pattern})(?:, (?:{_ENTRY.pattern}))*,?)?\)")
"""A PartitionSpec as `partition_spec_text` writes it, and nothing that Python would run."""


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


def spec_text_rank(text: str) -> int | None:
    """How many dimensions the text of a PartitionSpec names; None where it is another text.

    Whoever pastes an exported constraint runs this text, so nothing else may be in it.

    >>> spec_text_rank("P(P.UNCONSTRAINED, ('data', 'model'), None)")
    3
    >>> spec_text_rank("P(print('x'))") is None
    True
    """
    if _SPEC.fullmatch(text) is None:
        return None
    return sum(1 for _ in _ENTRY.finditer(text[2:-1]))


def _with_tuples(entry: SpecEntry) -> Iterable[str | tuple[str, ...] | None]:
    return [tuple(axes) if isinstance(axes, list) else axes for axes in entry]
