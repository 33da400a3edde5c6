"""The sharding rule of a primitive, discovered by running it on small arrays.

It is run on operands whole and cut in two, and what the halves give is compared with the whole:
where they concatenate to it the dimension passes, where they add up to it, it is reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import RuleBuilder, Shape
from autoshard.jax_internals import jaxprs
from autoshard.tracing.program import Eqn

MOST_ELEMENTS = 2**16
"""An array of more elements is not run. Chosen by hand, to keep discovery to some milliseconds a
run; `test_a_large_sample_is_not_run` fails with 2**20."""

MOST_CUTS = 512
"""Combinations of operand dimensions of one size that are considered. Chosen by hand, against
primitives of very many operands; `test_discovered_by_running` fails with 4."""

MOST_RUNS = 48
"""Cuts that are run for one equation. Chosen by hand: a product of three matrices needs about
twenty, `test_dtypes` fails with 4."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Dimensions of one size cut in two together.

    Attributes:
        operands: By position of an operand that is cut, its dimension.
        results: By position of a result that is cut, its dimension.
    """

    operands: Mapping[int, int]
    results: Mapping[int, int]


def discovered_rule(eqn: Eqn, foreign: bool) -> ShardingRule:
    """The rule that runs on small operands do not contradict.

    Args:
        eqn: An equation that may be run.
        foreign: Whether it calls code that the compiler does not know.

    Raises:
        Exception: Whatever jax raises if it runs at no size that is small enough.
    """
    sample = _sample(eqn, foreign)
    builder = RuleBuilder.of(eqn)
    for cut in itertools.islice(sample.cuts(), MOST_RUNS):
        operands, results = cut.operands.items(), cut.results.items()
        if builder.is_free(operands, results) and sample.halves_make_whole(cut):
            kind = FactorKind.PASS_THROUGH if cut.results else FactorKind.REDUCTION
            builder.add_factor(kind, operands, results)
    return builder.build()


def _sample(eqn: Eqn, foreign: bool) -> _Sample:
    """The equation at the first sizes at which it runs."""
    shapes = [v.shape for v in (*eqn.inputs, *eqn.outputs)]
    failure: Exception = ValueError(f"its smallest sample has more than {MOST_ELEMENTS} elements")
    for scaled in _scalings(shapes, foreign):
        scaled_shapes = [tuple(scaled.get(size, size) for size in shape) for shape in shapes]
        if max(map(math.prod, scaled_shapes)) > MOST_ELEMENTS:
            continue
        # Sizes may depend on each other in ways that only running it shows.
        operands, results = scaled_shapes[: len(eqn.inputs)], scaled_shapes[len(eqn.inputs) :]
        try:
            return _Sample(eqn, foreign, operands, results)
        except Exception as error:
            failure = error
    raise failure


def _scalings(shapes: Sequence[Shape], foreign: bool) -> list[dict[int, int]]:
    """Sizes to try, by size: each another small one, all divided by the same, its own.

    Foreign code may rely on sizes that it does not check: it keeps its own if they are small.
    """
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    divisor = _largest_even_divisor(sizes)
    own = {size: size for size in sizes}
    divided = {size: size // divisor for size in sizes}
    small = {size: 2 * (i + 2) for i, size in enumerate(sizes)}
    return [own, divided] if foreign else [small, divided, own]


def _largest_even_divisor(sizes: Sequence[int]) -> int:
    """The largest divisor of all sizes that leaves all of them even, so that they can be halved."""
    common = math.gcd(*sizes)
    for divisor in range(common, 1, -1):
        if common % divisor == 0 and all(size // divisor % 2 == 0 for size in sizes):
            return divisor
    return 1


class _Sample:
    """An equation with operands of certain shapes, and its results."""

    def __init__(
        self, eqn: Eqn, foreign: bool, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> None:
        self._eqn, self._foreign = eqn, foreign
        self._operand_shapes, self._result_shapes = tuple(operands), tuple(results)
        rng = np.random.default_rng(0)  # seeded, so that a rule is the same in every process
        self._operands = []
        for value, shape in zip(jaxprs.operand_values(eqn.origin), operands, strict=True):
            abstract = isinstance(value, jax.ShapeDtypeStruct)
            self._operands.append(_drawn(rng, shape, value.dtype) if abstract else value)
        self._whole = self._run(self._operands, results)

    def _run(self, operands: Sequence[Any], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The results, which must have these shapes."""
        call = jax.jit(jaxprs.as_call(self._eqn.origin, shapes))
        results = [np.asarray(array) for array in call(*operands)]
        actual = [array.shape for array in results]
        if actual != list(shapes):
            raise ValueError(f"its results have the shapes {actual}, not {list(shapes)}")
        return results

    def cuts(self) -> Iterator[_Cut]:
        """Every cut of operand dimensions of one size, at most one of each operand.

        Few operands first: what passes in one operand alone is then not tried with others.
        """
        sizes = {size for shape in self._operand_shapes for size in shape}
        candidates = []
        for size in sorted(sizes):
            if size > 1 and size % 2 == 0:
                candidates += [(size, operands) for operands in self._operand_choices(size)]
        candidates.sort(key=lambda candidate: len(candidate[1]))
        for size, operands in candidates:
            results = self._results_cut_with(operands, size)
            if results is not None:
                yield _Cut(operands, results)

    def _operand_choices(self, size: int) -> Iterator[dict[int, int]]:
        """Each choice of operands and one dimension of this size of each, by position."""
        dims = [_dims_of_size(shape, size) for shape in self._operand_shapes]
        options: list[list[int | None]] = [[None, *own] for own in dims]
        if self._foreign:
            # Only what a caller could do as well: another size, in all arrays at once.
            if max(map(len, dims)) > 1:
                return
            options = [own[-1:] for own in options]
        for chosen in itertools.islice(itertools.product(*options), MOST_CUTS):
            operands = {i: dim for i, dim in enumerate(chosen) if dim is not None}
            if operands:
                yield operands

    def _results_cut_with(self, operands: Mapping[int, int], size: int) -> Mapping[int, int] | None:
        """The result dimensions that are cut with these operand dimensions; None if not clear."""
        dims: list[list[int]] | None
        if "result_avals" in self._eqn.params:  # it states its results: it cannot be asked
            dims = [_dims_of_size(shape, size) for shape in self._result_shapes]
        else:
            dims = self._dims_that_shrink(operands)
        if dims is None or any(len(own) > 1 for own in dims):
            return None
        return {i: own[0] for i, own in enumerate(dims) if own}

    def _dims_that_shrink(self, operands: Mapping[int, int]) -> list[list[int]] | None:
        """By result, the dimensions that change with halves of these operands; None if refused."""
        half = self._half(_Cut(operands, {}), 0)
        try:
            avals = jax.eval_shape(jaxprs.as_call(self._eqn.origin), *half)
        except Exception:
            return None
        shapes = [aval.shape for aval in avals]
        if list(map(len, shapes)) != list(map(len, self._result_shapes)):
            return None
        return [
            [dim for dim, size in enumerate(shape) if size != whole[dim]]
            for shape, whole in zip(shapes, self._result_shapes, strict=True)
        ]

    def _half(self, cut: _Cut, part: int) -> list[Any]:
        """One half of the operands."""
        return [
            np.split(array, 2, axis=cut.operands[i])[part] if i in cut.operands else array
            for i, array in enumerate(self._operands)
        ]

    def halves_make_whole(self, cut: _Cut) -> bool:
        """Whether the results of the halves make the whole, and not by chance."""
        shapes = []
        for i, shape in enumerate(self._result_shapes):
            sizes = list(shape)
            if i in cut.results:
                sizes[cut.results[i]] //= 2
            shapes.append(tuple(sizes))
        try:
            first, second = (self._run(self._half(cut, part), shapes) for part in (0, 1))
        except Exception:  # it refuses halves, or their results have other shapes
            return False
        halves = list(enumerate(zip(first, second, strict=True)))
        return all(self._makes_whole(cut, i, *pair) for i, pair in halves) and any(
            self._is_conclusive(cut, i, *pair) for i, pair in halves
        )

    def _makes_whole(self, cut: _Cut, result: int, one: np.ndarray, other: np.ndarray) -> bool:
        whole = self._whole[result]
        if result in cut.results:
            return _equal(np.concatenate([one, other], axis=cut.results[result]), whole)
        if cut.results:  # the factor passes to another result: this one does not depend on it
            return _equal(one, whole) and _equal(other, whole)
        return _equal(one + other, whole)

    def _is_conclusive(self, cut: _Cut, result: int, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether a result tells anything: one of equal halves, or of zeros, does not."""
        if result in cut.results:
            return not _equal(one, other)
        whole = self._whole[result]
        return not cut.results and not _equal(whole, np.zeros_like(whole))


def _dims_of_size(shape: Shape, size: int) -> list[int]:
    return [dim for dim, other in enumerate(shape) if other == size]


def _drawn(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Random values: floats in [0.1, 10), of which roots and logarithms exist; small integers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(10 ** rng.uniform(-1, 1, shape)).astype(dtype)
    if np.issubdtype(dtype, np.bool_):
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0, 5, shape)).astype(np.dtype(dtype))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Up to half of the digits, for floats: halves are summed in another order."""
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    finfo: Any = jnp.finfo  # untyped in a part of jax's releases
    eps = math.sqrt(float(finfo(a.dtype).eps))
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    x, y = a.astype(wide), b.astype(wide)
    scale = float(np.abs(x).max(initial=0.0))
    return bool(np.allclose(x, y, rtol=eps, atol=eps * scale, equal_nan=True))
