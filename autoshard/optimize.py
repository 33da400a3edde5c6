"""The driver: `optimize` and `apply`. One readable loop over the stages; each stage is a module of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.carry import Carry
from autoshard.compile import CompilerOptions
from autoshard.cost_model.hardware import Hardware, hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.errors import (
    ArgumentError,
    NoFeasiblePlanError,
    PathError,
    RuleError,
    SearchFailedError,
    SignatureError,
    TableError,
)
from autoshard.inputs import inputs_for
from autoshard.isolate import Isolation
from autoshard.layout import AxisRule, Layout, Problem, shard_count
from autoshard.meshes import MeshInfo
from autoshard.pins import canonical_spec
from autoshard.plan import Plan, Verification, own_version
from autoshard.prepare import Pins, Prepared, Request, make_request, prepare
from autoshard.progress import Progress
from autoshard.race import FAR, Candidate, Race
from autoshard.report import bytes_text
from autoshard.search.presets import presets
from autoshard.search.proposer import Proposals, propose
from autoshard.signature import Call
from autoshard.table import SpecTable, spec_from_entry

_SIZE = re.compile(r"^\s*([0-9.]+)\s*([KMGT]?i?B)\s*$")
_UNITS = {"B": 1, **{f"{u}iB": 2 ** (10 * i) for i, u in enumerate("KMGT", 1)},
          **{f"{u}B": 10 ** (3 * i) for i, u in enumerate("KMGT", 1)}}  # fmt: skip
PARTITIONED_PER_COMPILED = 2
ROUNDS_OF_REJECTIONS = 3


@dataclass(frozen=True, slots=True)
class Effort:
    """How much evidence a search gathers.

    Attributes:
        compiled: Candidates compiled at most (more only where none of them fits the budget or gives right numbers); up
            to half of them presets.
        measured: Candidates measured at most; the best preset is among them if it is two or more.
        seconds: Compile and measure nothing new after this long; None for as long as it takes.
    """

    compiled: int = 12
    measured: int = 4
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.compiled < 0 or self.measured < 0 or (self.seconds is not None and self.seconds < 0):
            raise ArgumentError(f"{self!r}: all numbers must be >= 0.")
        if self.measured > self.compiled:
            raise ArgumentError(f"{self!r}: what is measured must be compiled first. Use compiled >= measured.")


def optimize(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    *,
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
    storage: str | Path | None = None,
    study: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Plan:
    """Searches for the best layout of a function on a mesh.

    Args:
        fn: What you would give to `jax.jit`; already jitted is fine.
        example_args: Positional arguments: pytrees of arrays, NumPy arrays, scalars or `jax.ShapeDtypeStruct` (values
            for verifying and measuring are then made here); or a function that returns them.
        mesh: A `jax.sharding.Mesh` with Auto or Explicit axes, or a string such as `"data=4,model=2"`.
        example_kwargs: Keyword arguments.
        static_argnums: As for `jax.jit`.
        static_argnames: As for `jax.jit`.
        donate_argnums: As for `jax.jit`.
        donate_argnames: As for `jax.jit`.
        carry: Which outputs feed which arguments of the next step, `{argument: output}`; by default donated arguments
            are matched by structure and shapes.
        pins: Leaf paths (or `re.compile(...)`) to PartitionSpecs that stay fixed; or another Plan or SpecTable.
        user_constraints: `"pin"` keeps the function's own `with_sharding_constraint`s, `"ignore"` drops them.
        memory_budget_bytes: Per device, an int or text such as `"16GiB"`.
        hardware: A preset's name, a file written by calibration, or a `Hardware`; by default the mesh's devices.
        effort: How many candidates are compiled and measured.
        compiler_options: Passed to XLA as they are.
        isolate: Compile each candidate in a process of its own first: one whose compilation aborts, hangs or runs out
            of memory is rejected with its reason and the search goes on.
        compile_timeout_s: With `isolate`, a compilation that takes longer has failed.
        compile_memory_bytes: With `isolate`, what the compiler's process may allocate, an int or text such as
            `"16GiB"`.
        storage: A journal file or Optuna storage URL in which the study is kept, to continue it later.
        study: The study's name in it.
        seed: Of the sampler.
        progress: Say what is being done, on standard error.

    Returns:
        The best plan found: callable like `fn`.

    Raises:
        TraceError: If `fn` cannot be traced.
        NoFeasiblePlanError: If nothing fits the memory budget.
        SearchFailedError: If every candidate was rejected.
        AutoshardError: For arguments that are not of the documented form; the message says which and how to mend it.
    """
    effort = Effort() if effort is None else effort
    budget_bytes = parse_bytes(memory_budget_bytes)
    if not compile_timeout_s > 0:
        raise ArgumentError(f"compile_timeout_s={compile_timeout_s!r}: it must be more than 0.")
    compiler_bytes = parse_bytes(compile_memory_bytes, "compile_memory_bytes")
    request, call = make_request(
        fn, example_args, mesh, example_kwargs=example_kwargs, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames, carry=carry,
        pins=pins, user_constraints=user_constraints,
    )  # fmt: skip
    machine = resolve_hardware(hardware, request.mesh)
    isolation: AbstractContextManager[Isolation | None] = nullcontext()
    if isolate:
        isolation = Isolation(request.mesh, timeout_s=compile_timeout_s, memory_bytes=compiler_bytes)
    with Progress(progress) as reporter, isolation as isolated:
        prepared = prepare(request, call)
        problem, program = prepared.problem, prepared.traced.program
        reporter.say(
            f"{program.name}: {len(program.eqns)} equations, {problem.roles.axes.count} logical axes, "
            f"{len(problem.roles.roles)} roles"
        )
        for note in prepared.notes:
            reporter.say(note)
        predictor = Predictor(problem, machine, call.donated, has_reduce_scatter=request.mesh.platform != "cpu")
        started = time.monotonic()
        proposals = propose(
            problem,
            predictor,
            _identity(prepared),
            budget_bytes=budget_bytes,
            storage=storage,
            study_name=study,
            seed=seed,
            on_progress=lambda done, of: reporter.doing(f"proposing, {done} of {of} asked"),
        )
        reporter.say(f"{len(proposals.ranked)} distinct layouts from {proposals.evaluations} predictions")
        race = Race(
            prepared, predictor, proposals.evidence, inputs_for(call, program), budget_bytes, compiler_options, reporter
        )
        race.isolation = isolated
        race.deadline_s = None if effort.seconds is None else started + effort.seconds
        interrupted = proposals.interrupted
        try:
            winner = _best_so_far(race, proposals) if interrupted else _run(race, proposals, effort)
        except KeyboardInterrupt:
            interrupted = True
            winner = _best_so_far(race, proposals)
        if interrupted:
            reporter.say("interrupted; returning the best so far")
    return _plan(race, proposals, winner, compiler_options, interrupted)


def _run(race: Race, proposals: Proposals, effort: Effort) -> Candidate:
    """Climbs the ladder; returns the winner."""
    race.enter(proposals.ranked)
    hopeful = [c for c in race.candidates if _maybe_fits(c, race.budget_bytes, FAR)]
    if not effort.compiled:
        fitting = [
            c for c in race.candidates if c.trial.constraints == "anchors" and _maybe_fits(c, race.budget_bytes, 1)
        ]
        if not fitting:
            raise _infeasible(race, proposals, compiled=False)
        return fitting[0]
    shortlist = _shortlist(_distinct(hopeful), PARTITIONED_PER_COMPILED * effort.compiled)
    race.progress.say(f"partitioning {len(shortlist)} candidates")
    times = race.partition(shortlist)
    ranked = sorted(
        (c for c in shortlist if c.trial.key in times),
        key=lambda c: (c.proposal.excess_bytes(race.budget_bytes), times[c.trial.key], c.proposal.prediction.time_s),
    )
    ranked = _distinct(ranked)
    known = [c for c in race.candidates if c.trial.compiled is not None or c.trial.status == "rejected"]
    fresh = [c for c in ranked if c not in known]
    chosen = known + _with_presets(fresh, max(0, effort.compiled - len(known)), presets_at_least=effort.compiled // 2)
    for number, candidate in enumerate(chosen):
        if number and race.late():
            race.progress.say(f"out of time after {number} of {len(chosen)} compiles")
            break
        race.compile(candidate)
    fitting = [c for c in chosen if c.trial.compiled is not None and c.trial.status != "rejected"]
    if not fitting:
        fitting = _compile_smallest(race, chosen, effort.compiled)
    fitting.sort(key=lambda c: c.order)
    if effort.measured:
        return _measured_winner(race, fitting, effort)
    while True:
        for candidate in fitting:
            race.verify(candidate)
            if candidate.trial.status != "rejected":
                return candidate
        fitting = _next_best(race, effort.compiled)


def _next_best(race: Race, count: int) -> list[Candidate]:
    """Where everything that was tried is wrong: presets that were not, then others by prediction, a few at a time."""
    rejected = sum(c.trial.status == "rejected" for c in race.candidates)
    rest = [c for c in race.candidates if c.trial.status != "rejected" and _maybe_fits(c, race.budget_bytes, FAR)]
    rest.sort(key=lambda c: not c.is_preset)
    for candidate in rest[:count] if rejected < ROUNDS_OF_REJECTIONS * count else []:
        race.compile(candidate)
        if candidate.trial.status != "rejected":
            return [candidate]
    raise _all_rejected(race)


def _measured_winner(race: Race, fitting: list[Candidate], effort: Effort) -> Candidate:
    """Verifies and measures the best few; the fastest correct one, ties within noise by prediction."""
    left = list(fitting)
    while left:
        chosen = _with_presets(left, effort.measured, presets_at_least=max(1, effort.measured // 2))
        for candidate in chosen:
            race.verify(candidate)
        rejected = [c for c in chosen if c.trial.status == "rejected"]
        if rejected:
            left = [c for c in left if c not in rejected] or _next_best(race, effort.compiled)
            continue
        race.measure(chosen)
        measured = [c for c in chosen if c.trial.measured is not None and c.trial.status != "rejected"]
        if measured:
            return race.fastest(measured)
        left = [c for c in left if c not in chosen]
        if not left:
            left = _next_best(race, effort.compiled)
    raise _all_rejected(race)


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Without those that differ from an earlier one in nothing that any evidence so far can see."""
    seen: set[object] = set()
    kept = []
    for candidate in candidates:
        layout, trial = candidate.layout, candidate.trial
        moved = (
            candidate.proposal.prediction.collectives if trial.partitioned is None else trial.partitioned.collectives
        )
        looks = (trial.constraints, layout.input_specs(), layout.output_specs(), moved)
        if looks not in seen or candidate.is_preset:
            kept.append(candidate)
        seen.add(looks)
    return kept


def _shortlist(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The best by prediction, and every preset."""
    best = candidates[:count]
    return best + [c for c in candidates[count:] if c.is_preset]


def _with_presets(ranked: list[Candidate], count: int, presets_at_least: int) -> list[Candidate]:
    """The first `count` of a ranking, its last places (never the first) to the best presets where too few are in it."""
    chosen = ranked[:count]
    missing = min(presets_at_least, count - 1) - sum(c.is_preset for c in chosen)
    for candidate in ranked[count:]:
        if missing <= 0:
            break
        if candidate.is_preset:
            chosen.append(candidate)
            missing -= 1
    while len(chosen) > count:
        dropped = next(i for i in range(len(chosen) - 1, -1, -1) if not chosen[i].is_preset)
        chosen.pop(dropped)
    return chosen


def _maybe_fits(candidate: Candidate, budget_bytes: int | None, factor: float) -> bool:
    return budget_bytes is None or candidate.proposal.prediction.peak_bytes <= factor * budget_bytes


def _compile_smallest(race: Race, tried: list[Candidate], count: int) -> list[Candidate]:
    """Where nothing compiled fits: the layouts of the smallest predicted peak, before saying that nothing does."""
    rest = [c for c in race.candidates if c not in tried and c.trial.status != "rejected"]
    rest.sort(key=lambda c: (c.proposal.prediction.peak_bytes, c.trial.key))
    for candidate in rest[: max(count, 4)]:
        race.compile(candidate)
        if candidate.trial.status != "rejected":
            return [candidate]
    raise _infeasible(race, None, compiled=True) if race.budget_bytes is not None else _all_rejected(race)


def _infeasible(race: Race, proposals: Proposals | None, *, compiled: bool) -> NoFeasiblePlanError:
    budget = bytes_text(race.budget_bytes or 0)
    smallest = min(race.candidates, key=lambda c: c.proposal.prediction.peak_bytes)
    prediction = smallest.proposal.prediction
    part, held = max(prediction.argument_bytes.items(), key=lambda item: item[1])
    program = race.prepared.traced.program
    leaf_bytes = {
        path: value.bytes // shard_count(smallest.layout.fit(value).spec, race.prepared.problem.mesh_axes)
        for path, value in zip(program.input_paths, program.body.inputs, strict=True)
    }
    leaf = max(leaf_bytes, key=lambda path: leaf_bytes[path], default="")
    peaks = [c.trial.compiled.peak_bytes for c in race.candidates if c.trial.compiled is not None]
    text = (
        f"all {len(race.candidates)} candidates need more than the budget of {budget} per device; the smallest "
        f"predicted peak is {bytes_text(prediction.peak_bytes)} ({smallest.trial.name}; of it {part} {bytes_text(held)}"
        + (f", most in {leaf}, {bytes_text(leaf_bytes[leaf])})" if leaf else ")")
    )
    if compiled and peaks:
        text += f", the smallest compiled peak of {len(peaks)} is {bytes_text(min(peaks))}"
    else:
        text += " (predicted only: nothing was compiled)"
    donated = race.prepared.traced.call.donated
    advice = ["Raise memory_budget_bytes", "add devices"]
    if not all(donated):
        advice.append("donate arguments that the step replaces (donate_argnums)")
    return NoFeasiblePlanError(f"{text}.\n{', '.join(advice)}, or shrink the batch.")


def _all_rejected(race: Race) -> SearchFailedError:
    reasons = [f"{c.trial.name}: {c.trial.reason}" for c in race.candidates if c.trial.status == "rejected"]
    listed = "\n  ".join(reasons[:12])
    return SearchFailedError(f"all {len(reasons)} candidates that were tried were rejected:\n  {listed}")


def _best_so_far(race: Race, proposals: Proposals) -> Candidate:
    """After an interruption: the best measured, else compiled, else predicted candidate."""
    if not race.candidates:
        race.enter(proposals.ranked[:1])
    alive = [c for c in race.candidates if c.trial.status != "rejected"]
    measured = [c for c in alive if c.trial.measured is not None]
    if measured:
        return race.fastest(measured)
    compiled = [c for c in alive if c.trial.compiled is not None]
    return min(compiled or alive, key=lambda c: c.order)


def _plan(
    race: Race, proposals: Proposals, winner: Candidate, compiler_options: CompilerOptions | None, interrupted: bool
) -> Plan:
    winner.trial = replace(winner.trial, status="winner")
    if winner.trial.verified is not None:
        found = winner.trial.verified
        verified = Verification(
            True, f"outputs equal those of the {found.against}, largest error {found.max_abs_err:.3g}"
        )
    elif interrupted:
        verified = Verification(False, "the search was interrupted before the comparison")
    else:
        verified = Verification(False, race.reference_failure or "nothing was run: effort compiled=0")
    prepared = race.prepared
    return Plan(
        user_fn=prepared.request.fn,
        options=prepared.request.options,
        traced=prepared.traced,
        layout=winner.layout,
        mesh=prepared.request.mesh,
        carry=prepared.carry,
        verified=verified,
        trials=tuple(c.trial for c in race.candidates),
        skipped=proposals.skipped,
        notes=(*prepared.notes, *race.notes),
        compiler_options=compiler_options,
        compiled=winner.compiled,
        rebind=_rebinder(prepared.request),
    )


def apply(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    layout: Plan | SpecTable | str | Path | Sequence[AxisRule | str | tuple[str, str]],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    carry: Carry = None,
    pins: Pins = None,
    user_constraints: str = "pin",
    compiler_options: CompilerOptions | None = None,
    constraints: str = "anchors",
) -> Plan:
    """Applies a known layout; searches nothing, compiles at the first call.

    Args:
        fn: As for `optimize`, and so are the other arguments of the same names.
        example_args: Positional arguments.
        mesh: The mesh.
        layout: A SpecTable or its path, a preset's name (`"fsdp"`), a list of rules (`"wq.1->model"`, pairs or
            `AxisRule`s), or a Plan.
        example_kwargs: Keyword arguments.
        static_argnums: As for `jax.jit`.
        static_argnames: As for `jax.jit`.
        donate_argnums: As for `jax.jit`.
        donate_argnames: As for `jax.jit`.
        carry: As for `optimize`.
        pins: As for `optimize`.
        user_constraints: As for `optimize`.
        compiler_options: As for `optimize`.
        constraints: `"anchors"` states the layout inside the function too, `"arguments"` on arguments and outputs only.
            A table or plan decides for itself.

    Returns:
        The plan. It is not verified: nothing is run here.

    Raises:
        TableError: If the table is for another mesh or another function, or cannot be read.
        RuleError: If the preset or a role does not exist here; the existing ones are named.
    """
    request, call = make_request(
        fn, example_args, mesh, example_kwargs=example_kwargs, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames, carry=carry,
        pins=pins, user_constraints=user_constraints,
    )  # fmt: skip
    if constraints not in ("anchors", "arguments"):
        raise ArgumentError(f"constraints={constraints!r}; use 'anchors' or 'arguments'.")
    prepared = prepare(request, call)
    if isinstance(layout, Path) or (isinstance(layout, str) and (layout.endswith(".json") or Path(layout).is_file())):
        layout = SpecTable.load(layout)
    notes = list(prepared.notes)
    inside = constraints == "anchors"
    reason = "apply searches and runs nothing"
    problem = prepared.problem
    if isinstance(layout, Plan):
        rules, inside = layout.rules, layout.layout.inside
    elif isinstance(layout, SpecTable):
        rules = tuple(AxisRule.parse(text) for text in layout.rules)
        inside = layout.constraints == "anchors"
        notes += _check_table(layout, prepared)
        problem = _pin_table(layout, prepared, Layout(problem, rules, inside))
        reason = f"apply runs nothing; the table says {layout.verified}"
    elif isinstance(layout, str):
        rules = _preset_rules(layout, prepared)
    else:
        rules = tuple(map(_as_rule, layout))
    return Plan(
        user_fn=fn,
        options=request.options,
        traced=prepared.traced,
        layout=Layout(problem, rules, inside),
        mesh=request.mesh,
        carry=prepared.carry,
        verified=Verification(False, reason),
        notes=tuple(notes),
        compiler_options=compiler_options,
        rebind=_rebinder(request),
    )


def _as_rule(rule: AxisRule | str | tuple[str, str]) -> AxisRule:
    if isinstance(rule, AxisRule):
        return rule
    if isinstance(rule, str):
        return AxisRule.parse(rule)
    pair: Any = rule
    if isinstance(pair, tuple) and len(pair) == 2:
        return AxisRule(str(pair[0]), str(pair[1]))
    raise RuleError(f"{rule!r} is no axis rule. Use 'role->mesh axis', a pair (role, mesh axis) or an AxisRule.")


def _preset_rules(name: str, prepared: Prepared) -> tuple[AxisRule, ...]:
    anything = hardware_for("cpu")  # only bytes are asked for, and they are the same on any hardware
    predictor = Predictor(prepared.problem, anything, prepared.traced.call.donated)
    made, skipped = presets(prepared.problem, predictor.sent_bytes)
    for preset in made:
        if preset.name == name:
            return preset.rules
    for left_out in skipped:
        if left_out.name == name:
            raise RuleError(
                f"preset {name!r} makes no sense here: {left_out.reason}. Use one of {[p.name for p in made]}."
            )
    raise RuleError(
        f"{name!r} is no preset, and no file of that name exists. The presets are {[p.name for p in made]}."
    )


def _check_table(table: SpecTable, prepared: Prepared) -> list[str]:
    """Refuses a table of another mesh or function; says what else changed."""
    mesh, program = prepared.request.mesh, prepared.traced.program
    if dict(table.mesh.axes) != dict(mesh.axes):
        raise TableError(
            f"the table is for mesh {dict(table.mesh.axes)}, this mesh is {dict(mesh.axes)}. "
            f"Search again for this mesh, or apply its rules alone: apply(..., layout=table.rules)."
        )
    here, there = set(program.input_paths), set(table.inputs)
    if here != there:
        stale, new = sorted(there - here), sorted(here - there)
        raise TableError(
            f"the table is for {table.function!r} with other arguments than {program.name!r}: "
            f"{len(stale)} leaves are gone ({', '.join(stale[:3])}), {len(new)} are new ({', '.join(new[:3])}). "
            f"Search again, or apply its rules alone: apply(..., layout=table.rules)."
        )
    notes = []
    if table.fingerprint != program.fingerprint:
        if table.versions.get("jax") != jax.__version__:
            notes.append(f"the table was written with jax {table.versions.get('jax')}, this is {jax.__version__}")
        else:
            notes.append("the program changed since the table was written; its numbers are not of this program")
    return notes


def _pin_table(table: SpecTable, prepared: Prepared, derived: Layout) -> Problem:
    """The problem with every spec of the table pinned that the rules alone would not give here."""
    program, pins = prepared.traced.program, dict(prepared.problem.pins)
    sides = (
        (table.inputs, program.input_paths, program.body.inputs),
        (table.outputs, program.output_paths, program.body.outputs),
    )
    for entries, paths, values in sides:
        for path, value in zip(paths, values, strict=True):
            entry = entries.get(path)
            if entry is None or tuple(entry.shape) != value.shape:
                continue  # the rules derive the spec of another shape
            spec = canonical_spec(spec_from_entry(entry.spec), value, prepared.request.mesh.axes, path)
            if spec != derived.fit(value).spec:
                pins[value.index] = spec
    return replace(prepared.problem, pins=pins)


def _rebinder(request: Request) -> Callable[[Plan, Call], Plan]:
    def rebind(plan: Plan, call: Call) -> Plan:
        try:
            prepared = prepare(request, call)
            known = {role.name for role in prepared.problem.roles.roles}
            rules = tuple(rule for rule in plan.rules if rule.role in known)
            layout = Layout(prepared.problem, rules, plan.layout.inside)
        except (PathError, RuleError, ValueError) as error:
            raise SignatureError(f"the plan's rules do not fit the new shapes: {error}") from error
        return Plan(
            user_fn=plan.user_fn,
            options=plan.options,
            traced=prepared.traced,
            layout=layout,
            mesh=plan.mesh,
            carry=prepared.carry,
            verified=Verification(False, "the rules of a plan for other shapes, applied without a search"),
            compiler_options=plan.compiler_options,
            rebind=plan.rebind,
        )

    return rebind


def _identity(prepared: Prepared) -> dict[str, str]:
    """What a study is for."""
    mesh = prepared.request.mesh
    return {
        "program": prepared.traced.program.fingerprint,
        "mesh": ",".join(f"{name}={size}" for name, size in mesh.axes.items()),
        "devices": mesh.device_kind,
        "jax": jax.__version__,
        "autoshard": own_version(),
    }


def parse_bytes(size: int | str | None, name: str = "memory_budget_bytes") -> int | None:
    """A number of bytes from an int or text; `name` is the argument that it came by.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 kB".replace("k", "K")), parse_bytes(1024)
    (17179869184, 1500, 1024)

    Raises:
        ArgumentError: If it is neither.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None:
        raise ArgumentError(f"{name}={size!r}; use a positive int, or text such as '16GiB' or '800MB'.")
    return int(float(match[1]) * _UNITS[match[2]])


def resolve_hardware(hardware: Hardware | str | None, mesh: MeshInfo) -> Hardware:
    """The hardware to predict for: as named, or what the mesh's devices are."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        if Path(hardware).suffix == ".json":
            return Hardware.load(hardware)
        return hardware_for(hardware)
    return hardware_for(mesh.device_kind)
