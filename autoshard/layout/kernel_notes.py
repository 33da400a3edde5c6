"""What a layout does with the kernels of a program, for people to read."""

from __future__ import annotations

from autoshard.axes.sharding_rules import FactorKind
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.tracing.primitives import KERNELS
from autoshard.tracing.program import Eqn
from autoshard.tracing.rewrite import ShardMapCall
from autoshard.tracing.source_lines import source_line


def notes_on_kernels(layout: Layout) -> list[str]:
    """For each kernel that can be cut, whether it is, and over which mesh axes.

    One line for each source line and outcome.
    """
    classes = layout.problem.logical_axes.classes
    kernels = []
    for eqn in classes.program.eqns:
        kinds = classes.rules[eqn.index].kinds
        can_be_cut = any(kind is not FactorKind.NEED_REPLICATION for kind in kinds)
        if eqn.primitive in KERNELS and can_be_cut:
            kernels.append(eqn)
    if not kernels:
        return []
    stated = constraints_for(layout).eqns
    notes = []
    for eqn in kernels:
        own = stated.get(eqn.index)
        notes.append(_note(eqn, own.shard_map if own else None))
    return list(dict.fromkeys(notes))


def _note(kernel: Eqn, call: ShardMapCall | None) -> str:
    name = f"{kernel.primitive} ({source_line(kernel)})"
    if call is None:
        return f"{name} runs whole on every device: the layout splits no dimension that can be cut"
    axes: list[str] = []
    for spec in (*call.operands, *call.results):
        for entry in spec:
            axes += entry if isinstance(entry, tuple) else [entry] if entry else []
    over = ", ".join(dict.fromkeys([*axes, *call.summed]))
    if kernel.primitive == "pallas_call":
        proof = "its grid and index maps show"
    else:
        proof = "running it on small arrays shows"
    return f"{name} runs by pieces, in a shard_map over {over}: {proof} that it can be cut so"
