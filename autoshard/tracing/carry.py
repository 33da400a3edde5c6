"""Which outputs feed which inputs of the next step: a plan for a step is a fixed point over these
leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, filterfalse
from numbers import Integral
from typing import Any

import jax

from autoshard.errors import ArgumentError
from autoshard.text import shown
from autoshard.tracing.signature import Call
from autoshard.tracing.trace import Traced

Carry = Mapping[int | str, int | str] | Sequence[tuple[int | str, int | str]] | None
"""Argument to output, as `optimize` takes it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """An argument, a top-level part of the output, or the whole output.

    Attributes:
        name: Its position or name.
        treedef: Its structure.
        leaves: Numbers of its array leaves, among those of all arguments or outputs.
    """

    name: int | str
    treedef: Any
    leaves: list[int]


def _parts(
    names: Iterable[int | str], treedefs: Iterable[Any], number_of: Mapping[int, int]
) -> Iterator[_Part]:
    """The parts of a tree, in order.

    Args:
        names: Their names.
        treedefs: Their structures.
        number_of: By number of a leaf of the tree, its number among the array leaves.
    """
    first = 0
    for name, treedef in zip(names, treedefs, strict=True):
        flat = range(first, first + treedef.num_leaves)
        yield _Part(name, treedef, [number_of[i] for i in flat if i in number_of])
        first += treedef.num_leaves


def _arguments(call: Call) -> Iterator[_Part]:
    """Every dynamic argument."""
    positional, keyword = call.treedef.children()
    static = {name for name, _ in call.statics}
    positions = filterfalse(static.__contains__, count())
    keywords = keyword.node_data()[1] if keyword.node_data() else ()
    names = [position for position, _ in zip(positions, positional.children(), strict=False)]
    number_of = {flat: number for number, flat in enumerate(call.array_positions)}
    treedefs = chain(positional.children(), keyword.children())
    yield from _parts([*names, *keywords], treedefs, number_of)


def _results(traced: Traced) -> Iterator[_Part]:
    """Each top-level part of the output, then the whole."""
    static = {flat for flat, _ in traced.static_outputs}
    arrays = [flat for flat in range(traced.num_outputs) if flat not in static]
    number_of = {flat: number for number, flat in enumerate(arrays)}
    tree = traced.out_tree
    # A bare leaf has no parts, and neither has an output without leaves.
    has_parts = tree.num_leaves and tree.node_data() is not None
    if has_parts:
        yield from _parts(_part_names(tree), tree.children(), number_of)
    yield _Part("out", tree, list(range(len(arrays))))


def _part_names(tree: Any) -> list[int | str]:
    """Keys of a dict or of a node with as many, else positions."""
    if tree.node_data() is None:
        return []
    kind, keys = tree.node_data()
    children = len(tree.children())
    if kind is dict or (isinstance(keys, list) and len(keys) == children):
        return [str(key) for key in keys]
    return list(range(children))


def matching_state(traced: Traced, *, donated_only: bool) -> tuple[tuple[int, int], ...]:
    """Pairs (input leaf, output leaf) of arguments that an output matches leaf by leaf.

    An output matches that has the same structure, shapes and dtypes; the first counts, and feeds
    one argument only.

    Args:
        traced: The traced call.
        donated_only: Consider donated arguments only (the default `carry` of a plan).
    """
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for argument in _arguments(traced.call):
        if not _may_be_state(traced.call, argument, donated_only):
            continue
        for output in _results(traced):
            if taken.isdisjoint(output.leaves) and _matches(traced, argument, output):
                pairs += zip(argument.leaves, output.leaves, strict=True)
                taken.update(output.leaves)
                break
    return tuple(pairs)


def _may_be_state(call: Call, argument: _Part, donated_only: bool) -> bool:
    if not argument.leaves:
        return False
    if donated_only:
        return all(call.donated[leaf] for leaf in argument.leaves)
    # A bare array that comes back with its shape is as likely an activation (a residual block).
    return not jax.tree_util.treedef_is_leaf(argument.treedef)


def _matches(traced: Traced, argument: _Part, output: _Part) -> bool:
    if not _same_structure(argument, output):
        return False
    return _first_unlike(traced, argument, output) is None


def _same_structure(argument: _Part, output: _Part) -> bool:
    same_tree = bool(argument.treedef == output.treedef)
    return same_tree and len(argument.leaves) == len(output.leaves)


def _first_unlike(traced: Traced, argument: _Part, output: _Part) -> tuple[int, int] | None:
    """The first pair of leaves that differ in shape or dtype; None where all are alike."""
    body = traced.program.body
    for i, o in zip(argument.leaves, output.leaves, strict=True):
        before, after = body.inputs[i], body.outputs[o]
        if before.shape != after.shape or before.dtype != after.dtype:
            return i, o
    return None


def resolve_carry(traced: Traced, carry: Carry) -> tuple[tuple[int, int], ...]:
    """Pairs (input leaf, output leaf) for the `carry` argument of `optimize`.

    Args:
        traced: The traced call.
        carry: None for the default (donated arguments matched by structure and aval); else argument
            to output, as a mapping or pairs: `{0: 0, "opt_state": 1}`. An output is a position or
            key of the returned tuple or dict, or `"out"` for the whole.

    Raises:
        ArgumentError: If an argument or output does not exist, or the two differ in structure or
            shapes.
    """
    if carry is None:
        return matching_state(traced, donated_only=True)
    arguments = {argument.name: argument for argument in _arguments(traced.call)}
    outputs = {output.name: output for output in _results(traced)}
    by_parameter = {
        traced.call.paths[argument.leaves[0]].split("/")[0]: argument.name
        for argument in arguments.values()
        if argument.leaves
    }
    pairs: list[tuple[int, int]] = []
    for name, output_name in _carry_items(carry):
        stated = f"carry={{{name!r}: {output_name!r}}}"
        argument = arguments.get(by_parameter.get(str(name), name))
        output = outputs.get(output_name)
        if argument is None or output is None:
            raise ArgumentError(
                f"{stated}: the arguments are {list(by_parameter) or list(arguments)} and the "
                f"outputs {list(outputs)}. Name one of each."
            )
        _check_alike(traced, stated, argument, output)
        pairs += zip(argument.leaves, output.leaves, strict=True)
    return tuple(pairs)


def _carry_items(
    carry: Mapping[int | str, int | str] | Sequence[tuple[int | str, int | str]],
) -> list[tuple[int | str, int | str]]:
    """(argument, output) pairs; one pair may be passed bare: `carry=(0, 0)`."""
    items: list[Any] = list(carry.items()) if isinstance(carry, Mapping) else list(carry)
    if len(items) == 2 and all(isinstance(item, Integral | str) for item in items):
        items = [(items[0], items[1])]
    for item in items:
        pair = item if isinstance(item, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(part, Integral | str) for part in pair):
            raise ArgumentError(
                f"carry={shown(repr(carry))}: {item!r} is no pair (argument, output), each by "
                f"position or name; use {{0: 0}} for an argument 0 that output 0 feeds."
            )
    return [(argument, output) for argument, output in items]


def _check_alike(traced: Traced, stated: str, argument: _Part, output: _Part) -> None:
    """Raises unless the output can be passed as the argument of the next step."""
    if not _same_structure(argument, output):
        raise ArgumentError(
            f"{stated}: the argument is {argument.treedef} and the output {output.treedef}. They "
            f"must have the same structure to feed each other."
        )
    unlike = _first_unlike(traced, argument, output)
    if unlike is not None:
        program, (i, o) = traced.program, unlike
        before, after = program.body.inputs[i], program.body.outputs[o]
        raise ArgumentError(
            f"{stated}: {traced.call.paths[i]} is {before.dtype}{list(before.shape)} but "
            f"{program.output_paths[o]} is {after.dtype}{list(after.shape)}."
        )
