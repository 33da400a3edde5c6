"""The ladder on a target: predicted, partitioned, compiled quickly, compiled fully; nothing is run.

Each rung cuts the ranked list. The quick level exists for TPUs only (the compiler's optimisation
level O0): its memory is within -15 % to +1 % of the full level's in a quarter of the time, its
estimates of time are useless, so there the compute is the model's. At the full level the TPU
compiler estimates the cycles of every operation; the GPU and CPU compilers never do. Collectives
have no estimate anywhere: they are the compiled program's, priced with the hardware's links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.compiler.cache import Refusal
from autoshard.compiler.compile import Reading, build, evidence_of
from autoshard.compiler.pool import CompilePool, Job, Outcome
from autoshard.cost_model.predict import Predictor
from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation, one_line, step_s
from autoshard.evaluate.failures import all_rejected, infeasible
from autoshard.evaluate.selection import (
    by_compiled_time,
    choose_compiled,
    uncompiled_best,
    with_presets,
)
from autoshard.evidence.candidate import CompiledEvidence, Status
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.search.proposer import Proposals
from autoshard.text import bytes_text, seconds_text

Level = Literal["quick", "full"]

QUICK_SLACK = 1.15
"""At the quick level a program may seem up to this much larger than it is (by the refusal) or
smaller (by its peak)."""


def select_on_target(
    evaluation: Evaluation, proposals: Proposals, effort: Effort, pool: CompilePool
) -> Entry:
    """Climbs the ladder on hardware that is not here; returns the winner."""
    evaluation.enter(proposals.ranked)
    if not effort.compiled:
        return uncompiled_best(evaluation, proposals, effort)
    return _TargetSelection(evaluation, pool).select(
        _unlike(choose_compiled(evaluation, effort)), effort, proposals
    )


@dataclass(frozen=True, eq=False)
class _TargetSelection:
    evaluation: Evaluation
    pool: CompilePool

    def select(self, chosen: Sequence[Entry], effort: Effort, proposals: Proposals) -> Entry:
        evaluation = self.evaluation
        if self._has_quick_level:
            self._compile([c for c in chosen if c.candidate.compiled is None], "quick")
        waiting = [
            c
            for c in evaluation.entries
            if not c.candidate.rejected and (c in chosen or _compiled(c))
        ]
        waiting.sort(key=lambda c: c.order)
        left = waiting
        while left:
            batch = with_presets(left, effort.full, presets_at_least=max(1, effort.full // 2))
            self._compile([c for c in batch if not _compiled(c, "full")], "full")
            left = [c for c in left if c not in batch]
            fitting = [c for c in waiting if not c.candidate.rejected and _compiled(c, "full")]
            if fitting:
                return by_compiled_time(fitting)[0]
            if evaluation.late():
                break
        return self._smallest(effort, proposals)

    def _smallest(self, effort: Effort, proposals: Proposals) -> Entry:
        """Where nothing that was chosen fits: those of the smallest predicted peak, before saying
        that none does.
        """
        evaluation = self.evaluation
        rest = [c for c in evaluation.entries if not c.candidate.rejected and not _compiled(c)]
        rest.sort(key=lambda c: (c.proposal.prediction.peak_bytes, c.candidate.key))
        smallest = (
            rest[: effort.full]
            + [c for c in rest[effort.full :] if c.candidate.is_preset][: effort.full]
        )
        self._compile(smallest, "full")
        fitting = [c for c in smallest if not c.candidate.rejected and _compiled(c, "full")]
        if fitting:
            return by_compiled_time(fitting)[0]
        some = any(_compiled(c) for c in evaluation.entries)
        raise (
            infeasible(evaluation, proposals, compiled=True)
            if some or evaluation.refusals
            else all_rejected(evaluation)
        )

    @property
    def _has_quick_level(self) -> bool:
        stated = self.evaluation.compiler_options or {}
        return (
            self.evaluation.prepared.request.mesh.platform == "tpu"
            and "optimization_level" not in stated
        )

    def _compile(self, entries: Sequence[Entry], level: Level) -> None:
        shared = self.evaluation.shared
        if shared.tasks.alone:
            self._compile_here(entries, level)
        else:
            shared.each(
                level,
                entries,
                lambda c: self._compile_here([c], level),
                needs="compile",
                stop=self.evaluation.late,
            )

    def _compile_here(self, entries: Sequence[Entry], level: Level) -> None:
        evaluation, mesh = self.evaluation, self.evaluation.prepared.request.mesh
        options = dict(evaluation.compiler_options or {}) | (
            executables.quick_compile_options() if level == "quick" else {}
        )
        jobs: list[Job] = []
        owners: list[Entry] = []
        for entry in entries:
            try:
                built = entry.built or build(evaluation.prepared.traced, entry.layout, mesh)
            except Exception as error:
                evaluation.reject(entry, f"lowering failed: {one_line(error)}")
                continue
            owners.append(entry)
            jobs.append(Job(built, options))
        if not jobs:
            return
        evaluation.progress.say(
            f"compiling {len(jobs)} candidates for {mesh.target}, {level} level"
        )
        done = 0

        def take(number: int, outcome: Outcome) -> None:
            nonlocal done
            done += 1
            self._take(owners[number], outcome, level)
            evaluation.progress.doing(f"compiled {done} of {len(jobs)}, {level} level")

        self.pool.compile(jobs, take, evaluation.late)

    def _take(self, entry: Entry, outcome: Outcome, level: Level) -> None:
        evaluation = self.evaluation
        slack = QUICK_SLACK if level == "quick" else 1.0
        if isinstance(outcome, Refusal):
            evaluation.refusals.append(outcome.needed_bytes)
            if outcome.needed_bytes > slack * outcome.available_bytes:
                needs, has = bytes_text(outcome.needed_bytes), bytes_text(outcome.available_bytes)
                evaluation.reject(
                    entry,
                    f"needs {needs} per device (the compiler refuses it), the device has {has}",
                )
            return
        if not isinstance(outcome, Reading):
            evaluation.reject(entry, f"compilation failed: {outcome.reason}")
            return
        mesh = evaluation.prepared.request.mesh
        found = priced(
            outcome, mesh, evaluation.predictor, entry.proposal.prediction.compute_s, level
        )
        entry.candidate = replace(entry.candidate, status=Status.COMPILED, compiled=found)
        over = evaluation.over_budget(entry)
        if over and found.peak_bytes > slack * (evaluation.budget_bytes or 0):
            evaluation.reject(entry, over)
            return
        evaluation.progress.say(
            f"{entry.candidate.name}: compiled ({level}) in {seconds_text(found.compile_s)}, step "
            f"{seconds_text(found.time_s)}, {bytes_text(found.collective_bytes)} moved, peak "
            f"{bytes_text(found.peak_bytes)}"
        )


def priced(
    reading: Reading, mesh: MeshInfo, predictor: Predictor, predicted_compute_s: float, level: Level
) -> CompiledEvidence:
    """The evidence of a program compiled for a target; compute is the compiler's own estimate where
    there is one.
    """
    clock_hz = mesh.target.clock_hz if mesh.target is not None else None
    if level == "full" and reading.cycles is not None and clock_hz is not None:
        compute_s, own = reading.cycles / clock_hz, True
    else:
        compute_s, own = predicted_compute_s, False
    evidence = evidence_of(reading, mesh, lambda ops: step_s(predictor, compute_s, ops))
    return replace(
        evidence, compute_s=compute_s, compute_from="compiler" if own else "predicted", level=level
    )


def _unlike(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that move the same data as an earlier one: compiling takes a minute, and they
    are as good.
    """
    seen: set[object] = set()
    kept = []
    for entry in entries:
        candidate = entry.candidate
        looks = (
            candidate.constraints,
            candidate.partitioned.collectives
            if candidate.partitioned is not None
            else candidate.key,
            f"{entry.proposal.prediction.peak_bytes:.2g}",
        )
        if looks not in seen or entry.candidate.is_preset:
            kept.append(entry)
        seen.add(looks)
    return kept


def _compiled(entry: Entry, level: Level | None = None) -> bool:
    """True if there is evidence of a compiled program (of this level)."""
    found = entry.candidate.compiled
    return found is not None and (level is None or found.level == level)
