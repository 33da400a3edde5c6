"""The driver: `optimize`, one readable pass over the stages; each stage is a module of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from autoshard._apply import rebinder
from autoshard.compiler.bound_plan import Verification
from autoshard.compiler.cache import CompileCache, default_folder
from autoshard.compiler.compile import CompilerOptions
from autoshard.compiler.isolated import Isolation
from autoshard.compiler.pool import CompilePool
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.hardware import Hardware, hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.devices.target import mesh_on
from autoshard.devices.topology import require_compiler
from autoshard.errors import (
    ArgumentError,
)
from autoshard.evaluate.device_runner import DeviceRunner
from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evaluate.inputs import inputs_for
from autoshard.evaluate.multiprocess import MultiProcessRunner, Outcome, follow, identity_of, joined
from autoshard.evaluate.selection import best_so_far, select
from autoshard.evaluate.target_selection import select_on_target
from autoshard.evidence.candidate import Status
from autoshard.evidence.throughput import Throughput, checked_samples
from autoshard.joint_search import Variant, device_count, over_mesh_shapes, over_variants
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.layout.prepare import Pins, Prepared, make_request, prepare
from autoshard.plan import Plan
from autoshard.processes.interrupts import Interrupts
from autoshard.processes.progress import Progress
from autoshard.report.advice import Advised, advise
from autoshard.search.proposer import Proposals, propose
from autoshard.search.study.shared_evaluation import Sharing, join
from autoshard.text import parse_bytes
from autoshard.tracing.carry import Carry
from autoshard.version import own_version


def optimize(
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
    isolate: bool = False,
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
        user_constraints: `"pin"` keeps the function's own `with_sharding_constraint`s, `"ignore"`
            drops them.
        memory_budget_bytes: Per device, an int or text such as `"16GiB"`; on a target at most what
            the part has.
        hardware: A preset's name, a file written by calibration, or a `Hardware`; by default the
            mesh's devices, with the slower network as the link of mesh axes that leave a TPU slice
            or a GPU host.
        effort: How many candidates are compiled and measured.
        compiler_options: Passed to XLA as they are.
        isolate: Compile each candidate in a process of its own first: one whose compilation aborts,
            hangs or runs out of memory is rejected with its reason and the search goes on.
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
    given = dict(locals())
    variants = given.pop("variants")
    if variants is not None:
        return over_variants(optimize, given, variants)
    if device_count(mesh) is not None:
        return over_mesh_shapes(optimize, given)
    if fn is None or example_args is None or isinstance(mesh, int):
        raise ArgumentError("optimize needs fn and example_args, or variants.")
    samples = checked_samples(samples_per_step)
    began = time.monotonic()
    effort = Effort() if effort is None else effort
    budget_bytes = parse_bytes(memory_budget_bytes)
    if not compile_timeout_s > 0:
        raise ArgumentError(f"compile_timeout_s={compile_timeout_s!r}: it must be more than 0.")
    compiler_bytes = parse_bytes(compile_memory_bytes, "compile_memory_bytes")
    request, call = make_request(
        fn, example_args, mesh_on(target, mesh), example_kwargs=example_kwargs, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames, carry=carry,
        pins=pins, user_constraints=user_constraints,
    )  # fmt: skip
    machine = resolve_hardware(hardware, request.mesh)
    isolation: AbstractContextManager[Isolation | None] = nullcontext()
    compilers: AbstractContextManager[CompilePool | None] = nullcontext()
    if request.mesh.target is not None:
        if effort.compiled:
            require_compiler(request.mesh.target)
        budget_bytes = _within(request.mesh.target.memory_bytes, budget_bytes)
        folder = default_folder() if cache_dir == "auto" else cache_dir
        cache = CompileCache(Path(folder)) if folder is not None else None
        compilers = CompilePool(
            request.mesh, timeout_s=compile_timeout_s, memory_bytes=compiler_bytes, cache=cache
        )
    elif isolate:
        isolation = Isolation(
            request.mesh, timeout_s=compile_timeout_s, memory_bytes=compiler_bytes
        )
    sharing = sharing or Sharing()
    with (
        Interrupts() as interrupts,
        joined(request.mesh, sharing.patience_s, interrupts) as process_group,
        Progress(
            progress and (process_group is None or process_group.leads), interrupts
        ) as reporter,
        isolation as isolated,
        compilers as pool,
        ExitStack() as stack,
    ):
        prepared = prepare(request, call)
        problem, program = prepared.problem, prepared.traced.program
        identity = _identity(prepared, machine, budget_bytes, compiler_options)
        runner = DeviceRunner(prepared, inputs_for(call, program), compiler_options)
        if process_group is not None:
            process_group.same(identity_of(prepared, identity))
            runner.peers = process_group
            if not process_group.leads:
                return _planned(runner, follow(process_group, runner, interrupts))
            runner = MultiProcessRunner(prepared, runner.inputs, compiler_options, process_group, process_group=process_group,
                                 interrupts=interrupts)  # fmt: skip
        reporter.say(
            f"{program.name}: {len(program.eqns)} equations, {problem.logical_axes.classes.count} logical "
            f"axes, "
            f"{len(problem.logical_axes.axes)} logical axes"
        )
        for note in prepared.notes:
            reporter.say(note)
        predictor = Predictor(problem, machine, call.donated, backend_for(request.mesh.platform))
        started = time.monotonic()
        shared = stack.enter_context(
            join(storage, study, sharing, identity, f"{seed} {effort.counts}")
        )
        if process_group is not None:
            process_group.on_lost = shared.lose
        proposals = shared.propose(
            lambda: propose(
                problem,
                predictor,
                budget_bytes=budget_bytes,
                seed=seed,
                on_progress=lambda done, of: reporter.doing(f"proposing, {done} of {of} asked"),
            ),
            problem,
            predictor,
        )
        bound = _bound_text(proposals, predictor)
        reporter.say(f"{proposals.evaluations} distinct layouts predicted; {bound}")
        evaluation = Evaluation(
            prepared, predictor, shared, runner, budget_bytes, compiler_options, reporter
        )
        evaluation.isolation = isolated
        evaluation.deadline_s = None if effort.seconds is None else started + effort.seconds
        interrupted = proposals.interrupted
        try:
            if interrupted:
                winner = best_so_far(evaluation, proposals)
            elif pool is not None:
                winner = select_on_target(evaluation, proposals, effort, pool)
            else:
                winner = select(evaluation, proposals, effort)
        except KeyboardInterrupt:
            interrupted = True
            winner = best_so_far(evaluation, proposals)
        if interrupted:
            reporter.say("interrupted; returning the best so far")
        advice = _advice(evaluation, winner) if effort.compiled and not interrupted else ()
        throughput = predictor.throughput(winner.layout, samples)
        outcome = _outcome(
            evaluation,
            proposals,
            winner,
            bound,
            advice,
            throughput,
            interrupted,
            time.monotonic() - began,
        )
        if process_group is not None:
            process_group.last_command("outcome", **msgspec.to_builtins(outcome))
        return _planned(runner, outcome)


def _advice(evaluation: Evaluation, winner: Entry) -> tuple[str, ...]:
    evaluation.progress.doing("looking for changes of the program that would gain more")
    backend = backend_for(evaluation.prepared.request.mesh.platform)
    case = Advised(
        evaluation.prepared,
        winner.layout,
        evaluation.predictor.hardware,
        backend,
        evaluation.budget_bytes,
        winner.proposal.prediction,
    )
    with suppress(KeyboardInterrupt):
        return advise(case)
    return ()


def _outcome(
    evaluation: Evaluation,
    proposals: Proposals,
    winner: Entry,
    bound: str,
    advice: tuple[str, ...],
    throughput: Throughput,
    interrupted: bool,
    search_s: float,
) -> Outcome:
    winner.candidate = replace(winner.candidate, status=Status.WINNER)
    target = evaluation.prepared.request.mesh.target
    if winner.candidate.verified is not None:
        found = winner.candidate.verified
        reason = (
            f"outputs equal those of the {found.against}, largest error {found.max_abs_err:.3g}"
        )
    elif target is not None:
        reason = evaluation.reference_failure or f"nothing runs on {target}, which is not here"
    elif interrupted:
        reason = "the search was interrupted before the comparison"
    else:
        reason = (
            evaluation.too_large(winner)
            or evaluation.reference_failure
            or "nothing was run: effort compiled=0"
        )
    return Outcome(
        key=winner.candidate.key,
        rules=winner.layout.rules,
        inside=winner.layout.inside,
        verified=winner.candidate.verified is not None,
        reason=reason,
        candidates=tuple(c.candidate for c in evaluation.entries),
        skipped=proposals.skipped,
        notes=(
            *evaluation.prepared.notes,
            *evaluation.notes,
            *(f"advice: {line}" for line in advice),
        ),
        advice=advice,
        bound=bound,
        throughput=throughput,
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        search_s=search_s,
    )


def _planned(runner: DeviceRunner, outcome: Outcome) -> Plan:
    """The plan of what came of a search, on any of its processes."""
    prepared = runner.prepared
    return Plan(
        user_fn=prepared.request.fn,
        options=prepared.request.options,
        traced=prepared.traced,
        layout=Layout(prepared.problem, outcome.rules, outcome.inside),
        mesh=prepared.request.mesh,
        carry=prepared.carry,
        verified=Verification(outcome.verified, outcome.reason),
        candidates=outcome.candidates,
        skipped=outcome.skipped,
        notes=outcome.notes,
        advice=outcome.advice,
        compiler_options=runner.compiler_options,
        precompiled=runner.compiled.get(outcome.key),
        bound=outcome.bound,
        throughput=outcome.throughput,
        samples_per_step=outcome.throughput.samples_per_step,
        when=outcome.when,
        search_s=outcome.search_s,
        rebind=rebinder(prepared.request),
    )


def _bound_text(proposals: Proposals, predictor: Predictor) -> str:
    """How far the best prediction may be from any layout's."""
    best_s, least_s = proposals.ranked[0].prediction.time_s, predictor.least_s()
    if best_s <= least_s * 1.0005:
        return "by the model no layout is faster than the best one found"
    return f"by the model no layout is more than {1 - least_s / best_s:.1%} faster than the best one found"


def _identity(
    prepared: Prepared, machine: Hardware, budget_bytes: int | None, options: CompilerOptions | None
) -> dict[str, str]:
    """What a study is for."""
    mesh, donated = prepared.request.mesh, prepared.traced.call.donated
    return {
        "program": prepared.traced.program.fingerprint,
        "mesh": ",".join(f"{name}={size}" for name, size in mesh.axes.items()),
        "devices": str(mesh.target or mesh.device_kind),
        "hardware": f"{machine.name} {hashlib.sha256(machine.to_json().encode()).hexdigest()[:8]}",
        "memory budget": str(budget_bytes),
        "compiler options": str(sorted((options or {}).items())),
        "donated leaves": f"{sum(donated)} of {len(donated)}",
        "jax": jax.__version__,
        "autoshard": own_version(),
    }


def resolve_hardware(hardware: Hardware | str | None, mesh: MeshInfo) -> Hardware:
    """The hardware to predict for: as named, or what the mesh's devices are."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        if Path(hardware).suffix == ".json":
            return (
                Hardware.load(hardware)
                .for_devices(mesh.device_kind, hardware)
                .with_far_axes(mesh.far_axes)
            )
        return hardware_for(hardware).with_far_axes(mesh.far_axes)
    return hardware_for(mesh.device_kind).with_far_axes(mesh.far_axes)


def _within(capacity_bytes: int | None, budget_bytes: int | None) -> int | None:
    """The smaller of what a device has and what is allowed."""
    known = [size for size in (capacity_bytes, budget_bytes) if size is not None]
    return min(known, default=None)
