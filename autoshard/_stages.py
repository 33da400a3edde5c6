"""The stages of `optimize`: prepare, propose, evaluate, finish; what each hands on is a value.

A session holds what they all need of this process (interrupts, progress, compilers, the other
processes of the mesh), open as long as the search.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
from autoshard.cost_model.hardware.backend import Backend, backend_for
from autoshard.cost_model.hardware.hardware import Hardware, resolve_hardware
from autoshard.cost_model.predict import Predictor
from autoshard.devices.target import mesh_on
from autoshard.devices.topology import require_compiler
from autoshard.errors import ArgumentError
from autoshard.evaluate.device_runner import DeviceRunner
from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation, Setting
from autoshard.evaluate.evaluator import Evaluator, LocalEvaluator
from autoshard.evaluate.multiprocess import (
    MultiProcessRunner,
    Outcome,
    follow,
    identity_of,
    joined,
)
from autoshard.evaluate.selection import best_so_far, select
from autoshard.evaluate.shared_evaluator import SharedEvaluator
from autoshard.evaluate.target_selection import select_on_target
from autoshard.evaluate.verification.inputs import inputs_for
from autoshard.evidence.candidate import Status
from autoshard.evidence.throughput import checked_samples
from autoshard.evidence.timings import Timings
from autoshard.layout.kernel_notes import notes_on_kernels
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import JitOptions, Pins, Prepared, Request, make_request, prepare
from autoshard.plan import Plan
from autoshard.processes.interrupts import Interrupts
from autoshard.processes.process_group import ProcessGroup
from autoshard.processes.progress import Progress
from autoshard.report.advice import Advised, advise
from autoshard.report.plan_text import timings_text
from autoshard.search.proposer import Proposals, propose
from autoshard.search.sampler import Watch
from autoshard.search.study.shared_study import SharedStudy, Sharing, join
from autoshard.text import parse_bytes
from autoshard.tracing.carry import Carry
from autoshard.tracing.signature import Call
from autoshard.version import own_version

# What is asked for --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompilerSettings:
    """How candidates are compiled; see the arguments of `optimize`."""

    options: CompilerOptions | None = None
    isolate: bool = True
    timeout_s: float = 600.0
    memory: int | str | None = None
    cache_dir: str | Path | None = "auto"

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ArgumentError(f"compile_timeout_s={self.timeout_s!r}: it must be more than 0.")
        parse_bytes(self.memory, "compile_memory_bytes")

    @property
    def memory_bytes(self) -> int | None:
        """What a compiler's process may allocate; None for as much as there is."""
        return parse_bytes(self.memory, "compile_memory_bytes")

    def cache(self) -> CompileCache | None:
        """Where it is kept what compiled programs for targets said."""
        folder = default_folder() if self.cache_dir == "auto" else self.cache_dir
        return None if folder is None else CompileCache(Path(folder))


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Where the study is kept and what this worker does of it; see the arguments of `optimize`."""

    storage: str | Path | None = None
    name: str | None = None
    sharing: Sharing | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Query:
    """The arguments of `optimize`, grouped."""

    fn: Callable[..., Any]
    example_args: Sequence[Any] | Callable[[], Sequence[Any]]
    example_kwargs: Mapping[str, Any] | None
    mesh: Mesh | str
    target: str | None
    jit: JitOptions
    carry: Carry
    pins: Pins
    user_constraints: str
    samples_per_step: Any
    memory_budget: int | str | None
    hardware: Hardware | str | None
    effort: Effort
    compiler: CompilerSettings
    study: StudySettings
    progress: bool


# The session --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Session:
    """What the stages of a search share.

    Attributes:
        query: What is asked for.
        request: The same, checked.
        call: The example arguments.
        samples_per_step: How many samples a step has; None where that was not said.
        budget_bytes: Memory of a device; None for no limit.
        hardware: What is predicted for.
        backend: What its compiler does.
        began_s: When the search began, by `time.monotonic`.
        deadline_s: When nothing new is started, by the same clock; None for never.
        interrupts: Ctrl-C.
        progress: Says what is being done.
        group: The processes of the mesh; None where they are this one alone.
        isolation: Compiles in a process of its own first; None for compiling here.
        compilers: Compile for a target; None where the devices are here.
        stack: What is closed when the search ends.
    """

    query: Query
    request: Request
    call: Call
    samples_per_step: float | None
    budget_bytes: int | None
    hardware: Hardware
    backend: Backend
    began_s: float
    deadline_s: float | None
    interrupts: Interrupts
    progress: Progress
    group: ProcessGroup | None
    isolation: Isolation | None
    compilers: CompilePool | None
    stack: ExitStack

    def late(self) -> bool:
        """True after the deadline."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    @property
    def follows(self) -> bool:
        """True in a process that does what the first one says."""
        return self.group is not None and not self.group.leads


@contextmanager
def opened(query: Query) -> Iterator[Session]:
    """A session for a query.

    Raises:
        AutoshardError: For arguments that are not of the documented form.
    """
    began_s = time.monotonic()
    samples_per_step = checked_samples(query.samples_per_step)
    budget_bytes = parse_bytes(query.memory_budget)
    request, call = make_request(
        query.fn,
        query.example_args,
        mesh_on(query.target, query.mesh),
        example_kwargs=query.example_kwargs,
        jit=query.jit,
        carry=query.carry,
        pins=query.pins,
        user_constraints=query.user_constraints,
    )
    mesh, target = request.mesh, request.mesh.target
    hardware = resolve_hardware(query.hardware, mesh.device_kind, mesh.far_axes)
    if target is not None:
        if query.effort.compiled:
            require_compiler(target)
        budget_bytes = _smaller(target.memory_bytes, budget_bytes)

    sharing = query.study.sharing or Sharing()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        group = stack.enter_context(joined(mesh, sharing.patience_s, interrupts))
        says = query.progress and (group is None or group.leads)
        progress = stack.enter_context(Progress(says, interrupts))
        compiler = query.compiler
        timeout_s, memory_bytes = compiler.timeout_s, compiler.memory_bytes
        isolation: Isolation | None = None
        compilers: CompilePool | None = None
        if target is not None:
            pool = CompilePool(
                mesh, timeout_s=timeout_s, memory_bytes=memory_bytes, cache=compiler.cache()
            )
            compilers = stack.enter_context(pool)
        elif compiler.isolate and (query.effort.compiled or query.effort.partitioned):
            isolated = Isolation(mesh, timeout_s=timeout_s, memory_bytes=memory_bytes)
            isolation = stack.enter_context(isolated)
        yield Session(
            query=query,
            request=request,
            call=call,
            samples_per_step=samples_per_step,
            budget_bytes=budget_bytes,
            hardware=hardware,
            backend=backend_for(mesh.platform),
            began_s=began_s,
            deadline_s=None if query.effort.seconds is None else began_s + query.effort.seconds,
            interrupts=interrupts,
            progress=progress,
            group=group,
            isolation=isolation,
            compilers=compilers,
            stack=stack,
        )


def _smaller(capacity_bytes: int | None, budget_bytes: int | None) -> int | None:
    """The smaller of what a device has and what is allowed."""
    sizes = [size for size in (capacity_bytes, budget_bytes) if size is not None]
    return min(sizes, default=None)


# Prepare ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreparedSearch:
    """A traced query.

    Attributes:
        prepared: The traced request, its logical axes and pins.
        runner: The devices.
        identity: What a study of it is for.
    """

    prepared: Prepared
    runner: DeviceRunner
    identity: Mapping[str, str]


def prepare_search(session: Session) -> PreparedSearch:
    """Traces the function, finds its logical axes, and makes sure that all processes were called
    alike.
    """
    progress = session.progress
    prepared = prepare(session.request, session.call, progress.stage)
    progress.say(f"traced: {progress.spent('trace')}; axes found: {progress.spent('axes')}")
    identity = _identity(session, prepared)
    inputs = inputs_for(session.call, prepared.traced.program)
    options = session.query.compiler.options
    if session.group is None:
        runner = DeviceRunner(prepared, inputs, options, isolation=session.isolation)
    else:
        session.group.check_same(identity_of(prepared, identity))
        if session.follows:
            runner = DeviceRunner(prepared, inputs, options, session.group)
        else:
            runner = MultiProcessRunner(
                prepared,
                inputs,
                options,
                session.group,
                process_group=session.group,
                interrupts=session.interrupts,
            )
    return PreparedSearch(prepared, runner, identity)


def _identity(session: Session, prepared: Prepared) -> dict[str, str]:
    """What a study is for; `search.study.shared_study.study_name` is made of a part of it."""
    mesh, donated = prepared.request.mesh, prepared.traced.call.donated
    program = prepared.traced.program
    leaves = "\n".join((*program.input_paths, *program.output_paths))
    hardware = session.hardware
    digest = hashlib.sha256(hardware.to_json().encode()).hexdigest()[:8]
    return {
        "program": program.fingerprint,
        # A fingerprint knows no names, and logical axes are called after leaves.
        "leaf names": hashlib.sha256(leaves.encode()).hexdigest()[:12],
        "mesh": ",".join(f"{name}={size}" for name, size in mesh.axes.items()),
        "devices": str(mesh.target or mesh.device_kind),
        "hardware": f"{hardware.name} {digest}",
        "memory budget": str(session.budget_bytes),
        "compiler options": str(sorted((session.query.compiler.options or {}).items())),
        "donated leaves": f"{sum(donated)} of {len(donated)}",
        "jax": jax.__version__,
        "autoshard": own_version(),
    }


def follow_leader(session: Session, search: PreparedSearch) -> Plan:
    """The plan that the first process of the mesh finds; this one does what it says."""
    assert session.group is not None
    outcome = follow(session.group, search.runner, session.interrupts)
    return _plan(search.runner, outcome)


# Propose ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ProposedSearch:
    """Proposed layouts.

    Attributes:
        search: The traced query.
        predictor: For the hardware.
        proposals: The best by prediction, and presets.
        bound: How much faster than the best one any layout could be, as text.
        study: What is shared with other workers; None for a search of this process alone.
    """

    search: PreparedSearch
    predictor: Predictor
    proposals: Proposals
    bound: str
    study: SharedStudy | None


def propose_layouts(session: Session, search: PreparedSearch) -> ProposedSearch:
    """Searches the space of axis rules by prediction."""
    progress, prepared = session.progress, search.prepared
    problem, program = prepared.problem, prepared.traced.program
    progress.say(
        f"{program.name}: {len(program.eqns)} equations, {problem.logical_axes.classes.count} "
        f"axis classes, {len(problem.logical_axes.axes)} logical axes"
    )
    for note in prepared.notes:
        progress.say(note)
    with progress.stage("search", "predicting"):
        predictor = Predictor(problem, session.hardware, session.call.donated, session.backend)
    cut_short = False

    def late() -> bool:
        nonlocal cut_short
        cut_short = cut_short or session.late()
        return cut_short

    def make() -> Proposals:
        with progress.stage("search"):
            return propose(
                problem,
                predictor,
                budget_bytes=session.budget_bytes,
                seed=session.query.study.seed,
                watch=Watch(
                    lambda done, of: progress.doing(f"proposing, {done} of {of} asked"), late
                ),
            )

    study = _joined_study(session, search.identity)
    proposals = make() if study is None else study.propose(make, problem, predictor)
    bound = _bound_text(proposals, predictor)
    progress.say(
        f"{proposals.evaluations} distinct layouts predicted: {progress.spent('search')}; {bound}"
    )
    if cut_short:
        progress.say("out of time before all layouts were predicted that are worth it")
    return ProposedSearch(search, predictor, proposals, bound, study)


def _joined_study(session: Session, identity: Mapping[str, str]) -> SharedStudy | None:
    """The study that is shared with other workers; None where this process is alone."""
    settings, effort = session.query.study, session.query.effort
    if settings.storage is None and settings.sharing is None:
        return None
    choices = f"{settings.seed} {effort.counts}"
    sharing = settings.sharing or Sharing()
    study = session.stack.enter_context(
        join(settings.storage, settings.name, sharing, identity, choices)
    )
    if session.group is not None:
        session.group.on_lost = study.abandon
    return study


def _bound_text(proposals: Proposals, predictor: Predictor) -> str:
    """How far the best prediction may be from any layout's."""
    best_s, least_s = proposals.ranked[0].prediction.time_s, predictor.least_s()
    if best_s <= least_s * 1.0005:  # would be printed as 0.0 %; a program that does nothing takes 0
        return "by the model no layout is faster than the best one found"
    share = 1 - least_s / best_s
    return f"by the model no layout is more than {share:.1%} faster than the best one found"


# Evaluate -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EvaluatedSearch:
    """A winner with the evidence of all candidates.

    Attributes:
        proposed: The proposals.
        evaluation: The candidates.
        winner: The best.
        interrupted: True if Ctrl-C ended the search early.
    """

    proposed: ProposedSearch
    evaluation: Evaluation
    winner: Entry
    interrupted: bool


def evaluate_candidates(session: Session, proposed: ProposedSearch) -> EvaluatedSearch:
    """Partitions, compiles, verifies and measures the best; where Ctrl-C ends that, takes the best
    so far.
    """
    evaluation = Evaluation(
        Setting(
            prepared=proposed.search.prepared,
            predictor=proposed.predictor,
            backend=session.backend,
            runner=proposed.search.runner,
            budget_bytes=session.budget_bytes,
            compiler_options=session.query.compiler.options,
            progress=session.progress,
            isolation=session.isolation,
            compilers=session.compilers,
            deadline_s=session.deadline_s,
        )
    )
    local = LocalEvaluator(evaluation)
    evaluator: Evaluator = local
    if proposed.study is not None:
        evaluator = SharedEvaluator(local, proposed.study)

    interrupted = proposed.proposals.interrupted
    if not interrupted:
        try:
            winner = _select(session, proposed, evaluator)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        if not evaluation.entries:
            evaluation.add(proposed.proposals.ranked[:1], {})
        winner = best_so_far(evaluation)
        session.progress.say("interrupted; returning the best so far")
    return EvaluatedSearch(proposed, evaluation, winner, interrupted)


def _select(session: Session, proposed: ProposedSearch, evaluator: Evaluator) -> Entry:
    known = {} if proposed.study is None else proposed.study.known()
    evaluator.evaluation.add(proposed.proposals.ranked, known)
    chosen_by = select if session.compilers is None else select_on_target
    winner = chosen_by(evaluator, session.query.effort)
    if proposed.study is not None:
        proposed.study.conclude(winner.candidate)
    return winner


# Finish -------------------------------------------------------------------------------------------


def finish_plan(session: Session, evaluated: EvaluatedSearch) -> Plan:
    """The plan of the winner, with what the user should know; told to the other processes."""
    outcome = _outcome(session, evaluated)
    session.progress.say(timings_text(outcome.timings))
    if session.group is not None:
        session.group.last_command("outcome", **msgspec.to_builtins(outcome))
    return _plan(evaluated.proposed.search.runner, outcome)


def _outcome(session: Session, evaluated: EvaluatedSearch) -> Outcome:
    proposed, evaluation, winner = evaluated.proposed, evaluated.evaluation, evaluated.winner
    advice = _advice(session, evaluated)
    winner.gain(Status.WINNER)
    notes = (
        *proposed.search.prepared.notes,
        *notes_on_kernels(winner.layout),
        *evaluation.notes,
        *(f"advice: {line}" for line in advice),
    )
    return Outcome(
        key=winner.key,
        rules=winner.layout.rules,
        inside=winner.layout.inside,
        verified=winner.candidate.verified is not None,
        reason=_verification_text(evaluated),
        candidates=tuple(entry.candidate for entry in evaluation.entries),
        skipped=proposed.proposals.skipped,
        notes=notes,
        advice=advice,
        bound=proposed.bound,
        throughput=proposed.predictor.throughput(winner.layout, session.samples_per_step),
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        search_s=time.monotonic() - session.began_s,
        timings=_timings(session),
    )


def _timings(session: Session) -> Timings:
    """Where the time went until now."""
    watch = session.progress.stopwatch
    return Timings(dict(watch.seconds), dict(watch.counts), time.monotonic() - session.began_s)


def _advice(session: Session, evaluated: EvaluatedSearch) -> tuple[str, ...]:
    """Changes of the program that would gain more; none where the search says little."""
    if evaluated.interrupted or not session.query.effort.compiled:
        return ()
    if session.late():
        session.progress.say("out of time before changes of the program were looked at")
        return ()
    case = Advised(
        evaluated.proposed.search.prepared,
        evaluated.winner.layout,
        session.hardware,
        session.backend,
        session.budget_bytes,
        evaluated.winner.proposal.prediction,
    )
    text = "looking for changes of the program that would gain more"
    with suppress(KeyboardInterrupt), session.progress.stage("advice", text):
        return advise(case)
    return ()


def _verification_text(evaluated: EvaluatedSearch) -> str:
    """What the winner's outputs were compared with, or why they were not."""
    evaluation, winner = evaluated.evaluation, evaluated.winner
    verified = winner.candidate.verified
    if verified is not None:
        return (
            f"outputs equal those of the {verified.against}, largest error "
            f"{verified.max_abs_err:.3g}"
        )
    target = evaluation.setting.prepared.request.mesh.target
    if target is not None:
        return evaluation.reference_failure or f"nothing runs on {target}, which is not here"
    if evaluated.interrupted:
        return "the search was interrupted before the comparison"
    too_large = evaluation.too_large(winner)
    not_compared = evaluation.reference_failure or evaluation.unverified
    return too_large or not_compared or "nothing was run: effort compiled=0"


def _plan(runner: DeviceRunner, outcome: Outcome) -> Plan:
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
        timings=outcome.timings,
        rebind=rebinder(prepared.request),
    )
