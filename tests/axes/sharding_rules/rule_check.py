"""Sharding rules as claims that are checked by running them.

`application` finds one equation of a function, with concrete operands. `disproved` cuts each
PASS_THROUGH and REDUCTION factor of a rule into shards, runs the primitive on them, puts the shards
of the results together and compares with the whole. `missing` does the converse: it looks for
factors of other kinds that can be cut all the same.

A primitive that addresses absolute positions (an index, a start, a group's extent) is told where
its shard starts: see `run_shards`. This is what a partitioner does as well.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from run_shards import Application, Array, Shard, run, run_shard

from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind, ShardingRule
from autoshard.tracing.program import Eqn, Value
from tests.stages import QUICKLY

_INLINED = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"}
_CUT = (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)

_GENERATORS = frozenset({"random_bits", "random_gamma", "random_split"})
"""Results depend on the position of an element among those of its key: only factors over keys are
cut."""


def application(primitive: str, function: Callable[..., Any], *inputs: Any) -> Application:
    """The first equation of a primitive in a function, with the operands it meets on these inputs.

    Args:
        primitive: Name of the primitive.
        function: A jax function; calls of jitted functions are entered.
        *inputs: Its concrete arguments.
    """
    closed = jax.make_jaxpr(function)(*inputs)
    match = next(_equations(closed.jaxpr, closed.consts, inputs, primitive), None)
    assert match is not None, f"no {primitive} in\n{closed}"
    jax_eqn, operands = match
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
        shape = tuple(getattr(var.aval, "shape", ()))
        return Value(next(counter), shape, "", 1, literal=hasattr(var, "val"))

    return Eqn(
        index=0,
        primitive=jax_eqn.primitive.name,
        params=jax_eqn.params,
        inputs=tuple(value(v) for v in jax_eqn.invars),
        outputs=tuple(value(v) for v in jax_eqn.outvars),
    )


def shard_count_of(app: Application, rule: ShardingRule, factor: int) -> int:
    """Into how many equal shards a factor is cut: the smallest prime that divides all its
    dimensions, or 1."""
    sizes = []
    for value, factors in rule.places(app.eqn):
        sizes += [size for size, other in zip(value.shape, factors, strict=True) if other == factor]
    common = math.gcd(*sizes, *_groups_on(app, rule, factor))
    return next((p for p in range(2, common + 1) if common % p == 0), 1)


def _groups_on(app: Application, rule: ShardingRule, factor: int) -> Iterator[int]:
    """Numbers of groups of a convolution along a factor: a shard has whole groups."""
    if app.eqn.primitive != "conv_general_dilated":
        return
    image = app.eqn.params["dimension_numbers"].lhs_spec
    for groups, dim in (("feature_group_count", image[1]), ("batch_group_count", image[0])):
        count = app.eqn.params[groups]
        if count > 1 and rule.operands[0][dim] == factor:
            yield count


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def _best(app: Application, whole: Array, indices: Sequence[Array]) -> Array:
    """Of the best of each shard, counted from its start, the best; the first of equals."""
    (axis,) = app.eqn.params["axes"]
    width = whole.shape[axis] // len(indices)
    candidates = jnp.stack([index + i * width for i, index in enumerate(indices)], axis)
    values = jnp.take_along_axis(whole, candidates, axis)
    (best,) = run(app.primitive, [values], dict(app.eqn.params))
    return jnp.take_along_axis(candidates, jnp.expand_dims(best, axis), axis).squeeze(axis)


def from_shards(
    app: Application, rule: ShardingRule, factor: int, count: int, arrays: Sequence[Array]
) -> list[list[Array]]:
    """For each result, what the shards make of it: one array, or several that must all equal the
    whole."""
    shards = [Shard(app, rule, factor, index, count) for index in range(count)]
    results = [run_shard(shard, list(arrays)) for shard in shards]
    is_reduction = rule.kinds[factor] is FactorKind.REDUCTION
    combined = []
    for i, factors in enumerate(rule.results):
        parts = [result[i] for result in results]
        if is_reduction and rule.combine == ARG_REDUCTION:
            combined.append([_best(app, arrays[0], parts)])
        elif is_reduction:
            combined.append([functools.reduce(_COMBINE[rule.combine], parts)])
        elif factor in factors:
            combined.append([jnp.concatenate(parts, axis=factors.index(factor))])
        else:
            combined.append(parts)
    return combined


def disproved(
    app: Application, rule: ShardingRule, tolerance: float = 0.0
) -> tuple[list[str], int]:
    """Claims of a rule that running contradicts, and how many factors were cut.

    Args:
        app: The equation and its operands.
        rule: Its rule.
        tolerance: Relative and absolute; 0 compares exactly (integer-valued data).
    """
    cuts = list(_claimed_cuts(app, rule))

    def both(*arrays: Array) -> tuple[list[Array], list[list[list[Array]]]]:
        whole = run(app.primitive, arrays, app.eqn.params)
        return whole, [from_shards(app, rule, factor, count, arrays) for factor, count in cuts]

    whole, combined = jax.jit(both, compiler_options=QUICKLY)(*app.operands)
    shapes = [value.shape for value in app.eqn.inputs]
    wrong = []
    for (factor, _), results in zip(cuts, combined, strict=True):
        if not same(whole, results, tolerance):
            claim = f"factor {factor} ({rule.kinds[factor].value}) of {rule}"
            wrong.append(
                f"{app.eqn.primitive}: {claim} does not cut; {shapes} {dict(app.eqn.params)}"
            )
    return wrong, len(cuts)


def _claimed_cuts(app: Application, rule: ShardingRule) -> Iterator[tuple[int, int]]:
    """(factor, shard count) of what a rule says can be cut."""
    for factor, kind in enumerate(rule.kinds):
        runs_by_key = app.eqn.primitive not in _GENERATORS or factor in rule.operands[0]
        count = shard_count_of(app, rule, factor)
        if kind in _CUT and runs_by_key and count > 1:
            yield factor, count


def same(whole: Sequence[Array], combined: Sequence[Sequence[Array]], tolerance: float) -> bool:
    """Whether everything combined of shards equals the whole."""
    for array, several in zip(whole, combined, strict=True):
        if not all(_equal(array, other, tolerance) for other in several):
            return False
    return True


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
    """Rules that say one thing more: (what, rule, the factor that it says can be cut)."""
    only_operands, only_results = _one_sided(rule)
    uncut = [factor for factor, kind in enumerate(rule.kinds) if kind not in _CUT]
    for factor in uncut:
        if factor in only_operands:
            reduced = _with_kind(rule, factor, FactorKind.REDUCTION)
            yield f"{_places(rule, factor)} is reduced", reduced, factor
        else:
            passing = _with_kind(rule, factor, FactorKind.PASS_THROUGH)
            yield f"{_places(rule, factor)} pass", passing, factor
    for a, b in itertools.product(uncut, uncut):
        if a in only_operands and b in only_results:
            what = f"{_places(rule, a)} and {_places(rule, b)} pass"
            yield what, _merged(_with_kind(rule, a, FactorKind.PASS_THROUGH), a, b), a


def _one_sided(rule: ShardingRule) -> tuple[set[int], set[int]]:
    """Factors of operands only, and those of results only."""
    in_operands = set(itertools.chain(*rule.operands))
    in_results = set(itertools.chain(*rule.results))
    return in_operands - in_results, in_results - in_operands


def _places(rule: ShardingRule, factor: int) -> str:
    """The dimensions of a factor, for people."""
    places = []
    for side, arrays in (("operand", rule.operands), ("result", rule.results)):
        for i, factors in enumerate(arrays):
            dims = [dim for dim, other in enumerate(factors) if other == factor]
            places += [f"{side} {i} dim {dim}" for dim in dims]
    return str(places)


def _with_kind(rule: ShardingRule, factor: int, kind: FactorKind) -> ShardingRule:
    kinds = list(rule.kinds)
    kinds[factor] = kind
    return replace(rule, kinds=tuple(kinds))


def _merged(rule: ShardingRule, factor: int, other: int) -> ShardingRule:
    """The rule whose results have one factor in the place of another."""
    results = [tuple(factor if f == other else f for f in factors) for factors in rule.results]
    return replace(rule, results=tuple(results))


def missing(apps: Sequence[Application], rule: ShardingRule, tolerance: float = 0.0) -> list[str]:
    """Cuts that the rule does not allow, but that work on all of these applications (equal but for
    their data)."""
    working = []
    for what, more, factor in hypotheses(rule):
        count = shard_count_of(apps[0], more, factor)
        if count > 1 and all(_cuts(app, more, factor, count, tolerance) for app in apps):
            working.append(what)
    return working


def _cuts(app: Application, rule: ShardingRule, factor: int, count: int, tolerance: float) -> bool:
    """Whether a factor can be cut; a primitive that refuses the shards cannot."""

    def by_shards(*arrays: Array) -> list[list[Array]]:
        return from_shards(app, rule, factor, count, arrays)

    try:
        combined = jax.jit(by_shards, compiler_options=QUICKLY)(*app.operands)
    except Exception:
        return False
    return same(run(app.primitive, app.operands, app.eqn.params), combined, tolerance)
