"""What a search does on the devices: compiles layouts, compares their outputs, times them.

All of it is asked for by a candidate's key or layout and answered in plain values, so that several
processes can do it together (`multiprocess`). Whatever goes wrong with a layout is an exception, of
which the evaluation makes a rejection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.compiler.compile import Built, Compiled, CompilerOptions, build, compile_built
from autoshard.compiler.isolated import Isolation
from autoshard.compiler.worker_process import Failure
from autoshard.evaluate.measure import measure
from autoshard.evaluate.shrink import shrink
from autoshard.evaluate.verification.inputs import Inputs, inputs_for
from autoshard.evaluate.verification.reference import (
    Reference,
    ReferenceFunction,
    Verdict,
    unsharded,
)
from autoshard.evidence.candidate import Measured, Verified
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.processes.process_group import SINGLE_PROCESS, Peers


@dataclass(frozen=True, slots=True)
class Compared:
    """Outputs held against others.

    Attributes:
        verified: The leaf that is farthest off.
        agrees: Whether all leaves are near enough.
    """

    verified: Verified
    agrees: bool


@dataclass(frozen=True, slots=True)
class Arbitrated:
    """What a third opinion says of a difference.

    Attributes:
        verdict: Who is wrong.
        finding: What is wrong with the reference, or why nothing was decided.
        compared: The layout against the reference that stands now.
    """

    verdict: Verdict
    finding: str
    compared: Compared


@dataclass(eq=False)
class DeviceRunner:
    """The devices of a mesh, with what was compiled for them by key.

    Attributes:
        prepared: The traced request.
        inputs: Values of its arguments.
        compiler_options: Passed to XLA as they are.
        peers: Processes that have devices of the mesh.
        compiled: By key.
        isolation: Compiles in a process of its own first; None for compiling here.
    """

    prepared: Prepared
    inputs: Inputs
    compiler_options: CompilerOptions | None
    peers: Peers = SINGLE_PROCESS
    compiled: dict[str, Compiled] = field(default_factory=dict)
    isolation: Isolation | None = None
    _reference: Reference | None = None
    _reference_key: str | None = None
    _start: Callable[[], None] | None = None

    def compile(
        self,
        key: str,
        layout: Layout,
        built: Built | None,
        time_of: Callable[[Sequence[Any]], float] | None,
    ) -> Compiled:
        """Compiles a layout, to run it later.

        Args:
            key: Of the candidate.
            layout: Its layout.
            built: The same, if it was built already.
            time_of: As for `compile_built`.
        """
        mesh = self.prepared.request.mesh
        built = built or build(self.prepared.traced, layout, mesh)
        options = self.compiler_options
        self.compiled[key] = compile_built(built, mesh, compiler_options=options, time_of=time_of)
        return self.compiled[key]

    def forget(self, key: str) -> None:
        """Drops what was compiled."""
        self.compiled.pop(key, None)

    def set_reference(self, other: str | None, name: str) -> str:
        """Runs what later comparisons are with: the unsharded function, or another compiled layout
        of this name.

        Returns:
            What is wrong with it; "" where nothing is.
        """
        if self._reference is not None and self._reference_key == other:
            return self._reference.finding
        if other is None:
            reference_function = unsharded(
                self.prepared.traced, self.inputs, self.prepared.request.mesh
            )
        else:
            known = self.compiled[other]
            reference_function = ReferenceFunction(
                known.run, known.built.in_shardings, f"layout {name}"
            )
        self._reference = self._reference_of(reference_function, self.prepared, self.inputs)
        self._reference_key = other
        return self._reference.finding

    def compare(self, key: str) -> Compared:
        """A layout's outputs against those of what `set_reference` ran last."""
        assert self._reference is not None
        return self._run_and_compare(self.compiled[key], self.inputs, self._reference)

    def arbitrate(self, key: str, layout: Layout, compared: Compared) -> Arbitrated:
        """A third opinion on a layout whose outputs differ from the unsharded function's: of the
        function run op by op, at smaller sizes where it is too long for that.

        Args:
            key: Of the candidate.
            layout: Its layout.
            compared: What `compare` said.
        """
        assert self._reference is not None
        outputs = self._outputs(self.compiled[key], self.inputs)
        verdict = self._reference.arbitrate(outputs)
        finding = self._reference.finding
        if verdict is Verdict.REFERENCE:
            compared = Compared(*self._reference.compare(outputs))
        elif verdict is Verdict.UNDECIDED:
            small = self._arbitrate_small(layout)
            if isinstance(small, str):
                finding = f"{finding}; {small}"
            else:
                verdict, finding = Verdict.LAYOUT, small.finding
        return Arbitrated(verdict, finding, compared)

    def _arbitrate_small(self, layout: Layout) -> Arbitrated | str:
        """The same at smaller sizes; why nothing is decided there either, or that the layout is
        wrong.
        """
        shrunk = self._shrunk(layout)
        if isinstance(shrunk, str):
            return f"not decided at smaller sizes: {shrunk}"
        compiled, inputs, reference, factor = shrunk
        outputs = self._outputs(compiled, inputs)
        compared = Compared(*reference.compare(outputs))
        if compared.agrees:
            return f"at sizes divided by up to {factor} it is right"
        verdict = reference.arbitrate(outputs)
        if verdict is not Verdict.LAYOUT:
            return f"at sizes divided by up to {factor}: {reference.finding}"
        return Arbitrated(verdict, "", compared)

    def compare_small(self, layout: Layout) -> tuple[Compared, int] | str:
        """The same at sizes divided by up to a factor, against the unsharded function at these, or
        why that is not possible; and the factor.
        """
        shrunk = self._shrunk(layout)
        if isinstance(shrunk, str):
            return shrunk
        compiled, inputs, reference, factor = shrunk
        return self._run_and_compare(compiled, inputs, reference), factor

    def _shrunk(self, layout: Layout) -> tuple[Compiled, Inputs, Reference, int] | str:
        """A layout compiled at sizes divided by up to a factor, inputs and reference there, and the
        factor; or why that is not possible.
        """
        shrunk = shrink(self.prepared, layout)
        if isinstance(shrunk, str):
            return shrunk
        traced, mesh = shrunk.prepared.traced, shrunk.prepared.request.mesh
        built = build(traced, shrunk.layout, mesh)
        options = self.compiler_options
        if self.isolation is not None:
            tried = self.isolation.compile(built, compiler_options=options)
            if isinstance(tried, Failure):
                return f"where it does not compile: {tried.reason}"
        inputs = inputs_for(traced.call, traced.program)
        reference = self._reference_of(unsharded(traced, inputs, mesh), shrunk.prepared, inputs)
        compiled = compile_built(built, mesh, compiler_options=options)
        return compiled, inputs, reference, shrunk.factor

    def _reference_of(
        self, reference_function: ReferenceFunction, prepared: Prepared, inputs: Inputs
    ) -> Reference:
        classes = prepared.problem.logical_axes.classes
        in_step = self.peers is not SINGLE_PROCESS
        return Reference(reference_function, classes, inputs, in_step=in_step)

    def measure(
        self,
        keys: Mapping[str, str],
        keep_inputs: bool,
        late: Callable[[], bool],
        on_round: Callable[[int, Mapping[str, float]], None] | None,
    ) -> dict[str, Measured]:
        """Times layouts against each other; see `measure.measure`.

        Args:
            keys: By name.
            keep_inputs: As there, and so are the others.
            late: True once time is up.
            on_round: Called after each round.
        """
        return measure(
            {name: self.compiled[key] for name, key in keys.items()},
            self.inputs,
            self.prepared.carry,
            keep_inputs=keep_inputs,
            late=late,
            on_round=on_round,
            peers=self.peers,
            sync=self._sync,
        )

    def _run_and_compare(
        self, compiled: Compiled, inputs: Inputs, reference: Reference
    ) -> Compared:
        return Compared(*reference.compare(self._outputs(compiled, inputs)))

    def _outputs(self, compiled: Compiled, inputs: Inputs) -> list[Any]:
        leaves: list[Any] = []
        self.peers.run_on_all(lambda: leaves.extend(inputs.place(compiled.built.in_shardings)))
        return list(compiled.run(*leaves))

    def _sync(self) -> None:
        """Makes devices of several processes wait for each other."""
        if self.peers is SINGLE_PROCESS:
            return
        if self._start is None:
            mesh = self.prepared.request.mesh.auto
            everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            ones = jax.make_array_from_callback(
                (mesh.size,), everywhere, lambda index: np.ones(mesh.size, np.float32)[index]
            )
            total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._start = lambda: jax.block_until_ready(total(ones))
        self._start()
