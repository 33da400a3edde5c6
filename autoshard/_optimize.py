"""The driver: `optimize`, four stages that read as four lines; each has a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from autoshard._stages import (
    CompilerSettings,
    Query,
    StudySettings,
    evaluate_candidates,
    finish_plan,
    follow_leader,
    opened,
    prepare_search,
    propose_layouts,
)
from autoshard.arguments import check_arguments, check_kind
from autoshard.compiler.compile import CompilerOptions
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.errors import ArgumentError
from autoshard.evaluate.effort import Effort
from autoshard.joint_search import Variant, device_count, over_mesh_shapes, over_variants
from autoshard.layout.prepare import JitOptions, Pins
from autoshard.plan import Plan
from autoshard.search.study.shared_study import Sharing
from autoshard.tracing.carry import Carry
from autoshard.tracing.signature import refuse_tracers


def optimize(  # noqa: PLR0913
    fn: Callable[..., Any] | None,
    example_args: Sequence[Any] | Callable[[], Sequence[Any]] | None,
    mesh: Mesh | str | int,
    *,
    variants: Mapping[str, Variant] | None = None,
    samples_per_step: float | Mapping[str, float] | None = None,
    target: str | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    carry: Carry = None,
    pins: Pins = None,
    user_constraints: str = "pin",
    memory_budget_bytes: int | str | None = None,
    hardware: Hardware | str | None = None,
    effort: Effort | None = None,
    compiler_options: CompilerOptions | None = None,
    isolate: bool = True,
    compile_timeout_s: float = 600.0,
    compile_memory_bytes: int | str | None = None,
    cache_dir: str | Path | None = "auto",
    storage: str | Path | None = None,
    study: str | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Plan:
    """Searches for the best layout of a function on a mesh.

    Args:
        fn: What you would give to `jax.jit`; already jitted is fine.
        example_args: Positional arguments: pytrees of arrays, NumPy arrays, scalars or
            `jax.ShapeDtypeStruct` (values for verifying and measuring are then made here); or a
            function that returns them.
        mesh: A `jax.sharding.Mesh` with Auto or Explicit axes, or a string such as
            `"data=4,model=2"`; or just a number of devices such as `"8"`: every shape of 1 to 3
            axes is predicted, and the best one searched. It may have devices of several processes
            (`jax.distributed`), which then all make the same call: they search together, the first
            one decides and keeps the study, and all return the same plan.
        variants: Instead of `fn`, functions by name that do the same work in other ways (`{"remat":
            f, "plain": g}`), each alone or with example arguments of its own (`("batch=64": (f,
            args)}`): searched jointly.
        samples_per_step: How many samples a step has, by variant where they differ: the time of one
            is compared, and the throughput printed.
        target: Hardware that is not here, such as `"tpu:v5e:4x4"`, with `mesh` as text; see
            `autoshard.target`. Nothing is run on it: candidates are compiled by its real compiler,
            in processes of their own, and not measured.
        example_kwargs: Keyword arguments.
        static_argnums: As for `jax.jit`.
        static_argnames: As for `jax.jit`.
        donate_argnums: As for `jax.jit`.
        donate_argnames: As for `jax.jit`.
        carry: Which outputs feed which arguments of the next step, `{argument: output}`; by default
            donated arguments are matched by structure and shapes.
        pins: Leaf paths (or `re.compile(...)`) to PartitionSpecs that stay fixed; or another Plan
            or SpecTable; or `"metadata"` for the mesh axes that the model's own variables name.
        user_constraints: `"pin"` keeps the function's own `with_sharding_constraint`s and, where it
            is written for Explicit axes, the shardings that it states (`out_sharding=`,
            `jax.sharding.reshard`); `"ignore"` drops them.
        memory_budget_bytes: Per device, an int or text such as `"16GiB"`; on a target at most what
            the part has.
        hardware: A preset's name, a file written by calibration, or a `Hardware`; by default the
            mesh's devices, with the slower network as the link of mesh axes that leave a TPU slice
            or a GPU host.
        effort: How many candidates are compiled and measured.
        compiler_options: Passed to XLA as they are.
        isolate: Compile each candidate in another process first: one whose compilation aborts,
            hangs or runs out of memory is rejected with its reason and the search goes on. That
            process takes no accelerator; it stays for the next search, and ends with this process
            or after ten minutes without work. With False everything compiles here.
        compile_timeout_s: With `isolate`, a compilation that takes longer has failed.
        compile_memory_bytes: With `isolate`, what the compiler's process may allocate, an int or
            text such as `"16GiB"`.
        cache_dir: Where it is kept what compiled programs for targets said; `"auto"` is `autoshard`
            in the user's cache folder, None keeps nothing.
        storage: A journal file or Optuna storage URL in which the study is kept, to continue it
            later, and to share it with other workers: processes that make the same call, anywhere,
            at any time.
        study: The study's name in it.
        sharing: What this worker does of a stored study, and how long its storage and other workers
            are waited for.
        seed: Of the sampler.
        progress: Say what is being done, on standard error.

    Returns:
        The best plan found: callable like `fn`.

    Raises:
        TraceError: If `fn` cannot be traced.
        NoFeasiblePlanError: If nothing fits the memory budget.
        SearchFailedError: If every candidate was rejected.
        ProcessesError: If the mesh has devices of several processes, and these do not all make the
            same call, or one of them fails or does not answer.
        AutoshardError: For arguments that are not of the documented form; the message says which
            and how to mend it.
    """
    arguments = dict(locals())  # for the searches of several shapes or variants
    check_arguments(arguments)
    refuse_tracers("optimize", example_args, example_kwargs)
    if effort is not None:
        check_kind("effort", effort, Effort, "autoshard.Effort(compiled=4, measured=2), say")
    if sharing is not None:
        check_kind("sharing", sharing, Sharing, "autoshard.Sharing(lease_s=60.0), say")
    arguments.pop("variants")
    if variants is not None:
        return over_variants(optimize, arguments, variants)
    if device_count(mesh) is not None:
        return over_mesh_shapes(optimize, arguments)
    if fn is None or example_args is None or isinstance(mesh, int):
        raise ArgumentError("optimize needs fn and example_args, or variants.")

    query = Query(
        fn=fn,
        example_args=example_args,
        example_kwargs=example_kwargs,
        mesh=mesh,
        target=target,
        jit=JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames),
        carry=carry,
        pins=pins,
        user_constraints=user_constraints,
        samples_per_step=samples_per_step,
        memory_budget=memory_budget_bytes,
        hardware=hardware,
        effort=effort or Effort(),
        compiler=CompilerSettings(
            compiler_options, isolate, compile_timeout_s, compile_memory_bytes, cache_dir
        ),
        study=StudySettings(storage, study, sharing, seed),
        progress=progress,
    )
    with opened(query) as session:
        search = prepare_search(session)
        if session.follows:
            return follow_leader(session, search)
        proposed = propose_layouts(session, search)
        evaluated = evaluate_candidates(session, proposed)
        return finish_plan(session, evaluated)
