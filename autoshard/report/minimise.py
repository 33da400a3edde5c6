"""The fewest annotations: which of a plan's constraints the partitioner needs to do what the plan
does.

Most constraints of a plan repeat what the partitioner would propagate anyway. They are dropped as
far as Shardy's own passes (tens of milliseconds a try) then still give the same shardings of
arguments and results and the same collectives; the compiled program confirms it. What is left is
expressed in the source (`source_constraints`), so that a team can paste a few lines instead of
running the tool. A `shard_map` of the plan is no constraint: it is kept, and said where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jax.sharding import PartitionSpec

from autoshard.compiler.compile import Compiled, CompilerOptions, build, compile_built
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.report.source_constraints import (
    SourceConstraint,
    as_constraints,
    source_constraints_for,
)
from autoshard.report.source_expressions import Edits, SourceSpan, constraint_text, patch
from autoshard.shardy.partition import Partitioned, partition
from autoshard.tracing.program import Program
from autoshard.tracing.rewrite import Constraints, EqnConstraints
from autoshard.tracing.source_lines import source_line
from autoshard.tracing.trace import Traced

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MinimalConstraints:
    """The constraints that a plan needs.

    Attributes:
        constraints: Those that are left, in program order.
        stated: Number of constraints that the plan itself states in the traced program.
        source_constraints: Number of source constraints that together would state them all.
        tries: How often Shardy's passes ran, and how often the compiler.
        compiled: The compiled program with the constraints that are left; None if nothing was
            compiled.
        plan: The compiled program of the plan.
        shard_maps: What runs in a `jax.shard_map`, with the specs of its operands and results.
    """

    constraints: tuple[SourceConstraint, ...]
    stated: int
    source_constraints: int
    tries: tuple[int, int]
    compiled: CompiledEvidence | None
    plan: CompiledEvidence | None
    shard_maps: tuple[str, ...] = ()

    @property
    def same(self) -> bool | None:
        """True if the compiled collectives are those of the plan; None if nothing was compiled."""
        if self.compiled is None or self.plan is None:
            return None
        return self.compiled.collectives == self.plan.collectives

    @property
    def inexpressible(self) -> tuple[SourceConstraint, ...]:
        """Those that cannot be written in the source: only the plan itself can state them."""
        return tuple(c for c in self.constraints if c.expression is None)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line per constraint, with file, line and the code to write there.

        `model.py:88: h = with_sharding_constraint(h, P('data', None, 'model'))`
        """
        return tuple(f"{c.source}: {line_text(c)}" for c in self.constraints)

    def edits(self) -> Edits:
        """By file, the expressions to wrap and their PartitionSpecs, for `paste` and `patch`."""
        # Results as computed come first: `paste` puts the first one innermost.
        ordered = sorted(self.constraints, key=lambda c: c.what != "result as computed")
        edits: dict[str, list[tuple[SourceSpan, PartitionSpec]]] = {}
        for constraint in ordered:
            if constraint.expression is not None:
                span = constraint.expression.span
                edits.setdefault(span.file, []).append((span, constraint.spec))
        return edits

    def patch(self) -> str:
        """The constraints as a unified diff of the model's files."""
        return patch(self.edits())

    def __str__(self) -> str:
        collectives = "not compiled"
        if self.same is not None:
            collectives = "those of the plan" if self.same else "OTHER than the plan's"
        head = (
            f"{len(self.constraints)} of {self.source_constraints} source constraints (for "
            f"{self.stated} in the traced program) are needed; the compiled collectives are "
            f"{collectives}"
        )
        return "\n".join([head, *(f"  {line}" for line in (*self.lines, *self.shard_maps))])


def line_text(constraint: SourceConstraint) -> str:
    """A constraint as a line of Python: an assignment where its expression is assigned."""
    expression, spec = constraint.expression, constraint.spec
    if expression is None:
        return f"{constraint.what} of {constraint.primitive}: {constraint_text('...', spec)}"
    if expression.target:
        return f"{expression.target} = {constraint_text(expression.target, spec)}"
    return constraint_text(" ".join(expression.text.split()), spec)


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
    source_constraints = source_constraints_for(layout.problem.logical_axes.classes, stated)
    expressible = [c for c in source_constraints if c.expression is not None]
    passes = _Passes(traced, layout, mesh)

    def given(some: Sequence[SourceConstraint]) -> Constraints:
        return _with_shard_maps(as_constraints(some), stated)

    # As near to the plan as the source can express it; the compiler judges whether that is enough.
    wanted = passes.outcome(given(expressible))
    needed = fewest(expressible, lambda some: passes.outcome(given(some)) == wanted)

    def compiles(some: Sequence[SourceConstraint]) -> CompiledEvidence:
        built = build(traced, layout, mesh, given(some))
        return compile_built(built, mesh, compiler_options=compiler_options).evidence

    programs = _Programs(compiles, source_constraints)
    plan = None if compiled is None else compiled().evidence
    if plan is not None:
        collectives = plan.collectives
        needed = _until_compiled(
            needed,
            (expressible, source_constraints),
            lambda some: programs.evidence(some).collectives == collectives,
        )
    return MinimalConstraints(
        constraints=tuple(sorted(needed, key=lambda c: c.traced[0].eqn)),
        stated=len(stated),
        source_constraints=len(source_constraints),
        compiled=None if plan is None else programs.evidence(needed),
        tries=(passes.tries, programs.tries),
        plan=plan,
        shard_maps=tuple(_shard_maps(layout.problem.program, stated)),
    )


def _with_shard_maps(constraints: Constraints, stated: Constraints) -> Constraints:
    """The constraints, with the shard_maps of the plan."""
    eqns = dict(constraints.eqns)
    for index, of_plan in stated.eqns.items():
        if of_plan.shard_map is not None:
            eqns[index] = replace(eqns.get(index, EqnConstraints()), shard_map=of_plan.shard_map)
    return replace(constraints, eqns=eqns)


def _shard_maps(program: Program, stated: Constraints) -> Iterator[str]:
    """A line for each shard_map of the plan, in program order; equal ones once."""
    lines: dict[str, None] = {}
    for eqn in program.eqns:
        of_plan = stated.eqns.get(eqn.index)
        if of_plan is not None and of_plan.shard_map is not None:
            call = of_plan.shard_map
            specs = f"in_specs={call.operands}, out_specs={call.results}"
            lines[f"{source_line(eqn)}: {eqn.primitive} in a jax.shard_map, {specs}"] = None
    yield from lines


def _until_compiled(
    needed: list[SourceConstraint],
    pools: Iterable[Sequence[SourceConstraint]],
    enough: Callable[[Sequence[SourceConstraint]], bool],
) -> list[SourceConstraint]:
    """What is needed, and the fewest more of the first pool with which the compiled program agrees.

    Shardy's passes are not the whole partitioner, so what is enough for them may be too little.
    """
    for pool in pools:
        if enough(needed):
            return needed
        if enough(pool):
            rest = [c for c in pool if c not in needed]
            needed = [*needed, *fewest(rest, _beside(needed, enough))]
    return needed


def _beside(
    base: Sequence[T], enough: Callable[[Sequence[T]], bool]
) -> Callable[[Sequence[T]], bool]:
    """Whether something is enough together with a base."""
    return lambda some: enough([*base, *some])


class _Passes:
    """What Shardy's passes make of constraints; each set of them is tried once."""

    def __init__(self, traced: Traced, layout: Layout, mesh: MeshInfo) -> None:
        self._traced, self._layout, self._mesh = traced, layout, mesh
        self._outcomes: dict[str, object] = {}

    @property
    def tries(self) -> int:
        """How often the passes ran."""
        return len(self._outcomes)

    def outcome(self, constraints: Constraints) -> object:
        """Collectives and the shardings of arguments and results; the failure where they fail."""
        key = repr(constraints)
        if key not in self._outcomes:
            lowered = build(self._traced, self._layout, self._mesh, constraints).lower()
            outcome: object = partition(lowered, self._mesh.axes)
            if isinstance(outcome, Partitioned):
                outcome = outcome.collectives, outcome.arg_shardings, outcome.result_shardings
            self._outcomes[key] = outcome
        return self._outcomes[key]


class _Programs:
    """What the compiler makes of constraints; each set of them is compiled once."""

    def __init__(
        self,
        compiles: Callable[[Sequence[SourceConstraint]], CompiledEvidence],
        order: Sequence[SourceConstraint],
    ) -> None:
        self._compiles, self._order = compiles, order
        self._evidence: dict[tuple[SourceConstraint, ...], CompiledEvidence] = {}

    @property
    def tries(self) -> int:
        """How often the compiler ran."""
        return len(self._evidence)

    def evidence(self, some: Sequence[SourceConstraint]) -> CompiledEvidence:
        """The compiled program with these constraints."""
        # In one order, so that a set is compiled once whichever way it was put together.
        key = tuple(sorted(some, key=self._order.index))
        if key not in self._evidence:
            self._evidence[key] = self._compiles(key)
        return self._evidence[key]


def fewest(items: Sequence[T], enough: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset that is enough and of which none can be dropped, in about k log n tries for k of n.

    Items are taken from the front: the last one of the shortest prefix that is enough is needed,
    and so on (Junker 2004, QuickXplain, with a prefix search). At last each one left is tried
    without.
    """
    needed: list[T] = []
    left = list(items)
    while not enough(needed):
        if not left or not enough([*needed, *left]):
            return [*needed, *left]
        length = _shortest_prefix(left, _beside(list(needed), enough))
        needed.append(left[length - 1])
        left = left[: length - 1]
    # What was needed beside others may not be needed any more beside later ones.
    for item in list(needed):
        without = [other for other in needed if other is not item]
        if enough(without):
            needed = without
    return needed


def _shortest_prefix(items: Sequence[T], enough: Callable[[Sequence[T]], bool]) -> int:
    """Length of the shortest prefix that is enough, where all items are.

    By bisection, which takes it that more is no worse.
    """
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(items[:middle]):
            high = middle
        else:
            low = middle
    return high
