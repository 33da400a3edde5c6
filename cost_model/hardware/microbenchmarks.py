"""Microbenchmarks of matmuls, memory and collectives on the devices of a mesh.

A program repeats its operation within a call for about `CALL_S` seconds, and what a call that does
it once takes is subtracted. Programs are timed in interleaved rounds, so that a busy moment hits
them alike, in fewer of them what is long. Where its arguments lie in memory alone makes an
operation of microseconds up to twice as slow, the same in every round, so they are put in `PLACES`
places, a round for each in turn, or in as many as `PLACED_BYTES` a device hold. The lowest tenth of
the rounds of a place counts, since other work on the machine only ever adds time, and the median
over the places. Even and odd rounds, each on their own, say how far that can be relied on
(`Sample.spread`).

The constants below were chosen by hand on 8 fake CPU devices over 2 cores, until
`test_two_calibrations_agree_and_beat_the_preset` held: two calibrations agree within 25 %.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cost_model.hardware.backend import backend_for
from autoshard.evidence.collectives import KINDS

CALL_S = 2e-3
"""Seconds for which one call repeats its operation: long against the dispatch of a call."""

REPEATS = (1, 8, 64, 512)
"""Repetitions that are tried until a call takes `CALL_S`; at most the last of them."""

PLACES = 8
"""Places in memory for the arguments of each operation; the median over them counts."""

PLACED_BYTES = 2**22
"""Bytes a device that the copies of one operation's arguments may take together: large arguments
lie in one place, where the place no longer matters."""

LOWEST = 0.1
"""Share of the rounds of a place, the fastest, that counts: other work only ever adds time."""

MATMUL_ROWS = (64, 128, 256, 512)
"""Rows and columns of the matmuls: from what dispatch decides to what the rate decides."""

STREAM_BYTES = (2**18, 2**20, 2**22)
"""Bytes a device that are read and written once."""

COLLECTIVE_BYTES = (2**12, 2**16, 2**20, 2**22)
"""Full bytes of the collectives: from what latency decides to what bandwidth decides."""

OVERLAP_ROWS, OVERLAP_BYTES = 256, 2**20
"""The matmul and the all_reduce that run together, both also measured alone."""

Run = Callable[[int, int], Any]
"""Does an operation so many times, on arguments in the place of this number, below `PLACES`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One microbenchmark.

    Attributes:
        what: `matmul float32`, `stream`, or a kind of collective.
        mesh_axis: Over which it went, "" for compute.
        group_size: Devices in its group.
        amount: Flops of a matmul, bytes moved by a stream, the full bytes of a collective; per
            device.
        measured_s: Seconds of one operation: of the lowest rounds, median over the places of its
            arguments.
        fitted_s: What the fit predicts.
        spread: How far even and odd rounds, each on their own, are apart, relative: 0.1 where one
            of them takes 10 % more.
    """

    what: str
    mesh_axis: str
    group_size: int
    amount: float
    measured_s: float = 0.0
    fitted_s: float = 0.0
    spread: float = 0.0

    @property
    def residual(self) -> float:
        """Relative: 0.1 where the fit is 10 % above the measurement."""
        return self.fitted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Microbenchmark:
    """A sample that is not measured yet, and what to run for it."""

    sample: Sample
    run: Run


# The programs -------------------------------------------------------------------------------------


def compute_benchmarks(mesh: Mesh, dtypes: Sequence[str]) -> Iterator[Microbenchmark]:
    """Matmuls of each dtype, and streams through memory."""
    everywhere = PartitionSpec(tuple(mesh.axis_names))
    for dtype in dtypes:
        for rows in MATMUL_ROWS:
            x = jnp.ones((mesh.size * rows, rows), dtype)
            w = jnp.ones((rows, rows), dtype) / rows
            run = _repeated(mesh, _matmul, (everywhere, PartitionSpec()), x, w)
            yield Microbenchmark(Sample(f"matmul {dtype}", "", 1, 2.0 * rows**3), run)
    for size in STREAM_BYTES:
        x = jnp.ones((mesh.size * size // 4,), np.float32)
        run = _repeated(mesh, lambda a: a * 1.0001 + 1e-6, (everywhere,), x)
        yield Microbenchmark(Sample("stream", "", 1, 2.0 * size), run)


def collective_benchmarks(mesh: Mesh) -> Iterator[Microbenchmark]:
    """Every kind of collective that the devices have, over each mesh axis on its own."""
    everywhere = PartitionSpec(tuple(mesh.axis_names))
    backend = backend_for(mesh.devices.flat[0].platform)
    kinds = [kind for kind in KINDS if kind != "reduce_scatter" or backend.has_reduce_scatter]
    for name, n in mesh.shape.items():
        axis, devices = str(name), int(n)
        if devices == 1:
            continue
        for kind in kinds:
            operation = _collective(kind, axis, devices)
            for full_bytes in COLLECTIVE_BYTES:
                sharded = kind in ("all_gather", "all_to_all")
                held_bytes = full_bytes // devices if sharded else full_bytes
                x = jnp.ones((mesh.size * held_bytes // 4,), np.float32)
                run = _repeated(mesh, operation, (everywhere,), x)
                yield Microbenchmark(Sample(kind, axis, devices, float(full_bytes)), run)


def overlap_run(mesh: Mesh) -> Run | None:
    """A matmul and an all_reduce that do not depend on each other.

    Over the first mesh axis of more than one device; None where there is none.
    """
    axis = next((str(axis) for axis, n in mesh.shape.items() if n > 1), None)
    if axis is None:
        return None
    everywhere = PartitionSpec(tuple(mesh.axis_names))
    all_reduce = _collective("all_reduce", axis, int(mesh.shape[axis]))

    def both(pair: Any, w: Any) -> Any:
        a, b = pair
        return a @ w, all_reduce(b)

    rows = OVERLAP_ROWS
    pair = (
        jnp.ones((mesh.size * rows, rows), np.float32),
        jnp.ones((mesh.size * OVERLAP_BYTES // 4,), np.float32),
    )
    w = jnp.ones((rows, rows), np.float32) / rows
    return _repeated(mesh, both, ((everywhere, everywhere), PartitionSpec()), pair, w)


def _matmul(a: Any, b: Any) -> Any:
    return (a @ b).astype(a.dtype)


def _collective(kind: str, axis: str, n: int) -> Callable[[Any], Any]:
    """One collective that returns what has the shape of its argument."""
    ring = [(i, (i + 1) % n) for i in range(n)]

    def reduce_scatter(x: Any) -> Any:
        return jnp.tile(jax.lax.psum_scatter(x, axis, tiled=True), n) * (1 / n)

    return {
        "all_gather": lambda x: jax.lax.all_gather(x, axis, tiled=True)[: len(x)],
        "reduce_scatter": reduce_scatter,
        "all_reduce": lambda x: jax.lax.psum(x, axis) * (1 / n),
        "all_to_all": lambda x: jax.lax.all_to_all(x.reshape(n, -1), axis, 0, 0).reshape(-1),
        "collective_permute": lambda x: jax.lax.ppermute(x, axis, ring),
    }[kind]


def _repeated(mesh: Mesh, operation: Callable[..., Any], specs: Sequence[Any], *args: Any) -> Run:
    """A compiled program that does an operation so many times on every device.

    What the operation returns is its first argument of the next time, so that none can be left out.
    """

    def body(times: Any, x: Any, *rest: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, carry: operation(carry, *rest), x)

    def put(value: Any, spec: Any) -> Any:
        return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), value, spec)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs[0], check_vma=False
    )
    times_on_devices = functools.cache(lambda times: put(np.int32(times), PartitionSpec()))
    argument_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    copies = int(np.clip(PLACED_BYTES * mesh.size // argument_bytes, 1, PLACES))
    places = []
    for _ in range(copies):
        places.append([put(value, spec) for value, spec in zip(args, specs, strict=True)])
    compiled = jax.jit(mapped).lower(times_on_devices(1), *places[0]).compile()
    return lambda times, place: compiled(times_on_devices(times), *places[place % copies])


# The timing ---------------------------------------------------------------------------------------


class Stopwatch:
    """Times a program, each round in the next place of its arguments."""

    def __init__(self, run: Run, repeats: int) -> None:
        self._run, self._repeats = run, repeats
        # of each round: seconds of a call that does it once, and of one with all repetitions more
        self._rounds: list[tuple[float, float]] = []

    def time_round(self) -> None:
        """Times a call that does the operation once, and one with so many repetitions more."""
        place = len(self._rounds) % PLACES
        self._rounds.append((self._call_s(1, place), self._call_s(1 + self._repeats, place)))

    def _call_s(self, times: int, place: int) -> float:
        start_s = time.perf_counter()
        jax.block_until_ready(self._run(times, place))
        return time.perf_counter() - start_s

    def operation_s(self, rounds: slice = slice(None)) -> float:
        """Seconds of one operation, from these rounds of each place.

        An upper bound where repeating it takes no longer than doing it once.
        """
        lowest = []  # of each place: seconds of a call that does it once, of one that repeats it
        for place in range(PLACES):
            timed = self._rounds[place::PLACES][rounds]
            if timed:
                lowest.append(np.quantile(timed, LOWEST, axis=0))
        once_s, repeated_s = np.median(lowest, axis=0)
        repetitions_s = repeated_s - once_s if repeated_s > once_s else repeated_s
        return float(repetitions_s) / self._repeats

    def spread(self) -> float:
        """How far even and odd rounds are apart, relative; 0 where there are too few to tell."""
        if len(self._rounds) <= PLACES:
            return 0.0
        even_s, odd_s = (self.operation_s(slice(first, None, 2)) for first in (0, 1))
        return abs(even_s / odd_s - 1.0)


def interleaved(runs: Sequence[Run], rounds: int) -> list[Stopwatch]:
    """Times all programs in rounds: what is short is repeated more, what is long less often."""
    watches, periods = [], []
    for run in runs:
        repeats = CALL_S / _rough_operation_s(run)
        watches.append(Stopwatch(run, int(np.clip(repeats, 1, REPEATS[-1]))))
        # of what is longer than a call, two rounds a place are left at least
        periods.append(int(np.clip(1 / repeats, 1, max(1, rounds // (2 * PLACES)))))
    for number in range(rounds):
        for position, (watch, period) in enumerate(zip(watches, periods, strict=True)):
            if (number + position) % period == 0:
                watch.time_round()
    return watches


def _rough_operation_s(run: Run) -> float:
    """Seconds of one operation, from as many repetitions as tell them from the call itself."""
    for repeats in REPEATS:
        watch = Stopwatch(run, repeats)
        for _ in range(PLACES):
            watch.time_round()
        if watch.operation_s() * repeats > CALL_S / 2:
            break
    return watch.operation_s()
