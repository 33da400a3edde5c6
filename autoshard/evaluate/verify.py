"""Is it right? Outputs of a layout against those of the unsharded function, from one trace.

What counts as equal follows from the function itself, not from a fixed tolerance. Sharding changes
the order of sums, so each float leaf may differ by `FACTOR * eps * sqrt(longest sum)` of its own
scale, eps that of the float32 in which sums are accumulated; by `LOW_FACTOR` roundings to the
lowest precision on any path of the program (few enough that a sum counted twice is seen in bfloat16
too); and by `DRIFT_FACTOR` times what the *unsharded* function itself changes when every float
input is moved by one unit in the last place (an optimizer that divides by the root of a tiny second
moment amplifies rounding, and says so here). Integers and booleans must be equal, except where that
same nudge changes them (an argmax between near ties).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autoshard.axes.axis_classes import AxisClasses
from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind
from autoshard.compiler.transfer import whole
from autoshard.evaluate.inputs import Inputs
from autoshard.evidence.candidate import Verified
from autoshard.layout.mesh import MeshInfo
from autoshard.tracing.program import Value
from autoshard.tracing.rewrite import as_function, as_reference
from autoshard.tracing.trace import Traced

FACTOR = 16.0
"""Times the rounding of the longest sum, which grows with the root of its length (Higham 2002,
section 4.2, for random errors): a few sums follow each other in one step.
`tests/evaluate/test_verify.py` has the false alarms below it and the wrong numbers above it."""

LOW_FACTOR = 4.0
"""Roundings to the lowest precision on a path of the program; few enough that a sum counted twice
is seen in bfloat16 too (`tests/evaluate/test_verify.py`)."""

COARSEST = 0.25
"""However low the precision (float8_e5m2 has an epsilon of 0.25), a lost shard or a sum counted
twice must be seen."""

DRIFT_FACTOR = 4.0
"""Times what one unit in the last place of the inputs changes: reordering moves a sum by a few
units. `tests/evaluate/test_verify.py` has an optimizer with tiny second moments."""

NUDGES = 3
"""Random nudges: with one, half of the near ties of an argmax would not move
(`tests/evaluate/test_verify.py`)."""


@dataclass(frozen=True, eq=False)
class Reference:
    """Outputs of the unsharded function and how far each leaf may be from them.

    Attributes:
        outputs: By output leaf, as NumPy.
        unstable: By output leaf of integers, where the nudges changed it; None where they did not,
            and for floats.
        tolerance: By output leaf, absolute.
        against: What the outputs are of.
        paths: Leaf paths of the outputs.
    """

    outputs: tuple[np.ndarray, ...]
    unstable: tuple[np.ndarray | None, ...]
    tolerance: tuple[float, ...]
    against: str
    paths: tuple[str, ...]

    def compare(self, outputs: Sequence[Any]) -> tuple[Verified, bool]:
        """(the leaf that is farthest off, whether all leaves agree)."""
        worst = Verified(0.0, self.tolerance[0] if self.tolerance else 0.0, self.against, "")
        worst_ratio, agrees = -1.0, True
        for number, output in enumerate(outputs):
            error, tolerance = self._largest_error(number, output), self.tolerance[number]
            agrees &= error <= tolerance
            leaf = Verified(error, tolerance, self.against, self.paths[number])
            if leaf.in_tolerances > worst_ratio:
                worst, worst_ratio = leaf, leaf.in_tolerances
        return worst, agrees

    def _largest_error(self, number: int, output: Any) -> float:
        """Of what this process has of an output leaf."""
        wanted, unstable = self.outputs[number], self.unstable[number]
        largest = 0.0
        for index, shard in shards_of(output):
            may_differ = None if unstable is None else unstable[index]
            largest = max(largest, _error(wanted[index], shard, may_differ))
        return largest


def shards_of(leaf: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """(index, value) of what this process has of a leaf: the whole, or its shards where others have
    some.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        yield ..., to_numpy(leaf)
        return
    seen = set()
    for shard in leaf.addressable_shards:
        where = str(shard.index)
        if where not in seen:
            seen.add(where)
            yield shard.index, to_numpy(shard.data)


def to_numpy(leaf: Any) -> np.ndarray:
    """A leaf on the host; keys as their data, low-precision floats as float32.

    One that other processes have a part of is gathered by all of them: they must all come here.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = whole(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if host.dtype == jax.dtypes.float0:
        return np.zeros(host.shape, np.int8)
    if jnp.issubdtype(host.dtype, jnp.inexact) and host.dtype.itemsize < 4:
        return host.astype(np.float32)
    return host


def _error(wanted: np.ndarray, output: np.ndarray, unstable: np.ndarray | None) -> float:
    """Largest difference; inf where shapes or NaNs disagree. Where `unstable` is True an integer
    may differ.
    """
    if wanted.shape != output.shape:
        return math.inf
    if not wanted.size:
        return 0.0
    if np.issubdtype(wanted.dtype, np.inexact):
        return _float_error(wanted, output)
    return _integer_error(wanted, output, unstable)


def _integer_error(wanted: np.ndarray, output: np.ndarray, unstable: np.ndarray | None) -> float:
    differs = wanted != output
    if unstable is not None:
        differs = differs & ~unstable
    if not differs.any():
        return 0.0
    distance = np.abs(wanted.astype(np.float64) - output.astype(np.float64))
    # large integers may be equal as floats
    return float(np.where(differs, np.maximum(distance, 1.0), 0.0).max())


def _float_error(wanted: np.ndarray, output: np.ndarray) -> float:
    finite = np.isfinite(wanted) & np.isfinite(output)
    same = (wanted == output) | (np.isnan(wanted) & np.isnan(output))
    if not (finite | same).all():
        return math.inf
    accurate: Any = np.complex128 if np.iscomplexobj(wanted) else np.float64
    with np.errstate(invalid="ignore"):
        distance = np.abs(wanted.astype(accurate) - output.astype(accurate))
        return float(np.where(finite, distance, 0.0).max())


def epsilon_of(classes: AxisClasses) -> float:
    """Machine epsilon of the lowest float precision that anything in the program is computed in."""
    lowest = 0.0
    for dtype in {value.dtype for value in _computed(classes)}:
        if dtype.startswith(("float", "bfloat", "complex")) and dtype != "float0":
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


def rounding_of(classes: AxisClasses) -> float:
    """How far outputs may differ because sums are taken in another order, relative to their
    scale.
    """
    eps, single = epsilon_of(classes), epsilon("float32")
    low = min(LOW_FACTOR * eps, COARSEST) if eps > single else 0.0
    return FACTOR * min(eps, single) * math.sqrt(longest_sum(classes)) + low


@dataclass(frozen=True, eq=False)
class ReferenceFunction:
    """A way to run the function whose outputs others are compared with.

    Attributes:
        run: Takes and returns flat leaves.
        shardings: Of the leaves it takes.
        against: What it is called in the evidence.
    """

    run: Callable[..., Sequence[Any]]
    shardings: tuple[Sharding, ...]
    against: str


def unsharded(traced: Traced, inputs: Inputs, mesh: MeshInfo) -> ReferenceFunction:
    """The unsharded function on one device, from the jaxpr that jax traced.

    A function that names several devices itself (a nested jit with shardings, a shard_map) cannot
    run on one; then it is the function as it stands, with replicated arguments. The user's
    constraints, and prints and callbacks that return nothing, are left out. One that is written for
    Explicit axes runs under them as it is written: what is searched was rewritten.
    """
    run = jax.jit(as_function(as_reference(traced.original), traced.program.name))
    if traced.own_mesh is not None:
        return _on_explicit_axes(run, traced, mesh)
    count = len(inputs.call.avals)
    alone: tuple[Sharding, ...] = (SingleDeviceSharding(mesh.own_device),) * count
    try:
        jax.block_until_ready(run(*inputs.place(alone)))
    except ValueError:
        if len(mesh.processes) > 1:  # so that every process has the whole outputs
            run = jax.jit(run, out_shardings=NamedSharding(mesh.auto, PartitionSpec()))
        return ReferenceFunction(
            run, (NamedSharding(mesh.auto, PartitionSpec()),) * count, "replicated function"
        )
    return ReferenceFunction(run, alone, "unsharded function")


def _on_explicit_axes(run: Callable[..., Any], traced: Traced, mesh: MeshInfo) -> ReferenceFunction:
    """The function under its own Explicit axes, with arguments as it was traced for."""
    if len(mesh.processes) > 1:
        run = jax.jit(run, out_shardings=NamedSharding(mesh.user, PartitionSpec()))
    specs = [aval.sharding.spec for aval in traced.original.in_avals]
    shardings = tuple(NamedSharding(mesh.user, spec) for spec in specs)
    return ReferenceFunction(run, shardings, "function under its own Explicit axes")


def reference_of(
    reference_function: ReferenceFunction, classes: AxisClasses, inputs: Inputs
) -> Reference:
    """Runs a reference function, and again with every float input nudged by one unit in the last
    place.
    """
    run, shardings = reference_function.run, reference_function.shardings
    outputs = [to_numpy(leaf) for leaf in run(*inputs.place(shardings))]
    nudged = [_nudged(run, inputs, shardings, seed) for seed in range(NUDGES)]
    rounding = rounding_of(classes)
    tolerances: list[float] = []
    unstable: list[np.ndarray | None] = []
    for number, wanted in enumerate(outputs):
        others = [leaves[number] for leaves in nudged]
        if np.issubdtype(wanted.dtype, np.inexact):
            unstable.append(None)
            tolerances.append(_tolerance(wanted, others, rounding))
        else:
            moved = np.asarray(np.any([other != wanted for other in others], axis=0))
            unstable.append(moved if moved.any() else None)
            tolerances.append(0.0)
    return Reference(
        tuple(outputs),
        tuple(unstable),
        tuple(tolerances),
        reference_function.against,
        classes.program.output_paths,
    )


def _tolerance(wanted: np.ndarray, nudged: Sequence[np.ndarray], rounding: float) -> float:
    """How far a float leaf may be off: by rounding relative to its scale, and by what nudged inputs
    change.
    """
    finite: Any = np.abs(wanted[np.isfinite(wanted)])
    scale = float(finite.max(initial=0.0))
    drifts = [_error(wanted, other, None) for other in nudged]
    drift = max((d for d in drifts if math.isfinite(d)), default=0.0)
    return rounding * scale + DRIFT_FACTOR * drift + float(np.finfo(np.float32).tiny)


def _nudged(
    run: Callable[..., Sequence[Any]], inputs: Inputs, shardings: Sequence[Any], seed: int
) -> list[np.ndarray]:
    """Outputs with each element of every float input moved by -1, 0 or +1 units in the last
    place.
    """
    rng = np.random.default_rng(seed)
    leaves: list[jax.Array] = []
    for leaf in inputs.place(shardings):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = _nudged_leaf(leaf, rng)
        leaves.append(leaf)
    return [to_numpy(output) for output in run(*leaves)]


def _nudged_leaf(leaf: jax.Array, rng: np.random.Generator) -> jax.Array:
    scale = 1.0 + epsilon(leaf.dtype) * rng.integers(-1, 2, leaf.shape)
    shards, kind = [], leaf.sharding.memory_kind
    for shard in leaf.addressable_shards:
        moved = np.asarray(shard.data).astype(np.float64) * scale[shard.index]
        place = SingleDeviceSharding(shard.device, memory_kind=kind)
        shards.append(jax.device_put(moved.astype(leaf.dtype), place))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
