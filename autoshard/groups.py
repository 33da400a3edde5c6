"""What each argument leaf is for: parameters, optimizer state or data, read from the data flow, never from names.

A leaf that comes back as an output one step later is state. State whose value reaches a contraction, gather or
convolution through anything but its own update is a parameter; state that only feeds elementwise updates (momentum,
variance, counts) is optimizer state. Where nothing comes back (a forward pass), or only what has the batch axis (the
cache of a decode step), the leaves without the batch axis are the parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.dim_rules import LoopKind
from autoshard.dims import NO_AXIS, LogicalAxes
from autoshard.program import Value

ANCHORS = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general"})


class Group(enum.Enum):
    """What an argument leaf is for."""

    PARAMETER = "parameters"
    OPTIMIZER = "optimizer"
    DATA = "data"


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of the argument leaves.

    Attributes:
        of_input: By input leaf.
        optimizer_values: Values that hold optimizer state or are computed from it at its own shape, before it meets the
            parameters (`Value.index`); an axis rule that is scoped to the optimizer state applies to these.
    """

    of_input: tuple[Group, ...]
    optimizer_values: frozenset[int]


def find_groups(axes: LogicalAxes, state: Sequence[tuple[int, int]]) -> Groups:
    """Assigns each argument leaf its group.

    Args:
        axes: The logical axes.
        state: Pairs (input leaf, output leaf) that are the same array one step later.
    """
    carried = {source for source, _ in state}
    inputs = axes.program.body.inputs
    batch = _batch_axis(axes)
    state_axes = [axes.of_value[inputs[leaf].index] for leaf in carried if inputs[leaf].shape]
    data_axes = [axes.of_value[v.index] for leaf, v in enumerate(inputs) if leaf not in carried]
    brought = [dims for dims in data_axes if batch in dims]
    # A batch leads the data (or, brought by none, all state): the classes of a linear model are in its labels too.
    leads = any(d[0] == batch for d in brought) if brought else all(d[0] == batch for d in state_axes)
    if state_axes and not (leads and all(batch in dims for dims in state_axes)):
        anchored = _reaches_anchor(axes)
        kept = {True: Group.PARAMETER, False: Group.OPTIMIZER}
        of_input = [kept[v.index in anchored] if leaf in carried else Group.DATA for leaf, v in enumerate(inputs)]
    else:
        of_input = [
            Group.DATA if batch is None or batch in axes.of_value[v.index] or not v.shape else Group.PARAMETER
            for v in inputs
        ]
    return Groups(tuple(of_input), _optimizer_values(axes, of_input, state))


def _batch_axis(axes: LogicalAxes) -> int | None:
    """The axis that most bytes of intermediate values have, of those no anchor contracts and no scan consumes."""
    contracted: set[int] = set()
    coverage: dict[int, float] = {}
    leftmost: dict[int, int] = {}
    for eqn, trips in axes.program.walk():
        rule = axes.rules[eqn.index]
        if eqn.primitive in ANCHORS:
            loops = axes.loops(eqn)
            contracted |= {loops[i][0] for i, kind in enumerate(rule.kinds) if kind is LoopKind.REDUCED}
        for value in eqn.outputs:
            for dim, axis in enumerate(axes.of_value[value.index]):
                coverage[axis] = coverage.get(axis, 0.0) + trips * value.bytes
                leftmost[axis] = min(leftmost.get(axis, dim), dim)
    free = [a for a in coverage if a != NO_AXIS and a not in contracted and a not in axes.scanned]
    return max(free, key=lambda a: (coverage[a], -leftmost[a], -a), default=None)


def _reaches_anchor(axes: LogicalAxes) -> set[int]:
    """Values from which an anchor is reached (backwards over the program, to a fixed point)."""
    reached: set[int] = set()
    size = -1
    while size != len(reached):
        size = len(reached)
        for eqn in reversed(axes.program.eqns):
            reached |= {tie.source.index for tie in eqn.ties if tie.target.index in reached}
            if eqn.primitive in ANCHORS or (not eqn.bodies and any(v.index in reached for v in eqn.outputs)):
                reached |= {v.index for v in eqn.inputs}
    return reached


def _optimizer_values(axes: LogicalAxes, of_input: Sequence[Group], state: Sequence[tuple[int, int]]) -> frozenset[int]:
    program = axes.program
    own = [leaf for leaf, group in enumerate(of_input) if group is Group.OPTIMIZER]
    inside = {program.body.inputs[leaf].index for leaf in own}
    back = dict(state)
    parameters_out = {
        program.body.outputs[back[leaf]].index
        for leaf, group in enumerate(of_input)
        if group is Group.PARAMETER and leaf in back
    }

    def grows(value: Value, like: tuple[Value, ...]) -> bool:
        return value.index not in parameters_out and any(
            v.index in inside and v.shape == value.shape and v.shape for v in like
        )

    for eqn in program.body.eqns:
        if not eqn.bodies:
            inside |= {out.index for out in eqn.outputs if grows(out, eqn.inputs)}
    inside |= {program.body.outputs[back[leaf]].index for leaf in own if leaf in back}
    return frozenset(inside)
