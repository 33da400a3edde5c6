"""What runs: a layout bound to a function and a mesh, as a jitted drop-in for the function."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.compiler.compile import Built, Compiled, CompilerOptions, build, compile_built
from autoshard.compiler.transfer import put
from autoshard.errors import ArgumentError, PathError, TargetError
from autoshard.evidence.candidate import Candidate, Skipped
from autoshard.evidence.throughput import Throughput
from autoshard.evidence.timings import Timings
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.constraints import PlacedConstraint, constraints_for, placed
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.layout.spec import to_partition_spec
from autoshard.tracing.functionalize import FunctionalizedStep
from autoshard.tracing.jit_options import CallOptions
from autoshard.tracing.signature import Call, flatten_call
from autoshard.tracing.trace import Traced

log = logging.getLogger("autoshard")

SHOWN_LEAVES = 3
"""So many leaves are named in a message. Chosen by hand; no test depends on it."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether the plan's outputs are right. True in a condition only if they were compared.

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


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """Axis rules and pins bound to a function and a mesh; callable like the function.

    Attributes:
        user_fn: The function.
        options: Its statics and donated arguments.
        traced: The function as it was traced.
        layout: The axis rules.
        mesh: The mesh.
        carry: Pairs (input leaf, output leaf): outputs that are arguments of the next step.
        verified: Whether outputs were compared with a reference, and which.
        candidates: Every candidate with prediction, evidence or rejection.
        skipped: Presets that make no sense for this function, with the reason.
        notes: What a user should know (carry that was assumed, effects, conversions, advice).
        advice: Changes of the program that are predicted to gain more, one line each (see
            `autoshard.report.advice`); none where nothing was compiled.
        compiler_options: Passed to XLA as they are.
        precompiled: The program that the search compiled; None where it did not.
        bound: How much faster than the best candidate any layout could be, by the model.
        chosen: Name of the mesh shape or variant that won, where several were searched.
        throughput: Of the plan as predicted by the search; None if nothing was searched.
        samples_per_step: How many samples a step has, where the user said so.
        when: Date and time (UTC) at which the search ended; "" if nothing was searched.
        search_s: How long it took.
        timings: Where that went, by stage; None if nothing was searched.
        rebind: Gives the plan for another signature: traced anew, the same rules, no search.
    """

    user_fn: Callable[..., Any]
    options: CallOptions
    traced: Traced
    layout: Layout
    mesh: MeshInfo
    carry: tuple[tuple[int, int], ...]
    verified: Verification
    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    compiler_options: CompilerOptions | None = None
    precompiled: Compiled | None = field(default=None, repr=False)
    bound: str = ""
    chosen: str = ""
    throughput: Throughput | None = None
    samples_per_step: float | None = None
    when: str = ""
    search_s: float | None = None
    timings: Timings | None = None
    rebind: Callable[[Self, Call], Self] | None = field(default=None, repr=False)
    _rebound: list[Self] = field(default_factory=list, init=False, repr=False)

    # Specs and shardings --------------------------------------------------------------------------

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
        """Shardings of the positional arguments but statics, for `jax.jit(in_shardings=...)`."""
        args, _ = self.traced.call.rebuild(self.built.in_shardings)
        static = {position for position, _ in self.traced.call.statics}
        return tuple(arg for position, arg in enumerate(args) if position not in static)

    @property
    def out_shardings(self) -> Any:
        """Shardings of the outputs, in the structure of the outputs."""
        return self.traced.unflatten_outputs(self.built.out_shardings)

    # Programs -------------------------------------------------------------------------------------

    @functools.cached_property
    def built(self) -> Built:
        """The layout as a jitted function of flat leaves."""
        if self.precompiled is not None:
            return self.precompiled.built
        return build(self.traced, self.layout, self.mesh)

    @functools.cached_property
    def _program(self) -> Compiled:
        if self.precompiled is not None:
            return self.precompiled
        self._needs_devices("compile()")
        return compile_built(self.built, self.mesh, compiler_options=self.compiler_options)

    def compile(self) -> Compiled:
        """The compiled program: the one the search compiled, else compiled now, once."""
        return self._program

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for these arguments (arrays or ShapeDtypeStructs), as `jax.jit(fn).lower` does.

        For a target what comes back is for reading: its own `compile()` asks jax for devices that
        are not here.
        """
        call = flatten_call(self.user_fn, args, kwargs, self.options)
        return self._for(call).built.lower()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan; arrays laid out otherwise are moved, donated arguments are consumed."""
        self._needs_devices("calling the plan")
        call = flatten_call(self.user_fn, args, kwargs, self.options)
        plan = self._for(call)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            outputs = plan.built.function(*call.leaves)
        else:
            outputs = plan.compile().run(*_laid_out(plan, call.leaves))
        return self._finished(args, plan.traced.unflatten_outputs(outputs))

    def _finished(self, args: tuple[Any, ...], outputs: Any) -> Any:
        """The outputs as the user's function returns them; modules that it changes in place are
        changed.
        """
        if isinstance(self.user_fn, FunctionalizedStep):
            return self.user_fn.write_back(args, outputs)
        return outputs

    @property
    def fn(self) -> Callable[..., Any]:
        """The function with the constraints inside, not jitted; differentiable and vmappable."""

        def constrained(*args: Any, **kwargs: Any) -> Any:
            call = flatten_call(self.user_fn, args, kwargs, self.options)
            plan = self._for(call)
            return plan.traced.unflatten_outputs(plan.built.function(*call.leaves))

        constrained.__name__ = constrained.__qualname__ = self.traced.program.name
        return constrained

    def _for(self, call: Call) -> Self:
        """This plan, or for another signature its like: traced once, the same rules, no search."""
        for plan in (self, *self._rebound):
            if call.same_as(plan.traced.call):
                return plan
        if self.rebind is None:
            raise ArgumentError("this plan serves only the shapes that it was made for.")
        plan = self.rebind(self, call)
        log.info(
            "new signature (%s): traced again, the same rules applied, no search",
            ", ".join(self._new_shapes(call)[:SHOWN_LEAVES]) or "same shapes",
        )
        self._rebound.append(plan)
        return plan

    def _new_shapes(self, call: Call) -> list[str]:
        """Leaves of a call with shapes that this plan's function was not traced for."""
        traced = {(aval.shape, aval.dtype) for aval in self.traced.call.avals}
        texts = []
        for path, aval in zip(call.paths, call.avals, strict=True):
            if (aval.shape, aval.dtype) not in traced:
                texts.append(f"{path} {tuple(aval.shape)}")
        return texts

    # Arguments ------------------------------------------------------------------------------------

    def place(self, argument: int | str, tree: Any) -> Any:
        """A copy of an argument on the devices, laid out as the plan needs it.

        Args:
            argument: Position or name of the parameter.
            tree: The argument: the structure that it had in `example_args`.

        Raises:
            ArgumentError: If the function has no such argument.
            PathError: If the tree has other leaves than the argument had.
        """
        self._needs_devices("place(...)")
        paths = self.traced.program.input_paths
        _, numbers = owned_leaves(self, argument, "place")
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [i for i, leaf in enumerate(leaves) if not self.traced.call.is_static(leaf)]
        if len(arrays) != len(numbers):
            shown = [paths[i] for i in numbers[:4]]
            raise PathError(
                f"place({argument!r}, ...): the tree has {len(arrays)} array leaves, but the "
                f"argument had {len(numbers)} ({', '.join(shown)}, ...). "
                f"Pass the same structure."
            )
        avals, shardings = self.traced.call.avals, self.built.in_shardings
        for position, number in zip(arrays, numbers, strict=True):
            if avals[number].dtype != jax.dtypes.float0:
                leaves[position] = _private(leaves[position], shardings[number])
        return jax.tree.unflatten(treedef, leaves)

    def abstract(self, argument: int | str) -> Any:
        """An argument as `jax.ShapeDtypeStruct`s with the plan's shardings, in its structure.

        What orbax restores into: `checkpointer.restore(path, plan.abstract("params"))` puts each
        shard where it belongs, whatever plan or mesh it was saved under.

        Args:
            argument: Position or name of the parameter.

        Raises:
            ArgumentError: If the function has no such argument.
        """
        owner, _ = owned_leaves(self, argument, "abstract")
        avals, shardings = self.traced.call.avals, self.built.in_shardings
        structs = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(avals, shardings, strict=True)
        ]
        return argument_of(self, owner, structs)

    def _needs_devices(self, what: str) -> None:
        if self.mesh.target is not None:
            raise TargetError(
                f"{what}: this plan is for {self.mesh.target}, which is not here, so nothing can "
                f"run on it. Save its table, plan.table.save(path), and apply it where the devices "
                f"are: autoshard.apply(fn, args, mesh, path)."
            )


def argument_of(plan: BoundPlan, owner: int | str, leaves: Sequence[Any]) -> Any:
    """One argument of the plan's function, built of leaves of all of them."""
    args, kwargs = plan.traced.call.rebuild(leaves)
    return args[owner] if isinstance(owner, int) else kwargs[owner]


def owned_leaves(plan: BoundPlan, name: int | str, what: str) -> tuple[int | str, list[int]]:
    """(owner, leaf numbers) of an argument given by position or name.

    Raises:
        ArgumentError: If the function has no such argument; `what` was asked for.
    """
    paths, owners = plan.traced.program.input_paths, plan.traced.call.owners
    owner: int | str = name
    if isinstance(name, str) and name not in owners:
        by_name: dict[str, int | str] = {}
        for path, of_path in zip(paths, owners, strict=True):
            by_name[path.split("/")[0].split("[")[0].split(".")[0]] = of_path
        owner = by_name.get(name, name)
    numbers = [i for i, of_leaf in enumerate(owners) if of_leaf == owner]
    if not numbers:
        raise ArgumentError(
            f"{what}({name!r}, ...): the function's arguments are {sorted(set(map(str, owners)))}."
        )
    return owner, numbers


def _laid_out(plan: BoundPlan, leaves: Sequence[Any]) -> list[Any]:
    """The leaves as the plan's program takes them."""
    call = plan.traced.call
    uses = Counter(map(id, leaves))
    rows = zip(leaves, call.avals, plan.built.in_shardings, call.donated, strict=True)
    laid_out = []
    for leaf, aval, sharding, donated in rows:
        if donated and uses[id(leaf)] > 1:  # jax dies of a donated array that is passed twice
            laid_out.append(_private(leaf, sharding))
        else:
            laid_out.append(_moved(leaf, aval, sharding, donated))
    return laid_out


def _moved(leaf: Any, aval: jax.ShapeDtypeStruct, sharding: NamedSharding, donated: bool) -> Any:
    """The leaf laid out as needed: itself where it is so already, else a copy; donating that spares
    the original.
    """
    if aval.dtype == jax.dtypes.float0:
        return leaf
    if isinstance(leaf, jax.Array):
        if leaf.sharding == sharding:
            return leaf
        if leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return put(leaf, sharding)  # the same buffers, which are the user's to donate
    elif aval.weak_type:
        return leaf  # a Python number, whose type an array would not have
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
    # A copy is made on the devices, also of what is kept elsewhere.
    return put(placed.copy(), sharding) if shared else placed
