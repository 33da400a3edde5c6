"""Places in the model's source: the expression an equation came from, and constraints pasted around
expressions.

A traced equation keeps the frames of the call that made it, with exact extents (line and column,
first and last). The same extents in the file's syntax tree are the expression, so a constraint
inside the program can be said in the words of the source, and written there by a text edit.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import PartitionSpec

from autoshard.tracing.program import Eqn
from autoshard.tracing.source_lines import frames_of

_LIBRARIES = ("site-packages", "dist-packages")
_PRODUCTS = frozenset({"dot", "matmul", "dot_general"})
_LOOK_UPS = frozenset({"take", "take_along_axis"})
_IMPORTS = (
    "from jax.lax import with_sharding_constraint",
    "from jax.sharding import PartitionSpec as P",
)


@dataclass(frozen=True, slots=True)
class Site:
    """An expression of the source, by its extents.

    Attributes:
        file: Path of the file.
        line: First line, from 1.
        column: Where it starts there, in UTF-8 bytes from 0, as `ast` counts.
        end_line: Last line.
        end_column: Just after its last byte.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def sites_of(eqn: Eqn) -> tuple[Site, ...]:
    """The expressions that an equation was made in, innermost first: the user's own code, else
    whatever is not jax's.

    Frames of autoshard, which did the tracing, and those around it are left out.
    """
    here = str(Path(__file__).parent)
    found = []
    for file, *extents in frames_of(eqn):
        if file.startswith(here):
            break
        found.append(Site(file, *extents))
    own = [site for site in found if not any(name in Path(site.file).parts for name in _LIBRARIES)]
    return tuple(own or found)


@functools.lru_cache(maxsize=64)
def _tree(
    file: str, changed_ns: int
) -> Mapping[tuple[int, int, int, int], tuple[ast.expr, ast.stmt | None]]:
    """By extents, every expression of a file with the statement that it is the right-hand side
    of.
    """
    tree = ast.parse(Path(file).read_bytes())
    assigned = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    return {
        (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0): (
            node,
            assigned.get(id(node)),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
    }


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression of the source.

    Attributes:
        site: Where it is.
        text: As written.
        target: The variable that it is assigned to, "" if it is part of a larger expression.
        node: Its syntax.
    """

    site: Site
    text: str
    target: str
    node: ast.expr


def expression_at(site: Site) -> Expression | None:
    """The expression at a place; None where the source cannot be read or has no expression of these
    extents.
    """
    try:
        path = Path(site.file)
        tree = _tree(site.file, path.stat().st_mtime_ns)
        source = path.read_text(encoding="utf-8")
    except (OSError, SyntaxError, ValueError):
        return None
    node, statement = tree.get(
        (site.line, site.column, site.end_line, site.end_column), (None, None)
    )
    if node is None:
        return None
    single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    name = statement.targets[0] if single and isinstance(statement, ast.Assign) else None
    target = name.id if isinstance(name, ast.Name) else ""
    return Expression(site, ast.get_source_segment(source, node) or "", target, node)


def operand_expression(whole: Expression, eqn: Eqn, position: int) -> Expression | None:
    """The part of an expression that one operand of its equation is written as; None where that is
    not known.
    """
    node = _operand_node(whole.node, eqn, position)
    if node is None:
        return None
    site = Site(
        whole.site.file,
        node.lineno,
        node.col_offset,
        node.end_lineno or 0,
        node.end_col_offset or 0,
    )
    return expression_at(site)


def _operand_node(node: ast.expr, eqn: Eqn, position: int) -> ast.expr | None:
    if isinstance(node, ast.Subscript):
        return node.value if eqn.primitive == "gather" and position == 0 else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return (node.left, node.right)[position]
    if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _PRODUCTS and eqn.primitive == "dot_general" and len(node.args) >= 2:
        return node.args[position]
    if name in _LOOK_UPS and eqn.primitive == "gather" and position == 0 and node.args:
        return node.args[0]
    if name == "einsum" and eqn.primitive == "dot_general" and len(node.args) == 3:
        first = node.args[0]
        text = (
            first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        )
        order = _einsum_order(text, eqn)
        return None if order is None else node.args[1 + order[position]]
    return None


def _einsum_order(text: str, eqn: Eqn) -> tuple[int, int] | None:
    """Which operands of an einsum the left and the right side of its dot_general are; None if that
    is not certain.

    jax swaps them where that saves a transposition.
    """
    names = text.replace(" ", "").split("->")[0].split(",")
    if len(names) != 2 or "." in text:
        return None
    (contracted, batched) = eqn.params["dimension_numbers"]
    fitting = []
    for order in ((0, 1), (1, 0)):
        left, right = (names[i] for i in order)
        if len(left) != len(eqn.inputs[0].shape) or len(right) != len(eqn.inputs[1].shape):
            continue
        if all([left[i] for i in a] == [right[i] for i in b] for a, b in (contracted, batched)):
            fitting.append(order)
    return fitting[0] if len(fitting) == 1 else None


def constraint_text(expression: str, spec: PartitionSpec) -> str:
    """A constraint as people write it.

    >>> constraint_text("h", PartitionSpec("data", None, "model"))
    "with_sharding_constraint(h, P('data', None, 'model'))"
    """
    return f"with_sharding_constraint({expression}, {spec_text(spec)})"


def spec_text(spec: PartitionSpec) -> str:
    """A PartitionSpec as Python that needs nothing but `P`.

    >>> spec_text(PartitionSpec(PartitionSpec.UNCONSTRAINED, ("data", "model"), None))
    "P(P.UNCONSTRAINED, ('data', 'model'), None)"
    """
    entries = (
        "P.UNCONSTRAINED" if entry is PartitionSpec.UNCONSTRAINED else repr(entry)
        for entry in tuple(spec)
    )
    return f"P({', '.join(entries)})"


def paste(source: str, wanted: Iterable[tuple[Site, PartitionSpec]]) -> str:
    """A file's text with constraints written around expressions, and the imports that they need.

    Args:
        source: The text.
        wanted: Where and what; of several around one expression the first is the innermost.
    """
    specs: dict[tuple[int, int, int, int], list[PartitionSpec]] = {}
    for site, spec in wanted:
        specs.setdefault((site.line, site.column, site.end_line, site.end_column), []).append(spec)
    if not specs:
        return source
    starts = [0]
    for row in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    edits = []  # at one place inner ones close first, then outer ones open first
    for (line, column, end_line, end_column), own in specs.items():
        start, end = starts[line - 1] + column, starts[end_line - 1] + end_column
        edits.append((start, 1, -end, "with_sharding_constraint(" * len(own)))
        edits.append((end, 0, -start, "".join(f", {spec_text(spec)})" for spec in own)))
    data = source.encode()
    for at, _, _, text in sorted(edits, reverse=True):
        data = data[:at] + text.encode() + data[at:]
    return _with_imports(data.decode(), source)


def _with_imports(text: str, source: str) -> str:
    """The text with the imports that constraints need, after those that the file begins with."""
    missing = [f"{line}\n" for line in _IMPORTS if line not in source.splitlines()]
    after = 0
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        after = node.end_lineno or 0
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:after], *missing, *lines[after:]])


def patch(wanted: Iterable[tuple[Site, PartitionSpec]]) -> str:
    """The same as a unified diff over all files, for `git apply` in the current directory."""
    by_file: dict[str, list[tuple[Site, PartitionSpec]]] = {}
    for site, spec in wanted:
        by_file.setdefault(site.file, []).append((site, spec))
    parts: list[str] = []
    for file, own in by_file.items():
        before = Path(file).read_text(encoding="utf-8")
        after = paste(before, own)
        name = (
            Path(file).relative_to(Path.cwd())
            if Path(file).is_relative_to(Path.cwd())
            else Path(file)
        )
        parts += difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{name}", f"b/{name}"
        )
    return "".join(parts)
