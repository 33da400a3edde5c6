"""The search space: an ordered list of logical axes for each mesh axis, as Optuna parameters.

A layout is one rule list per mesh axis, and the order of the mesh axes, which says who takes a
dimension first where two meet (`Placements`). In the study a parameter per mesh axis and logical
axis says where in its list the logical axis stands (0: not at all). A last parameter per mesh axis
sends the parameters' axes to it in the optimizer state alone (ZeRO-1). Different points may be the
same effective layout. Rules that hold under a condition only, or take the last occurrence, are no
points: `moves.refinements` lists them around a good layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule
from autoshard.layout.problem import Problem
from autoshard.search.axis_sizes import activation_bytes, argument_bytes, dividing_mesh_axes

PLACES = 4
"""Places in the list of a mesh axis. Logical axes at the same place come in the order of the space,
so a list has a point if it goes against that order three times at most. In the 20 searches that
`proposer` names the best is the same with 2 to 6."""

MAX_LOGICAL_AXES = 14
"""Logical axes that a rule may name, the largest first; those behind them hold few bytes, and each
multiplies the points of the space by `PLACES` + 1 for every mesh axis. The best of the 20 is the
same with 10 to 20; with 6 it differs by 1 % in three."""

Point = Mapping[str, str | int]
RuleList = tuple[AxisRule, ...]
"""Rules of one mesh axis, in order."""

Lists = tuple[RuleList, ...]
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

    # Points ---------------------------------------------------------------------------------------

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
        order = list(self.able)
        if len(order) > 1:
            order = str(point["first"]).split(",")
        return tuple(self._decode_list(axis, point) for axis in order)

    def _decode_list(self, axis: str, point: Point) -> RuleList:
        places = {name: int(point[f"{axis} {name}"]) for name in self.able[axis]}
        listed = [name for name in self.able[axis] if places[name]]
        # Logical axes at the same place come in the order of the space.
        listed.sort(key=lambda name: (places[name], self.logical_axes.index(name)))
        rules = tuple(AxisRule(name, axis) for name in listed)
        if self.optimizer_axes and point[f"{axis} (optimizer)"]:
            rules += self.of_optimizer(axis)
        return rules

    def encode(self, lists: Lists) -> Point | None:
        """A point for lists.

        None if the space has none that keeps the order of their logical axes.
        """
        point: dict[str, str | int] = dict.fromkeys(self.parameters(), 0)
        if len(self.able) > 1:
            order = [rules[0].mesh_axis for rules in lists if rules]
            order += [axis for axis in self.able if axis not in order]
            point["first"] = ",".join(order)
        for rules in lists:
            of_list = self._encode_list(rules)
            if of_list is None:
                return None
            point.update(of_list)
        return point

    def _encode_list(self, rules: RuleList) -> dict[str, int] | None:
        """The parameters of a mesh axis that are not 0; None if there is no point."""
        if not rules:
            return {}
        axis = rules[0].mesh_axis
        plain = plain_rules(rules)
        scoped = rules[len(plain) :]
        if plain + scoped != rules or scoped not in ((), self.of_optimizer(axis)):
            return None
        point: dict[str, int] = {}
        place, previous = 1, -1
        for rule in plain:
            name = f"{axis} {rule.logical_axis}"
            if rule.logical_axis not in self.able[axis] or name in point:
                return None
            # Only what comes against the order of the space needs a place of its own.
            rank = self.logical_axes.index(rule.logical_axis)
            place += rank < previous
            previous = rank
            point[name] = place
        if place > PLACES:
            return None
        if scoped:
            point[f"{axis} (optimizer)"] = 1
        return point

    # Lists ----------------------------------------------------------------------------------------

    def of_optimizer(self, axis: str) -> RuleList:
        """The rules that send the parameters' axes to a mesh axis in the optimizer state alone."""
        return tuple(AxisRule(name, axis, where=OPTIMIZER) for name in self.optimizer_axes)

    def lists(self, rules: Sequence[AxisRule]) -> Lists:
        """The rules of each mesh axis.

        The mesh axes come in an order that keeps who is first in a logical axis, where there is
        one, else in the one that breaks fewest of these claims.
        """
        of_mesh_axis: dict[str, list[AxisRule]] = {axis: [] for axis in self.able}
        claims: dict[str, dict[str, None]] = {}
        for rule in rules:
            if rule.mesh_axis in of_mesh_axis:
                of_mesh_axis[rule.mesh_axis].append(rule)
                claims.setdefault(rule.logical_axis, {})[rule.mesh_axis] = None
        before = [pair for mesh_axes in claims.values() for pair in combinations(mesh_axes, 2)]

        def broken(order: tuple[str, ...]) -> int:
            return sum(order.index(a) > order.index(b) for a, b in before)

        order = min(permutations(self.able), key=broken)
        return tuple(tuple(of_mesh_axis[axis]) for axis in order)

    def order_of(self, lists: Lists) -> tuple[str, ...]:
        """Mesh axis of each list; empty ones stand for those that are left, in mesh order."""
        named = [rules[0].mesh_axis if rules else None for rules in lists]
        left = iter(axis for axis in self.able if axis not in named)
        return tuple(next(left) if name is None else name for name in named)


def rules_of(lists: Lists) -> RuleList:
    """One rule list."""
    return tuple(rule for rules in lists for rule in rules)


def plain_rules(rules: Sequence[AxisRule]) -> RuleList:
    """Those of rules that hold everywhere and take the first occurrence."""
    return tuple(rule for rule in rules if rule.where == EVERYWHERE and rule.occurrence == "first")


def make_space(problem: Problem, optimizer_axes: Sequence[str] = ()) -> Space:
    """The space of a problem.

    Its largest logical axes that some mesh axis divides and no scan consumes.

    Args:
        problem: The problem.
        optimizer_axes: Logical axes of the ZeRO-1 rule; empty where no argument is optimizer state.
    """
    total_bytes = argument_bytes(problem)
    total_bytes.update(activation_bytes(problem))
    del total_bytes[NO_AXIS]
    divided_by: dict[str, list[str]] = {}
    for index in sorted(total_bytes, key=lambda index: (-total_bytes[index], index)):
        logical_axis = problem.logical_axes.axes[index]
        mesh_axes = dividing_mesh_axes(problem, index)
        if mesh_axes and not logical_axis.scanned and len(divided_by) < MAX_LOGICAL_AXES:
            divided_by[logical_axis.name] = mesh_axes
    able = {
        axis: tuple(name for name, mesh_axes in divided_by.items() if axis in mesh_axes)
        for axis, size in problem.mesh_axes.items()
        if size > 1
    }
    return Space(problem, tuple(divided_by), able, tuple(optimizer_axes))


def every_list(space: Space, axis: str, at_most: int) -> list[RuleList] | None:
    """Every order of every choice of logical axes for one mesh axis.

    Each with and without the mesh axis' optimizer rules.

    Returns:
        The rule lists; None if there are more than `at_most`.
    """
    lists: list[RuleList] = []
    for length in range(len(space.able[axis]) + 1):
        for chosen in permutations(space.able[axis], length):
            rules = tuple(AxisRule(name, axis) for name in chosen)
            lists.append(rules)
            if space.optimizer_axes:
                lists.append(rules + space.of_optimizer(axis))
            if len(lists) > at_most:
                return None
    return lists
