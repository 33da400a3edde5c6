"""The plan: a jitted drop-in for the function, with the shardings and inner constraints of one
layout.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import report, start
from autoshard.compile import Built, Compiled, CompilerOptions, build, compile_built
from autoshard.constrain import PlacedConstraint, constraints_for, placed
from autoshard.cost_model.hardware import Hardware
from autoshard.errors import ArgumentError, PathError, TargetError
from autoshard.explain import Explanation, explain
from autoshard.in_place import InPlace
from autoshard.layout import AxisRule, Layout, to_partition_spec
from autoshard.meshes import MeshInfo
from autoshard.minimise import MinimalConstraints, minimise
from autoshard.otherwise import LeafExplanation, Leaves, WhatIf, explain_leaf, what_if
from autoshard.pins import PinMap
from autoshard.report_html import fragment_html
from autoshard.signature import Call, CallOptions, flatten_call, is_static
from autoshard.table import SpecTable
from autoshard.tabulate import table_of
from autoshard.throughput import Throughput
from autoshard.trace import Traced
from autoshard.transfer import put
from autoshard.trial import Skipped, Trial

log = logging.getLogger("autoshard")


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether the plan's numbers are right, and how that is known. True in a condition only if they
    were compared.

    Attributes:
        ok: True if outputs were compared with a reference and agree.
        reason: Against what, or why they were not compared.
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"{'yes' if self.ok else 'no'} ({self.reason})"


@dataclass(eq=False)
class Plan:
    """Axis rules and pins bound to a function and a mesh; callable like the function.

    Attributes:
        verified: Whether outputs were compared with a reference, and which.
        trials: Every candidate with prediction, evidence or rejection.
        skipped: Presets that make no sense for this function, with the reason.
        notes: What a person should know (carry that was assumed, effects, conversions, advice).
        advice: Changes of the program that are predicted to gain more, one line each (see
            `autoshard.advice`); none was looked for where nothing was compiled.
        bound: How much faster than the best one found any layout could be, by the model.
        chosen: Name of the mesh shape or variant that won, where several were searched.
        throughput: Of the plan as predicted by the search; None if nothing was searched.
        samples_per_step: How many samples a step has, where somebody said so.
        when: Date and time (UTC) at which the search ended; "" if nothing was searched.
        search_s: How long it took.
    """

    user_fn: Callable[..., Any]
    options: CallOptions
    traced: Traced
    layout: Layout
    mesh: MeshInfo
    carry: tuple[tuple[int, int], ...]
    verified: Verification
    trials: tuple[Trial, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    compiler_options: CompilerOptions | None = None
    compiled: Compiled | None = None
    bound: str = ""
    chosen: str = ""
    throughput: Throughput | None = None
    samples_per_step: float | None = None
    when: str = ""
    search_s: float | None = None
    rebind: Callable[[Plan, Call], Plan] | None = field(default=None, repr=False)
    _built: Built | None = field(default=None, repr=False)
    leaves: dict[str | None, Leaves] = field(default_factory=dict, init=False, repr=False)
    _others: list[Plan] = field(default_factory=list, repr=False)

    # What it says ---------------------------------------------------------------------------------

    @property
    def rules(self) -> tuple[AxisRule, ...]:
        """The axis rules, in order."""
        return self.layout.rules

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by leaf path."""
        specs = map(to_partition_spec, self.layout.input_specs())
        return dict(zip(self.traced.program.input_paths, specs, strict=True))

    @property
    def constraints(self) -> tuple[PlacedConstraint, ...]:
        """What is stated inside the function, with source lines."""
        return placed(self.layout, constraints_for(self.layout))

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Shardings of the positional arguments, as `jax.jit(fn, in_shardings=...)` takes them
        (statics left out).
        """
        args, _ = self.traced.call.rebuild(self.built.in_shardings)
        static = {i for i, _ in self.traced.call.statics if isinstance(i, int)}
        return tuple(arg for i, arg in enumerate(args) if i not in static)

    @property
    def out_shardings(self) -> Any:
        """Shardings of the outputs, in the structure of the outputs."""
        return self.traced.unflatten_outputs(self.built.out_shardings)

    @property
    def table(self) -> SpecTable:
        """The plan as a file; `plan.table.save(path)`."""
        return table_of(self)

    def __str__(self) -> str:
        return report.plan_text(self)

    def records(self) -> list[dict[str, Any]]:
        """The candidates as plain dicts, for a data frame or JSON: prediction, evidence, reason."""
        return [trial.to_dict() for trial in self.trials]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fragment_html(self.table)

    def __repr__(self) -> str:
        rules = ", ".join(map(str, self.rules)) or "replicated"
        return f"<Plan of {self.traced.program.name} on {dict(self.mesh.axes)}: {rules}; verified: {self.verified}>"

    # What it does ---------------------------------------------------------------------------------

    @property
    def built(self) -> Built:
        """The layout as a jitted function of flat leaves."""
        if self._built is None:
            self._built = (
                self.compiled.built if self.compiled else build(self.traced, self.layout, self.mesh)
            )
        return self._built

    def compile(self) -> Compiled:
        """The compiled program: the one the search compiled, else compiled now, once."""
        if self.compiled is None:
            self._needs_devices("compile()")
            self.compiled = compile_built(
                self.built, self.mesh, compiler_options=self.compiler_options
            )
        return self.compiled

    def minimise(self) -> MinimalConstraints:
        """The fewest constraints inside the function that give the same collectives, in the words
        of the source.

        Takes some dozens of runs of Shardy's passes and a few compilations; none for a plan of
        another machine.
        """
        compiled = None if self.mesh.target is not None else self.compile
        return minimise(self.traced, self.layout, self.mesh, compiled, self.compiler_options)

    @overload
    def explain(
        self, leaf: None = None, *, hardware: Hardware | str | None = None
    ) -> Explanation: ...

    @overload
    def explain(self, leaf: str, *, hardware: Hardware | str | None = None) -> LeafExplanation: ...

    def explain(
        self, leaf: str | None = None, *, hardware: Hardware | str | None = None
    ) -> Explanation | LeafExplanation:
        """What the plan moves, from which source line and rule, what each device stores, and why no
        preset is better.

        Args:
            leaf: A leaf path: explains its spec instead, and what each other one would cost.
            hardware: What seconds are predicted for, a preset or file; by default the mesh's
                devices.

        Raises:
            PathError: If there is no such leaf.
        """
        return explain(self, hardware) if leaf is None else explain_leaf(self, leaf, hardware)

    def what_if(self, pins: PinMap, *, hardware: Hardware | str | None = None) -> WhatIf:
        """Predicts the plan with other pins; `.compile()` of the answer asks the compiler.

        The first question builds the predictor's tables, later ones take milliseconds.

        Raises:
            PathError: If a pin names no leaf.
            SpecError: If a spec does not fit its leaf.
        """
        return what_if(self, pins, hardware)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan. Arrays that are not laid out as it needs are moved; donated arguments are
        consumed.
        """
        self._needs_devices("calling the plan")
        call = flatten_call(self.user_fn, args, kwargs, self.options)
        plan = self if call.same_as(self.traced.call) else self._for(call)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            return self._finished(
                args, plan.traced.unflatten_outputs(plan.built.function(*call.leaves))
            )
        executable = plan.compile().executable
        times = Counter(
            id(leaf) for leaf in call.leaves
        )  # jax dies of a donated array that is passed twice
        leaves = [
            _private(leaf, sharding)
            if donated and times[id(leaf)] > 1
            else _moved(leaf, aval, sharding, donated)
            for leaf, aval, sharding, donated in zip(
                call.leaves,
                plan.traced.call.avals,
                plan.built.in_shardings,
                plan.traced.call.donated,
                strict=True,
            )
        ]
        return self._finished(args, plan.traced.unflatten_outputs(executable(*leaves)))

    def _finished(self, args: tuple[Any, ...], outputs: Any) -> Any:
        """The outputs as the person's function returns them; modules that it changes in place are
        changed.
        """
        return self.user_fn.finish(args, outputs) if isinstance(self.user_fn, InPlace) else outputs

    @property
    def fn(self) -> Callable[..., Any]:
        """The function with the constraints inside, not jitted; differentiable and vmappable as the
        original is.
        """

        def constrained(*args: Any, **kwargs: Any) -> Any:
            call = flatten_call(self.user_fn, args, kwargs, self.options)
            plan = self if call.same_as(self.traced.call) else self._for(call)
            return plan.traced.unflatten_outputs(plan.built.function(*call.leaves))

        constrained.__name__ = constrained.__qualname__ = self.traced.program.name
        return constrained

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for these arguments (arrays or ShapeDtypeStructs), as `jax.jit(fn).lower` does.

        For a target what comes back is for reading: its own `compile()` asks jax for devices that
        are not here.
        """
        call = flatten_call(self.user_fn, args, kwargs, self.options)
        plan = self if call.same_as(self.traced.call) else self._for(call)
        return plan.built.lower()

    def place(self, argument: int | str, tree: Any) -> Any:
        """A copy of an argument on the devices, laid out as the plan needs it; yours stays as it
        is.

        Args:
            argument: Position or name of the parameter.
            tree: The argument: the structure that it had in `example_args`.

        Raises:
            ArgumentError: If the function has no such argument.
            PathError: If the tree has other leaves than the argument had.
        """
        self._needs_devices("place(...)")
        paths = self.traced.program.input_paths
        _, numbers = start.owned(self, argument, "place")
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [i for i, leaf in enumerate(leaves) if not is_static(leaf)]
        if len(arrays) != len(numbers):
            raise PathError(
                f"place({argument!r}, ...): the tree has {len(arrays)} array leaves, but the "
                f"argument had "
                f"{len(numbers)} ({', '.join(paths[i] for i in numbers[:4])}, ...). Pass the same "
                f"structure."
            )
        avals, shardings = self.traced.call.avals, self.built.in_shardings
        for position, number in zip(arrays, numbers, strict=True):
            if avals[number].dtype != jax.dtypes.float0:
                leaves[position] = _private(leaves[position], shardings[number])
        return jax.tree.unflatten(treedef, leaves)

    def _needs_devices(self, what: str) -> None:
        if self.mesh.target is not None:
            raise TargetError(
                f"{what}: this plan is for {self.mesh.target}, which is not here, so nothing can "
                f"run on it. Save its "
                f"table, plan.table.save(path), and apply it where the devices are: "
                f"autoshard.apply(fn, args, mesh, "
                f"path)."
            )

    def abstract(self, argument: int | str) -> Any:
        """An argument as `jax.ShapeDtypeStruct`s with the plan's shardings, in its structure.

        What orbax restores into: `checkpointer.restore(path, plan.abstract("params"))` puts each
        shard where it belongs, whatever plan or mesh it was saved under.

        Args:
            argument: Position or name of the parameter.

        Raises:
            ArgumentError: If the function has no such argument.
        """
        return start.abstract(self, argument)

    def _for(self, call: Call) -> Plan:
        """The plan for another signature: traced anew, the same rules, no search; remembered."""
        for plan in self._others:
            if call.same_as(plan.traced.call):
                return plan
        if self.rebind is None:
            raise ArgumentError("this plan serves only the shapes that it was made for.")
        plan = self.rebind(self, call)
        changed = [
            f"{path} {tuple(new.shape)}"
            for path, new in zip(call.paths, call.avals, strict=True)
            if (new.shape, new.dtype) not in {(o.shape, o.dtype) for o in self.traced.call.avals}
        ]
        log.info(
            "new signature (%s): traced again, the same rules applied, no search",
            ", ".join(changed[:3]) or "same shapes",
        )
        self._others.append(plan)
        return plan


def _moved(leaf: Any, aval: jax.ShapeDtypeStruct, sharding: NamedSharding, donated: bool) -> Any:
    """The leaf laid out as needed: itself where it is so already, else a copy; donating that spares
    the original.
    """
    if aval.dtype == jax.dtypes.float0:
        return leaf
    if isinstance(leaf, jax.Array) and (
        leaf.sharding == sharding
        or (leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim))
    ):
        return leaf if leaf.sharding == sharding else put(leaf, sharding)
    if aval.weak_type and not isinstance(leaf, jax.Array):
        return leaf
    return _private(leaf, sharding) if donated else put(leaf, sharding)


def _private(leaf: Any, sharding: NamedSharding) -> Any:
    """A copy with this sharding that shares no buffer with the leaf.

    `device_put` reuses the shards that already lie where they should, `may_alias=False` or not.
    """
    placed = put(leaf, sharding)
    if not isinstance(leaf, jax.Array):
        return placed
    here = leaf.sharding.devices_indices_map(leaf.shape)
    there = sharding.devices_indices_map(leaf.shape)
    shared = any(here.get(device) == index for device, index in there.items())
    return placed.copy() if shared else placed
