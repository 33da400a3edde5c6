"""How far an element of an output may be off: what rounding does to it.

A layout changes the order of sums and what is fused. So the function is run again and again with
its sums in other orders, its equations each by itself, and now and then with every float input
moved by one unit in the last place: what an element moves in these runs is its spread. An element
may be off by `FACTOR` times its spread, and by a few roundings of its own number format. Where a
run changes an integer, a boolean or whether a number is finite (an argmax between near ties, the
routing of a token), that element says nothing.

Runs are made as they are needed: a few first, then twice as many while something still differs, for
an element that flips between two values may stay on one of them for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autoshard.axes.axis_classes import AxisClasses
from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind
from autoshard.evaluate.verification.compare import distances
from autoshard.tracing.program import Value

FACTOR = 8.0
"""Times the spread of an element: the spread is the largest of a few moves, the error of a layout
is the largest of very many elements. `tests/benchmarks/faults.py` measures both sides: right
layouts stay below, faults lie above."""

FIRST_RUNS = 4
"""Runs before anything is compared: with one, many elements would not have moved yet."""

MOST_RUNS = 32
"""Runs before something is called wrong: an element that is one of two values by chance is on the
same side of all with probability 2^-31 (`tests/evaluate/test_verify.py` has a first Adam step of
nothing but noise)."""

ROUNDINGS = 4.0
"""Units in the last place of an element itself: sums that no run changed still round, and a fused
multiplication rounds once less (`tests/benchmarks/faults.py`)."""

LOW_ROUNDINGS = 4.0
"""Where the spread does not say what fusing does: roundings to the lowest precision on a path of
the program, of the scale of an output; few enough that a sum counted twice is seen in bfloat16 too
(`tests/evaluate/test_verify.py`)."""

COARSEST = 0.25
"""However low the precision (float8_e5m2 has an epsilon of 0.25), a lost shard or a sum counted
twice must be seen."""

SUM_ROUNDINGS = 16.0
"""Where the function cannot be run with its sums in other orders, and before the compiled function
is called wrong: times the rounding of the longest sum, which grows with the root of its length
(Higham 2002, section 4.2, for random errors). `tests/evaluate/test_verify.py` has the false alarms
below it and the wrong numbers above it."""

Outputs = Sequence[np.ndarray]


class Spread:
    """What rounding does to each element of each output.

    Attributes:
        base: The outputs that the runs are held against.
        runs: How many were made.
        sums_moved: Whether the runs have their sums in other orders; else they only have other
            inputs.
    """

    def __init__(self, run: Callable[[int], Outputs], base: Outputs, *, sums_moved: bool) -> None:
        """Starts without runs; `run` takes the number of one, from 1."""
        self.base, self.sums_moved, self.runs = base, sums_moved, 0
        self._run = run
        self._moved = [np.zeros(leaf.shape, np.float32) for leaf in base]

    def add(self, outputs: Outputs) -> None:
        """Counts the outputs of another run."""
        for moved, base, leaf in zip(self._moved, self.base, outputs, strict=True):
            with np.errstate(over="ignore"):
                moved[...] = np.maximum(moved, distances(base, leaf))

    def double(self) -> bool:
        """Makes the first runs, or as many again as there are; False where there are enough."""
        if self.runs >= MOST_RUNS:
            return False
        for number in range(self.runs + 1, max(FIRST_RUNS, 2 * self.runs) + 1):
            self.add(self._run(number))
            self.runs = number
        return True

    def of(self, number: int) -> np.ndarray:
        """Of an output, by element; infinite where an integer, a boolean or finiteness changed."""
        moved = self._moved[number]
        if np.issubdtype(self.base[number].dtype, np.inexact):
            return moved
        return np.where(moved > 0, np.float32(np.inf), np.float32(0.0))

    def largest(self, number: int) -> float:
        """Of an output of floats, the largest move of an element that stays finite."""
        moved = self._moved[number]
        return float(moved[np.isfinite(moved)].max(initial=0.0))


class Rounding:
    """What the number formats of a program allow, besides the spread."""

    def __init__(self, classes: AxisClasses) -> None:
        """Reads the precisions and the longest sum of the program."""
        lowest, single = epsilon_of(classes), epsilon("float32")
        self._single = min(lowest, single)
        self._low = min(LOW_ROUNDINGS * lowest, COARSEST) if lowest > single else 0.0
        self._sum = SUM_ROUNDINGS * self._single * math.sqrt(longest_sum(classes))
        self._own: list[float] = []
        for value in classes.program.body.outputs:
            of_floats = _is_float(value.dtype)
            self._own.append(max(epsilon(value.dtype), self._single) if of_floats else 0.0)

    def tolerance(
        self,
        number: int,
        wanted: np.ndarray,
        spread: Spread,
        *,
        fused: bool,
        by_scale: bool = False,
    ) -> np.ndarray:
        """How far each element of an output may be off.

        Args:
            number: Position of the output.
            wanted: Its elements.
            spread: Of its elements.
            fused: Whether the spread has a run with equations fused. In low precision that changes
                much: without such a run, an element may be off by some roundings of the scale of
                its output; with one, by the largest move of any element (one that is rounded to few
                digits seldom moves, and then far).
            by_scale: Allow besides what the rounding of the longest sum does at the scale of the
                output, as where no run has its sums in other orders. The function is called wrong
                beyond that only: compiled whole it has kernels that its equations alone have not.
        """
        if not np.issubdtype(wanted.dtype, np.inexact):
            return spread.of(number)
        finite = np.isfinite(wanted)
        size = np.where(finite, np.abs(np.where(finite, wanted, 0)), 0.0)
        scale = float(size.max(initial=0.0))
        of_output = float(np.finfo(np.float32).tiny)
        if by_scale or not spread.sums_moved:
            of_output += self._sum * scale
        if not fused:
            of_output += self._low * scale
        elif self._low:
            of_output += spread.largest(number)
        of_elements = FACTOR * spread.of(number).astype(np.float64)
        return np.asarray(of_elements + ROUNDINGS * self._own[number] * size + of_output)


def epsilon_of(classes: AxisClasses) -> float:
    """Machine epsilon of the lowest float precision that anything in the program is computed in."""
    lowest = 0.0
    for dtype in {value.dtype for value in _computed(classes)}:
        if _is_float(dtype):
            lowest = max(lowest, epsilon(dtype))
    return lowest


def _computed(classes: AxisClasses) -> Iterator[Value]:
    """Results of equations, but for scalars of the usual precisions (counters, learning rates)."""
    for eqn in classes.program.eqns:
        for value in eqn.outputs:
            if value.shape or value.dtype not in ("float32", "float64"):
                yield value


def epsilon(dtype: Any) -> float:
    """Machine epsilon of a float or complex dtype."""
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.eps)


def longest_sum(classes: AxisClasses) -> int:
    """Number of terms of the longest reduction in the program."""
    longest = 1
    for eqn in classes.program.eqns:
        factors = classes.factors(eqn)
        rule = classes.rules[eqn.index]
        if rule.combine == ARG_REDUCTION:
            continue
        terms = 1
        for (_, size), kind in zip(factors, rule.kinds, strict=True):
            if kind is FactorKind.REDUCTION:
                terms *= size
        longest = max(longest, terms)
    return longest


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float0"


def nudged(leaf: jax.Array, rng: np.random.Generator) -> jax.Array:
    """A float leaf with each element moved by -1, 0 or +1 units in the last place.

    Whole numbers stay: a mask, a count, a position in floats is exact, and moved it would mean
    something else.
    """
    scale = epsilon(leaf.dtype) * rng.integers(-1, 2, leaf.shape)
    shards, kind = [], leaf.sharding.memory_kind
    for shard in leaf.addressable_shards:
        old = np.asarray(shard.data).astype(np.float64)
        moved = np.where(old == np.round(old), old, old * (1.0 + scale[shard.index]))
        place = SingleDeviceSharding(shard.device, memory_kind=kind)
        shards.append(jax.device_put(moved.astype(leaf.dtype), place))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
