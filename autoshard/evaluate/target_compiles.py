"""Compiling candidates for hardware that is not here, and pricing what the compiler says.

The quick level exists for TPUs only (the compiler's optimisation level O0): its memory is within
-15 % to +1 % of the full level's in a quarter of the time, its estimates of time are useless, so
there the compute is the model's. At the full level the TPU compiler estimates the cycles of every
operation; the GPU and CPU compilers never do. Collectives have no estimate anywhere: they are the
compiled program's, priced with the hardware's links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from autoshard.compiler.cache import Refusal
from autoshard.compiler.compile import Reading, build, evidence_of
from autoshard.compiler.pool import Job, Outcome
from autoshard.cost_model.predict import Predictor
from autoshard.devices.platforms import facts_of
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation, program_s
from autoshard.evidence.candidate import CompiledEvidence, Status
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.text import bytes_text, one_line, seconds_text

Level = Literal["quick", "full"]

QUICK_SLACK = 1.15
"""At the quick level a program may seem up to this much larger than it is (by the refusal) or
smaller (by its peak): -15 % to +1 % were measured on language model steps for v5e, libtpu 0.0.50.
`tests/targets/test_target.py` covers both sides."""


def has_quick_level(evaluation: Evaluation) -> bool:
    """True where the compiler has a quick level, and the user does not choose another."""
    options = evaluation.setting.compiler_options or {}
    platform = evaluation.setting.prepared.request.mesh.platform
    return facts_of(platform).has_quick_level and "optimization_level" not in options


def compile_on_target(evaluation: Evaluation, entries: Sequence[Entry], level: Level) -> None:
    """Compiles candidates beside each other in the pool of the evaluation."""
    setting = evaluation.setting
    mesh = setting.prepared.request.mesh
    options = dict(setting.compiler_options or {})
    if level == "quick":
        options |= executables.quick_compile_options()
    jobs: list[Job] = []
    owners: list[Entry] = []
    for entry in entries:
        try:
            built = entry.built or build(setting.prepared.traced, entry.layout, mesh)
        except Exception as error:
            evaluation.reject(entry, f"lowering failed: {one_line(error)}")
            continue
        owners.append(entry)
        jobs.append(Job(built, options))
    if not jobs:
        return

    setting.progress.say(f"compiling {len(jobs)} candidates for {mesh.target}, {level} level")
    done = 0

    def take(number: int, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        _take(evaluation, owners[number], outcome, level)
        setting.progress.doing(f"compiled {done} of {len(jobs)}, {level} level")

    assert setting.compilers is not None
    setting.compilers.compile(jobs, take, evaluation.late)


def _take(evaluation: Evaluation, entry: Entry, outcome: Outcome, level: Level) -> None:
    """What came of compiling a candidate."""
    slack = QUICK_SLACK if level == "quick" else 1.0
    if isinstance(outcome, Refusal):
        evaluation.refusals.append(outcome.needed_bytes)
        if outcome.needed_bytes > slack * outcome.available_bytes:
            needs, has = bytes_text(outcome.needed_bytes), bytes_text(outcome.available_bytes)
            evaluation.reject(
                entry, f"needs {needs} per device (the compiler refuses it), the device has {has}"
            )
        return
    if not isinstance(outcome, Reading):
        evaluation.reject(entry, f"compilation failed: {outcome.reason}")
        return

    mesh = evaluation.setting.prepared.request.mesh
    compute_s = entry.proposal.prediction.compute_s
    evidence = priced(outcome, mesh, evaluation.setting.predictor, compute_s, level)
    entry.gain(Status.COMPILED, compiled=evidence)
    excess = evaluation.over_budget(entry)
    if excess and evidence.peak_bytes > slack * (evaluation.setting.budget_bytes or 0):
        evaluation.reject(entry, excess)
        return
    evaluation.setting.progress.say(
        f"{entry.name}: compiled ({level}) in {seconds_text(evidence.compile_s)}, step "
        f"{seconds_text(evidence.time_s)}, {bytes_text(evidence.collective_bytes)} moved, peak "
        f"{bytes_text(evidence.peak_bytes)}"
    )


def priced(
    reading: Reading, mesh: MeshInfo, predictor: Predictor, predicted_compute_s: float, level: Level
) -> CompiledEvidence:
    """The evidence of a program compiled for a target; compute is the compiler's own estimate where
    there is one.
    """
    clock_hz = mesh.target.clock_hz if mesh.target is not None else None
    estimated = level == "full" and reading.cycles is not None and clock_hz is not None
    compute_s = predicted_compute_s
    if estimated:
        assert reading.cycles is not None
        assert clock_hz is not None
        compute_s = reading.cycles / clock_hz
    evidence = evidence_of(reading, mesh, lambda ops: program_s(predictor, compute_s, ops))
    return replace(
        evidence,
        compute_s=compute_s,
        compute_from="compiler" if estimated else "predicted",
        level=level,
    )
