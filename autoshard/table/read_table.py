"""Reads the text of a table: migrates, validates and unfolds it; errors name the place."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from autoshard.table.leaf_patterns import MAX_LEAVES, Each, sorted_by_path, unfold
from autoshard.table.migrate import schema_2_checksum, to_current
from autoshard.table.schema import (
    ConstraintEntry,
    Leaf,
    Line,
    TableData,
    TableFile,
    as_output,
    checksum_of,
    plan_parts,
)
from autoshard.table.spec_entry import mesh_axes_by_dim, spec_text, spec_text_rank
from autoshard.table.strict_json import Source, object_at, parse

MAX_DEVICES = 2**20
"""Devices of a mesh: ten times the largest cluster that anybody has written of (100,000 GPUs,
2024). Chosen by hand; test_sizes_are_bounded has a mesh above it."""

MAX_PATH = 4096
"""Characters of a leaf path, as of a file's (Linux, PATH_MAX). Chosen by hand;
test_sizes_are_bounded has a path above it."""

MAX_LIKENESSES = 1000
"""Output subtrees that are like inputs: each multiplies the leaves of the file. Chosen by hand;
test_sizes_are_bounded has more."""

_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}(?:<[a-z0-9_]{1,63}>)?")
"""`float32`, `float8_e4m3fn`, `key<fry>`."""

_FLOAT0 = "[('float0', 'V')]"
"""The dtype of the tangent of an integer, as NumPy writes it."""


def read_table(text: str, where: str) -> TableData:
    """A table of this schema or an older one.

    Args:
        text: Of the file.
        where: Names the file in errors.

    Raises:
        TableError: If it is no JSON, or no table of a known schema.
    """
    source = Source(text, where)
    written = parse(source)
    data = to_current(written, where)
    # Leaf by leaf, so that an error names the leaf and its line; then the rest of the file.
    inputs, outputs = (
        _read_leaves(side, object_at(data, side, where), source) for side in ("inputs", "outputs")
    )
    file: TableFile = source.convert({**data, "inputs": {}, "outputs": {}}, TableFile)
    _check(file, source)
    table = TableData(
        function=file.function,
        mesh=file.mesh,
        rules=file.rules,
        constraints=file.constraints,
        inputs=sorted_by_path(inputs),
        outputs=sorted_by_path(_outputs_like(file, inputs, source) | outputs),
        inside=file.inside,
        outputs_like=file.outputs_like,
        evidence=file.evidence,
    )
    if written["schema"] == 2 and table.evidence.checksum == schema_2_checksum(table):
        return _with_checksum(table)
    return table


def _check(file: TableFile, source: Source) -> None:
    if file.constraints not in ("anchors", "arguments"):
        raise source.error("Expected 'anchors' or 'arguments'", "constraints")
    axes, types = len(file.mesh.axes), len(file.mesh.types)
    if axes != types:
        raise source.error(f"mesh has {axes} axes but {types} types", "mesh")
    devices = math.prod(file.mesh.axes.values())
    if devices > MAX_DEVICES:
        raise source.error(f"mesh has {devices} devices, at most {MAX_DEVICES} are read", "mesh")
    for number, entry in enumerate(file.inside):
        fault = inside_fault(entry)
        if fault:
            raise source.error(fault, f"inside[{number}]")


def inside_fault(entry: ConstraintEntry) -> str:
    """What is wrong with a constraint inside the function; "" if nothing is."""
    rank = spec_text_rank(entry.spec)
    if rank is None:
        return f"{entry.spec!r} is no PartitionSpec, such as P('data', None)"
    if rank > len(entry.shape):
        return f"the spec {entry.spec} has {rank} dimensions, the value {len(entry.shape)}"
    return ""


def _read_leaves(side: str, entries: Mapping[str, Any], source: Source) -> dict[str, Leaf]:
    lines: dict[str, tuple[Each, Leaf]] = {}
    for path, entry in entries.items():
        if len(path) > MAX_PATH:
            raise source.error(f"a leaf path has {len(path)} characters, {MAX_PATH} at most", side)
        part = f"{side}['{path}']"
        line: Line = source.convert(entry, Line, part)
        fault = _fault(line)
        if fault:
            raise source.error(fault, part)
        leaf = Leaf(line.shape, line.dtype, line.spec, line.logical_axes, line.group)
        lines[path] = tuple(line.each), leaf
    try:
        return unfold(lines)
    except ValueError as error:
        raise source.error(str(error), side) from None


def _fault(line: Line) -> str:
    """What is wrong with a line that has the right types; "" if nothing is."""
    rank = len(line.shape)
    if len(line.spec) > rank or len(line.logical_axes) not in (0, rank):
        return f"spec or logical axes do not fit {rank} dimensions"
    if _DTYPE.fullmatch(line.dtype) is None and line.dtype != _FLOAT0:
        return f"{line.dtype!r} is the dtype of no array"
    mesh_axes = [axis for axes in mesh_axes_by_dim(line.spec) for axis in axes]
    if len(set(mesh_axes)) < len(mesh_axes):
        return "the spec uses a mesh axis twice"
    text = spec_text(line.spec)
    if line.text not in ("", text):
        return (
            f"the text {line.text} says otherwise than the spec, {text} (write both alike, or "
            f"leave the text out)"
        )
    return ""


def _outputs_like(file: TableFile, inputs: Mapping[str, Leaf], source: Source) -> dict[str, Leaf]:
    """Output leaves that are written down as "like those below that argument"."""
    outputs: dict[str, Leaf] = {}
    if len(file.outputs_like) > MAX_LIKENESSES:
        count = len(file.outputs_like)
        raise source.error(f"{count} subtrees are like others, {MAX_LIKENESSES} at most", "outputs")
    for prefix, like in file.outputs_like.items():
        below = {path: leaf for path, leaf in inputs.items() if path.startswith(f"{like}/")}
        if not below:
            raise source.error(f"no input leaf lies below {like!r}", f"outputs_like['{prefix}']")
        for path, leaf in below.items():
            outputs[prefix + path.removeprefix(like)] = as_output(leaf)
        if len(outputs) > MAX_LEAVES:
            raise source.error(f"more than {MAX_LEAVES} leaves", "outputs_like")
    return outputs


def _with_checksum(table: TableData) -> TableData:
    """The table with the checksum of this schema: nobody edited it, only its schema is new."""
    evidence = msgspec.structs.replace(table.evidence, checksum=checksum_of(plan_parts(table)))
    return msgspec.structs.replace(table, evidence=evidence)
