"""The search space: an ordered list of logical axes for each mesh axis, and its encoding as Optuna
parameters.

A layout is one rule list per mesh axis, and the order of the mesh axes, which says who takes a
dimension first where two meet (`Placements`). In the study a parameter per mesh axis and logical axis says
where in its list the logical axis stands (0: not at all). A last parameter per mesh axis sends the
parameters' axes to it in the optimizer state alone (ZeRO-1). Different points may be the same
effective layout. Rules that hold under a condition only, or take the last occurrence, are no
points: `refinements` lists them around a good layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Occurrence, Scope, ScopeKind
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Fit, Problem

PLACES = 4
MAX_LOGICAL_AXES = 14
Point = Mapping[str, str | int]
Lists = tuple[tuple[AxisRule, ...], ...]
"""The rules of each mesh axis, mesh axes with the first claim first."""


@dataclass(frozen=True, eq=False)
class Space:
    """The space of a problem.

    Attributes:
        problem: The problem.
        logical_axes: Names of the logical axes that rules may use, largest first.
        able: By mesh axis with more than one device, the logical axes that it may split.
        optimizer_axes: Logical axes for the optimizer-state rule, in order.
    """

    problem: Problem
    logical_axes: tuple[str, ...]
    able: Mapping[str, tuple[str, ...]]
    optimizer_axes: tuple[str, ...]

    def parameters(self) -> dict[str, tuple[str | int, ...]]:
        """Name and choices of every Optuna parameter."""
        choices: dict[str, tuple[str | int, ...]] = {}
        for axis, logical_axes in self.able.items():
            for logical_axis in logical_axes:
                choices[f"{axis} {logical_axis}"] = tuple(range(PLACES + 1))
            if self.optimizer_axes:
                choices[f"{axis} (optimizer)"] = (0, 1)
        if len(self.able) > 1:
            choices["first"] = tuple(",".join(order) for order in permutations(self.able))
        return choices

    def decode(self, point: Point) -> Lists:
        """The lists of a point."""
        order = str(point["first"]).split(",") if len(self.able) > 1 else list(self.able)
        lists = []
        for axis in order:
            places = {
                logical_axis: int(point[f"{axis} {logical_axis}"])
                for logical_axis in self.able[axis]
            }
            listed = sorted(
                (logical_axis for logical_axis in places if places[logical_axis]),
                key=lambda r: (places[r], self.logical_axes.index(r)),
            )
            rules = [AxisRule(logical_axis, axis) for logical_axis in listed]
            if self.optimizer_axes and point[f"{axis} (optimizer)"]:
                rules += self.of_optimizer(axis)
            lists.append(tuple(rules))
        return tuple(lists)

    def of_optimizer(self, axis: str) -> tuple[AxisRule, ...]:
        """The rules that send the parameters' axes to a mesh axis in the optimizer state alone."""
        return tuple(
            AxisRule(logical_axis, axis, where=OPTIMIZER) for logical_axis in self.optimizer_axes
        )

    def encode(self, lists: Lists) -> Point | None:
        """A point for lists, or None where the space has none that keeps the order of their
        roles.
        """
        point: dict[str, str | int] = dict.fromkeys(self.parameters(), 0)
        order = [rules[0].mesh_axis for rules in lists if rules]
        if len(self.able) > 1:
            order += [axis for axis in self.able if axis not in order]
            point["first"] = ",".join(order)
        for rules in lists:
            if not rules:
                continue
            axis = rules[0].mesh_axis
            plain, scoped = _plain(rules), tuple(r for r in rules if r.where == OPTIMIZER)
            if plain + scoped != rules or scoped not in ((), self.of_optimizer(axis)):
                return None
            place, previous = 1, -1
            for rule in plain:
                if rule.logical_axis not in self.able[axis] or point[f"{axis} {rule.logical_axis}"]:
                    return None
                place += self.logical_axes.index(rule.logical_axis) < previous
                previous = self.logical_axes.index(rule.logical_axis)
                point[f"{axis} {rule.logical_axis}"] = place
            if place > PLACES:
                return None
            if scoped:
                point[f"{axis} (optimizer)"] = 1
        return point

    def lists(self, rules: Sequence[AxisRule]) -> Lists:
        """The rules of each mesh axis; mesh axes in an order that keeps who is first in a logical axis,
        where there is one.
        """
        of_mesh_axis: dict[str, list[AxisRule]] = {axis: [] for axis in self.able}
        place: dict[tuple[str, str], int] = {}
        for number, rule in enumerate(rules):
            if rule.mesh_axis in of_mesh_axis:
                of_mesh_axis[rule.mesh_axis].append(rule)
                place.setdefault((rule.logical_axis, rule.mesh_axis), number)

        logical_axes = {logical_axis for logical_axis, _ in place}
        pairs = [
            (a, b)
            for logical_axis in logical_axes
            for a, b in permutations(self.able, 2)
            if (logical_axis, a) in place
            and (logical_axis, b) in place
            and place[logical_axis, a] < place[logical_axis, b]
        ]
        orders = permutations(self.able)
        order = min(
            orders,
            key=lambda order: sum(order.index(a) > order.index(b) for a, b in pairs),
            default=(),
        )
        return tuple(tuple(of_mesh_axis[axis]) for axis in order)


def rules_of(lists: Lists) -> tuple[AxisRule, ...]:
    """One rule list."""
    return tuple(rule for rules in lists for rule in rules)


def _plain(rules: Sequence[AxisRule]) -> tuple[AxisRule, ...]:
    return tuple(rule for rule in rules if rule.where == EVERYWHERE and rule.occurrence == "first")


def neighbours(space: Space, lists: Lists, axis: str) -> Iterator[Lists]:
    """Lists that differ in the rules of one mesh axis: one logical axis more, less, another, alone or at
    another place.

    Rules under a condition stay where they are.

    Args:
        space: Whose logical axes are used.
        lists: Where to start.
        axis: The mesh axis.
    """
    order = order_of(space, lists)
    by_axis = dict(zip(order, lists, strict=True))
    mine = by_axis[axis]
    plain = [i for i, rule in enumerate(mine) if rule.where == EVERYWHERE]
    listed = {mine[i].logical_axis for i in plain}
    new = [
        AxisRule(logical_axis, axis)
        for logical_axis in space.able[axis]
        if logical_axis not in listed
    ]

    def made(rules: Sequence[AxisRule]) -> Lists:
        return tuple(tuple(rules) if name == axis else by_axis[name] for name in order)

    last = (
        plain[-1] + 1
        if plain
        else next((i for i, r in enumerate(mine) if r.where == OPTIMIZER), len(mine))
    )
    for rule in new:
        for i in sorted({*plain, last}):
            yield made((*mine[:i], rule, *mine[i:]))
        for i in plain:
            yield made((*mine[:i], rule, *mine[i + 1 :]))
    for i in plain:
        yield made((*mine[:i], *mine[i + 1 :]))
    for i, j in combinations(plain, 2):
        changed = list(mine)
        changed[i], changed[j] = changed[j], changed[i]
        yield made(changed)
    if len(plain) > 2:  # else the same as without the other
        for i in plain:
            yield made([rule for j, rule in enumerate(mine) if j == i or j not in plain])
    if len(plain) > 1:
        yield made([rule for j, rule in enumerate(mine) if j not in plain])
    if space.optimizer_axes:
        scoped = space.of_optimizer(axis)
        rest = tuple(rule for rule in mine if rule.where != OPTIMIZER)
        yield made(rest if len(rest) < len(mine) else (*mine, *scoped))


def exchanges(space: Space, lists: Lists) -> Iterator[Lists]:
    """Lists that differ in two mesh axes: they change rules, a logical axis changes its mesh axis, or
    another one is first.
    """
    order = order_of(space, lists)
    for changed in permutations(range(len(order))):
        if changed != tuple(range(len(order))):
            yield tuple(lists[i] for i in changed)
    for i, j in permutations(range(len(order)), 2):
        source, target = order[i], order[j]
        whole = tuple(replace(rule, mesh_axis=target) for rule in lists[i])
        other = tuple(replace(rule, mesh_axis=source) for rule in lists[j])
        if i < j and all(r.logical_axis in space.able[r.mesh_axis] for r in (*whole, *other)):
            yield tuple(
                other if k == i else whole if k == j else rules for k, rules in enumerate(lists)
            )
        for rule in _plain(lists[i]):
            moved = replace(rule, mesh_axis=target)
            if rule.logical_axis in space.able[target] and moved not in lists[j]:
                left = tuple(r for r in lists[i] if r != rule)
                for there in (
                    (moved, *lists[j]),
                    (*_plain(lists[j]), moved, *lists[j][len(_plain(lists[j])) :]),
                ):
                    yield tuple(
                        left if k == i else there if k == j else rules
                        for k, rules in enumerate(lists)
                    )


def order_of(space: Space, lists: Lists) -> tuple[str, ...]:
    """Mesh axis of each list; empty ones stand for those that are left, in mesh order."""
    named = [rules[0].mesh_axis if rules else None for rules in lists]
    left = iter(axis for axis in space.able if axis not in named)
    return tuple(next(left) if name is None else name for name in named)


def refinements(space: Space, rules: Sequence[AxisRule]) -> Iterator[tuple[AxisRule, ...]]:
    """Rule lists one step beyond the space: a rule takes the last occurrence, or a condition, or a
    new one comes first.

    A condition (`with` or `without` another logical axis of the same value) is worth a try where it is true
    of some of the values that have the logical axis and false of others; conditions that are true of the
    same values count once. A new rule comes first or after the last rule of its logical axis (which decides
    the order of the mesh axes in a dimension), and only where other rules have its mesh axis in
    some value that has its logical axis: that is what sends experts to the data axis but leaves it to the
    batch while tokens are still in sequences.

    Args:
        space: Whose logical axes are used.
        rules: Where to start.
    """
    problem = space.problem
    layout = Layout(problem, tuple(rules))
    having: dict[str, list[tuple[frozenset[int], Fit]]] = defaultdict(list)
    twice: set[str] = set()
    for signature in problem.signatures:
        fit = layout.fit_signature(signature)
        present = frozenset(signature[0]) - {NO_AXIS}
        for logical_axis in present:
            name = problem.logical_axes.axes[logical_axis].name
            having[name].append((present, fit))
            if signature[0].count(logical_axis) > 1:
                twice.add(name)
    for i, rule in enumerate(rules):
        if rule.logical_axis in twice:
            flipped: Occurrence = "last" if rule.occurrence == "first" else "first"
            yield (*rules[:i], replace(rule, occurrence=flipped), *rules[i + 1 :])
        if rule.where == EVERYWHERE:
            for where in _conditions(problem, having[rule.logical_axis]):
                yield (*rules[:i], replace(rule, where=where), *rules[i + 1 :])
    for name in space.logical_axes:
        for axis, logical_axes in space.able.items():
            contested = [
                (present, fit)
                for present, fit in having[name]
                if any(axis in axes for axes in fit.spec)
            ]
            if name in logical_axes and contested:
                last = max(
                    (i for i, rule in enumerate(rules) if rule.logical_axis == name), default=-1
                )
                for where in _conditions(problem, contested):
                    new = AxisRule(name, axis, where=where)
                    yield (new, *rules)
                    if last >= 0:
                        yield (*rules[: last + 1], new, *rules[last + 1 :])


def _conditions(problem: Problem, values: Sequence[tuple[frozenset[int], Fit]]) -> Iterator[Scope]:
    """Conditions that are true of some of these values only, one for each set of values that can be
    told apart.
    """
    seen: set[frozenset[int]] = set()
    everywhere = frozenset(range(len(values)))
    for other in sorted(frozenset().union(*(present for present, _ in values))):
        having = frozenset(i for i, (present, _) in enumerate(values) if other in present)
        for kind, chosen in ((ScopeKind.WITHOUT, everywhere - having), (ScopeKind.WITH, having)):
            if chosen and chosen != everywhere and chosen not in seen:
                seen.add(chosen)
                yield Scope(kind, problem.logical_axes.axes[other].name)


def make_space(problem: Problem, optimizer_axes: Sequence[str] = ()) -> Space:
    """The space of a problem: its largest logical axes that some mesh axis divides and no scan consumes.

    Args:
        problem: The problem.
        optimizer_axes: Logical axes of the ZeRO-1 rule; empty where no argument is optimizer state.
    """
    weight: dict[int, float] = defaultdict(float)
    program = problem.program
    for value in program.body.inputs:
        for logical_axis in set(problem.logical_axes.of_value[value.index]):
            weight[logical_axis] += value.bytes
    for eqn, trip_count in program.walk():
        for value in eqn.outputs:
            for logical_axis in set(problem.logical_axes.of_value[value.index]):
                weight[logical_axis] += trip_count * value.bytes
    weight.pop(NO_AXIS, None)
    axes = {name: size for name, size in problem.mesh_axes.items() if size > 1}
    divided: dict[str, list[str]] = {}
    for index in sorted(weight, key=lambda r: (-weight[r], r)):
        found = problem.logical_axes.axes[index]
        by = [axis for axis, size in axes.items() if any(s % size == 0 for s in found.sizes)]
        if by and not found.scanned and len(divided) < MAX_LOGICAL_AXES:
            divided[found.name] = by
    able = {
        axis: tuple(logical_axis for logical_axis, by in divided.items() if axis in by)
        for axis in axes
    }
    return Space(problem, tuple(divided), able, tuple(optimizer_axes))


def every_list(space: Space, axis: str, at_most: int) -> list[tuple[AxisRule, ...]] | None:
    """Every order of every choice of logical axes for one mesh axis, with and without its optimizer rules.

    Returns:
        The rule lists; None if there are more than `at_most`.
    """
    logical_axes = space.able[axis]
    found: list[tuple[AxisRule, ...]] = []
    for length in range(len(logical_axes) + 1):
        for chosen in permutations(logical_axes, length):
            rules = tuple(AxisRule(logical_axis, axis) for logical_axis in chosen)
            found.append(rules)
            if space.optimizer_axes:
                found.append(rules + space.of_optimizer(axis))
            if len(found) > at_most:
                return None
    return found
