"""Moves of the local search: rule lists that differ a little from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Occurrence, Scope, ScopeKind
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Fit, Problem
from autoshard.search.axis_sizes import dividing_mesh_axes
from autoshard.search.space import Lists, RuleList, Space, plain_rules
from autoshard.tracing.primitives import ANCHORS

# In one mesh axis ---------------------------------------------------------------------------------


def neighbours(space: Space, lists: Lists, axis: str) -> Iterator[Lists]:
    """Lists that differ in the rules of one mesh axis.

    One logical axis more, less, another, alone or at another place. Rules under a condition stay
    where they are.

    Args:
        space: Whose logical axes are used.
        lists: Where to start.
        axis: The mesh axis.
    """
    place = space.order_of(lists).index(axis)
    for rules in _changed(space, axis, lists[place]):
        yield (*lists[:place], rules, *lists[place + 1 :])


def _changed(space: Space, axis: str, rules: RuleList) -> Iterator[RuleList]:
    plain = [i for i, rule in enumerate(rules) if rule.where == EVERYWHERE]
    yield from _with_another(space, axis, rules, plain)
    for i in plain:
        yield (*rules[:i], *rules[i + 1 :])
    for i, j in combinations(plain, 2):
        swapped = list(rules)
        swapped[i], swapped[j] = rules[j], rules[i]
        yield tuple(swapped)
    yield from _with_one_or_none(rules, plain)
    if space.optimizer_axes:
        yield _with_optimizer_toggled(space, axis, rules)


def _with_another(
    space: Space, axis: str, rules: RuleList, plain: Sequence[int]
) -> Iterator[RuleList]:
    """A logical axis more, before each plain rule and after the last; or instead of one."""
    listed = {rules[i].logical_axis for i in plain}
    places = sorted({*plain, _end_of_plain(rules, plain)})
    for name in space.able[axis]:
        if name in listed:
            continue
        new = AxisRule(name, axis)
        for i in places:
            yield (*rules[:i], new, *rules[i:])
        for i in plain:
            yield (*rules[:i], new, *rules[i + 1 :])


def _end_of_plain(rules: RuleList, plain: Sequence[int]) -> int:
    """Where a plain rule goes that comes last: rules for the optimizer state stay behind it."""
    if plain:
        return plain[-1] + 1
    scoped = (i for i, rule in enumerate(rules) if rule.where == OPTIMIZER)
    return next(scoped, len(rules))


def _with_one_or_none(rules: RuleList, plain: Sequence[int]) -> Iterator[RuleList]:
    """One plain rule alone, then none; not where that is to leave out the only other one."""
    keeps: list[set[int]] = []
    if len(plain) > 2:
        keeps += [{i} for i in plain]
    if len(plain) > 1:
        keeps.append(set())
    for keep in keeps:
        yield tuple(rule for i, rule in enumerate(rules) if i in keep or i not in plain)


def _with_optimizer_toggled(space: Space, axis: str, rules: RuleList) -> RuleList:
    without = tuple(rule for rule in rules if rule.where != OPTIMIZER)
    return without if len(without) < len(rules) else rules + space.of_optimizer(axis)


# In two mesh axes ---------------------------------------------------------------------------------


def exchanges(space: Space, lists: Lists) -> Iterator[Lists]:
    """Lists that differ in two mesh axes.

    Another one is first, they change rules, or a logical axis changes its mesh axis.
    """
    same = tuple(range(len(lists)))
    for order in permutations(same):
        if order != same:
            yield tuple(lists[i] for i in order)
    mesh_axes = space.order_of(lists)
    for i, j in permutations(same, 2):
        if i < j:
            yield from _with_rules_exchanged(space, lists, mesh_axes, (i, j))
        yield from _with_rule_moved(space, lists, mesh_axes, (i, j))


def _with_rules_exchanged(
    space: Space, lists: Lists, mesh_axes: Sequence[str], pair: tuple[int, int]
) -> Iterator[Lists]:
    """All rules of two mesh axes, each on the other one, where it may split all of them."""
    i, j = pair
    to_j = tuple(replace(rule, mesh_axis=mesh_axes[j]) for rule in lists[i])
    to_i = tuple(replace(rule, mesh_axis=mesh_axes[i]) for rule in lists[j])
    if all(rule.logical_axis in space.able[rule.mesh_axis] for rule in (*to_j, *to_i)):
        yield _with_lists(lists, {i: to_i, j: to_j})


def _with_rule_moved(
    space: Space, lists: Lists, mesh_axes: Sequence[str], pair: tuple[int, int]
) -> Iterator[Lists]:
    """A rule of one mesh axis on another one, first there or after its plain rules."""
    i, j = pair
    target = mesh_axes[j]
    for rule in plain_rules(lists[i]):
        moved = replace(rule, mesh_axis=target)
        if rule.logical_axis not in space.able[target] or moved in lists[j]:
            continue
        without = tuple(other for other in lists[i] if other != rule)
        plain = plain_rules(lists[j])
        others = lists[j][len(plain) :]
        yield _with_lists(lists, {i: without, j: (moved, *lists[j])})
        yield _with_lists(lists, {i: without, j: (*plain, moved, *others)})


def _with_lists(lists: Lists, changed: Mapping[int, RuleList]) -> Lists:
    return tuple(changed.get(i, rules) for i, rules in enumerate(lists))


# Beyond the space ---------------------------------------------------------------------------------


def refinements(space: Space, rules: Sequence[AxisRule]) -> Iterator[RuleList]:
    """Rule lists one step beyond the space.

    A rule takes the last occurrence, or a condition, or a new one comes under a condition.

    A condition (`with` or `without` another logical axis of the same value) is worth a try where it
    is true of some of the values that have the logical axis and false of others; conditions that
    are true of the same values count once. A new rule comes first or after the last rule of its
    logical axis (which decides the order of the mesh axes in a dimension), and only where other
    rules have its mesh axis in some value that has its logical axis: that is what sends experts to
    the data axis but leaves it to the batch while tokens are still in sequences.

    An optimizer that multiplies may have a layout of its own, entered and left by one reshard: a
    logical axis of its products comes first there, over each mesh axis and over all of them (a
    stack of layers, each of which is orthogonalised on one device).

    Args:
        space: Whose logical axes are used.
        rules: Where to start.
    """
    fits = _Fits(Layout(space.problem, tuple(rules)))
    for i, rule in enumerate(rules):
        for refined in _refined(space.problem, rule, fits):
            yield (*rules[:i], refined, *rules[i + 1 :])
    for name in space.logical_axes:
        for axis, logical_axes in space.able.items():
            if name in logical_axes:
                yield from _with_conditional_rule(space.problem, rules, fits, AxisRule(name, axis))
    for first in _in_optimizer(space.problem):
        if not set(first) <= set(rules):
            yield (*first, *rules)


def _in_optimizer(problem: Problem) -> Iterator[RuleList]:
    """Rules that send a logical axis of what the optimizer multiplies to mesh axes there."""
    multiplied: set[int] = set()
    for eqn in problem.program.eqns:
        signature = problem.factor_signature(eqn)
        if eqn.primitive in ANCHORS and signature.optimizer:
            multiplied.update(signature.logical_axes)
    for logical_axis in sorted(multiplied - {NO_AXIS}):
        name = problem.logical_axes.axes[logical_axis].name
        rules = tuple(
            AxisRule(name, axis, where=OPTIMIZER)
            for axis in dividing_mesh_axes(problem, logical_axis)
        )
        if len(rules) > 1:
            yield rules
        yield from ((rule,) for rule in rules)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A signature, fitted.

    Attributes:
        present: The logical axes that it has.
        fit: How a layout splits it.
    """

    present: frozenset[int]
    fit: Fit


class _Fits:
    """How a layout splits every signature of its problem.

    Attributes:
        having: By name of a logical axis, the signatures that have it.
        twice: Names of logical axes that some signature has twice.
    """

    def __init__(self, layout: Layout) -> None:
        problem = layout.problem
        self.having: dict[str, list[_Fitted]] = defaultdict(list)
        self.twice: set[str] = set()
        for signature in problem.signatures:
            present = frozenset(signature.logical_axes) - {NO_AXIS}
            fitted = _Fitted(present, layout.fit_signature(signature))
            for logical_axis in present:
                name = problem.logical_axes.axes[logical_axis].name
                self.having[name].append(fitted)
                if signature.logical_axes.count(logical_axis) > 1:
                    self.twice.add(name)


def _refined(problem: Problem, rule: AxisRule, fits: _Fits) -> Iterator[AxisRule]:
    """The rule with another occurrence, or under a condition."""
    if rule.logical_axis in fits.twice:
        flipped: Occurrence = "last" if rule.occurrence == "first" else "first"
        yield replace(rule, occurrence=flipped)
    if rule.where == EVERYWHERE:
        for where in _conditions(problem, fits.having[rule.logical_axis]):
            yield replace(rule, where=where)


def _with_conditional_rule(
    problem: Problem, rules: Sequence[AxisRule], fits: _Fits, new: AxisRule
) -> Iterator[RuleList]:
    """With a new rule under each condition, where other rules have its mesh axis."""
    contested = [
        fitted
        for fitted in fits.having[new.logical_axis]
        if any(new.mesh_axis in axes for axes in fitted.fit.spec)
    ]
    if not contested:
        return
    same_axis = [i for i, rule in enumerate(rules) if rule.logical_axis == new.logical_axis]
    for where in _conditions(problem, contested):
        conditional = replace(new, where=where)
        yield (conditional, *rules)
        if same_axis:
            after = same_axis[-1] + 1
            yield (*rules[:after], conditional, *rules[after:])


def _conditions(problem: Problem, values: Sequence[_Fitted]) -> Iterator[Scope]:
    """Conditions that are true of some of these values only, one for each set of values."""
    everywhere = frozenset(range(len(values)))
    seen: set[frozenset[int]] = {frozenset(), everywhere}
    for other in sorted(frozenset().union(*(value.present for value in values))):
        having = frozenset(i for i, value in enumerate(values) if other in value.present)
        for kind, chosen in ((ScopeKind.WITHOUT, everywhere - having), (ScopeKind.WITH, having)):
            if chosen not in seen:
                seen.add(chosen)
                yield Scope(kind, problem.logical_axes.axes[other].name)
