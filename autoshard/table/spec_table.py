"""Stage 10: the spec table, a small JSON file that a training repo commits and a colleague reviews.

The file has two halves. What the plan *is* (mesh, rules, specs, constraints): sorted, one leaf a
line, regular leaves folded into patterns, and byte for byte the same for the same plan. And the
evidence, which alone may hold dates, seconds and versions, with a checksum of the first half: where
that differs, the specs were edited and the numbers are stale.

Specs are written as MaxText's golden shardings and orbax write them: for each dimension `null`,
`"axis"`, or `["axis", "axis"]`. msgspec validates and gives the JSON Schema: it is small, fast and
depends on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from autoshard.errors import TableError
from autoshard.evidence.candidate import Candidate
from autoshard.table.leaf_patterns import Each, fold
from autoshard.table.strict_json import shown

if TYPE_CHECKING:
    pass

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from jax.sharding import PartitionSpec

from autoshard.layout.spec import Spec
from autoshard.table.leaf_patterns import alike, path_key, unfold
from autoshard.table.migrate import SCHEMA, checksum_of, checksum_of_2, to_current
from autoshard.table.strict_json import convert, object_at, parse, read_text, refusal

T = TypeVar("T")
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
SpecEntry = list[str | list[str] | None]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One leaf: shape, dtype and spec (trailing nulls left out), the logical axis of each dimension, and
    what the leaf is for.

    `group` is `parameters`, `optimizer` or `data` for arguments, "" for outputs and where it is not
    known.
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

    axes: dict[str, Annotated[int, msgspec.Meta(ge=1, le=2**31)]]
    types: list[str]


class ConstraintEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal constraints inside the function, for people: where, on what, and how many (one a layer,
    say).
    """

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


class SpecTable(msgspec.Struct, frozen=True):
    """A plan as data, every leaf by its path.

    Attributes:
        function: Name of the function.
        mesh: The mesh it is for.
        rules: Axis rules in order, as text.
        constraints: `anchors` (stated inside the function) or `arguments`.
        inputs: Argument leaves by path.
        outputs: Output leaves by path.
        inside: The constraints put inside the function.
        outputs_like: Output subtrees written down as "like that input subtree": `{"out/0":
            "params"}`.
        evidence: How it is known to be good.
    """

    function: str
    mesh: MeshEntry
    rules: list[str]
    constraints: str
    inputs: dict[str, Leaf]
    outputs: dict[str, Leaf]
    inside: list[ConstraintEntry]
    outputs_like: dict[str, str]
    evidence: Evidence

    @staticmethod
    def load(path: str | Path) -> SpecTable:
        """Reads and validates a table, of this schema or an older one.

        Raises:
            TableError: If the file is missing, is no JSON, or is no table of a known schema; the
                place is named.
        """
        return SpecTable.loads(read_text(path), shown(path))

    @staticmethod
    def loads(text: str, where: str = "table") -> SpecTable:
        """Reads and validates the text of a table; `where` names it in errors.

        Raises:
            TableError: As `load`.
        """
        written = parse(text, where)
        data = to_current(written, where)
        leaves = {
            name: _read_leaves(name, object_at(data, name, where), where, text)
            for name in ("inputs", "outputs")
        }
        file: TableFile = convert({**data, "inputs": {}, "outputs": {}}, TableFile, where, "", text)
        if file.constraints not in ("anchors", "arguments"):
            raise refusal("Expected 'anchors' or 'arguments'", where, "constraints", text)
        if len(file.mesh.types) != len(file.mesh.axes):
            raise refusal(
                f"mesh has {len(file.mesh.axes)} axes but {len(file.mesh.types)} types",
                where,
                "mesh",
                text,
            )
        likes: dict[str, Leaf] = {}
        for prefix, source in file.outputs_like.items():
            below = {p: leaf for p, leaf in leaves["inputs"].items() if p.startswith(f"{source}/")}
            if not below:
                raise refusal(
                    f"no input leaf lies below {source!r}", where, f"outputs_like['{prefix}']", text
                )
            likes |= {
                prefix + path.removeprefix(source): _as_output(leaf) for path, leaf in below.items()
            }
        table = SpecTable(
            function=file.function,
            mesh=file.mesh,
            rules=file.rules,
            constraints=file.constraints,
            inputs=by_path(leaves["inputs"]),
            outputs=by_path(likes | leaves["outputs"]),
            inside=file.inside,
            outputs_like=file.outputs_like,
            evidence=file.evidence,
        )
        if written["schema"] == 2 and table.evidence.checksum == checksum_of_2(table._parts()):
            evidence = msgspec.structs.replace(table.evidence, checksum=table.checksum())
            return msgspec.structs.replace(table, evidence=evidence)
        return table

    def save(self, path: str | Path) -> None:
        """Writes the table; the directory is made if it does not exist, and the file appears whole
        or not at all.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(
            f"{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        )  # others may save the same at this time
        draft.write_text(self.dumps(), encoding="utf-8")
        draft.replace(target)

    def dumps(self) -> str:
        """The text of the file: one leaf or pattern, rule, constraint or candidate a line."""
        known = {path: _as_output(leaf) for path, leaf in self.inputs.items()}
        likes = {
            prefix: source
            for prefix, source in self.outputs_like.items()
            if alike(self.outputs, prefix, known, source)
        }
        told = {
            path: leaf
            for path, leaf in self.outputs.items()
            if not any(
                path.startswith(f"{prefix}/") and leaf == known[source + path.removeprefix(prefix)]
                for prefix, source in likes.items()
            )
        }
        evidence = {
            name: value
            for name, value in msgspec.to_builtins(self.evidence).items()
            if value not in ("", None)
        }
        fields = {
            "schema": _text(SCHEMA),
            "function": _text(self.function),
            "mesh": _text(msgspec.to_builtins(self.mesh)),
            "rules": _rows(map(_text, self.rules)),
            "constraints": _text(self.constraints),
            "inputs": _object(fold(self.inputs), _line_text),
            "outputs": _object(fold(told), _line_text),
            "outputs_like": _text(likes),
            "inside": _rows(_text(msgspec.to_builtins(entry)) for entry in self.inside),
            "evidence": _object(
                evidence, lambda v: _rows(map(_text, v), 4) if isinstance(v, list) else _text(v)
            ),
        }
        return (
            "{\n"
            + ",\n".join(f"  {_text(name)}: {text}" for name, text in fields.items())
            + "\n}\n"
        )

    def checksum(self) -> str:
        """Digest of mesh, rules, constraints and leaves, however they are written down."""
        return checksum_of(self._parts())

    def _parts(self) -> list[Any]:
        """What the plan is, as plain builtins; the evidence is not."""
        parts: list[Any] = msgspec.to_builtins(
            [self.mesh, self.rules, self.constraints, self.inputs, self.outputs]
        )
        return parts

    @property
    def edited(self) -> bool:
        """True if specs, rules or mesh were changed after the table was written: its numbers are of
        another plan.
        """
        return self.evidence.checksum not in ("", self.checksum())

    @property
    def fingerprint(self) -> str:
        """Of the traced program."""
        return self.evidence.fingerprint

    @property
    def versions(self) -> dict[str, str]:
        """Of jax and autoshard when it was written."""
        return self.evidence.versions

    @property
    def verified(self) -> str:
        """`yes (against ...)` or `no (reason)`."""
        return self.evidence.verified

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by leaf path."""
        return {path: spec_from_entry(leaf.spec) for path, leaf in self.inputs.items()}

    def output_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each output leaf."""
        return {path: spec_from_entry(leaf.spec) for path, leaf in self.outputs.items()}


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file; shipped as `schema.json`."""
    return {
        "title": "autoshard spec table",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **msgspec.json.schema(TableFile),
    }


def by_path(leaves: Mapping[str, T]) -> dict[str, T]:
    """Leaves in the order of their paths, numbers inside paths by size."""
    return dict(sorted(leaves.items(), key=lambda item: path_key(item[0])))


def _as_output(leaf: Leaf) -> Leaf:
    return msgspec.structs.replace(leaf, group="")


def _read_leaves(name: str, entries: Mapping[str, Any], where: str, text: str) -> dict[str, Leaf]:
    lines: dict[str, tuple[Each, Leaf]] = {}
    for path, entry in entries.items():
        place = f"{name}['{path}']"
        line: Line = convert(entry, Line, where, place, text)
        if len(line.spec) > len(line.shape) or (
            line.logical_axes and len(line.logical_axes) != len(line.shape)
        ):
            raise refusal(
                f"spec or logical axes do not fit {len(line.shape)} dimensions", where, place, text
            )
        used = [
            axis
            for dim in line.spec
            for axis in ([] if dim is None else [dim] if isinstance(dim, str) else dim)
        ]
        if len(set(used)) < len(used):
            raise refusal("the spec uses a mesh axis twice", where, place, text)
        if line.text and line.text != spec_text(line.spec):
            raise refusal(
                f"the text {line.text} says otherwise than the spec, {spec_text(line.spec)} (write "
                f"both alike, or "
                f"leave the text out)", where, place, text,
            )  # fmt: skip
        lines[path] = (
            tuple(line.each),
            Leaf(line.shape, line.dtype, line.spec, line.logical_axes, line.group),
        )
    try:
        return unfold(lines)
    except ValueError as error:
        raise refusal(str(error), where, name, text) from None


def _line_text(line: tuple[Each, Leaf]) -> str:
    each, leaf = line
    fields: dict[str, Any] = {
        "spec": leaf.spec,
        "text": spec_text(leaf.spec),
        "shape": leaf.shape,
        "dtype": leaf.dtype,
    }
    fields |= {"logical_axes": leaf.logical_axes} if leaf.logical_axes else {}
    fields |= {"group": leaf.group} if leaf.group else {}
    return _text(fields | ({"each": list(each)} if each else {}))


def _object(values: Mapping[str, T], text_of: Callable[[T], str]) -> str:
    return _braced([f"{_text(name)}: {text_of(value)}" for name, value in values.items()], "{}", 2)


def _rows(rows: Any, indent: int = 2) -> str:
    return _braced(list(rows), "[]", indent)


def _braced(rows: Sequence[str], braces: str, indent: int) -> str:
    if not rows:
        return braces
    margin = " " * indent
    return (
        braces[0] + "\n" + ",\n".join(f"{margin}  {row}" for row in rows) + f"\n{margin}{braces[1]}"
    )


def _text(value: Any) -> str:
    """JSON on one line; what is not printable is escaped, so that looking at the file does nothing
    to a terminal.
    """
    text = json.dumps(_rounded(value), ensure_ascii=False)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    )


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
    entry: SpecEntry = [
        None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in spec
    ]
    while entry and entry[-1] is None:
        entry.pop()
    return entry


def spec_from_entry(entry: SpecEntry) -> PartitionSpec:
    """The PartitionSpec of a JSON entry."""
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in entry))


def spec_text(entry: SpecEntry) -> str:
    """A spec as Python writes it.

    >>> spec_text(["data", None, ["fsdp", "model"]])
    "P('data', None, ('fsdp', 'model'))"
    """
    return (
        f"P({', '.join(repr(tuple(axes) if isinstance(axes, list) else axes) for axes in entry)})"
    )


def candidates_of(table: SpecTable) -> list[Candidate]:
    """The candidates in a table's evidence.

    Raises:
        TableError: If a record is none.
    """
    try:
        return [msgspec.convert(record, Candidate) for record in table.evidence.candidates]
    except msgspec.ValidationError as error:
        raise TableError(
            f"the table's evidence has a candidate that is none ({shown(error)}). Restore it from "
            f"version control."
        ) from None
