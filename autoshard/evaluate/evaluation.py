"""The ladder that candidates climb: partitioned, compiled, verified, measured. A failure is a
rejection, nothing stops.

Each rung cuts the ranked list. What a candidate earned is kept in the study, so an interrupted
search continues.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from autoshard.compiler.compile import Built, CompilerOptions, build
from autoshard.compiler.isolated import Failure, InProcess, Isolation
from autoshard.cost_model.predict import Predictor
from autoshard.evaluate.candidate import Candidate
from autoshard.evaluate.device_runner import Bench
from autoshard.evaluate.measure import RunError, ratio_interval
from autoshard.evidence.candidate import CompiledEvidence, PartitionedEvidence, Predicted, Trial
from autoshard.evidence.collectives import CollectiveOp
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.processes.progress import Progress
from autoshard.search.proposer import Proposal
from autoshard.search.simplify_rules import Shortener
from autoshard.search.study.shared_evaluation import Shared, adopted
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition
from autoshard.text import bytes_text, seconds_text

log = logging.getLogger("autoshard")

NOISE = 1.05
"""Medians within this ratio count as equally fast, as do those whose bootstrap interval holds 1."""

ARGUMENTS_PREDICTED = 100
"""Candidates from the top of the ranking within which layouts for arguments only get a prediction
of their own."""

FAR = 2.0
"""Prediction alone prunes a candidate only beyond this multiple of the memory budget."""


@dataclass(eq=False)
class Race:
    """The candidates of one search and what is done with them."""

    prepared: Prepared
    predictor: Predictor
    shared: Shared
    bench: Bench
    budget_bytes: int | None
    compiler_options: CompilerOptions | None
    progress: Progress
    candidates: list[Candidate] = field(default_factory=list)
    reference_failure: str = ""
    isolation: Isolation | None = None
    notes: list[str] = field(default_factory=list)
    deadline_s: float | None = None
    due: tuple[Candidate, ...] = ()
    refusals: list[int] = field(default_factory=list)
    """Bytes that programs need which the compiler refuses."""

    def enter(self, proposals: Iterable[Proposal]) -> None:
        """Enters each proposal twice: with constraints inside, and for arguments only; best first
        by prediction.

        Layouts for arguments only are one where their arguments are split alike. What the rules say
        of the inside does not hold there, so the best of them are predicted by the fewest rules
        that give the same arguments.
        """
        entered = {c.trial.key for c in self.candidates}
        shortener = Shortener(self.predictor.placements)
        shortened: list[tuple[Proposal, Layout, str]] = []
        known = self.shared.known()
        for proposal in proposals:
            for inside in (True, False):
                layout = proposal.layout if inside else replace(proposal.layout, inside=False)
                key = proposal.key if inside else layout.key()
                if key in entered:
                    continue
                entered.add(key)
                if inside or len(entered) > ARGUMENTS_PREDICTED:
                    self._enter(proposal, layout, key, known)
                else:
                    shortened.append((proposal, shortener.shorten(layout), key))
        if shortened:
            index = self.predictor.placements.of_rules([layout.rules for _, layout, _ in shortened])
            for (proposal, layout, key), own in zip(
                shortened, self.predictor.predict_each(index), strict=True
            ):
                self._enter(replace(proposal, prediction=own), layout, key, known)
        self.candidates.sort(key=lambda c: c.proposal.order(self.budget_bytes))

    def _enter(
        self, proposal: Proposal, layout: Layout, key: str, known: Mapping[str, Trial]
    ) -> None:
        p = proposal.prediction
        predicted = Predicted(p.time_s, p.peak_bytes, p.collective_bytes)
        trial = Trial(
            name=proposal.name if layout.inside else f"{proposal.name} (arguments)",
            origin=proposal.origin,
            rules=tuple(map(str, layout.rules)),
            constraints="anchors" if layout.inside else "arguments",
            key=key,
            predicted=predicted,
        )
        if key in known:
            trial = adopted(trial, known[key])
        self.candidates.append(Candidate(layout, proposal, trial))

    def reject(self, candidate: Candidate, reason: str) -> None:
        """Takes a candidate out of the race."""
        candidate.trial = candidate.trial.reject(reason)
        self.bench.forget(candidate.trial.key)
        self.progress.say(f"{candidate.trial.name}: rejected, {reason.splitlines()[0]}")

    def standing(self) -> str:
        """How the race stands: the best so far, how many are left to compile, how many were
        rejected.
        """
        alive = [
            c
            for c in self.candidates
            if c.trial.compiled is not None and c.trial.status != "rejected"
        ]
        parts = []
        if alive:
            best = min(alive, key=lambda c: c.order)
            measured = best.trial.measured
            text = "compiled" if measured is None else f"{seconds_text(measured.median_s)} measured"
            parts.append(f"best so far {best.trial.name}, {text}")
        left = sum(c.trial.compiled is None and c.trial.status != "rejected" for c in self.due)
        parts += [f"{left} left to compile"] if left else []
        rejected = sum(c.trial.status == "rejected" for c in self.candidates)
        parts += [f"{rejected} rejected"] if rejected else []
        return ", ".join(parts)

    # Rungs ----------------------------------------------------------------------------------------

    def time_s(self, compute_s: float, ops: Sequence[CollectiveOp]) -> float:
        """Seconds of a step: predicted compute, and the collectives of a program priced with the
        hardware's links.
        """
        return step_s(self.predictor, compute_s, ops)

    def _as_sent(self, ops: Sequence[CollectiveOp]) -> list[CollectiveOp]:
        """Shardy's collectives as the backend sends them: XLA:CPU makes a reduce_scatter an
        all_reduce and a slice.
        """
        lacking = self.prepared.request.mesh.platform == "cpu"
        return [
            replace(op, kind="all_reduce") if lacking and op.kind == "reduce_scatter" else op
            for op in ops
        ]

    def partition(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Runs Shardy's passes on candidates; returns seconds of a step by key."""
        times: dict[str, float] = {}
        for number, candidate in enumerate(candidates):
            self.progress.doing(
                f"partitioning {number + 1} of {len(candidates)}: {candidate.trial.name}"
            )
            compute_s = candidate.proposal.prediction.compute_s
            if candidate.trial.compiled is not None:
                times[candidate.trial.key] = candidate.trial.compiled.time_s
                continue
            if candidate.trial.status == "rejected":
                continue
            try:
                candidate.built = build(
                    self.prepared.traced, candidate.layout, self.prepared.request.mesh
                )
                found = self._partition(candidate.built.lower())
            except Exception as error:
                self.reject(candidate, f"lowering failed: {one_line(error)}")
                continue
            if isinstance(found, Failure):
                self.reject(candidate, f"partitioning failed: {found.reason}")
                continue
            if isinstance(found, PartitionFailure):
                log.info("%s: not partitioned (%s)", candidate.trial.name, found.reason)
                times[candidate.trial.key] = candidate.proposal.prediction.time_s
                continue
            times[candidate.trial.key] = self.time_s(compute_s, self._as_sent(found.ops))
            candidate.trial = replace(
                candidate.trial,
                status="partitioned",
                partitioned=PartitionedEvidence(found.collectives, found.collective_bytes),
            )
        return times

    def _partition(self, lowered: jax.stages.Lowered) -> Partitioned | PartitionFailure | Failure:
        """Runs Shardy's passes, in a process of their own where candidates compile in one."""
        found = None if self.isolation is None else self.isolation.partition(lowered)
        if found is None or isinstance(found, InProcess):
            return partition(lowered, self.prepared.request.mesh.axes)
        return found

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Compiles candidates of which there is no evidence yet, here or on other workers."""
        new = [c for c in candidates if c.trial.compiled is None and c.trial.status != "rejected"]
        self.due = tuple(new)

        def stop() -> bool:
            return self.late() and any(c.trial.compiled is not None for c in candidates)

        self.shared.each("compile", new, self._compile, needs="compile", stop=stop)

    def _compile(self, candidate: Candidate, *, to_run: bool = False) -> None:
        """Compiles one candidate here; where there is evidence of it already, only if it is needed
        `to_run`.

        With isolation that is in a process of its own, and in this one only what survived there and
        is needed `to_run`.
        """
        if candidate.trial.status == "rejected" or self._on_bench(candidate):
            return
        if candidate.trial.compiled is not None and not to_run:
            return
        trial = candidate.trial
        self.progress.doing(f"compiling {trial.name}", self.standing())
        compute_s = candidate.proposal.prediction.compute_s
        try:
            built = candidate.built or build(
                self.prepared.traced, candidate.layout, self.prepared.request.mesh
            )
            found = trial.compiled or self._isolated(built, compute_s)
            if isinstance(found, Failure):
                self.reject(candidate, f"compilation failed: {found.reason}")
                return
            if found is None or to_run:
                made = self.bench.compile(
                    trial.key, candidate.layout, built, lambda ops: self.time_s(compute_s, ops)
                )
                found = found or made.evidence
        except Exception as error:
            self.reject(candidate, f"compilation failed: {one_line(error)}")
            return
        if trial.compiled is not None:
            return  # its evidence stands
        found = replace(found, compute_s=compute_s)
        candidate.trial = replace(trial, status="compiled", compiled=found)
        over = self.over_budget(candidate)
        if over:
            self.reject(candidate, over)
            return
        self.progress.say(
            f"{trial.name}: compiled in {seconds_text(found.compile_s)}, "
            f"{bytes_text(found.collective_bytes)} moved, "
            f"peak {bytes_text(found.peak_bytes)}"
        )

    def _isolated(self, built: Built, compute_s: float) -> CompiledEvidence | Failure | None:
        """Compiles in a process of its own; None where that is not wanted or not possible (which is
        noted).
        """
        if self.isolation is None:
            return None
        outcome = self.isolation.compile(
            built,
            compiler_options=self.compiler_options,
            time_of=lambda ops: self.time_s(compute_s, ops),
        )
        if not isinstance(outcome, InProcess):
            return outcome
        note = f"compiled in the process of the search, not isolated: {outcome.reason}"
        if note not in self.notes:
            self.notes.append(note)
            self.progress.say(note)
        return None

    def over_budget(self, candidate: Candidate) -> str:
        """Why a compiled candidate does not fit the memory budget; empty where it does."""
        found = candidate.trial.compiled
        if found is None or self.budget_bytes is None or found.peak_bytes <= self.budget_bytes:
            return ""
        return f"needs {bytes_text(found.peak_bytes)} per device (compiled), the budget is {bytes_text(self.budget_bytes)}"

    def verify(self, candidate: Candidate) -> None:
        """Compares a compiled candidate's outputs with the unsharded function's; a mismatch rejects
        it.

        Where the unsharded function does not fit on one device, the outputs are compared with those
        of another compiled layout, and the same layout with the unsharded function at smaller
        sizes.
        """
        self.compile([candidate])
        if (
            candidate.trial.status == "rejected"
            or candidate.trial.verified is not None
            or self.reference_failure
        ):
            return
        for failure in self.shared.each(
            "verify",
            [candidate],
            self._verify,
            needs="measure",
            note=lambda: self.reference_failure,
        ):
            self.reference_failure = failure

    def _verify(self, candidate: Candidate) -> None:
        if self.too_large(candidate):
            return
        self._compile(candidate, to_run=True)
        if not self._on_bench(candidate):
            return
        self.progress.doing(f"verifying {candidate.trial.name}", self.standing())
        try:
            other = self._other(candidate)
            self.bench.refer(
                None if other is None else other.trial.key,
                "" if other is None else other.trial.name,
            )
        except Exception as error:
            self.reference_failure = f"nothing to compare with: {one_line(error)}"
            return
        try:
            compared = self.bench.compare(candidate.trial.key)
            if other is not None and compared.agrees:
                small = self.bench.compare_small(candidate.layout)
                if isinstance(small, str):
                    self.progress.say(
                        f"{candidate.trial.name}: not compared at smaller sizes, {small}"
                    )
                else:
                    below, factor = small
                    text = f"{compared.found.against}, and the {below.found.against} at sizes divided by up to {factor}"
                    worst = compared if below.agrees else below
                    compared = replace(worst, found=replace(worst.found, against=text))
        except Exception as error:
            self.reject(candidate, f"running failed: {one_line(error)}")
            return
        found = compared.found
        candidate.trial = replace(candidate.trial, verified=found)
        if not compared.agrees:
            self.reject(
                candidate,
                f"wrong numbers: {found.leaf} differs from that of the {found.against} by "
                f"{found.max_abs_err:.3g}, "
                f"tolerance {found.tolerance:.3g}",
            )

    def _on_bench(self, candidate: Candidate) -> bool:
        """True for a candidate that is compiled here, to be run."""
        return candidate.trial.key in self.bench.compiled

    def too_large(self, candidate: Candidate) -> str:
        """Why a candidate cannot be run here: devices on the CPU share the host's memory; empty
        where it can.
        """
        found, mesh = candidate.trial.compiled, self.prepared.request.mesh
        if found is None or mesh.platform != "cpu":
            return ""
        need, there = found.peak_bytes * math.prod(mesh.axes.values()), host_bytes()
        if need <= there:
            return ""
        return f"not run: it needs {bytes_text(need)} on all devices, and this host has {bytes_text(there)}"

    def _other(self, candidate: Candidate) -> Candidate | None:
        """What to compare a candidate with: a compiled candidate, or None for the unsharded
        function.

        Raises:
            LookupError: If there is neither.
        """
        whole = self.predictor.predict(replace(candidate.layout, rules=())).peak_bytes
        if whole <= self.predictor.hardware.memory_bytes:
            return None
        for other in self.candidates:
            if (
                other.trial.compiled is None
                or other.layout.input_specs() == candidate.layout.input_specs()
            ):
                continue
            self._compile(other, to_run=True)
            if self._on_bench(other):
                return other
        raise LookupError(
            "the unsharded function does not fit on one device, and no second layout was compiled"
        )

    def late(self) -> bool:
        """True after the deadline (`time.monotonic`)."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def measure(self, candidates: Sequence[Candidate]) -> None:
        """Measures candidates against each other, round by round."""
        self.compile(candidates)
        alive = [c for c in candidates if c.trial.status != "rejected" and not self.too_large(c)]
        if not alive or (
            all(c.trial.measured is not None for c in alive) and not self.shared.again
        ):
            return

        def best_s() -> float | None:
            return min(
                (c.trial.measured.median_s for c in alive if c.trial.measured is not None),
                default=None,
            )

        self.shared.group("measure", alive, lambda: self._measure(alive), best_s)

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self._compile(candidate, to_run=True)
        by_name = {c.trial.name: c for c in candidates if self._on_bench(c)}
        while by_name:
            try:
                found = self.bench.measure(
                    {name: c.trial.key for name, c in by_name.items()},
                    self._inputs_fit(list(by_name.values())),
                    self.late,
                    lambda n, best: self.progress.doing(
                        f"measuring round {n}: "
                        + ", ".join(f"{k} {seconds_text(v)}" for k, v in best.items())
                    ),
                )
            except RunError as failure:
                self.reject(by_name.pop(failure.name), f"running failed: {failure.reason}")
                continue
            for name, measured in found.items():
                candidate = by_name[name]
                candidate.trial = replace(candidate.trial, status="measured", measured=measured)
                self.progress.say(
                    f"{name}: measured {seconds_text(measured.median_s)} ({measured.rounds} rounds)"
                )
            return

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate:
        """The fastest by the clock; those within noise of it are ordered by prediction, then
        canonical form.
        """
        seconds = {
            c.trial.key: c.trial.measured.seconds
            for c in candidates
            if c.trial.measured is not None
        }

        def no_slower(mine: Candidate, other: Candidate) -> bool:
            interval = ratio_interval(seconds[mine.trial.key], seconds[other.trial.key])
            return interval.ratio <= NOISE or interval.low <= 1.0

        tied = [
            c
            for c in candidates
            if all(no_slower(c, other) for other in candidates if other is not c)
        ]
        return min(tied or candidates, key=lambda c: c.order)

    def _inputs_fit(self, candidates: Sequence[Candidate]) -> bool:
        memory = self.budget_bytes or self.predictor.hardware.memory_bytes
        need = sum(
            c.trial.compiled.argument_bytes for c in candidates if c.trial.compiled is not None
        )
        peak = max(
            (c.trial.compiled.peak_bytes for c in candidates if c.trial.compiled is not None),
            default=0,
        )
        return need + peak <= memory


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def step_s(predictor: Predictor, compute_s: float, ops: Sequence[CollectiveOp]) -> float:
    """Seconds of a step: these of compute, and a program's collectives priced with the links of the
    hardware.
    """
    comm_s = sum(
        op.trip_count * predictor.collective_s(op.kind, op.axes, op.full_bytes, op.group_size)
        for op in ops
    )
    return compute_s + comm_s - predictor.hardware.overlap * min(compute_s, comm_s)
