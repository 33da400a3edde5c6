"""The candidates of one search, and what is done with one of them here: partition, compile, verify,
measure.

A failure is a rejection with its reason; nothing stops. Which candidates get how far is decided in
`selection`, and where they are evaluated, here or on other workers, by an `Evaluator`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autoshard.compiler.compile import Built, CompilerOptions, build
from autoshard.compiler.isolated import InProcess, Isolation
from autoshard.compiler.pool import CompilePool
from autoshard.compiler.worker_process import Failure
from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.hardware.step_components import step_s
from autoshard.cost_model.predict import Predictor
from autoshard.evaluate.device_runner import Compared, DeviceRunner
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.measure import RunError, ratio_interval
from autoshard.evaluate.verification.reference import Verdict
from autoshard.evidence.candidate import (
    Candidate,
    CompiledEvidence,
    PartitionedEvidence,
    Status,
    Verified,
)
from autoshard.evidence.collectives import CollectiveOp
from autoshard.layout.prepare import Prepared
from autoshard.processes.progress import Progress
from autoshard.search.proposer import Proposal
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition
from autoshard.text import bytes_text, first_line, one_line, seconds_text

log = logging.getLogger("autoshard")

NOISE = 1.05
"""Medians within this ratio count as equally fast, as do those whose bootstrap interval holds 1.
The promise of the README (`never slower than the best preset beyond noise`); on shared machines two
runs of one program differ by up to 5 % in the median. `tests/evaluate/test_order.py` pins it."""

ARGUMENTS_PREDICTED = 100
"""Candidates from the top of the ranking within which layouts for arguments only get a prediction
of their own; far more than are ever partitioned. `tests/search/test_proposer.py` covers 100."""


OUT_OF_TIME = "out of time (Effort.seconds) before the comparison"

MOMENT_S = 0.1
"""What passes may take at least, where the deadline is now. Chosen by hand; no test depends on
it."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What an evaluation works with.

    Attributes:
        prepared: The traced request.
        predictor: Of its problem, for the hardware.
        backend: What the compiler does.
        runner: The devices.
        budget_bytes: Memory of a device; None for no limit.
        compiler_options: Passed to XLA as they are.
        progress: Says what is being done.
        isolation: Compiles in a process of its own first; None for compiling here.
        compilers: Compile for a target that is not here; None where the devices are here.
        deadline_s: By `time.monotonic`, when nothing new is started any more; None for never.
    """

    prepared: Prepared
    predictor: Predictor
    backend: Backend
    runner: DeviceRunner
    budget_bytes: int | None
    compiler_options: CompilerOptions | None
    progress: Progress
    isolation: Isolation | None = None
    compilers: CompilePool | None = None
    deadline_s: float | None = None


class Evaluation:
    """The candidates of one search.

    Attributes:
        setting: What it works with.
        entries: The candidates, best first by prediction.
        notes: What the user should know of them.
        refusals: Bytes that programs need which the compiler refuses.
        reference_failure: Why outputs cannot be compared; "" where they can.
        unverified: Why some were not compared though they could be; "" if all were.
    """

    def __init__(self, setting: Setting) -> None:
        """Starts without candidates."""
        self.setting = setting
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self.refusals: list[int] = []
        self.reference_failure = ""
        self.unverified = ""
        self._expired = False
        self._due: tuple[Entry, ...] = ()

    def add(self, proposals: Iterable[Proposal], known: Mapping[str, Candidate]) -> None:
        """Adds each proposal twice: with constraints inside, and for arguments only.

        Layouts for arguments only are one where their arguments are split alike. What the rules say
        of the inside does not hold there, so the best of them are predicted by the fewest rules
        that give the same arguments.

        Args:
            proposals: Best first by prediction.
            known: By key, candidates of which there is evidence already.
        """
        added = {entry.key for entry in self.entries}
        simplifier = RuleSimplifier(self.setting.predictor.placements)
        to_predict: list[Proposal] = []
        for proposal in proposals:
            if proposal.key not in added:
                added.add(proposal.key)
                self._add(proposal, known)

            layout = replace(proposal.layout, inside=False)
            key = layout.key()
            if key in added:
                continue
            added.add(key)
            if len(added) > ARGUMENTS_PREDICTED:
                self._add(replace(proposal, layout=layout, key=key), known)
            else:
                simplified = simplifier.simplify(layout)
                to_predict.append(replace(proposal, layout=simplified, key=key))
        for proposal in self._predicted(to_predict):
            self._add(proposal, known)
        self.entries.sort(key=lambda entry: entry.proposal.order(self.setting.budget_bytes))

    def _predicted(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """The proposals, each with a prediction of its own layout."""
        if not proposals:
            return []
        predictor = self.setting.predictor
        index = predictor.placements.of_rules([p.layout.rules for p in proposals])
        predictions = predictor.predict_each(index)
        return [replace(p, prediction=own) for p, own in zip(proposals, predictions, strict=True)]

    def _add(self, proposal: Proposal, known: Mapping[str, Candidate]) -> None:
        entry = Entry.of(proposal)
        if proposal.key in known:
            entry.candidate = known[proposal.key].named_as(entry.candidate)
        self.entries.append(entry)

    def reject(self, entry: Entry, reason: str) -> None:
        """Takes a candidate out of the search."""
        entry.candidate = entry.candidate.reject(reason)
        self.setting.runner.forget(entry.key)
        self.setting.progress.say(f"{entry.name}: rejected, {first_line(reason)}")

    def late(self) -> bool:
        """True after the deadline."""
        deadline_s = self.setting.deadline_s
        return deadline_s is not None and time.monotonic() > deadline_s

    def status(self) -> str:
        """How the search stands: the best so far, how many are left to compile, how many were
        rejected.
        """
        parts = []
        alive = [entry for entry in self.entries if entry.fits]
        if alive:
            best = min(alive, key=lambda entry: entry.order)
            measured = best.candidate.measured
            text = "compiled" if measured is None else f"{seconds_text(measured.median_s)} measured"
            parts.append(f"best so far {best.name}, {text}")
        left = sum(entry.untried for entry in self._due)
        if left:
            parts.append(f"{left} left to compile")
        rejected = sum(entry.rejected for entry in self.entries)
        if rejected:
            parts.append(f"{rejected} rejected")
        return ", ".join(parts)

    # Partitioning ---------------------------------------------------------------------------------

    def partition(self, entries: Sequence[Entry], *, may_compile: bool = False) -> dict[str, float]:
        """Runs Shardy's passes on candidates, as long as there is time and it pays.

        Args:
            entries: The most promising first.
            may_compile: Whether one of them may be compiled, to learn what that takes.

        Returns:
            Seconds of a step by key, of those that are not rejected; compiled seconds where there
            are any, predicted ones where the passes fail or were not run.
        """
        times: dict[str, float] = {}
        stopped = ""
        for number, entry in enumerate(entries):
            self.setting.progress.doing(
                f"partitioning {number + 1} of {len(entries)}: {entry.name}"
            )
            fresh = entry.compiled is None and not entry.rejected
            if fresh and not stopped:
                stopped = self._why_not_partition(entries, may_compile=may_compile)
                if stopped:
                    left = f"the other {len(entries) - number} candidates are not partitioned"
                    self.setting.progress.say(f"{stopped}; {left}")
            time_s: float | None = entry.time_s
            if fresh and not stopped:
                time_s = self._partition(entry)
            if time_s is not None and not entry.rejected:
                times[entry.key] = time_s
        return times

    def _why_not_partition(self, entries: Sequence[Entry], *, may_compile: bool) -> str:
        """Why the next of these is not partitioned: time is up, or it would cost more than to
        compile it; "" if it is.

        What a compilation takes is known once there was one. Before that the question is asked only
        where the passes took longer than all the rest of the search so far: then the best of these
        candidates is compiled now.
        """
        if self.late():
            return "out of time"
        watch = self.setting.progress.stopwatch
        passes_s, lower_s = watch.mean_s("partition"), watch.mean_s("lower")
        dominates = self._expired or 2 * watch.seconds.get("partition", 0.0) > watch.total_s
        may_compile = may_compile and self.setting.compilers is None
        if may_compile and dominates and not watch.counts.get("compile"):
            self.compile(next(entry for entry in entries if not entry.rejected))
        compile_s = watch.mean_s("compile")
        if not compile_s or (passes_s + lower_s <= compile_s and not self._expired):
            return ""
        return (
            f"partitioning a candidate takes {seconds_text(passes_s + lower_s)}, compiling one "
            f"{seconds_text(compile_s)}"
        )

    def _partition(self, entry: Entry) -> float | None:
        """Seconds of a step by the partitioned program; None where the candidate is rejected."""
        setting, stage = self.setting, self.setting.progress.stopwatch.stage
        try:
            with stage("lower"):
                entry.built = build(
                    setting.prepared.traced, entry.layout, setting.prepared.request.mesh
                )
                lowered = entry.built.lower()
            outcome = self._run_passes(lowered)
        except Exception as error:
            self.reject(entry, f"lowering failed: {one_line(error)}")
            return None
        if isinstance(outcome, Failure):
            self.reject(entry, f"partitioning failed: {outcome.reason}")
            return None
        prediction = entry.proposal.prediction
        if isinstance(outcome, PartitionFailure):
            log.info("%s: not partitioned (%s)", entry.name, outcome.reason)
            self._expired = self._expired or outcome.expired
            return prediction.time_s
        evidence = PartitionedEvidence(outcome.collectives, outcome.collective_bytes)
        entry.gain(Status.PARTITIONED, partitioned=evidence)
        return program_s(
            setting.predictor, prediction.compute_s, setting.backend.as_sent(outcome.ops)
        )

    def _run_passes(self, lowered: jax.stages.Lowered) -> Partitioned | PartitionFailure | Failure:
        """Runs Shardy's passes, in a process of their own where candidates compile in one."""
        isolation, stage = self.setting.isolation, self.setting.progress.stopwatch.stage
        ready = False
        if isolation is not None:
            with stage("start"):
                ready = isolation.ready()
        if isolation is not None and ready:
            with stage("partition"):
                outcome = isolation.partition(lowered, self._passes_limit_s())
            if not isinstance(outcome, InProcess):
                return outcome
        with stage("partition"):
            return partition(lowered, self.setting.prepared.request.mesh.axes)

    def _passes_limit_s(self) -> float:
        """How long the passes may take: as a compilation, or where there was none yet, as all of
        the search so far; and not beyond the deadline.
        """
        watch, deadline_s = self.setting.progress.stopwatch, self.setting.deadline_s
        limit_s = watch.mean_s("compile") or watch.total_s
        if deadline_s is not None:
            limit_s = min(limit_s, max(deadline_s - time.monotonic(), MOMENT_S))
        return limit_s

    # Compiling ------------------------------------------------------------------------------------

    def expect(self, entries: Sequence[Entry]) -> None:
        """Says which candidates are to be compiled next, for `status`."""
        self._due = tuple(entries)

    def compiled_here(self, entry: Entry) -> bool:
        """True for a candidate that is compiled in this process, to be run."""
        return entry.key in self.setting.runner.compiled

    def compile(self, entry: Entry, *, to_run: bool = False) -> None:
        """Compiles one candidate; where there is evidence of it already, only if it is needed
        `to_run`.

        With isolation that is in a process of its own, and in this one only what survived there and
        is needed `to_run`.
        """
        if entry.rejected or self.compiled_here(entry):
            return
        before = entry.compiled
        if before is not None and not to_run:
            return
        try:
            with self.setting.progress.stage("compile", f"compiling {entry.name}", self.status()):
                evidence = self._compile(entry, to_run=to_run)
        except Exception as error:
            self.reject(entry, f"compilation failed: {one_line(error)}")
            return
        if isinstance(evidence, Failure):
            self.reject(entry, f"compilation failed: {evidence.reason}")
            return
        if before is not None:
            return  # its evidence stands

        evidence = replace(evidence, compute_s=entry.proposal.prediction.compute_s)
        entry.gain(Status.COMPILED, compiled=evidence)
        excess = self.over_budget(entry)
        if excess:
            self.reject(entry, excess)
            return
        self.setting.progress.say(
            f"{entry.name}: compiled in {seconds_text(evidence.compile_s)}, "
            f"{bytes_text(evidence.collective_bytes)} moved, peak {bytes_text(evidence.peak_bytes)}"
        )

    def _compile(self, entry: Entry, *, to_run: bool) -> CompiledEvidence | Failure:
        setting = self.setting
        compute_s = entry.proposal.prediction.compute_s
        built = entry.built or build(
            setting.prepared.traced, entry.layout, setting.prepared.request.mesh
        )
        evidence = entry.compiled or self._compile_isolated(built, compute_s)
        if isinstance(evidence, Failure):
            return evidence
        if evidence is not None and not to_run:
            return evidence
        compiled = setting.runner.compile(
            entry.key,
            entry.layout,
            built,
            lambda ops: program_s(self.setting.predictor, compute_s, ops),
        )
        return evidence or compiled.evidence

    def _compile_isolated(
        self, built: Built, compute_s: float
    ) -> CompiledEvidence | Failure | None:
        """Compiles in a process of its own; None where that is not wanted or not possible (which is
        noted).
        """
        isolation = self.setting.isolation
        if isolation is None:
            return None
        outcome = isolation.compile(
            built,
            compiler_options=self.setting.compiler_options,
            time_of=lambda ops: program_s(self.setting.predictor, compute_s, ops),
        )
        if not isinstance(outcome, InProcess):
            return outcome
        note = f"compiled in the process of the search, not isolated: {outcome.reason}"
        if note not in self.notes:
            self.notes.append(note)
            self.setting.progress.say(note)
        return None

    def over_budget(self, entry: Entry) -> str:
        """Why a compiled candidate does not fit the memory budget; "" where it does."""
        budget_bytes = self.setting.budget_bytes
        if entry.compiled is None or budget_bytes is None:
            return ""
        peak_bytes = entry.compiled.peak_bytes
        if peak_bytes <= budget_bytes:
            return ""
        needs, budget = bytes_text(peak_bytes), bytes_text(budget_bytes)
        return f"needs {needs} per device (compiled), the budget is {budget}"

    # Verifying ------------------------------------------------------------------------------------

    def wants_verifying(self, entry: Entry) -> bool:
        """True for a candidate whose outputs were not compared yet, and can be."""
        compared = entry.candidate.verified is not None
        if entry.rejected or compared or self.reference_failure:
            return False
        if self.late():
            self.unverified = OUT_OF_TIME
            return False
        return True

    def verify(self, entry: Entry) -> None:
        """Compares a compiled candidate's outputs with the unsharded function's; a mismatch rejects
        it.

        Where the unsharded function does not fit on one device, the outputs are compared with those
        of another compiled layout, and the same layout with the unsharded function at smaller
        sizes.
        """
        if self.too_large(entry):
            return
        self.compile(entry, to_run=True)
        if not self.compiled_here(entry):
            return
        with self.setting.progress.stage("verify", f"verifying {entry.name}", self.status()):
            self._verify(entry)

    def _verify(self, entry: Entry) -> None:
        """`verify`, of a candidate that was compiled to run."""
        try:
            other = self._set_reference(entry)
        except Exception as error:
            self.reference_failure = f"nothing to compare with: {one_line(error)}"
            return
        try:
            compared = self.setting.runner.compare(entry.key)
            finding = ""
            if other is None and not compared.agrees:
                compared, finding = self._arbitrated(entry, compared)
            elif other is not None and compared.agrees:
                compared = self._compared_below(entry, compared)
        except Exception as error:
            self.reject(entry, f"running failed: {one_line(error)}")
            return
        entry.gain(entry.candidate.status, verified=compared.verified)
        if not compared.agrees:
            self.reject(entry, _mismatch_text(compared.verified) + finding)

    def _set_reference(self, entry: Entry) -> Entry | None:
        """Runs what a candidate is compared with: another layout, or (None) the unsharded
        function, of which it notes what is wrong with it.
        """
        other = self._other_layout(entry)
        if other is None:
            self._note(self.setting.runner.set_reference(None, ""))
        else:
            self.setting.runner.set_reference(other.key, other.name)
        return other

    def _arbitrated(self, entry: Entry, compared: Compared) -> tuple[Compared, str]:
        """What stands after a third opinion on a layout that differs from the unsharded function;
        and where that is not decided, why.

        If the function is what is wrong, candidates that agreed with it are compared again.
        """
        self.setting.progress.doing(f"{entry.name} differs, asking a third opinion", self.status())
        arbitrated = self.setting.runner.arbitrate(entry.key, entry.layout, compared)
        if arbitrated.verdict is Verdict.UNDECIDED:
            return (
                arbitrated.compared,
                f" (which of the two is wrong is open: {arbitrated.finding})",
            )
        if arbitrated.verdict is Verdict.REFERENCE:
            self._note(arbitrated.finding)
            for other in self.entries:
                if other.candidate.verified is not None and self.compiled_here(other):
                    again = self.setting.runner.compare(other.key)
                    other.gain(other.candidate.status, verified=again.verified)
                    if not again.agrees:
                        self.reject(other, _mismatch_text(again.verified))
        return arbitrated.compared, ""

    def _note(self, finding: str) -> None:
        """Tells the user what is wrong with the reference, once."""
        if finding and finding not in self.notes:
            self.notes.append(finding)
            self.setting.progress.say(finding)

    def _compared_below(self, entry: Entry, compared: Compared) -> Compared:
        """A comparison with another layout, and with the unsharded function at smaller sizes where
        that is possible.
        """
        below = self.setting.runner.compare_small(entry.layout)
        if isinstance(below, str):
            self.setting.progress.say(f"{entry.name}: not compared at smaller sizes, {below}")
            return compared
        small, factor = below
        against = (
            f"{compared.verified.against}, and the {small.verified.against} at sizes divided by "
            f"up to {factor}"
        )
        worst = compared if small.agrees else small
        return replace(worst, verified=replace(worst.verified, against=against))

    def _other_layout(self, entry: Entry) -> Entry | None:
        """What to compare a candidate with: a compiled one, or None for the unsharded function.

        Raises:
            LookupError: If there is neither.
        """
        predictor = self.setting.predictor
        whole_bytes = predictor.predict(replace(entry.layout, rules=())).peak_bytes
        if whole_bytes <= predictor.hardware.memory_bytes:
            return None
        specs = entry.layout.input_specs()
        for other in self.entries:
            if other.compiled is None or other.layout.input_specs() == specs:
                continue
            self.compile(other, to_run=True)
            if self.compiled_here(other):
                return other
        raise LookupError(
            "the unsharded function does not fit on one device, and no second layout was compiled"
        )

    def too_large(self, entry: Entry) -> str:
        """Why a candidate cannot be run here; "" where it can.

        Devices of the host share its memory.
        """
        mesh = self.setting.prepared.request.mesh
        if entry.compiled is None or not self.setting.backend.shares_host_memory:
            return ""
        need = entry.compiled.peak_bytes * math.prod(mesh.axes.values())
        there = host_bytes()
        if need <= there:
            return ""
        return (
            f"not run: it needs {bytes_text(need)} on all devices, and this host has "
            f"{bytes_text(there)}"
        )

    # Measuring ------------------------------------------------------------------------------------

    def measure(self, entries: Sequence[Entry]) -> None:
        """Measures candidates against each other, round by round."""
        for entry in entries:
            self.compile(entry, to_run=True)
        with self.setting.progress.stage("measure", "measuring"):
            self._measure(entries)

    def _measure(self, entries: Sequence[Entry]) -> None:
        """`measure`, of candidates that were compiled to run."""
        by_name = {entry.name: entry for entry in entries if self.compiled_here(entry)}
        while by_name:
            try:
                measured = self.setting.runner.measure(
                    {name: entry.key for name, entry in by_name.items()},
                    self._inputs_fit(list(by_name.values())),
                    self.late,
                    self._say_round,
                )
            except RunError as failure:
                self.reject(by_name.pop(failure.name), f"running failed: {failure.reason}")
                continue
            for name, medians in measured.items():
                by_name[name].gain(Status.MEASURED, measured=medians)
                self.setting.progress.say(
                    f"{name}: measured {seconds_text(medians.median_s)} ({medians.rounds} rounds)"
                )
            return

    def _say_round(self, number: int, best_s: Mapping[str, float]) -> None:
        times = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in best_s.items())
        self.setting.progress.doing(f"measuring round {number}: {times}")

    def _inputs_fit(self, entries: Sequence[Entry]) -> bool:
        """True if the arguments of all candidates and one program fit on a device together."""
        memory = self.setting.budget_bytes or self.setting.predictor.hardware.memory_bytes
        compiled = [entry.compiled for entry in entries if entry.compiled is not None]
        arguments = sum(evidence.argument_bytes for evidence in compiled)
        peak = max((evidence.peak_bytes for evidence in compiled), default=0)
        return arguments + peak <= memory


def program_s(predictor: Predictor, compute_s: float, ops: Sequence[CollectiveOp]) -> float:
    """Seconds of a step: these of compute, and a program's collectives priced with the links of the
    hardware.
    """
    comm_s = 0.0
    for op in ops:
        one_s = predictor.collective_s(op.kind, op.axes, op.full_bytes, op.group_size)
        comm_s += op.trip_count * one_s
    return step_s(compute_s, comm_s, predictor.hardware.overlap)


def fastest(entries: Sequence[Entry]) -> Entry:
    """The fastest by the clock; those within noise of it are ordered by prediction, then canonical
    form.
    """
    seconds: dict[str, tuple[float, ...]] = {}
    for entry in entries:
        if entry.candidate.measured is not None:
            seconds[entry.key] = entry.candidate.measured.seconds

    def no_slower(mine: Entry, other: Entry) -> bool:
        interval = ratio_interval(seconds[mine.key], seconds[other.key])
        return interval.ratio <= NOISE or interval.low <= 1.0

    tied = []
    for entry in entries:
        if all(no_slower(entry, other) for other in entries if other is not entry):
            tied.append(entry)
    return min(tied or entries, key=lambda entry: entry.order)


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _mismatch_text(verified: Verified) -> str:
    return (
        f"wrong numbers: {verified.leaf} differs from that of the {verified.against} by "
        f"{verified.max_abs_err:.3g}, tolerance {verified.tolerance:.3g}"
    )
