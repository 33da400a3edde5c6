"""The search space: which roles may go to which mesh axes, and its encoding as Optuna parameters.

A point gives each role an assignment (no mesh axis, one, or several in order) and a rank; rules are listed by rank,
then by role. A last parameter sends the parameters' axes to mesh axes in the optimizer state alone (ZeRO-1). Different
points may be the same effective layout: `Layout.key` tells. Rules that hold under a condition only, or take the last
occurrence, are no points: `refinements` lists them around a good layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from autoshard.dims import NO_AXIS
from autoshard.layout import EVERYWHERE, OPTIMIZER, AxisRule, Fit, Layout, Occurrence, Problem

RANKS = 4
MAX_ROLES = 14
NOTHING = "-"
Point = Mapping[str, str | int]


@dataclass(frozen=True, eq=False)
class Space:
    """The space of a problem.

    Attributes:
        problem: The problem.
        roles: Names of the roles that rules may use, largest first.
        assignments: What a role may be sent to, as text: `-`, `data`, `data,model`.
        optimizer_roles: Roles for the optimizer-state rule, in order.
    """

    problem: Problem
    roles: tuple[str, ...]
    assignments: Mapping[str, tuple[str, ...]]
    optimizer_roles: tuple[str, ...]

    def parameters(self) -> dict[str, tuple[str | int, ...]]:
        """Name and choices of every Optuna parameter."""
        choices: dict[str, tuple[str | int, ...]] = {}
        for role in self.roles:
            choices[f"assign {role}"] = self.assignments[role]
            choices[f"rank {role}"] = tuple(range(RANKS))
        if self.optimizer_roles:
            choices["optimizer"] = _orders(self.problem.mesh_axes)
        return choices

    def decode(self, point: Point) -> tuple[AxisRule, ...]:
        """The rule list of a point."""
        order = sorted(self.roles, key=lambda role: (point[f"rank {role}"], self.roles.index(role)))
        rules = [
            AxisRule(role, axis)
            for role in order
            for axis in str(point[f"assign {role}"]).split(",")
            if axis != NOTHING
        ]
        over = str(point.get("optimizer", NOTHING))
        if over != NOTHING:
            rules += [AxisRule(r, a, where=OPTIMIZER) for r in self.optimizer_roles for a in over.split(",")]
        return tuple(rules)

    def encode(self, rules: Sequence[AxisRule]) -> Point | None:
        """A point for a rule list, or None where the space has none that keeps the roles' order and axes."""
        everywhere = [rule for rule in rules if rule.where == EVERYWHERE]
        scoped = [rule for rule in rules if rule.where == OPTIMIZER]
        if len(everywhere) + len(scoped) != len(rules) or any(rule.occurrence != "first" for rule in rules):
            return None
        axes: dict[str, list[str]] = defaultdict(list)
        for rule in everywhere:
            axes[rule.role].append(rule.mesh_axis)
        point: dict[str, str | int] = {}
        rank, previous = 0, -1
        for role in axes:
            if role not in self.roles or ",".join(axes[role]) not in self.assignments[role]:
                return None
            if self.roles.index(role) < previous:
                rank += 1
            previous = self.roles.index(role)
            point[f"rank {role}"] = rank
        if rank >= RANKS:
            return None
        for role in self.roles:
            point.setdefault(f"rank {role}", RANKS - 1)
            point[f"assign {role}"] = ",".join(axes[role]) if role in axes else NOTHING
        if self.optimizer_roles:
            over = tuple(dict.fromkeys(rule.mesh_axis for rule in scoped))
            if {rule.role for rule in scoped} not in (set(), set(self.optimizer_roles)):
                return None
            point["optimizer"] = ",".join(over) or NOTHING
        elif scoped:
            return None
        return point


def refinements(space: Space, rules: Sequence[AxisRule]) -> Iterator[tuple[AxisRule, ...]]:
    """Rule lists one step beyond the space: a rule takes the last occurrence, or a condition, or a new one comes first.

    A condition (`with` or `without` another role of the same value) is worth a try where it is true of some of the
    values that have the role and false of others; conditions that are true of the same values count once. A new rule
    comes first or after the last rule of its role (which decides the order of the mesh axes in a dimension), and only
    where other rules have its mesh axis in some value that has its role: that is what sends experts to the data axis
    but leaves it to the batch while tokens are still in sequences.

    Args:
        space: Whose roles and assignments are used.
        rules: Where to start.
    """
    problem = space.problem
    layout = Layout(problem, tuple(rules))
    having: dict[str, list[tuple[frozenset[int], Fit]]] = defaultdict(list)
    twice: set[str] = set()
    for signature in problem.signatures:
        fit = layout.fit_signature(signature)
        present = frozenset(signature[0]) - {NO_AXIS}
        for role in present:
            name = problem.roles.roles[role].name
            having[name].append((present, fit))
            if signature[0].count(role) > 1:
                twice.add(name)
    for i, rule in enumerate(rules):
        if rule.role in twice:
            flipped: Occurrence = "last" if rule.occurrence == "first" else "first"
            yield (*rules[:i], replace(rule, occurrence=flipped), *rules[i + 1 :])
        if rule.where == EVERYWHERE:
            for where in _conditions(problem, having[rule.role]):
                yield (*rules[:i], replace(rule, where=where), *rules[i + 1 :])
    for name in space.roles:
        for axis in space.assignments[name]:
            contested = [(present, fit) for present, fit in having[name] if any(axis in axes for axes in fit.spec)]
            if axis in problem.mesh_axes and contested:
                last = max((i for i, rule in enumerate(rules) if rule.role == name), default=-1)
                for where in _conditions(problem, contested):
                    new = AxisRule(name, axis, where=where)
                    yield (new, *rules)
                    if last >= 0:
                        yield (*rules[: last + 1], new, *rules[last + 1 :])


def _conditions(problem: Problem, values: Sequence[tuple[frozenset[int], Fit]]) -> Iterator[str]:
    """Conditions that are true of some of these values only, one for each set of values that can be told apart."""
    seen: set[frozenset[int]] = set()
    everywhere = frozenset(range(len(values)))
    for other in sorted(frozenset().union(*(present for present, _ in values))):
        having = frozenset(i for i, (present, _) in enumerate(values) if other in present)
        for word, chosen in (("without", everywhere - having), ("with", having)):
            if chosen and chosen != everywhere and chosen not in seen:
                seen.add(chosen)
                yield f"{word} {problem.roles.roles[other].name}"


def _orders(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Every ordered choice of mesh axes with more than one device, as text; nothing first."""
    names = [name for name, size in axes.items() if size > 1]
    chosen = [NOTHING]
    for length in range(1, min(len(names), 3) + 1):
        chosen += [",".join(order) for order in permutations(names, length)]
    return tuple(chosen)


def make_space(problem: Problem, optimizer_roles: Sequence[str] = ()) -> Space:
    """The space of a problem: its largest roles that some mesh axis divides and no scan consumes.

    Args:
        problem: The problem.
        optimizer_roles: Roles of the ZeRO-1 rule; empty where no argument is optimizer state.
    """
    weight: dict[int, float] = defaultdict(float)
    program = problem.program
    for value in program.body.inputs:
        for role in set(problem.roles.of_value[value.index]):
            weight[role] += value.bytes
    for eqn, trips in program.walk():
        for value in eqn.outputs:
            for role in set(problem.roles.of_value[value.index]):
                weight[role] += trips * value.bytes
    weight.pop(NO_AXIS, None)
    assignments: dict[str, tuple[str, ...]] = {}
    for index in sorted(weight, key=lambda r: (-weight[r], r)):
        role_of = problem.roles.roles[index]
        if role_of.scanned or len(assignments) == MAX_ROLES:
            continue
        legal = tuple(
            text
            for text in _orders(problem.mesh_axes)
            if text == NOTHING or any(_divides(size, text.split(","), problem.mesh_axes) for size in role_of.sizes)
        )
        if len(legal) > 1:
            assignments[role_of.name] = legal
    return Space(problem, tuple(assignments), assignments, tuple(optimizer_roles))


def _divides(size: int, axes: Sequence[str], mesh_axes: Mapping[str, int]) -> bool:
    for axis in axes:
        if size % mesh_axes[axis]:
            return False
        size //= mesh_axes[axis]
    return True
