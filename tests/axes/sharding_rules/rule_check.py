"""Sharding rules as claims that are checked by running them.

`application` finds one equation of a function, with concrete operands. `disproved` cuts each PASS_THROUGH
and REDUCTION loop of a rule into pieces, runs the primitive on the pieces, puts the pieces of the
results together and compares with the whole. `missing` does the converse: it looks for loops of
other kinds that can be cut all the same.

A primitive that addresses absolute positions (an index, a start, a group's extent) is told where
its piece starts: see `_RUN`. This is what a partitioner does as well.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind, ShardingRule
from autoshard.tracing.program import Eqn, Value
from tests.stages import QUICKLY

Array = Any
Mode = lax.GatherScatterMode

_INLINED = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"}
_CUT = (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)

_GENERATORS = frozenset({"random_bits", "random_gamma", "random_split"})
"""Results depend on the position of an element among those of its key: only loops over keys are
cut."""


@dataclass(frozen=True)
class Application:
    """One primitive applied to concrete operands.

    Attributes:
        primitive: The jax primitive.
        operands: Concrete arrays.
        eqn: The same equation in the words of autoshard.
    """

    primitive: Any
    operands: tuple[Array, ...]
    eqn: Eqn


def application(primitive: str, function: Callable[..., Any], *inputs: Any) -> Application:
    """The first equation of a primitive in a function, with the operands it meets on these inputs.

    Args:
        primitive: Name of the primitive.
        function: A jax function; calls of jitted functions are entered.
        *inputs: Its concrete arguments.
    """
    closed = jax.make_jaxpr(function)(*inputs)
    found = next(_equations(closed.jaxpr, closed.consts, inputs, primitive), None)
    assert found is not None, f"no {primitive} in\n{closed}"
    jax_eqn, operands = found
    return Application(jax_eqn.primitive, tuple(operands), to_eqn(jax_eqn))


def _equations(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], primitive: str
) -> Iterator[tuple[Any, list[Any]]]:
    """Interprets a jaxpr and yields each equation of the primitive with its operands."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
        if eqn.primitive.name == primitive:
            yield eqn, operands
        if eqn.primitive.name in _INLINED:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            yield from _equations(
                getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, primitive
            )
        env.update(zip(eqn.outvars, run(eqn.primitive, operands, eqn.params), strict=True))


def to_eqn(jax_eqn: Any) -> Eqn:
    """An equation of a jaxpr in the words of autoshard."""
    counter = itertools.count()

    def value(var: Any) -> Value:
        return Value(
            next(counter), tuple(getattr(var.aval, "shape", ())), "", 1, literal=hasattr(var, "val")
        )

    return Eqn(
        index=0,
        primitive=jax_eqn.primitive.name,
        params=jax_eqn.params,
        inputs=tuple(value(v) for v in jax_eqn.invars),
        outputs=tuple(value(v) for v in jax_eqn.outvars),
    )


def run(primitive: Any, operands: Sequence[Array], params: Any) -> list[Array]:
    """Results of a primitive."""
    results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(results) if primitive.multiple_results else [results]


@dataclass(frozen=True)
class Piece:
    """One of `parts` equal pieces of an equation along one loop."""

    app: Application
    rule: ShardingRule
    factor: int
    part: int
    parts: int

    def dims(self, operand: int) -> list[int]:
        """Dimensions of an operand that are cut."""
        return [d for d, factor in enumerate(self.rule.operands[operand]) if factor == self.factor]

    def start(self, size: int) -> int:
        """Where the piece of a dimension of this size starts."""
        return self.part * size // self.parts

    def of(self, array: Array, factors: Sequence[int]) -> Array:
        """This piece of an array whose dimensions run over `loops`."""
        if self.factor not in factors:
            return array
        return array[
            tuple(
                slice(self.start(size), self.start(size) + size // self.parts)
                if factor == self.factor
                else slice(None)
                for size, factor in zip(array.shape, factors, strict=True)
            )
        ]

    def operands(self, arrays: Sequence[Array]) -> list[Array]:
        """This piece of all operands."""
        return [
            self.of(array, factors)
            for array, factors in zip(arrays, self.rule.operands, strict=True)
        ]

    def shape(self, result: int) -> tuple[int, ...]:
        """Shape of this piece of a result."""
        sizes = self.app.eqn.outputs[result].shape
        return tuple(
            size // self.parts if factor == self.factor else size
            for size, factor in zip(sizes, self.rule.results[result], strict=True)
        )

    def bind(self, operands: Sequence[Array], **changed: Any) -> list[Array]:
        """Results of the primitive on these operands, with some parameters changed."""
        return run(self.app.primitive, operands, {**self.app.eqn.params, **changed})

    @property
    def params(self) -> Any:
        """Parameters of the whole."""
        return self.app.eqn.params


def parts_of(app: Application, rule: ShardingRule, factor: int) -> int:
    """Into how many equal pieces a loop is cut: the smallest prime that divides all its dimensions,
    or 1."""
    common = 0
    for values, maps in ((app.eqn.inputs, rule.operands), (app.eqn.outputs, rule.results)):
        for value, factors in zip(values, maps, strict=True):
            for size, other in zip(value.shape, factors, strict=True):
                if other == factor:
                    common = math.gcd(common, size)
    if app.eqn.primitive == "conv_general_dilated":
        for groups, dim in (("feature_group_count", 1), ("batch_group_count", 0)):
            count = app.eqn.params[groups]
            if (
                count > 1
                and rule.operands[0][app.eqn.params["dimension_numbers"].lhs_spec[dim]] == factor
            ):
                common = math.gcd(common, count)
    return next((p for p in range(2, common + 1) if common % p == 0), 1)


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def _identity(combine: str, array: Array) -> Array:
    """What stands for an operand that another piece counts already."""
    if combine in ("add", "xor", "or"):
        return jnp.zeros_like(array)
    if combine == "mul":
        return jnp.ones_like(array)
    return array


def _picked(app: Application, whole: Array, indices: Sequence[Array]) -> Array:
    """Of the best of each piece, counted from its start, the best; the first of equals."""
    (axis,) = app.eqn.params["axes"]
    width = whole.shape[axis] // len(indices)
    found = jnp.stack([index + part * width for part, index in enumerate(indices)], axis)
    (best,) = run(app.primitive, [jnp.take_along_axis(whole, found, axis)], dict(app.eqn.params))
    return jnp.take_along_axis(found, jnp.expand_dims(best, axis), axis).squeeze(axis)


def from_pieces(
    app: Application, rule: ShardingRule, factor: int, parts: int, arrays: Sequence[Array]
) -> list[list[Array]]:
    """For each result, what the pieces make of it: one array, or several that must all equal the
    whole."""
    runner = _RUN.get(app.eqn.primitive, _plain)
    pieces = [runner(Piece(app, rule, factor, part, parts), list(arrays)) for part in range(parts)]
    made = []
    for i, factors in enumerate(rule.results):
        parts_of_result = [piece[i] for piece in pieces]
        if rule.kinds[factor] is FactorKind.REDUCTION and rule.combine == ARG_REDUCTION:
            made.append([_picked(app, arrays[0], parts_of_result)])
        elif rule.kinds[factor] is FactorKind.REDUCTION:
            made.append([functools.reduce(_COMBINE[rule.combine], parts_of_result)])
        elif factor in factors:
            made.append([jnp.concatenate(parts_of_result, axis=factors.index(factor))])
        else:
            made.append(parts_of_result)
    return made


def disproved(
    app: Application, rule: ShardingRule, tolerance: float = 0.0
) -> tuple[list[str], int]:
    """Claims of a rule that running contradicts, and how many loops were cut.

    Args:
        app: The equation and its operands.
        rule: Its rule.
        tolerance: Relative and absolute; 0 compares exactly (integer-valued data).
    """
    cuts = [
        (factor, parts)
        for factor, kind in enumerate(rule.kinds)
        if kind in _CUT
        and (parts := parts_of(app, rule, factor)) > 1
        and (app.eqn.primitive not in _GENERATORS or factor in rule.operands[0])
    ]

    def both(*arrays: Array) -> tuple[list[Array], list[list[list[Array]]]]:
        whole = run(app.primitive, arrays, app.eqn.params)
        return whole, [from_pieces(app, rule, factor, parts, arrays) for factor, parts in cuts]

    whole, made = jax.jit(both, compiler_options=QUICKLY)(*app.operands)
    wrong = [
        f"{app.eqn.primitive}: loop {factor} ({rule.kinds[factor].value}) of {rule} does not cut; "
        f"{[v.shape for v in app.eqn.inputs]} {dict(app.eqn.params)}"
        for (factor, _), results in zip(cuts, made, strict=True)
        if not same(whole, results, tolerance)
    ]
    return wrong, len(cuts)


def same(whole: Sequence[Array], made: Sequence[Sequence[Array]], tolerance: float) -> bool:
    """Whether everything made of pieces equals the whole."""
    return all(
        _equal(a, b, tolerance) for a, several in zip(whole, made, strict=True) for b in several
    )


def _equal(a: Array, b: Array, tolerance: float) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = np.asarray(a), np.asarray(b)
    if tolerance and np.issubdtype(x.dtype, np.inexact):
        return bool(np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True))
    return bool(np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact)))


def hypotheses(rule: ShardingRule) -> Iterator[tuple[str, ShardingRule, int]]:
    """Rules that say one thing more: (what, rule, the loop that it says can be cut)."""
    in_operands = {factor for factors in rule.operands for factor in factors}
    in_results = {factor for factors in rule.results for factor in factors}

    def places(factor: int) -> str:
        return str(
            [
                f"operand {i} dim {d}"
                for i, factors in enumerate(rule.operands)
                for d, x in enumerate(factors)
                if x == factor
            ]
            + [
                f"result {i} dim {d}"
                for i, factors in enumerate(rule.results)
                for d, x in enumerate(factors)
                if x == factor
            ]
        )

    def kind(factor: int, new: FactorKind) -> ShardingRule:
        return replace(
            rule, kinds=tuple(new if i == factor else k for i, k in enumerate(rule.kinds))
        )

    uncut = [factor for factor, k in enumerate(rule.kinds) if k not in _CUT]
    for factor in uncut:
        if factor in in_results:
            yield f"{places(factor)} pass", kind(factor, FactorKind.PASS_THROUGH), factor
        else:
            yield f"{places(factor)} is reduced", kind(factor, FactorKind.REDUCTION), factor
    for a, b in itertools.product(uncut, uncut):
        if a in in_operands - in_results and b in in_results - in_operands:
            merged = kind(a, FactorKind.PASS_THROUGH)
            results = tuple(
                tuple(a if factor == b else factor for factor in factors)
                for factors in merged.results
            )
            yield f"{places(a)} and {places(b)} pass", replace(merged, results=results), a


def missing(apps: Sequence[Application], rule: ShardingRule, tolerance: float = 0.0) -> list[str]:
    """Cuts that the rule does not allow, but that work on all of these applications (equal but for
    their data)."""
    found = []
    for what, more, factor in hypotheses(rule):
        parts = parts_of(apps[0], more, factor)
        if parts > 1 and all(_cuts(app, more, factor, parts, tolerance) for app in apps):
            found.append(what)
    return found


def _cuts(app: Application, rule: ShardingRule, factor: int, parts: int, tolerance: float) -> bool:
    """Whether a loop can be cut; a primitive that refuses the pieces cannot."""
    try:
        made = jax.jit(
            lambda *arrays: from_pieces(app, rule, factor, parts, arrays), compiler_options=QUICKLY
        )(*app.operands)
    except Exception:
        return False
    return same(run(app.primitive, app.operands, app.eqn.params), made, tolerance)


# How pieces are run -------------------------------------------------------------------------------


def _plain(piece: Piece, arrays: list[Array]) -> list[Array]:
    return piece.bind(piece.operands(arrays))


def _with_result_shape(name: str) -> Callable[[Piece, list[Array]], list[Array]]:
    def runner(piece: Piece, arrays: list[Array]) -> list[Array]:
        return piece.bind(piece.operands(arrays), **{name: piece.shape(0)})

    return runner


def _iota(piece: Piece, arrays: list[Array]) -> list[Array]:
    (made,) = piece.bind(arrays, shape=piece.shape(0))
    dim = piece.params["dimension"]
    start = (
        piece.start(piece.app.eqn.outputs[0].shape[dim])
        if piece.rule.results[0][dim] == piece.factor
        else 0
    )
    return [made + jnp.asarray(start, made.dtype)]


def _slice(piece: Piece, arrays: list[Array]) -> list[Array]:
    ends = list(piece.params["limit_indices"])
    for dim in piece.dims(0):
        ends[dim] = arrays[0].shape[dim] // piece.parts
    return piece.bind(piece.operands(arrays), limit_indices=tuple(ends))


def _split(piece: Piece, arrays: list[Array]) -> list[Array]:
    axis = piece.params["axis"]
    sizes = tuple(piece.shape(i)[axis] for i in range(len(piece.app.eqn.outputs)))
    return piece.bind(piece.operands(arrays), sizes=sizes)


def _conv(piece: Piece, arrays: list[Array]) -> list[Array]:
    image = piece.params["dimension_numbers"].lhs_spec
    changed = {
        name: piece.params[name] // piece.parts
        for name, dim in (("feature_group_count", image[1]), ("batch_group_count", image[0]))
        if piece.params[name] > 1 and dim in piece.dims(0)
    }
    return piece.bind(piece.operands(arrays), **changed)


def _counted_once(*operands: int) -> Callable[[Piece, list[Array]], list[Array]]:
    """Pieces of a REDUCTION loop of which all but the first have the identity for these operands."""

    def runner(piece: Piece, arrays: list[Array]) -> list[Array]:
        pieces = piece.operands(arrays)
        if piece.part and piece.rule.kinds[piece.factor] is FactorKind.REDUCTION:
            for i in operands:
                pieces[i] = _identity(piece.rule.combine, pieces[i])
        return piece.bind(pieces)

    return runner


def _reduce(piece: Piece, arrays: list[Array]) -> list[Array]:
    count = len(piece.app.eqn.outputs)
    return _counted_once(*range(count, 2 * count))(piece, arrays)


def _dynamic_update_slice(piece: Piece, arrays: list[Array]) -> list[Array]:
    """A piece with margins as large as the update: what falls outside the piece is written to the
    margins."""
    operand, update, *starts = piece.operands(arrays)
    for dim in set(piece.dims(0)) - set(piece.dims(1)):
        size, width = arrays[0].shape[dim], update.shape[dim]
        operand = _with_margins(operand, dim, width)
        start = jnp.clip(starts[dim], 0, size - width) - piece.start(size) + width
        starts[dim] = jnp.clip(start, 0, size // piece.parts + width)
    (result,) = piece.bind([operand, update, *starts])
    for dim in set(piece.dims(0)) - set(piece.dims(1)):
        width = update.shape[dim]
        result = lax.slice_in_dim(result, width, result.shape[dim] - width, axis=dim)
    return [result]


def _with_margins(array: Array, dim: int, width: int) -> Array:
    return jnp.pad(array, [(width, width) if d == dim else (0, 0) for d in range(array.ndim)])


def _gather(piece: Piece, arrays: list[Array]) -> list[Array]:
    """Indices are shifted by the start of the piece; what another piece holds counts as 0."""
    numbers, mode = piece.params["dimension_numbers"], piece.params["mode"]
    operand, indices = piece.operands(arrays)
    sizes = list(piece.params["slice_sizes"])
    window = [
        d
        for d in range(operand.ndim)
        if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for dim, position in zip(window, numbers.offset_dims, strict=True):
        if piece.rule.results[0][position] == piece.factor:
            sizes[dim] //= piece.parts
    if piece.rule.kinds[piece.factor] is not FactorKind.REDUCTION:
        return piece.bind([operand, indices], slice_sizes=tuple(sizes))
    (dim,) = piece.dims(0)
    if dim not in numbers.start_index_map:
        (result,) = piece.bind([operand, indices])
        return [result if piece.part == 0 else jnp.zeros_like(result)]
    column = numbers.start_index_map.index(dim)
    index = indices[..., column]
    size, local = arrays[0].shape[dim], operand.shape[dim]
    outside = jnp.zeros(index.shape, bool)
    if mode == Mode.FILL_OR_DROP:
        outside = (index < 0) | (index >= size)
    index = jnp.clip(index, 0, size - 1) - piece.start(size)
    here = (index >= 0) & (index < local)
    shifted = indices.at[..., column].set(
        jnp.where(outside, -1 if piece.part == 0 else 0, jnp.clip(index, 0, local - 1))
    )
    (result,) = piece.bind([operand, shifted])
    mine = jnp.where(outside, piece.part == 0, here)
    batch = [d for d in range(result.ndim) if d not in numbers.offset_dims]
    return [
        jnp.where(lax.broadcast_in_dim(mine, result.shape, batch), result, jnp.zeros_like(result))
    ]


def _scatter(piece: Piece, arrays: list[Array]) -> list[Array]:
    """Indices are shifted by the start of the piece, which has margins for windows that cross its
    ends."""
    if piece.rule.kinds[piece.factor] is FactorKind.REDUCTION:
        return _counted_once(0)(piece, arrays)
    numbers, mode = piece.params["dimension_numbers"], piece.params["mode"]
    operand, indices, updates = piece.operands(arrays)
    alone = [d for d in piece.dims(0) if not piece.dims(1) and not piece.dims(2)]
    if not alone:
        return piece.bind([operand, indices, updates])
    (dim,) = alone
    widths = _window_sizes(numbers, operand.ndim, updates.shape)
    if mode == Mode.CLIP:
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            last = arrays[0].shape[d] - widths[d]
            indices = indices.at[..., column].set(jnp.clip(indices[..., column], 0, last))
    column = numbers.scatter_dims_to_operand_dims.index(dim)
    size, width, index = arrays[0].shape[dim], widths[dim], indices[..., column]
    dropped = (index < 0) | (index > size - width)
    index = jnp.clip(index, 0, size - width) - piece.start(size) + width
    outside = dropped | (index < 0) | (index > size // piece.parts + width)
    indices = indices.at[..., column].set(jnp.where(outside, -1, index))
    (result,) = piece.bind(
        [_with_margins(operand, dim, width), indices, updates], mode=Mode.FILL_OR_DROP
    )
    return [lax.slice_in_dim(result, width, result.shape[dim] - width, axis=dim)]


def _window_sizes(numbers: Any, rank: int, updates: Sequence[int]) -> list[int]:
    """Extent of an update window along each dimension of the operand."""
    inner = iter(numbers.update_window_dims)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if d in gone else updates[next(inner)] for d in range(rank)]


def _ragged_dot(piece: Piece, arrays: list[Array]) -> list[Array]:
    """A cut of the ragged dimension clips each group's extent; groups of another piece multiply by
    0."""
    numbers = piece.params["ragged_dot_dimension_numbers"]
    left, right, sizes = piece.operands(arrays)
    (ragged,) = numbers.lhs_ragged_dimensions
    groups = [d for d in piece.dims(1) if d in numbers.rhs_group_dimensions]
    if groups:
        held = np.arange(arrays[1].shape[groups[0]]) // right.shape[groups[0]] == piece.part
        mask = held.reshape([-1 if d == groups[0] else 1 for d in range(arrays[1].ndim)])
        right = arrays[1] * jnp.asarray(mask, arrays[1].dtype)
    if ragged in piece.dims(0):
        start = piece.start(arrays[0].shape[ragged])
        ends = jnp.clip(jnp.cumsum(sizes, axis=-1) - start, 0, left.shape[ragged])
        sizes = jnp.diff(ends, axis=-1, prepend=0)
    results = piece.bind([left, right, sizes])
    if not any(piece.dims(i) for i in range(3)):
        return [piece.of(results[0], piece.rule.results[0])]
    return results


_RUN: dict[str, Callable[[Piece, list[Array]], list[Array]]] = {
    "broadcast_in_dim": _with_result_shape("shape"),
    "conv_general_dilated": _conv,
    "dynamic_slice": _with_result_shape("slice_sizes"),
    "dynamic_update_slice": _dynamic_update_slice,
    "empty": _with_result_shape("shape"),
    "gather": _gather,
    "iota": _iota,
    "ragged_dot_general": _ragged_dot,
    "reduce": _reduce,
    "reshape": _with_result_shape("new_sizes"),
    "slice": _slice,
    "split": _split,
    "symmetric_product": _counted_once(1),
} | dict.fromkeys(
    ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter
)
