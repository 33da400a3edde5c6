"""The outputs that layouts are compared with, and whether they can be trusted.

A reference is the unsharded function as jax compiles it. The compiler may get that wrong too
(XLA:CPU updates an array in place that it still reads), so the function is also run with every
equation by itself. Where the two differ, or a layout differs from both, a third opinion decides:
the function op by op, without jit. What the third opinion contradicts is wrong; where it agrees
with neither, nothing is decided, and that is said.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autoshard.axes.axis_classes import AxisClasses
from autoshard.evaluate.verification.compare import distances, shape_of, shards_of, to_numpy
from autoshard.evaluate.verification.inputs import Inputs
from autoshard.evaluate.verification.interpret import each_alone, op_by_op
from autoshard.evaluate.verification.rounding import Rounding, Spread, nudged
from autoshard.evidence.candidate import Verified
from autoshard.layout.mesh import MeshInfo
from autoshard.text import one_line
from autoshard.tracing.rewrite import as_function, as_reference
from autoshard.tracing.trace import Traced

log = logging.getLogger("autoshard")

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""How XLA:CPU compiles the function with every equation by itself, which is run a few times: half
as long (a decoder step 3.8 s of CPU time instead of 6.6, as compiled for a layout 1.8)."""

OP_BY_OP = "function run op by op (the compiler gets the unsharded function wrong)"
"""What outputs are compared with where the compiled unsharded function is wrong."""


class Verdict(enum.StrEnum):
    """Who is wrong where a layout differs from the unsharded function."""

    LAYOUT = "layout"
    REFERENCE = "reference"
    UNDECIDED = "undecided"


@dataclass(frozen=True, eq=False)
class ReferenceFunction:
    """A way to run the function whose outputs others are compared with.

    Attributes:
        run: Takes and returns flat leaves.
        shardings: Of the leaves it takes.
        against: What it is called in the evidence.
        each_alone: The same with every equation by itself and sums in another order, of a seed and
            flat leaves; None where that cannot be run.
        op_by_op: The same without jit; None where that cannot be run.
    """

    run: Callable[..., Sequence[Any]]
    shardings: tuple[Sharding, ...]
    against: str
    each_alone: Callable[..., Sequence[Any]] | None = None
    op_by_op: Callable[..., Sequence[Any]] | None = None


def unsharded(traced: Traced, inputs: Inputs, mesh: MeshInfo) -> ReferenceFunction:
    """The unsharded function on one device, from the jaxpr that jax traced.

    A function that names several devices itself (a nested jit with shardings, a shard_map) cannot
    run on one; then it is the function as it stands, with replicated arguments. The user's
    constraints, and prints and callbacks that return nothing, are left out. One that is written for
    Explicit axes runs under them as it is written: what is searched was rewritten.
    """
    closed = as_reference(traced.original)
    run = jax.jit(as_function(closed, traced.program.name))
    if traced.own_mesh is not None:
        return _on_explicit_axes(run, traced, mesh)
    on_cpu = mesh.own_device.platform == "cpu"
    apart = jax.jit(each_alone(closed), compiler_options=QUICKLY if on_cpu else None)
    single_ops = op_by_op(closed)
    count = len(inputs.call.avals)
    alone: tuple[Sharding, ...] = (SingleDeviceSharding(mesh.own_device),) * count
    try:
        jax.block_until_ready(run(*inputs.place(alone)))
    except ValueError:
        everywhere = NamedSharding(mesh.auto, PartitionSpec())
        if len(mesh.processes) > 1:  # so that every process has the whole outputs
            run = jax.jit(run, out_shardings=everywhere)
            apart = jax.jit(apart, out_shardings=everywhere)
        return ReferenceFunction(
            run, (everywhere,) * count, "replicated function", apart, single_ops
        )
    return ReferenceFunction(run, alone, "unsharded function", apart, single_ops)


def _on_explicit_axes(run: Callable[..., Any], traced: Traced, mesh: MeshInfo) -> ReferenceFunction:
    """The function under its own Explicit axes, with arguments as it was traced for."""
    if len(mesh.processes) > 1:
        run = jax.jit(run, out_shardings=NamedSharding(mesh.user, PartitionSpec()))
    specs = [aval.sharding.spec for aval in traced.original.in_avals]
    shardings = tuple(NamedSharding(mesh.user, spec) for spec in specs)
    return ReferenceFunction(run, shardings, "function under its own Explicit axes")


class Reference:
    """Outputs of the unsharded function, and how far each element may be from them.

    Attributes:
        outputs: By output leaf, as NumPy.
        against: What the outputs are of.
        finding: What is wrong with the function itself; "" where nothing is.
    """

    def __init__(
        self,
        reference_function: ReferenceFunction,
        classes: AxisClasses,
        inputs: Inputs,
        *,
        in_step: bool = False,
    ) -> None:
        """Runs the function in two ways, and a third one where they differ.

        Args:
            reference_function: How to run it.
            classes: Of its program.
            inputs: Its inputs.
            in_step: Several processes run it in step: all runs that could be needed are made at
                once, since what one of them needs the others would not know.
        """
        self._function, self._inputs, self._in_step = reference_function, inputs, in_step
        self._paths = classes.program.output_paths
        self._rounding = Rounding(classes)
        self._third: Sequence[np.ndarray] | str | None = None
        self.against, self.finding = reference_function.against, ""
        self.outputs = tuple(_host(reference_function.run(*self._placed())))
        self._spread = self._spread_of_sums()
        if in_step:
            self._run_all()
        self._fused = False
        if self._spread.sums_moved:
            if self._compare(self._spread.base, by_scale=True)[1]:
                self._spread.add(self.outputs)  # what fusing, and other kernels of products, do
                self._fused = True
            else:
                self._settle()

    def compare(self, outputs: Sequence[Any]) -> tuple[Verified, bool]:
        """(the leaf that is farthest off, whether all leaves agree)."""
        return self._compare(outputs)

    def arbitrate(self, outputs: Sequence[Any]) -> Verdict:
        """Who is wrong where `compare` says that outputs differ; `finding` then says why.

        Where it is the reference, comparisons are with the third opinion from now on.
        """
        third = self._third_opinion()
        if isinstance(third, str):
            self.finding = f"no third opinion: {third}"
            return Verdict.UNDECIDED
        wrong, agrees = self._compare(third)
        if agrees:
            return Verdict.LAYOUT
        before = self.outputs
        self.outputs = tuple(third)
        if self._compare(outputs)[1]:
            self._replaced(wrong)
            return Verdict.REFERENCE
        self.outputs = before
        self.finding = _differing("run op by op it agrees with neither", wrong)
        return Verdict.UNDECIDED

    def _settle(self) -> None:
        """The function as compiled and with every equation by itself differ: which is right?"""
        verdict = self.arbitrate(self._spread.base)
        if verdict is Verdict.REFERENCE:
            return
        if verdict is Verdict.LAYOUT:  # the compiler gets the equations by themselves wrong
            self._spread = self._spread_of_inputs()
            if self._in_step:
                self._run_all()
            return
        worst, _ = self._compare(self._spread.base)
        self.finding = (
            _differing("with every equation compiled by itself it gives other numbers", worst)
            + f"; {self.finding}"
        )

    def _replaced(self, wrong: Verified) -> None:
        self.against = OP_BY_OP
        self.finding = _differing(
            f"the compiler ({jax.default_backend()}, jax {jax.__version__}) gets the unsharded "
            "function wrong",
            wrong,
        )
        log.warning("%s", self.finding)

    def _third_opinion(self) -> Sequence[np.ndarray] | str:
        """Outputs of the function op by op, or why there are none."""
        if self._third is None:
            if self._function.op_by_op is None:
                self._third = f"the {self.against} cannot be run without jit"
            else:
                try:
                    self._third = _host(self._function.op_by_op(*self._placed()))
                except Exception as error:
                    self._third = f"the function cannot be run op by op ({one_line(error)})"
        return self._third

    # Comparing ------------------------------------------------------------------------------------

    def _compare(self, outputs: Sequence[Any], *, by_scale: bool = False) -> tuple[Verified, bool]:
        """(the leaf that is farthest off, whether all agree); see `Rounding.tolerance`."""
        shards = [list(shards_of(output)) for output in outputs]
        for number, output in enumerate(outputs):
            if shape_of(output) != self.outputs[number].shape:
                return Verified(math.inf, 0.0, self.against, self._paths[number]), False
        while True:
            worst, agrees = self._worst(shards, by_scale=by_scale)
            if agrees or not self._spread.double():
                return worst, agrees

    def _worst(
        self, shards: Sequence[list[tuple[Any, np.ndarray]]], *, by_scale: bool
    ) -> tuple[Verified, bool]:
        worst = Verified(0.0, 0.0, self.against, "")
        worst_ratio, agrees = -1.0, True
        for number, of_leaf in enumerate(shards):
            tolerance = self._tolerance(number, by_scale=by_scale)
            for index, shard in of_leaf:
                error, allowed = _farthest(self.outputs[number][index], shard, tolerance[index])
                agrees &= error <= allowed
                leaf = Verified(error, allowed, self.against, self._paths[number])
                if leaf.in_tolerances > worst_ratio:
                    worst, worst_ratio = leaf, leaf.in_tolerances
        return worst, agrees

    def _tolerance(self, number: int, *, by_scale: bool) -> np.ndarray:
        """By element of an output, how far it may be off."""
        spread = self._spread
        if spread.runs == 0:
            spread.double()
        wanted = self.outputs[number]
        return self._rounding.tolerance(
            number, wanted, spread, fused=self._fused, by_scale=by_scale
        )

    # Runs -----------------------------------------------------------------------------------------

    def _placed(self) -> list[jax.Array]:
        return self._inputs.place(self._function.shardings)

    def _run_all(self) -> None:
        while self._spread.double():
            pass

    def _spread_of_sums(self) -> Spread:
        """What other orders of sums, and of every other run moved inputs, do; only the latter where
        the function cannot be run with its equations by themselves.
        """
        apart = self._function.each_alone
        if apart is None:
            return self._spread_of_inputs()

        def run(number: int) -> list[np.ndarray]:
            leaves = self._placed() if number % 2 else self._nudged(number)
            return _host(apart(np.uint32(number), *leaves))

        try:
            base = _host(apart(np.uint32(0), *self._placed()))
        except Exception as error:
            log.info("equations cannot be run by themselves: %s", one_line(error))
            return self._spread_of_inputs()
        return Spread(run, base, sums_moved=True)

    def _spread_of_inputs(self) -> Spread:
        def run(number: int) -> list[np.ndarray]:
            return _host(self._function.run(*self._nudged(number)))

        return Spread(run, self.outputs, sums_moved=False)

    def _nudged(self, seed: int) -> list[jax.Array]:
        rng = np.random.default_rng(seed)
        leaves = []
        for leaf in self._placed():
            floats = jnp.issubdtype(leaf.dtype, jnp.floating)
            leaves.append(nudged(leaf, rng) if floats else leaf)
        return leaves


def _host(leaves: Sequence[Any]) -> list[np.ndarray]:
    return [to_numpy(leaf) for leaf in leaves]


def _farthest(wanted: np.ndarray, output: np.ndarray, allowed: np.ndarray) -> tuple[float, float]:
    """Error and tolerance of the element that is farthest off for its own tolerance."""
    distance = distances(wanted, output)
    if distance.shape != allowed.shape:
        return math.inf, 0.0
    if not distance.size:
        return 0.0, 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(distance > 0, distance / allowed, 0.0)
    ratio = np.where(np.isinf(allowed), 0.0, ratio)  # inf / inf: this element says nothing
    at = int(np.argmax(ratio))
    return float(distance.flat[at]) if ratio.flat[at] else 0.0, float(allowed.flat[at])


def _differing(what: str, worst: Verified) -> str:
    return (
        f"{what}: {worst.leaf} differs by {worst.max_abs_err:.3g}, tolerance {worst.tolerance:.3g}"
    )
