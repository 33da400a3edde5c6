"""The format of the file, and a plan as data.

A table has two halves. What the plan *is* (mesh, rules, specs, constraints): sorted, one leaf a
line, regular leaves folded into patterns, and byte for byte the same for the same plan. And the
evidence, which alone may hold dates, seconds and versions, with a checksum of the first half: where
that differs, the specs were edited and the numbers are stale.

msgspec validates and gives the JSON Schema: it is small, fast and depends on nothing.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

import msgspec

from autoshard.table.spec_entry import SpecEntry

SCHEMA = 3
"""Version of the format that is written; tests/golden/tables has files of the older ones."""

Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A size or a count: up to 2**53 every JSON reader has the exact integer (RFC 8259, section 6)."""

AxisSize = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
"""Devices along a mesh axis: more than any cluster has."""


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One leaf: shape, dtype, spec, and the logical axis of each dimension.

    Trailing nulls of the spec are left out. `group` is `parameters`, `optimizer` or `data` for
    arguments, "" for outputs and where it is not known.
    """

    shape: list[Size]
    dtype: str
    spec: SpecEntry
    logical_axes: list[str | None] = []
    group: str = ""


class Line(Leaf, frozen=True, forbid_unknown_fields=True):
    """A leaf, or a pattern of leaves, as a line of the file.

    `text` is the spec as Python writes it, `each` the numbers that each `*` of a pattern stands
    for.
    """

    text: str = ""
    each: list[str] = []


class MeshEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mesh: axes in order, with size and type (`auto`, `explicit`)."""

    axes: dict[str, AxisSize]
    types: list[str]


class ConstraintEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal constraints inside the function: where, on what, and how many (one a layer, say)."""

    source: str
    primitive: str
    place: str
    shape: list[Size]
    spec: str
    times: Size = 1


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How it is known that the plan is good. Nothing here changes what the plan is.

    Attributes:
        fingerprint: Of the traced program; stable across processes and machines for one jax
            version.
        verified: `yes (against ...)` or `no (reason)`.
        versions: Of autoshard and jax when it was written.
        checksum: Of mesh, rules, constraints and leaves when it was written; "" where none was.
        arguments: Digest of the leaf paths, shapes and dtypes of the arguments.
        hardware: What it was searched for: platform, device kind, number of devices.
        when: Date and time (UTC) of the search; "" if there was none.
        search_s: How long the search took.
        primitives: How often each primitive occurs in the program.
        candidates: One record a candidate; every number stands under predicted, partitioned,
            compiled or measured.
    """

    fingerprint: str
    verified: str
    versions: dict[str, str]
    checksum: str = ""
    arguments: str = ""
    hardware: dict[str, str] = {}
    when: str = ""
    search_s: float | None = None
    primitives: dict[str, Size] = {}
    candidates: list[dict[str, Any]] = []


class TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file as it is written; see `SpecTable` for the meaning of the fields."""

    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)]
    function: str
    mesh: MeshEntry
    rules: list[str]
    constraints: str
    inputs: dict[str, Line]
    outputs: dict[str, Line]
    outputs_like: dict[str, str]
    inside: list[ConstraintEntry]
    evidence: Evidence


class TableData(msgspec.Struct, frozen=True):
    """The fields of a `SpecTable`, every leaf by its path."""

    function: str
    mesh: MeshEntry
    rules: list[str]
    constraints: str
    inputs: dict[str, Leaf]
    outputs: dict[str, Leaf]
    inside: list[ConstraintEntry]
    outputs_like: dict[str, str]
    evidence: Evidence


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file; shipped as `schema.json`."""
    return {
        "title": "autoshard spec table",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **msgspec.json.schema(TableFile),
    }


def as_output(leaf: Leaf) -> Leaf:
    """A leaf as an output has it, without a group."""
    return msgspec.structs.replace(leaf, group="")


def plan_parts(table: TableData) -> list[Any]:
    """What the plan is, as plain builtins: mesh, rules, constraints, inputs and outputs."""
    parts: list[Any] = msgspec.to_builtins(
        [table.mesh, table.rules, table.constraints, table.inputs, table.outputs]
    )
    return parts


def checksum_of(parts: list[Any]) -> str:
    """Digest of what a plan is."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
