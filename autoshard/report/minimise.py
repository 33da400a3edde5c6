"""The fewest annotations: which of a plan's constraints are needed for the partitioner to do what
the plan does.

Most constraints of a plan repeat what the partitioner would propagate anyway. They are dropped as
far as Shardy's own passes (tens of milliseconds a try) then still give the same shardings of
arguments and results and the same collectives; the compiled program confirms it. What is left is
said in the words of the source (`statements`), so that a team can paste a few lines instead of
running the tool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.compiler.compile import Compiled, CompilerOptions, build, compile_built
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.report.source_constraints import Statement, as_constraints, statements_for
from autoshard.report.source_expressions import Site, constraint_text, patch
from autoshard.shardy.partition import Partitioned, partition
from autoshard.tracing.rewrite import Constraints
from autoshard.tracing.trace import Traced

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


@dataclass(frozen=True, eq=False)
class MinimalConstraints:
    """The constraints that a plan needs.

    Attributes:
        constraints: Those that are left, in program order.
        stated: Number of constraints that the plan itself states in the traced program.
        statements: Number of statements in the source that would say them all.
        tries: How often Shardy's passes ran, and how often the compiler.
        compiled: The compiled program with the constraints that are left; None if nothing was
            compiled.
        plan: The compiled program of the plan.
    """

    constraints: tuple[Statement, ...]
    stated: int
    statements: int
    tries: tuple[int, int]
    compiled: CompiledEvidence | None
    plan: CompiledEvidence | None

    @property
    def same(self) -> bool | None:
        """True if the compiled collectives are those of the plan; None if nothing was compiled."""
        if self.compiled is None or self.plan is None:
            return None
        return self.compiled.collectives == self.plan.collectives

    @property
    def unsayable(self) -> tuple[Statement, ...]:
        """Those that cannot be written in the source: only the plan itself can state them."""
        return tuple(c for c in self.constraints if c.expression is None)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line per constraint: `model.py:88: h = with_sharding_constraint(h, P('data', None,
        'model'))`.
        """
        return tuple(f"{c.source}: {line_text(c)}" for c in self.constraints)

    def patch(self) -> str:
        """The constraints as a unified diff of the model's files."""
        return patch(
            (c.expression.site, c.spec) for c in self._sayable() if c.expression is not None
        )

    def edits(self) -> dict[str, list[tuple[Site, PartitionSpec]]]:
        """By file, the expressions to wrap and their PartitionSpecs, for `sites.paste`."""
        found: dict[str, list[tuple[Site, PartitionSpec]]] = {}
        for c in self._sayable():
            assert c.expression is not None
            found.setdefault(c.expression.site.file, []).append((c.expression.site, c.spec))
        return found

    def _sayable(self) -> list[Statement]:
        """Those with an expression, results as computed before results as stored."""
        said = [c for c in self.constraints if c.expression is not None]
        return sorted(said, key=lambda c: c.what != "result as computed")

    def __str__(self) -> str:
        word = {True: "those of the plan", False: "OTHER than the plan's", None: "not compiled"}[
            self.same
        ]
        head = f"{len(self.constraints)} of {self.statements} statements ({self.stated} constraints) are needed; "
        head += f"the compiled collectives are {word}"
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


def line_text(statement: Statement) -> str:
    """A constraint as a line of Python: an assignment where its expression is assigned to a
    variable.
    """
    found = statement.expression
    if found is None:
        return (
            f"{statement.what} of {statement.primitive}: {constraint_text('...', statement.spec)}"
        )
    if found.target:
        return f"{found.target} = {constraint_text(found.target, statement.spec)}"
    return constraint_text(" ".join(found.text.split()), statement.spec)


def minimise(
    traced: Traced,
    layout: Layout,
    mesh: MeshInfo,
    compiled: Callable[[], Compiled] | None,
    compiler_options: CompilerOptions | None = None,
) -> MinimalConstraints:
    """Finds the constraints that a layout needs.

    Args:
        traced: The traced call.
        layout: The layout.
        mesh: The mesh.
        compiled: Gives the layout's own compiled program, compiling it if nobody did yet; None to
            compile nothing.
        compiler_options: Passed to XLA as they are.

    Returns:
        The constraints that are left, with the compiled collectives.
    """
    stated = constraints_for(layout)
    statements = statements_for(layout.problem.logical_axes.classes, stated)
    sayable = [s for s in statements if s.expression is not None]
    passes = _Passes(traced, layout, mesh)
    wanted = passes.looks(stated)
    if passes.looks(as_constraints(sayable)) != wanted:
        wanted = passes.looks(
            as_constraints(sayable)
        )  # as near as the source can say it; the compiler judges
    chosen = fewest(sayable, lambda some: passes.looks(as_constraints(some)) == wanted)

    programs: dict[tuple[Statement, ...], CompiledEvidence] = {}

    def evidence(some: Sequence[Statement]) -> CompiledEvidence:
        key = tuple(sorted(some, key=statements.index))
        if key not in programs:
            built = build(traced, layout, mesh, as_constraints(key))
            programs[key] = compile_built(built, mesh, compiler_options=compiler_options).evidence
        return programs[key]

    plan = found = None
    if compiled is not None:
        wanted_program = plan = compiled().evidence

        def agrees(some: Sequence[Statement]) -> bool:
            return evidence(some).collectives == wanted_program.collectives

        for pool in (sayable, statements):
            if not agrees(chosen) and agrees(pool):
                rest, base = [s for s in pool if s not in chosen], tuple(chosen)
                chosen = [*base, *fewest(rest, lambda some, base=base: agrees([*base, *some]))]  # type: ignore[misc]
        found = evidence(chosen)
    return MinimalConstraints(
        constraints=tuple(sorted(chosen, key=lambda s: s.places[0].eqn)),
        stated=len(stated),
        statements=len(statements),
        tries=(passes.tries, len(programs)),
        compiled=found,
        plan=plan,
    )


class _Passes:
    """What Shardy's passes make of constraints, and how often they were asked."""

    def __init__(self, traced: Traced, layout: Layout, mesh: MeshInfo) -> None:
        self._traced, self._layout, self._mesh = traced, layout, mesh
        self._known: dict[str, object] = {}
        self.tries = 0

    def looks(self, constraints: Constraints) -> object:
        """Collectives and the shardings of arguments and results; where the passes fail, that."""
        key = repr(constraints)
        if key not in self._known:
            self.tries += 1
            lowered = build(self._traced, self._layout, self._mesh, constraints).lower()
            found = partition(lowered, self._mesh.axes)
            if isinstance(found, Partitioned):
                self._known[key] = found.collectives, found.arg_shardings, found.result_shardings
            else:
                self._known[key] = found
        return self._known[key]


def fewest(
    statements: Sequence[Statement], enough: Callable[[Sequence[Statement]], bool]
) -> list[Statement]:
    """A subset that is enough and of which none can be dropped, in about k log n tries for k of n.

    Statements are taken from the front: the last one of the shortest prefix that is enough is
    needed, and so on (Junker 2004, QuickXplain, with a prefix search). At last each one left is
    tried without.
    """
    needed: list[Statement] = []
    left = list(statements)
    while not enough(needed):
        if not left or not enough([*needed, *left]):
            return [*needed, *left]
        ahead = [*needed], [*left]
        count = _least(len(left), lambda n, ahead=ahead: enough([*ahead[0], *ahead[1][:n]]))  # type: ignore[misc]
        needed.append(left[count - 1])
        left = left[: count - 1]
    for statement in list(needed):
        without = [s for s in needed if s is not statement]
        if enough(without):
            needed = without
    return needed


def _least(count: int, enough: Callable[[int], bool]) -> int:
    """The least number that is enough, given that `count` is; by bisection, taking it that more is
    no worse.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
