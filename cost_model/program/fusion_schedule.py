"""The order in which the equations of a body run, and which of their results are stored: what fuses
into what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost_model.hardware.backend import Backend
from autoshard.tracing.primitives import (
    BRANCHING,
    EXPENSIVE,
    FUSED,
    MOVING,
    REDUCTIONS,
    SCALES,
    UPDATES,
)
from autoshard.tracing.program import Body, Eqn, MappingKind, Value

Buffer = tuple[Value, tuple[int, ...]]
"""A value in memory, and in which order its dimensions lie there, major first: () for the order of
its shape, (~i,) for operand i of a product, broadcast to the product's shape."""


MOST_INDICES = 15


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An equation that stores something or is no elementwise one, with everything fused into it; or
    a transposed copy.

    Attributes:
        eqn: The equation; of a copy, None.
        reads: Buffers that it reads, also through what is fused into it.
        makes: Those that it stores.
        updated: The buffer that it changes in place, if nobody else needs it.
    """

    eqn: Eqn | None
    reads: tuple[Buffer, ...]
    makes: tuple[Buffer, ...]
    updated: Buffer | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """A body's nodes in the order in which they run.

    Attributes:
        nodes: In order.
        fused: By `Eqn.index` of an equation without a node, the `Eqn.index` of the last node that
            it is fused into.
        loads: By `Eqn.index`, the operands (by number) that come from memory; what a node needs
            twice it loads once.
        stored: Results that reach memory.
    """

    nodes: tuple[Node, ...]
    fused: Mapping[int, int]
    loads: Mapping[int, frozenset[int]]
    stored: frozenset[Value]


def schedules(body: Body, backend: Backend) -> dict[Body, Schedule]:
    """The schedules of a body and of all bodies inside it."""
    found = {body: schedule(body, backend)}
    for eqn in body.eqns:
        for inner in eqn.bodies:
            found |= schedules(inner, backend)
    return found


def schedule(body: Body, backend: Backend) -> Schedule:
    """Schedules a body as a backend does."""
    fusion = _Fusion(body, backend)
    behind: dict[Value, dict[Buffer, None]] = {}
    through: dict[Value, list[int]] = {}
    nodes: list[Node] = []
    fused: dict[int, int] = {}
    copied: set[Buffer] = set()
    spread_out: set[Value] = set()
    from_memory: list[tuple[Eqn, int]] = []
    for eqn in body.eqns:
        orders = _orders(eqn) if backend.copies_transposed else {}
        spread = eqn.outputs[0] if eqn.index in fusion.summed else None
        reads: dict[Buffer, None] = {}
        inside: list[int] = []
        for number, value in enumerate(eqn.inputs):
            found: dict[Buffer, None] = {(value, ()): None}
            if value in behind and (value not in fusion.stored or fusion.on_the_fly(eqn, number)):
                found = behind[value]
                inside += through[value]
            elif value.shape:
                from_memory.append((eqn, number))
            copy = (value, orders[number]) if number in orders else None
            if spread is not None and value.shape != spread.shape:
                copy = (spread, (~number,))
            if copy is not None:
                if copy not in copied:
                    copied.add(copy)
                    nodes.append(Node(None, tuple(found), (copy,)))
                found = {copy: None}
            reads |= found
        makes = tuple((v, ()) for v in eqn.outputs if v in fusion.stored)
        if makes or not fusion.fusible(eqn):
            updated = (eqn.inputs[0], ()) if eqn.primitive in UPDATES else None
            nodes.append(Node(eqn, tuple(reads), makes, updated))
            fused |= dict.fromkeys(inside, eqn.index)
        again = (
            backend.instruction_fusion
            and eqn.primitive not in EXPENSIVE
            and eqn.index not in fusion.at_many
        )
        if fusion.fusible(eqn) and (not makes or (again and _at_most_unary(eqn, spread_out))):
            behind |= dict.fromkeys(eqn.outputs, reads)
            through |= {value: [*dict.fromkeys(inside), eqn.index] for value in eqn.outputs}
        if eqn.primitive in ("broadcast_in_dim", "iota"):
            spread_out.update(eqn.outputs)
    loads: dict[int, set[int]] = {}
    known: set[tuple[int, Value]] = set()
    for eqn, number in from_memory:
        load = fused.get(eqn.index, eqn.index), eqn.inputs[number]
        if load not in known:
            known.add(load)
            loads.setdefault(eqn.index, set()).add(number)
    return Schedule(
        tuple(_breadth_first(nodes) if backend.breadth_first else nodes),
        fused,
        {index: frozenset(numbers) for index, numbers in loads.items()},
        frozenset(fusion.stored),
    )


def _at_most_unary(eqn: Eqn, spread_out: set[Value]) -> bool:
    """True if it reads at most one value as large as its result: XLA computes such a one again even
    where it is stored.

    Reference:
        XLA, InstructionFusion::EffectivelyAtMostUnary.
    """
    large = [v for v in eqn.inputs if v.shape == eqn.outputs[0].shape and v not in spread_out]
    return len(large) <= 1


class _Fusion:
    """Decides, readers first, which results reach memory: the body's, and what some reader cannot
    compute itself.

    A producer is computed once for each index at which a fusion's root needs it: elementwise
    readers hand on the index of their own result, others ask at new ones. XLA gives up beyond
    `MOST_INDICES`, and for producers that branch (pad, concatenate) beyond one
    (FusionNodeIndexingEvaluation::CodeDuplicationTooHigh).
    """

    def __init__(self, body: Body, backend: Backend) -> None:
        self._backend = backend
        self._fuses = FUSED | backend.also_fuses
        self._readers: dict[Value, list[tuple[Eqn, int]]] = {}
        for eqn in body.eqns:
            for number, value in enumerate(eqn.inputs):
                self._readers.setdefault(value, []).append((eqn, number))
        self.stored: set[Value] = set()
        self.summed: set[int] = set()
        self.at_many: set[int] = set()
        self._indices: dict[Value, dict[int, set[object]]] = {}
        outputs = set(body.outputs)
        for eqn in reversed(body.eqns):
            self._visit(eqn, outputs)

    def _visit(self, eqn: Eqn, outputs: set[Value]) -> None:
        own = [reader for value in eqn.outputs for reader in self._readers.get(value, ())]
        only_summed = (
            own
            and outputs.isdisjoint(eqn.outputs)
            and all(r.primitive in REDUCTIONS for r, _ in own)
        )
        if only_summed and eqn.primitive in SCALES and not self._backend.fuses_into_reductions:
            self.summed.add(eqn.index)
            return
        sinks = eqn.primitive == "broadcast_in_dim" and eqn.inputs[0].literal
        fuses = self.fusible(eqn) and all(
            self.on_the_fly(*reader) or (sinks and _is_constant_of_loop(*reader)) for reader in own
        )
        if eqn.primitive in EXPENSIVE and len(own) > 1:
            fuses = False
        asked: dict[int, set[object]] = {}
        for value in eqn.outputs:
            for root, indices in self._indices.get(value, {}).items():
                asked.setdefault(root, set()).update(indices)
        most = max(map(len, asked.values()), default=0)
        if self._backend.instruction_fusion and most > (
            1 if eqn.primitive in BRANCHING else MOST_INDICES
        ):
            fuses = False
            self.at_many.add(eqn.index)
        made = [v for v in eqn.outputs if v in outputs or (not fuses and v in self._readers)]
        self.stored |= set(made)
        if not self.fusible(eqn):
            return
        if made:
            asked = {eqn.index: {None}}
        for value in eqn.inputs:
            if value.shape:
                found = self._indices.setdefault(value, {})
                for root, indices in asked.items():
                    same = eqn.primitive not in MOVING and value.shape == eqn.outputs[0].shape
                    found.setdefault(root, set()).update(
                        indices if same else ((eqn.index, i) for i in indices)
                    )

    def on_the_fly(self, reader: Eqn, number: int) -> bool:
        """True if a reader may compute an operand itself, or reads a transposed copy of it."""
        if reader.primitive in REDUCTIONS:
            return self._backend.fuses_into_reductions
        if self._backend.copies_transposed and number in _orders(reader):
            return True
        return self.fusible(reader) and reader.index not in self.summed

    def fusible(self, eqn: Eqn) -> bool:
        """True if it may be computed where it is read."""
        return eqn.primitive in self._fuses or is_outer_product(eqn)


def _breadth_first(nodes: Sequence[Node]) -> Iterable[Node]:
    """First in, first out, of what is ready: XLA's BFScheduler (Kahn's algorithm with a queue)."""
    maker = {buffer: i for i, node in enumerate(nodes) for buffer in node.makes}
    waits = [{maker[b] for b in node.reads if b in maker} for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for i, needed in enumerate(waits):
        for j in needed:
            users[j].append(i)
    pending = [len(needed) for needed in waits]
    ready = deque(i for i, count in enumerate(pending) if not count)
    while ready:
        i = ready.popleft()
        yield nodes[i]
        for user in users[i]:
            pending[user] -= 1
            if not pending[user]:
                ready.append(user)


def _is_constant_of_loop(eqn: Eqn, number: int) -> bool:
    """True if an operand of a loop is the same in each trip: XLA makes a spread-out number inside
    the loop.

    Reference:
        XLA, WhileLoopConstantSinking with sink_broadcast_of_constants.
    """
    began = {start for start, _ in eqn.carries}
    mappings = [
        t
        for t in eqn.mappings
        if t.kind is MappingKind.OPERAND_TO_INVAR and t.outer is eqn.inputs[number]
    ]
    return eqn.primitive in ("scan", "while") and all(
        not t.offset and t.inner not in began for t in mappings
    )


def is_outer_product(eqn: Eqn) -> bool:
    """True of a contraction that sums over nothing: XLA makes it a product of broadcasts
    (AlgebraicSimplifier).
    """
    if eqn.primitive != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.inputs[0].shape[d] == 1 for d in contracted)


def _orders(eqn: Eqn) -> Mapping[int, tuple[int, ...]]:
    """By operand of a contraction, the order of dimensions in which it must lie, where that is not
    its own.

    The batch comes first; on the left the contracted dimensions come last, on the right either way
    will do.
    """
    if eqn.primitive != "dot_general" or is_outer_product(eqn):
        return {}
    contracted, batched = eqn.params["dimension_numbers"]
    found = {}
    for number in (0, 1):
        inner, batch = tuple(contracted[number]), tuple(batched[number])
        free = tuple(
            d for d in range(len(eqn.inputs[number].shape)) if d not in inner and d not in batch
        )
        wanted = [(*batch, *free, *inner)] + ([(*batch, *inner, *free)] if number else [])
        if free and all(order != tuple(sorted(order)) for order in wanted):
            found[number] = wanted[0]
    return found
