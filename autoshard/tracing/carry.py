"""Which outputs feed which inputs of the next step: a plan for a step is a fixed point over these
leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from autoshard.errors import ArgumentError
from autoshard.tracing.signature import Call
from autoshard.tracing.trace import Traced

Carry = Mapping[int | str, int | str] | Sequence[tuple[int | str, int | str]] | None


def _arguments(call: Call) -> Iterator[tuple[int | str, Any, list[int]]]:
    """(owner, treedef, array leaf numbers) of every dynamic argument."""
    positional, keyword = call.treedef.children()
    number = {flat: i for i, flat in enumerate(call.array_positions)}
    static = {i for i, _ in call.statics if isinstance(i, int)}
    flat = 0
    position = 0
    for child in positional.children():
        while position in static:
            position += 1
        leaves = [number[flat + i] for i in range(child.num_leaves) if flat + i in number]
        yield position, child, leaves
        flat += child.num_leaves
        position += 1
    for name, child in zip(
        keyword.node_data()[1] if keyword.node_data() else (), keyword.children(), strict=True
    ):
        yield name, child, [number[flat + i] for i in range(child.num_leaves) if flat + i in number]
        flat += child.num_leaves


def _results(traced: Traced) -> Iterator[tuple[int | str, Any, list[int]]]:
    """(name, treedef, array leaf numbers) of the whole output, and of each of its top-level
    parts.
    """
    static = dict(traced.static_outputs)
    numbers: dict[int, int] = {}
    for flat in range(traced.num_outputs):
        if flat not in static:
            numbers[flat] = len(numbers)
    tree = traced.out_tree
    parts = tree.children() if tree.num_leaves and tree.node_data() is not None else []
    flat = 0
    names = _part_names(tree)
    for name, child in zip(names, parts, strict=True):
        yield (
            name,
            child,
            [numbers[flat + i] for i in range(child.num_leaves) if flat + i in numbers],
        )
        flat += child.num_leaves
    yield "out", tree, [numbers[i] for i in range(traced.num_outputs) if i in numbers]


def _part_names(tree: Any) -> list[int | str]:
    data = tree.node_data()
    if data is None:
        return []
    keys = data[1]
    if data[0] is dict or (isinstance(keys, list) and len(keys) == len(tree.children())):
        return [str(k) for k in keys]
    return list(range(len(tree.children())))


def matching_state(traced: Traced, *, donated_only: bool) -> tuple[tuple[int, int], ...]:
    """Pairs (input leaf, output leaf) of arguments that an output matches in structure, shapes and
    dtypes.

    Args:
        traced: The traced call.
        donated_only: Consider donated arguments only (the default `carry` of a plan).
    """
    call, outputs = traced.call, traced.program.body.outputs
    inputs = traced.program.body.inputs
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for _, treedef, leaves in _arguments(call):
        if not leaves or (donated_only and not all(call.donated[i] for i in leaves)):
            continue
        if not donated_only and jax.tree_util.treedef_is_leaf(treedef):
            # a bare array that comes back with its shape is as likely an activation (a residual
            # block)
            continue
        for _, out_treedef, out_leaves in _results(traced):
            if treedef != out_treedef or len(leaves) != len(out_leaves) or taken & set(out_leaves):
                continue
            same = all(
                inputs[i].shape == outputs[o].shape and inputs[i].dtype == outputs[o].dtype
                for i, o in zip(leaves, out_leaves, strict=True)
            )
            if same:
                pairs += zip(leaves, out_leaves, strict=True)
                taken |= set(out_leaves)
                break
    return tuple(pairs)


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
    items = list(carry.items()) if isinstance(carry, Mapping) else list(carry)
    if len(items) == 2 and all(isinstance(item, int | str) for item in items):
        items = [(items[0], items[1])]  # type: ignore[list-item]
    arguments = {owner: (tree, leaves) for owner, tree, leaves in _arguments(traced.call)}
    by_name = {
        traced.call.paths[leaves[0]].split("/")[0]: owner
        for owner, (_, leaves) in arguments.items()
        if leaves
    }
    results = {name: (tree, leaves) for name, tree, leaves in _results(traced)}
    pairs: list[tuple[int, int]] = []
    for argument, output in items:
        owner = by_name.get(str(argument), argument)
        if owner not in arguments or output not in results:
            raise ArgumentError(
                f"carry={{{argument!r}: {output!r}}}: the arguments are "
                f"{list(by_name) or list(arguments)} "
                f"and the outputs {list(results)}. Name one of each."
            )
        (tree, leaves), (out_tree, out_leaves) = arguments[owner], results[output]
        inputs, outputs = traced.program.body.inputs, traced.program.body.outputs
        if tree != out_tree or len(leaves) != len(out_leaves):
            raise ArgumentError(
                f"carry={{{argument!r}: {output!r}}}: the argument is {tree} and the output "
                f"{out_tree}. "
                f"They must have the same structure to feed each other."
            )
        for i, o in zip(leaves, out_leaves, strict=True):
            if inputs[i].shape != outputs[o].shape or inputs[i].dtype != outputs[o].dtype:
                raise ArgumentError(
                    f"carry={{{argument!r}: {output!r}}}: {traced.call.paths[i]} is "
                    f"{inputs[i].dtype}{list(inputs[i].shape)} but "
                    f"{traced.program.output_paths[o]} is "
                    f"{outputs[o].dtype}{list(outputs[o].shape)}."
                )
            pairs.append((i, o))
    return tuple(pairs)
