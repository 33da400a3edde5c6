"""Sharding rules of primitives that the registry does not know: a user's own, a call of foreign
code.

Two sources, in this order:

1. *Stated*: the primitive is lowered by itself, and the rules that Shardy states for the operations
   are composed. A dimension follows its major factor through the operations; one that is reduced on
   the way and reaches a result all the same (a fused softmax) passes, the all_reduce of the smaller
   inner value being left out.
2. *Discovered*: where an operation of the lowering has no rule (a custom call), the primitive is
   run on small operands, whole and cut in two, and what the pieces make is compared with the whole:
   concatenated it passes, added it is reduced.

Nothing is run that has a side effect, calls back into Python, or is foreign code with an integer
among its parameters (which may be a size that its buffers must have). Whatever goes wrong, the
dimensions stay unlinked: that costs a layout, never a result.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.axes.kernels import grid_rule
from autoshard.axes.sharding_rules import FactorKind, ShardingRule, known_primitives, rule_of
from autoshard.axes.sharding_rules.builder import RuleBuilder, replicated_rule
from autoshard.jax_internals import executables, jaxprs
from autoshard.shardy.op_rules import LoweredOps, lowered_ops
from autoshard.tracing.primitives import OPENED
from autoshard.tracing.program import Eqn

MAKERS = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.iota"})
"""Operations that make new dimensions of which every device can make its own part."""

MOST_ELEMENTS = 2**16
"""An array of more elements is not run: this keeps discovery to some milliseconds a run."""

MOST_CUTS, MOST_RUNS = 512, 48
"""Cuts thought of for one size, and cuts run for one equation; a product of three matrices needs
about twenty runs."""

Shape = tuple[int, ...]


class RuleFinder:
    """Finds the sharding rule of any equation; what it found is kept by primitive, parameters,
    shapes and dtypes.
    """

    def __init__(self) -> None:
        self._found: dict[object, ShardingRule] = {}
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """By primitive that the registry does not know, where its rule is from."""
        return tuple(self._notes.values())

    def rule_for(self, eqn: Eqn) -> ShardingRule:
        """The sharding rule of an equation; never raises."""
        if eqn.primitive == "pallas_call" and eqn.origin is not None:
            return grid_rule(eqn)
        if (
            eqn.bodies
            or eqn.origin is None
            or (eqn.primitive in known_primitives() and eqn.primitive not in OPENED)
        ):
            return rule_of(eqn)
        key = _key(eqn)
        if key not in self._found:
            self._found[key], source = _find(eqn)
            self._notes.setdefault(
                eqn.primitive, f"{eqn.primitive} has no sharding rule of its own: {source}"
            )
        return self._found[key]


def _key(eqn: Eqn) -> object:
    """Equal for equations of one rule. Parameters that cannot be hashed are told apart by
    identity.
    """

    def hashable(value: object) -> object:
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    params = tuple(sorted((name, hashable(value)) for name, value in eqn.params.items()))
    values = tuple((v.shape, v.dtype, v.literal) for v in (*eqn.inputs, *eqn.outputs))
    return eqn.primitive, id(eqn.origin.primitive), params, values


def _find(eqn: Eqn) -> tuple[ShardingRule, str]:
    """(rule, where it is from)."""
    if not any(size > 1 for value in (*eqn.inputs, *eqn.outputs) for size in value.shape):
        return replicated_rule(eqn), "it has no dimension to link"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a program that nobody asked for
        try:
            lowered = _lowered(eqn)
            ops = lowered_ops(lowered)
            rule = stated_rule(eqn, ops)
            if rule is not None:
                return rule, "its dimensions are linked as the compiler states for its lowering"
            refusal = _may_not_run(eqn, lowered, ops)
            if refusal:
                return replicated_rule(
                    eqn
                ), f"nothing is linked, because it is not run to find out ({refusal})"
            rule = _discovered(eqn, _is_foreign(ops))
        except Exception as error:
            first = str(error).strip().partition("\n")[0][:200]
            return replicated_rule(eqn), f"nothing is linked ({type(error).__name__}: {first})"
    return rule, "its dimensions are linked as running it on small arrays shows"


# Stated -------------------------------------------------------------------------------------------


def _lowered(eqn: Eqn) -> jax.stages.Lowered:
    """The equation lowered by itself, for one device."""
    call = jax.jit(jaxprs.as_call(eqn.origin), keep_unused=True)
    return call.lower(*jaxprs.operand_values(eqn.origin))


def stated_rule(eqn: Eqn, ops: LoweredOps) -> ShardingRule | None:
    """The rules of the operations composed; None where one that reads anything has none (loops,
    branches, calls).
    """
    first = [0, *itertools.accumulate(ops.ranks)]
    same = list(range(first[-1]))
    marks: list[tuple[int, FactorKind]] = []
    combine = "add"

    def root(node: int) -> int:
        while same[node] != node:
            node = same[node]
        return node

    for op in ops.ops:
        if op.rule is None:
            if op.operands:
                return None
            continue  # a constant
        majors: dict[str, list[int]] = {}
        minors: set[str] = set()
        for values, mapping in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for value, dims in zip(values, mapping, strict=True):
                for dim, op_factors in enumerate(dims):
                    if op_factors:
                        majors.setdefault(op_factors[0], []).append(first[value] + dim)
                        minors |= set(op_factors[1:])
        read = {f for dims in op.rule.operands for op_factors in dims for f in op_factors}
        made = set() if op.name in MAKERS else majors.keys() - read
        reduced = op.rule.kinds.get("reduction", ())
        moved = op.rule.kinds.get("permutation", ())
        whole = {
            f
            for kind in ("need_replication", "blocked_propagation")
            for f in op.rule.kinds.get(kind, ())
        }
        for op_factor, nodes in majors.items():
            for node in nodes:
                same[root(node)] = root(nodes[0])
            if op_factor in minors | made | whole:
                marks.append((nodes[0], FactorKind.NEED_REPLICATION))
            elif op_factor in moved:
                marks.append((nodes[0], FactorKind.PERMUTATION))
            elif op_factor in reduced:
                marks.append((nodes[0], FactorKind.REDUCTION))
                combine = op.combine
    marked = {(root(node), kind) for node, kind in marks}
    places: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
    for side, (arrays, values) in enumerate(
        ((eqn.inputs, ops.arguments), (eqn.outputs, ops.results))
    ):
        for position, (array, value) in enumerate(zip(arrays, values, strict=True)):
            for dim in range(len(array.shape)):
                # The first dimension of an array that runs over a loop is it: no array has two of
                # one loop.
                places.setdefault(root(first[value] + dim), ({}, {}))[side].setdefault(
                    position, dim
                )
            for dim in range(len(array.shape), ops.ranks[value]):  # the words of a typed key
                marked.add((root(first[value] + dim), FactorKind.NEED_REPLICATION))
    builder = RuleBuilder.of(eqn)
    for component, (operands, results) in places.items():
        if (component, FactorKind.NEED_REPLICATION) in marked:
            continue
        if (component, FactorKind.PERMUTATION) in marked:
            kind = FactorKind.PERMUTATION
        elif results:
            kind = FactorKind.PASS_THROUGH
        elif (component, FactorKind.REDUCTION) in marked:
            kind = FactorKind.REDUCTION
        else:
            continue
        builder.add_factor(kind, operands.items(), results.items())
    return builder.build(combine)


# Discovered ---------------------------------------------------------------------------------------


def _may_not_run(eqn: Eqn, lowered: jax.stages.Lowered, ops: LoweredOps) -> str:
    """Why an equation must not be run; empty where it may."""
    if jaxprs.has_effects(eqn.origin):
        return "it has a side effect"
    if executables.calls_python(lowered):
        return "it calls back into Python"
    params = eqn.params.get("attributes", ()) if eqn.primitive == "ffi_call" else eqn.params
    if _is_foreign(ops) and _holds_integer(params):
        return "it is foreign code with an integer parameter, which may be a size"
    return ""


def _is_foreign(ops: LoweredOps) -> bool:
    """True for a call of code that the compiler does not know."""
    return any(op.name == "stablehlo.custom_call" for op in ops.ops)


def _holds_integer(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_integer, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_holds_integer, value))
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.integer))
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Dimensions of one size cut in two together: by position of the operand or result, the
    dimension.
    """

    operands: Mapping[int, int]
    results: Mapping[int, int]


def _discovered(eqn: Eqn, foreign: bool) -> ShardingRule:
    """The rule that runs on small operands do not contradict.

    Raises:
        Exception: Whatever jax raises if it runs at no size that is small enough.
    """
    sample = _sample(eqn, foreign)
    builder = RuleBuilder.of(eqn)
    taken: set[tuple[str, int, int]] = set()
    for cut in itertools.islice(sample.cuts(), MOST_RUNS):
        places = {("operand", *place) for place in cut.operands.items()}
        places |= {("result", *place) for place in cut.results.items()}
        if places & taken or not sample.works(cut):
            continue
        taken |= places
        kind = FactorKind.PASS_THROUGH if cut.results else FactorKind.REDUCTION
        builder.add_factor(kind, cut.operands.items(), cut.results.items())
    return builder.build()


def _sample(eqn: Eqn, foreign: bool) -> _Sample:
    """The equation at the first sizes at which it runs: each size another small one, all divided by
    the same, its own.

    Foreign code may rely on sizes that it does not check: it keeps its own if they are small.
    """
    shapes = [v.shape for v in (*eqn.inputs, *eqn.outputs)]
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    common = math.gcd(*sizes)
    even = (
        d for d in range(common, 1, -1) if common % d == 0 and all(s // d % 2 == 0 for s in sizes)
    )
    divisor = next(even, 1)
    own, divided = {s: s for s in sizes}, {s: s // divisor for s in sizes}
    small = {s: 2 * (i + 2) for i, s in enumerate(sizes)}
    failure: Exception = ValueError(f"its smallest sample has more than {MOST_ELEMENTS} elements")
    for scaled in (own, divided) if foreign else (small, divided, own):
        at = [tuple(scaled.get(size, size) for size in shape) for shape in shapes]
        if max(map(math.prod, at)) > MOST_ELEMENTS:
            continue
        try:
            return _Sample(eqn, foreign, at[: len(eqn.inputs)], at[len(eqn.inputs) :])
        except Exception as error:
            failure = error
    raise failure


class _Sample:
    """An equation with operands of certain shapes, and its results."""

    def __init__(
        self, eqn: Eqn, foreign: bool, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> None:
        rng = np.random.default_rng(0)
        values = jaxprs.operand_values(eqn.origin)
        self._eqn, self._foreign = eqn, foreign
        self._operands = [
            _made(rng, shape, value.dtype) if isinstance(value, jax.ShapeDtypeStruct) else value
            for value, shape in zip(values, operands, strict=True)
        ]
        self._operand_shapes, self._result_shapes = tuple(operands), tuple(results)
        self._whole = self._run(self._operands, results)

    def _run(self, operands: Sequence[Any], results: Sequence[Shape]) -> list[np.ndarray]:
        """The results, which must have these shapes."""
        found = [
            np.asarray(a) for a in jax.jit(jaxprs.as_call(self._eqn.origin, results))(*operands)
        ]
        if [a.shape for a in found] != list(results):
            raise ValueError(
                f"its results have the shapes {[a.shape for a in found]}, not {list(results)}"
            )
        return found

    def cuts(self) -> Iterator[_Cut]:
        """Every cut of operand dimensions of one size, at most one of each operand; few operands
        first.
        """
        sizes = sorted(
            {size for shape in self._operand_shapes for size in shape if size > 1 and size % 2 == 0}
        )
        found: list[tuple[int, dict[int, int]]] = []
        for size in sizes:
            dims = [[d for d, s in enumerate(shape) if s == size] for shape in self._operand_shapes]
            options: list[list[int | None]] = [[None, *own] for own in dims]
            if (
                self._foreign
            ):  # only what a caller could do as well: another size, in all arrays at once
                if any(len(own) > 1 for own in dims):
                    continue
                options = [[own[0] if own else None] for own in dims]
            for chosen in itertools.islice(itertools.product(*options), MOST_CUTS):
                operands = {i: d for i, d in enumerate(chosen) if d is not None}
                if operands:
                    found.append((size, operands))
        found.sort(key=lambda item: len(item[1]))
        for size, operands in found:
            results = self._results_of(operands, size)
            if results is not None:
                yield _Cut(operands, results)

    def _results_of(self, operands: Mapping[int, int], size: int) -> Mapping[int, int] | None:
        """The result dimensions that are cut with these operand dimensions; None where that is not
        clear.
        """
        if "result_avals" in self._eqn.params:  # it cannot be asked
            cut = [[d for d, s in enumerate(shape) if s == size] for shape in self._result_shapes]
        else:
            pieces = self._piece(_Cut(operands, {}), 0)
            try:
                shapes = [
                    a.shape for a in jax.eval_shape(jaxprs.as_call(self._eqn.origin), *pieces)
                ]
            except Exception:
                return None
            if [len(shape) for shape in shapes] != [len(shape) for shape in self._result_shapes]:
                return None
            cut = [
                [d for d, (part, whole) in enumerate(zip(*pair, strict=True)) if part != whole]
                for pair in zip(shapes, self._result_shapes, strict=True)
            ]
        return (
            None
            if any(len(dims) > 1 for dims in cut)
            else {i: dims[0] for i, dims in enumerate(cut) if dims}
        )

    def _piece(self, cut: _Cut, part: int) -> list[Any]:
        """One half of the operands."""
        return [
            np.split(array, 2, axis=cut.operands[i])[part] if i in cut.operands else array
            for i, array in enumerate(self._operands)
        ]

    def works(self, cut: _Cut) -> bool:
        """Whether the halves make the whole; a result that would be whole by chance (all zeros)
        shows nothing.
        """
        shapes = [
            tuple(size // 2 if d == cut.results.get(i) else size for d, size in enumerate(shape))
            for i, shape in enumerate(self._result_shapes)
        ]
        try:
            halves = [self._run(self._piece(cut, part), shapes) for part in (0, 1)]
        except Exception:
            return False
        told = False
        for i, whole in enumerate(self._whole):
            one, other = halves[0][i], halves[1][i]
            if i in cut.results:
                made = np.concatenate([one, other], axis=cut.results[i])
                told |= not _equal(one, other)
            elif cut.results:
                if not _equal(one, whole):
                    return False
                made = other
            else:
                made = one + other
                told |= not _equal(whole, np.zeros_like(whole))
            if not _equal(made, whole):
                return False
        return told


def _made(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Random values: floats in [0.1, 10), of which roots and logarithms exist; small integers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(10 ** rng.uniform(-1, 1, shape)).astype(dtype)
    if np.issubdtype(dtype, np.bool_):
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0, 5, shape)).astype(np.dtype(dtype))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Up to half of the digits, for floats."""
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    finfo: Any = jnp.finfo  # untyped in a part of jax's releases
    eps = math.sqrt(float(finfo(a.dtype).eps))
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    x, y = a.astype(wide), b.astype(wide)
    return bool(
        np.allclose(x, y, rtol=eps, atol=eps * float(np.abs(x).max(initial=0.0)), equal_nan=True)
    )
