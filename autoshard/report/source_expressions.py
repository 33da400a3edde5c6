"""The expression of the user's source that an equation came from, and constraints pasted around it.

A traced equation keeps the frames of the call that made it, with exact extents (line and column,
first and last). The same extents in the file's syntax tree are the expression, so a constraint
inside the program can be expressed in the source, and written there by a text edit.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import PartitionSpec

from autoshard.table.spec_entry import partition_spec_text
from autoshard.tracing.program import Eqn
from autoshard.tracing.source_lines import frames_of

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_PRODUCTS = frozenset({"dot", "matmul", "dot_general"})
_LOOKUPS = frozenset({"take", "take_along_axis"})
_IMPORTS = (
    "from jax.lax import with_sharding_constraint",
    "from jax.sharding import PartitionSpec as P",
)

Extents = tuple[int, int, int, int]
"""First line and column, last line and column, as `SourceSpan` has them."""


@dataclass(frozen=True, slots=True)
class SourceSpan:
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

    @property
    def extents(self) -> Extents:
        """Where it is in the file."""
        return self.line, self.column, self.end_line, self.end_column

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


Edits = Mapping[str, Sequence[tuple[SourceSpan, PartitionSpec]]]
"""By file, the expressions to wrap, each with the PartitionSpec to state; of several around one
expression the first is the innermost."""


def spans_of(eqn: Eqn) -> tuple[SourceSpan, ...]:
    """The expressions that an equation was traced in, innermost first.

    The user's own code, else whatever is not jax's. Frames of autoshard, which did the tracing, and
    those around it are left out.
    """
    spans = []
    for file, *extents in frames_of(eqn):
        if file.startswith(_PACKAGE):
            break
        spans.append(SourceSpan(file, *extents))
    own = [span for span in spans if _LIBRARIES.isdisjoint(Path(span.file).parts)]
    return tuple(own or spans)


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression of the source.

    Attributes:
        span: Where it is.
        text: As written.
        target: The variable that it is assigned to, "" if it is part of a larger expression.
        node: Its syntax.
    """

    span: SourceSpan
    text: str
    target: str
    node: ast.expr


@functools.lru_cache(maxsize=64)
def _expressions(file: str, changed_ns: int) -> Mapping[Extents, tuple[ast.expr, str]]:
    """By extents, every expression of a file with the variable that it is assigned to.

    `changed_ns` is part of the key of the cache alone: a file that was edited is read again.
    """
    tree = ast.parse(Path(file).read_bytes())
    targets = {
        id(node.value): _target(node) for node in ast.walk(tree) if isinstance(node, ast.Assign)
    }
    expressions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr):
            expressions[_extents(node)] = node, targets.get(id(node), "")
    return expressions


def _target(assignment: ast.Assign) -> str:
    """The variable of `x = ...`; "" for several targets, attributes and patterns."""
    first, *others = assignment.targets
    return first.id if isinstance(first, ast.Name) and not others else ""


def _extents(node: ast.expr) -> Extents:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def expression_at(span: SourceSpan) -> Expression | None:
    """The expression at a span; None where the source cannot be read or has no such expression."""
    path = Path(span.file)
    try:
        expressions = _expressions(span.file, path.stat().st_mtime_ns)
        source = path.read_text(encoding="utf-8")
    except (OSError, SyntaxError, ValueError):
        return None
    if span.extents not in expressions:
        return None
    node, target = expressions[span.extents]
    return Expression(span, ast.get_source_segment(source, node) or "", target, node)


# Operands -----------------------------------------------------------------------------------------


def operand_expression(whole: Expression, eqn: Eqn, position: int) -> Expression | None:
    """The part of an expression that is an operand of its equation; None if that is not certain."""
    node = _operand_node(whole.node, eqn, position)
    if node is None:
        return None
    return expression_at(SourceSpan(whole.span.file, *_extents(node)))


def _operand_node(node: ast.expr, eqn: Eqn, position: int) -> ast.expr | None:
    if isinstance(node, ast.Subscript):
        return node.value if eqn.primitive == "gather" and position == 0 else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return (node.left, node.right)[position]
    if isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
        return _argument_node(node, eqn, position)
    return None


def _argument_node(call: ast.Call, eqn: Eqn, position: int) -> ast.expr | None:
    """The argument of a known function that is an operand of the equation it is traced to."""
    if eqn.primitive == "gather" and position == 0:
        return call.args[0] if _called_name(call) in _LOOKUPS and call.args else None
    if eqn.primitive == "dot_general":
        return _product_argument(call, eqn, position)
    return None


def _product_argument(call: ast.Call, eqn: Eqn, position: int) -> ast.expr | None:
    name = _called_name(call)
    if name in _PRODUCTS and len(call.args) >= 2:
        return call.args[position]
    if name == "einsum" and len(call.args) == 3:
        order = _einsum_order(call.args[0], eqn)
        return None if order is None else call.args[1 + order[position]]
    return None


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _einsum_order(subscripts: ast.expr, eqn: Eqn) -> tuple[int, int] | None:
    """Which operands of an einsum the left and the right side of its dot_general are; None if that
    is not certain.

    jax swaps them where that saves a transposition.
    """
    text = subscripts.value if isinstance(subscripts, ast.Constant) else None
    if not isinstance(text, str) or "." in text:
        return None
    names = text.replace(" ", "").split("->")[0].split(",")
    if len(names) != 2:
        return None
    fitting = [
        (left, right)
        for left, right in ((0, 1), (1, 0))
        if _names_sides(names[left], names[right], eqn)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _names_sides(left: str, right: str, eqn: Eqn) -> bool:
    """True if subscripts name the dimensions of a dot_general as it contracts and batches them."""
    if (len(left), len(right)) != (len(eqn.inputs[0].shape), len(eqn.inputs[1].shape)):
        return False
    for left_dims, right_dims in eqn.params["dimension_numbers"]:
        if [left[dim] for dim in left_dims] != [right[dim] for dim in right_dims]:
            return False
    return True


# Pasting ------------------------------------------------------------------------------------------


def constraint_text(expression: str, spec: PartitionSpec) -> str:
    """A constraint as people write it.

    >>> constraint_text("h", PartitionSpec("data", None, "model"))
    "with_sharding_constraint(h, P('data', None, 'model'))"
    """
    return f"with_sharding_constraint({expression}, {partition_spec_text(spec)})"


def paste(source: str, edits: Iterable[tuple[SourceSpan, PartitionSpec]]) -> str:
    """A file's text with constraints written around expressions, and the imports that they need.

    Args:
        source: The text.
        edits: The expressions and what to state; of several around one expression the first is the
            innermost.
    """
    specs: dict[Extents, list[PartitionSpec]] = {}
    for span, spec in edits:
        specs.setdefault(span.extents, []).append(spec)
    if not specs:
        return source
    data = source.encode()
    line_starts = [0]
    for row in data.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(row))
    insertions = []  # at one place inner ones close first, then outer ones open first
    for (line, column, end_line, end_column), own in specs.items():
        start, end = line_starts[line - 1] + column, line_starts[end_line - 1] + end_column
        closing = "".join(f", {partition_spec_text(spec)})" for spec in own)
        insertions.append((start, 1, -end, "with_sharding_constraint(" * len(own)))
        insertions.append((end, 0, -start, closing))
    for at, _, _, text in sorted(insertions, reverse=True):  # from the end: earlier places stay
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


def patch(edits: Edits) -> str:
    """What `paste` does to files, as a unified diff for `git apply` in the current directory."""
    parts: list[str] = []
    for file, of_file in edits.items():
        path = Path(file)
        name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        before = path.read_text(encoding="utf-8")
        after = paste(before, of_file)
        parts += difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{name}", f"b/{name}"
        )
    return "".join(parts)
