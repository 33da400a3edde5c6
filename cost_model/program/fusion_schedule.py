"""What fuses into what: the order in which a body's equations run, and what reaches memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

ReadsAt = tuple[Eqn, int]
"""An equation and the number of one of its operands."""

MOST_INDICES = 15
"""At how many indices XLA computes a producer inside one fusion at most.

XLA, `FusionNodeIndexingEvaluation::kAllowedCodeDuplication`. `tests/cost_model` passes without it;
with 1, the predicted memory of Llama on CPU changes.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An operation: an equation with everything fused into it, or a transposed copy.

    Attributes:
        eqn: The equation; of a copy, None.
        reads: Buffers that it reads, also through what is fused into it.
        writes: Those that it writes.
        updated: The buffer that it changes in place, if nobody else needs it.
    """

    eqn: Eqn | None
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
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
        in_memory: Results that reach memory.
    """

    nodes: tuple[Node, ...]
    fused: Mapping[int, int]
    loads: Mapping[int, frozenset[int]]
    in_memory: frozenset[Value]


def schedules(body: Body, backend: Backend) -> dict[Body, Schedule]:
    """The schedules of a body and of all bodies inside it."""
    by_body = {body: schedule(body, backend)}
    for eqn in body.eqns:
        for inner in eqn.bodies:
            by_body |= schedules(inner, backend)
    return by_body


def schedule(body: Body, backend: Backend) -> Schedule:
    """Schedules a body as a backend does."""
    scheduler = _Scheduler(body, backend)
    for eqn in body.eqns:
        scheduler.add(eqn)
    return scheduler.schedule()


@dataclass(frozen=True, eq=False, slots=True)
class _Inlined:
    """A value that its readers compute themselves.

    Attributes:
        reads: Buffers that they read for it, in order.
        eqns: `Eqn.index` of what they compute for it.
    """

    reads: dict[Buffer, None]
    eqns: list[int]


class _Scheduler:
    """Joins equations to nodes, in program order."""

    def __init__(self, body: Body, backend: Backend) -> None:
        self._backend = backend
        self._fusion = _Fusion(body, backend)
        self._nodes: list[Node] = []
        self._fused: dict[int, int] = {}  # `Eqn.index`: that of the last node it is fused into
        self._inlined: dict[Value, _Inlined] = {}
        self._from_memory: list[ReadsAt] = []  # what is not computed on the fly
        self._copies: set[Buffer] = set()
        self._broadcasts: set[Value] = set()

    def add(self, eqn: Eqn) -> None:
        """Adds the equation: a node, or something that its readers compute themselves."""
        reads, inlined = self._reads(eqn)
        writes = tuple((v, ()) for v in eqn.outputs if v in self._fusion.in_memory)
        fusible = self._fusion.fusible(eqn)

        if writes or not fusible:
            updated = (eqn.inputs[0], ()) if eqn.primitive in UPDATES else None
            self._nodes.append(Node(eqn, tuple(reads), writes, updated))
            self._fused |= dict.fromkeys(inlined, eqn.index)

        # Even what reaches memory for one reader may be computed again by another.
        if fusible and (not writes or self._computed_again(eqn)):
            eqns = [*dict.fromkeys(inlined), eqn.index]
            self._inlined |= dict.fromkeys(eqn.outputs, _Inlined(reads, eqns))
        if eqn.primitive in ("broadcast_in_dim", "iota"):
            self._broadcasts.update(eqn.outputs)

    def schedule(self) -> Schedule:
        """What was added, in the order in which it runs."""
        nodes = _breadth_first(self._nodes) if self._backend.breadth_first else self._nodes
        return Schedule(tuple(nodes), self._fused, self._loads(), frozenset(self._fusion.in_memory))

    def _reads(self, eqn: Eqn) -> tuple[dict[Buffer, None], list[int]]:
        """Buffers that an equation reads, in order, and `Eqn.index` of what it computes itself."""
        copies = self._copied_operands(eqn)
        reads: dict[Buffer, None] = {}
        inlined: list[int] = []
        for number, value in enumerate(eqn.inputs):
            sources: dict[Buffer, None] = {(value, ()): None}
            if self._is_inlined(eqn, number):
                sources = self._inlined[value].reads
                inlined += self._inlined[value].eqns
            elif value.shape:
                self._from_memory.append((eqn, number))
            copy = copies.get(number)
            if copy is not None:  # it reads the copy; what it was made of is read by that
                self._copy(copy, sources)
                sources = {copy: None}
            reads |= sources
        return reads, inlined

    def _is_inlined(self, eqn: Eqn, number: int) -> bool:
        value = eqn.inputs[number]
        if value not in self._inlined:
            return False
        return value not in self._fusion.in_memory or self._fusion.on_the_fly(eqn, number)

    def _copied_operands(self, eqn: Eqn) -> dict[int, Buffer]:
        """By number of the operand, the copy of it that an equation reads."""
        copies: dict[int, Buffer] = {}
        if self._backend.copies_transposed:
            for number, order in _operand_orders(eqn).items():
                copies[number] = (eqn.inputs[number], order)
        if eqn.index in self._fusion.in_reductions:  # a library's reduction reads equal shapes
            product = eqn.outputs[0]
            for number, value in enumerate(eqn.inputs):
                if value.shape != product.shape:
                    copies[number] = (product, (~number,))
        return copies

    def _copy(self, copy: Buffer, sources: Mapping[Buffer, None]) -> None:
        """Adds a node that makes the copy, unless there is one."""
        if copy not in self._copies:
            self._copies.add(copy)
            self._nodes.append(Node(None, tuple(sources), (copy,)))

    def _computed_again(self, eqn: Eqn) -> bool:
        """True if its readers compute it themselves though its result is in memory."""
        return (
            self._backend.instruction_fusion
            and eqn.primitive not in EXPENSIVE
            and eqn.index not in self._fusion.at_too_many_indices
            and self._at_most_unary(eqn)
        )

    def _at_most_unary(self, eqn: Eqn) -> bool:
        """True if it reads at most one value as large as its result.

        Reference:
            XLA, InstructionFusion::EffectivelyAtMostUnary.
        """
        shape = eqn.outputs[0].shape
        # Reading a broadcast costs as little as what it was broadcast from.
        large = [v for v in eqn.inputs if v.shape == shape and v not in self._broadcasts]
        return len(large) <= 1

    def _loads(self) -> dict[int, frozenset[int]]:
        """By `Eqn.index`, the operands that come from memory, each counted once in a node."""
        loads: dict[int, set[int]] = {}
        loaded: set[tuple[int, Value]] = set()
        for eqn, number in self._from_memory:
            load = (self._fused.get(eqn.index, eqn.index), eqn.inputs[number])
            if load not in loaded:
                loaded.add(load)
                loads.setdefault(eqn.index, set()).add(number)
        return {index: frozenset(numbers) for index, numbers in loads.items()}


class _Fusion:
    """Decides, readers first, what reaches memory.

    That is the body's outputs, and what some reader cannot compute itself.

    A producer is computed once for each index at which a fusion's root needs it: elementwise
    readers hand on the index of their own result, others need it at new ones. XLA gives up beyond
    `MOST_INDICES`, and for producers that branch (pad, concatenate) beyond one
    (FusionNodeIndexingEvaluation::CodeDuplicationTooHigh).

    Attributes:
        in_memory: Results that reach memory.
        in_reductions: `Eqn.index` of what a library's reduction computes itself.
        at_too_many_indices: `Eqn.index` of what would be computed too often in its readers.
    """

    def __init__(self, body: Body, backend: Backend) -> None:
        self.in_memory: set[Value] = set()
        self.in_reductions: set[int] = set()
        self.at_too_many_indices: set[int] = set()
        self._backend = backend
        self._fuses = FUSED | backend.also_fuses
        self._outputs = set(body.outputs)
        self._readers: dict[Value, list[ReadsAt]] = {}
        for eqn in body.eqns:
            for number, value in enumerate(eqn.inputs):
                self._readers.setdefault(value, []).append((eqn, number))
        # By value, then by `Eqn.index` of a fusion's root: the indices at which that needs it.
        self._indices: dict[Value, dict[int, set[object]]] = {}
        for eqn in reversed(body.eqns):
            self._visit(eqn)

    def on_the_fly(self, reader: Eqn, number: int) -> bool:
        """True if a reader may compute an operand itself, or reads a transposed copy of it."""
        if reader.primitive in REDUCTIONS:
            return self._backend.fuses_into_reductions
        if self._backend.copies_transposed and number in _operand_orders(reader):
            return True
        return self.fusible(reader) and reader.index not in self.in_reductions

    def fusible(self, eqn: Eqn) -> bool:
        """True if it may be computed where it is read."""
        return eqn.primitive in self._fuses or is_outer_product(eqn)

    def _visit(self, eqn: Eqn) -> None:
        """Decides on one equation, after all its readers."""
        readers: list[ReadsAt] = []
        for value in eqn.outputs:
            readers += self._readers.get(value, ())
        if self._belongs_to_reduction(eqn, readers):
            self.in_reductions.add(eqn.index)
            return
        indices = self._indices_by_root(eqn)
        fuses = self._computed_by(eqn, readers)
        if self._too_many(eqn, indices):
            fuses = False
            self.at_too_many_indices.add(eqn.index)

        in_memory = self._outputs.intersection(eqn.outputs)
        if not fuses:  # what has no reader and is no output is never computed
            in_memory |= self._readers.keys() & set(eqn.outputs)
        self.in_memory |= in_memory
        if self.fusible(eqn):
            # What reaches memory is the root of a fusion, computed at the one index of its result.
            self._hand_on(eqn, {eqn.index: {None}} if in_memory else indices)

    def _belongs_to_reduction(self, eqn: Eqn, readers: Sequence[ReadsAt]) -> bool:
        """True of a product that only a library's reductions read: they compute it themselves."""
        if self._backend.fuses_into_reductions or eqn.primitive not in SCALES or not readers:
            return False
        only_reduced = all(reader.primitive in REDUCTIONS for reader, _ in readers)
        return only_reduced and self._outputs.isdisjoint(eqn.outputs)

    def _computed_by(self, eqn: Eqn, readers: Sequence[ReadsAt]) -> bool:
        """True if all readers may compute it themselves."""
        if not self.fusible(eqn) or (eqn.primitive in EXPENSIVE and len(readers) > 1):
            return False
        # A broadcast number is sunk into loops, where it is broadcast again in each trip.
        sinks = eqn.primitive == "broadcast_in_dim" and eqn.inputs[0].literal
        for reader, number in readers:
            sinks_here = sinks and _is_constant_of_loop(reader, number)
            if not sinks_here and not self.on_the_fly(reader, number):
                return False
        return True

    def _too_many(self, eqn: Eqn, indices_by_root: Mapping[int, set[object]]) -> bool:
        """True if a root needs it at more indices than XLA computes it at."""
        if not self._backend.instruction_fusion:
            return False
        most = 1 if eqn.primitive in BRANCHING else MOST_INDICES
        return any(len(indices) > most for indices in indices_by_root.values())

    def _indices_by_root(self, eqn: Eqn) -> dict[int, set[object]]:
        """By `Eqn.index` of a fusion's root, the indices at which that needs any result."""
        by_root: dict[int, set[object]] = {}
        for value in eqn.outputs:
            for root, indices in self._indices.get(value, {}).items():
                by_root.setdefault(root, set()).update(indices)
        return by_root

    def _hand_on(self, eqn: Eqn, by_root: Mapping[int, set[object]]) -> None:
        """Notes at which indices the operands are needed."""
        for value in eqn.inputs:
            if not value.shape:
                continue
            same_index = eqn.primitive not in MOVING and value.shape == eqn.outputs[0].shape
            needed = self._indices.setdefault(value, {})  # by root
            for root, indices in by_root.items():
                new = indices if same_index else {(eqn.index, index) for index in indices}
                needed.setdefault(root, set()).update(new)


def _breadth_first(nodes: Sequence[Node]) -> Iterator[Node]:
    """First in, first out, of what is ready: XLA's BFScheduler (Kahn's algorithm with a queue)."""
    waits_for = _dependencies(nodes)
    pending = [len(earlier) for earlier in waits_for]  # by node, how many of those have not run
    readers: list[list[int]] = [[] for _ in nodes]
    for number, earlier in enumerate(waits_for):
        for producer in earlier:
            readers[producer].append(number)

    ready = deque(number for number, count in enumerate(pending) if not count)
    while ready:
        number = ready.popleft()
        yield nodes[number]
        for reader in readers[number]:
            pending[reader] -= 1
            if not pending[reader]:
                ready.append(reader)


def _dependencies(nodes: Sequence[Node]) -> list[set[int]]:
    """By node, the numbers of the nodes that write what it reads."""
    producer: dict[Buffer, int] = {}
    for number, node in enumerate(nodes):
        producer |= dict.fromkeys(node.writes, number)
    return [{producer[buffer] for buffer in node.reads if buffer in producer} for node in nodes]


def _is_constant_of_loop(eqn: Eqn, number: int) -> bool:
    """True if an operand of a loop is the same in each trip: XLA broadcasts a number inside it.

    Reference:
        XLA, WhileLoopConstantSinking with sink_broadcast_of_constants.
    """
    if eqn.primitive not in ("scan", "while"):
        return False
    carried = {start for start, _ in eqn.carries}
    for mapping in eqn.mappings:
        enters = mapping.kind is MappingKind.OPERAND_TO_INVAR
        changes = mapping.offset or mapping.inner in carried
        if enters and changes and mapping.outer is eqn.inputs[number]:
            return False
    return True


def is_outer_product(eqn: Eqn) -> bool:
    """True of a contraction that sums over nothing.

    XLA's AlgebraicSimplifier computes it as a product of broadcasts.
    """
    if eqn.primitive != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.inputs[0].shape[d] == 1 for d in contracted)


def _operand_orders(eqn: Eqn) -> Mapping[int, tuple[int, ...]]:
    """By operand of a contraction, the order in which its dimensions must lie, if not its own."""
    if eqn.primitive != "dot_general" or is_outer_product(eqn):
        return {}
    orders = {}
    for number in (0, 1):
        possible = _possible_orders(eqn, number)
        if all(order != tuple(sorted(order)) for order in possible):
            orders[number] = possible[0]
    return orders


def _possible_orders(eqn: Eqn, number: int) -> list[tuple[int, ...]]:
    """Orders in which a contraction reads the dimensions of an operand.

    The batch comes first; on the left the contracted dimensions come last, on the right either way
    will do.
    """
    contracted, batch = (tuple(dims[number]) for dims in eqn.params["dimension_numbers"])
    rank = len(eqn.inputs[number].shape)
    free = tuple(d for d in range(rank) if d not in contracted and d not in batch)
    if not free:
        return [tuple(range(rank))]
    if number == 0:
        return [(*batch, *free, *contracted)]
    return [(*batch, *free, *contracted), (*batch, *contracted, *free)]
