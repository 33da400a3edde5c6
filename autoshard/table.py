"""Stage 10: the spec table, a small JSON file that a training repo commits and a colleague reviews.

One leaf a line, in a stable order, so that a diff shows what changed and nothing else. Specs are written as MaxText's
golden shardings and orbax write them: for each dimension `null`, `"axis"`, or `["axis", "axis"]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import PartitionSpec

from autoshard.errors import TableError
from autoshard.layout import Spec

SCHEMA = 1
SpecEntry = list[str | list[str] | None]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One leaf: shape, dtype and spec (trailing nulls left out)."""

    shape: list[int]
    dtype: str
    spec: SpecEntry


class MeshEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mesh: axes in order, with size and type (`auto`, `explicit`)."""

    axes: dict[str, int]
    types: list[str]


class ConstraintEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One constraint inside the function, for people."""

    source: str
    primitive: str
    place: str
    shape: list[int]
    spec: str


class SpecTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as a file.

    Attributes:
        schema: Version of this format.
        function: Name of the function.
        fingerprint: Of the traced program.
        versions: Of jax and autoshard when it was written.
        mesh: The mesh it is for.
        rules: Axis rules in order, as text.
        constraints: `anchors` (stated inside the function) or `arguments`.
        verified: `yes (against ...)` or `no (reason)`.
        inputs: Argument leaves by path.
        outputs: Output leaves by path.
        inside: The constraints put inside the function.
        evidence: One record per candidate; every number stands under predicted, partitioned, compiled or measured.
    """

    schema: int
    function: str
    fingerprint: str
    versions: dict[str, str]
    mesh: MeshEntry
    rules: list[str]
    constraints: str
    verified: str
    inputs: dict[str, Leaf]
    outputs: dict[str, Leaf]
    inside: list[ConstraintEntry]
    evidence: list[dict[str, Any]]

    @staticmethod
    def load(path: str | Path) -> SpecTable:
        """Reads and validates a table.

        Raises:
            TableError: If the file is missing, is no JSON, or is no table of a known schema; the place is named.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TableError(
                f"{path}: cannot be read ({error.strerror}). Write one with plan.table.save(path)."
            ) from None
        try:
            table = msgspec.json.decode(data, type=SpecTable)
        except msgspec.ValidationError as error:
            raise TableError(f"{path}: is no spec table: {error}. Restore it from version control.") from None
        except msgspec.DecodeError as error:
            raise TableError(
                f"{path}: is no JSON ({error}), perhaps cut short. Restore it from version control."
            ) from None
        if table.schema != SCHEMA:
            raise TableError(
                f"{path}: has schema {table.schema}, this autoshard reads schema {SCHEMA}. Upgrade autoshard."
            )
        return table

    def save(self, path: str | Path) -> None:
        """Writes the table; the directory is made if it does not exist, and the file appears whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(target.name + ".tmp")
        draft.write_text(self.dumps(), encoding="utf-8")
        draft.replace(target)

    def dumps(self) -> str:
        """The text of the file: one leaf, rule, constraint or candidate a line."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        parts = []
        for name, value in fields.items():
            if isinstance(value, dict) and name in ("inputs", "outputs"):
                rows = [f"    {_text(key)}: {_text(item)}" for key, item in value.items()]
                body = "{\n" + ",\n".join(rows) + "\n  }" if rows else "{}"
            elif isinstance(value, list):
                rows = [f"    {_text(item)}" for item in value]
                body = "[\n" + ",\n".join(rows) + "\n  ]" if rows else "[]"
            else:
                body = _text(value)
            parts.append(f"  {_text(name)}: {body}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def input_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each argument leaf."""
        return {path: spec_from_entry(leaf.spec) for path, leaf in self.inputs.items()}


def _text(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Floats to four significant digits: evidence is no better, and a diff stays quiet."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def spec_to_entry(spec: Spec) -> SpecEntry:
    """A canonical spec as JSON.

    >>> spec_to_entry((("data",), (), ("fsdp", "model"), ()))
    ['data', None, ['fsdp', 'model']]
    """
    entry: SpecEntry = [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in spec]
    while entry and entry[-1] is None:
        entry.pop()
    return entry


def spec_from_entry(entry: SpecEntry) -> PartitionSpec:
    """The PartitionSpec of a JSON entry."""
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in entry))
