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
from autoshard.evaluate.device_runner import DeviceRunner
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.measure import RunError, ratio_interval
from autoshard.evidence.candidate import (
    Candidate,
    CompiledEvidence,
    PartitionedEvidence,
    Predicted,
    Status,
)
from autoshard.evidence.collectives import CollectiveOp
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.processes.progress import Progress
from autoshard.search.proposer import Proposal
from autoshard.search.simplify_rules import RuleSimplifier
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
class Evaluation:
    """The candidates of one search and what is done with them."""

    prepared: Prepared
    predictor: Predictor
    shared: Shared
    runner: DeviceRunner
    budget_bytes: int | None
    compiler_options: CompilerOptions | None
    progress: Progress
    entries: list[Entry] = field(default_factory=list)
    reference_failure: str = ""
    isolation: Isolation | None = None
    notes: list[str] = field(default_factory=list)
    deadline_s: float | None = None
    due: tuple[Entry, ...] = ()
    refusals: list[int] = field(default_factory=list)
    """Bytes that programs need which the compiler refuses."""

    def enter(self, proposals: Iterable[Proposal]) -> None:
        """Enters each proposal twice: with constraints inside, and for arguments only; best first
        by prediction.

        Layouts for arguments only are one where their arguments are split alike. What the rules say
        of the inside does not hold there, so the best of them are predicted by the fewest rules
        that give the same arguments.
        """
        entered = {c.candidate.key for c in self.entries}
        simplifier = RuleSimplifier(self.predictor.placements)
        simplified: list[tuple[Proposal, Layout, str]] = []
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
                    simplified.append((proposal, simplifier.simplify(layout), key))
        if simplified:
            index = self.predictor.placements.of_rules(
                [layout.rules for _, layout, _ in simplified]
            )
            for (proposal, layout, key), own in zip(
                simplified, self.predictor.predict_each(index), strict=True
            ):
                self._enter(replace(proposal, prediction=own), layout, key, known)
        self.entries.sort(key=lambda c: c.proposal.order(self.budget_bytes))

    def _enter(
        self, proposal: Proposal, layout: Layout, key: str, known: Mapping[str, Candidate]
    ) -> None:
        p = proposal.prediction
        predicted = Predicted(p.time_s, p.peak_bytes, p.collective_bytes)
        candidate = Candidate(
            name=proposal.name if layout.inside else f"{proposal.name} (arguments)",
            origin=proposal.origin,
            preset=proposal.preset,
            rules=tuple(map(str, layout.rules)),
            constraints="anchors" if layout.inside else "arguments",
            key=key,
            predicted=predicted,
        )
        if key in known:
            candidate = adopted(candidate, known[key])
        self.entries.append(Entry(layout, proposal, candidate))

    def reject(self, entry: Entry, reason: str) -> None:
        """Takes a candidate out of the race."""
        entry.candidate = entry.candidate.reject(reason)
        self.runner.forget(entry.candidate.key)
        self.progress.say(f"{entry.candidate.name}: rejected, {reason.splitlines()[0]}")

    def standing(self) -> str:
        """How the race stands: the best so far, how many are left to compile, how many were
        rejected.
        """
        alive = [
            c for c in self.entries if c.candidate.compiled is not None and not c.candidate.rejected
        ]
        parts = []
        if alive:
            best = min(alive, key=lambda c: c.order)
            measured = best.candidate.measured
            text = "compiled" if measured is None else f"{seconds_text(measured.median_s)} measured"
            parts.append(f"best so far {best.candidate.name}, {text}")
        left = sum(c.candidate.compiled is None and not c.candidate.rejected for c in self.due)
        parts += [f"{left} left to compile"] if left else []
        rejected = sum(c.candidate.rejected for c in self.entries)
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

    def partition(self, entries: Sequence[Entry]) -> dict[str, float]:
        """Runs Shardy's passes on candidates; returns seconds of a step by key."""
        times: dict[str, float] = {}
        for number, entry in enumerate(entries):
            self.progress.doing(
                f"partitioning {number + 1} of {len(entries)}: {entry.candidate.name}"
            )
            compute_s = entry.proposal.prediction.compute_s
            if entry.candidate.compiled is not None:
                times[entry.candidate.key] = entry.candidate.compiled.time_s
                continue
            if entry.candidate.rejected:
                continue
            try:
                entry.built = build(self.prepared.traced, entry.layout, self.prepared.request.mesh)
                found = self._partition(entry.built.lower())
            except Exception as error:
                self.reject(entry, f"lowering failed: {one_line(error)}")
                continue
            if isinstance(found, Failure):
                self.reject(entry, f"partitioning failed: {found.reason}")
                continue
            if isinstance(found, PartitionFailure):
                log.info("%s: not partitioned (%s)", entry.candidate.name, found.reason)
                times[entry.candidate.key] = entry.proposal.prediction.time_s
                continue
            times[entry.candidate.key] = self.time_s(compute_s, self._as_sent(found.ops))
            entry.candidate = replace(
                entry.candidate,
                status=Status.PARTITIONED,
                partitioned=PartitionedEvidence(found.collectives, found.collective_bytes),
            )
        return times

    def _partition(self, lowered: jax.stages.Lowered) -> Partitioned | PartitionFailure | Failure:
        """Runs Shardy's passes, in a process of their own where candidates compile in one."""
        found = None if self.isolation is None else self.isolation.partition(lowered)
        if found is None or isinstance(found, InProcess):
            return partition(lowered, self.prepared.request.mesh.axes)
        return found

    def compile(self, entries: Sequence[Entry]) -> None:
        """Compiles candidates of which there is no evidence yet, here or on other workers."""
        new = [c for c in entries if c.candidate.compiled is None and not c.candidate.rejected]
        self.due = tuple(new)

        def stop() -> bool:
            return self.late() and any(c.candidate.compiled is not None for c in entries)

        self.shared.each("compile", new, self._compile, needs="compile", stop=stop)

    def _compile(self, entry: Entry, *, to_run: bool = False) -> None:
        """Compiles one candidate here; where there is evidence of it already, only if it is needed
        `to_run`.

        With isolation that is in a process of its own, and in this one only what survived there and
        is needed `to_run`.
        """
        if entry.candidate.rejected or self._compiled_here(entry):
            return
        if entry.candidate.compiled is not None and not to_run:
            return
        candidate = entry.candidate
        self.progress.doing(f"compiling {candidate.name}", self.standing())
        compute_s = entry.proposal.prediction.compute_s
        try:
            built = entry.built or build(
                self.prepared.traced, entry.layout, self.prepared.request.mesh
            )
            found = candidate.compiled or self._isolated(built, compute_s)
            if isinstance(found, Failure):
                self.reject(entry, f"compilation failed: {found.reason}")
                return
            if found is None or to_run:
                made = self.runner.compile(
                    candidate.key, entry.layout, built, lambda ops: self.time_s(compute_s, ops)
                )
                found = found or made.evidence
        except Exception as error:
            self.reject(entry, f"compilation failed: {one_line(error)}")
            return
        if candidate.compiled is not None:
            return  # its evidence stands
        found = replace(found, compute_s=compute_s)
        entry.candidate = replace(candidate, status=Status.COMPILED, compiled=found)
        over = self.over_budget(entry)
        if over:
            self.reject(entry, over)
            return
        self.progress.say(
            f"{candidate.name}: compiled in {seconds_text(found.compile_s)}, "
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

    def over_budget(self, entry: Entry) -> str:
        """Why a compiled candidate does not fit the memory budget; empty where it does."""
        found = entry.candidate.compiled
        if found is None or self.budget_bytes is None or found.peak_bytes <= self.budget_bytes:
            return ""
        return f"needs {bytes_text(found.peak_bytes)} per device (compiled), the budget is {bytes_text(self.budget_bytes)}"

    def verify(self, entry: Entry) -> None:
        """Compares a compiled candidate's outputs with the unsharded function's; a mismatch rejects
        it.

        Where the unsharded function does not fit on one device, the outputs are compared with those
        of another compiled layout, and the same layout with the unsharded function at smaller
        sizes.
        """
        self.compile([entry])
        if (
            entry.candidate.rejected
            or entry.candidate.verified is not None
            or self.reference_failure
        ):
            return
        for failure in self.shared.each(
            "verify",
            [entry],
            self._verify,
            needs="measure",
            note=lambda: self.reference_failure,
        ):
            self.reference_failure = failure

    def _verify(self, entry: Entry) -> None:
        if self.too_large(entry):
            return
        self._compile(entry, to_run=True)
        if not self._compiled_here(entry):
            return
        self.progress.doing(f"verifying {entry.candidate.name}", self.standing())
        try:
            other = self._other(entry)
            self.runner.set_reference(
                None if other is None else other.candidate.key,
                "" if other is None else other.candidate.name,
            )
        except Exception as error:
            self.reference_failure = f"nothing to compare with: {one_line(error)}"
            return
        try:
            compared = self.runner.compare(entry.candidate.key)
            if other is not None and compared.agrees:
                small = self.runner.compare_small(entry.layout)
                if isinstance(small, str):
                    self.progress.say(
                        f"{entry.candidate.name}: not compared at smaller sizes, {small}"
                    )
                else:
                    below, factor = small
                    text = f"{compared.found.against}, and the {below.found.against} at sizes divided by up to {factor}"
                    worst = compared if below.agrees else below
                    compared = replace(worst, found=replace(worst.found, against=text))
        except Exception as error:
            self.reject(entry, f"running failed: {one_line(error)}")
            return
        found = compared.found
        entry.candidate = replace(entry.candidate, verified=found)
        if not compared.agrees:
            self.reject(
                entry,
                f"wrong numbers: {found.leaf} differs from that of the {found.against} by "
                f"{found.max_abs_err:.3g}, "
                f"tolerance {found.tolerance:.3g}",
            )

    def _compiled_here(self, entry: Entry) -> bool:
        """True for a candidate that is compiled here, to be run."""
        return entry.candidate.key in self.runner.compiled

    def too_large(self, entry: Entry) -> str:
        """Why a candidate cannot be run here: devices on the CPU share the host's memory; empty
        where it can.
        """
        found, mesh = entry.candidate.compiled, self.prepared.request.mesh
        if found is None or mesh.platform != "cpu":
            return ""
        need, there = found.peak_bytes * math.prod(mesh.axes.values()), host_bytes()
        if need <= there:
            return ""
        return f"not run: it needs {bytes_text(need)} on all devices, and this host has {bytes_text(there)}"

    def _other(self, entry: Entry) -> Entry | None:
        """What to compare a candidate with: a compiled candidate, or None for the unsharded
        function.

        Raises:
            LookupError: If there is neither.
        """
        whole = self.predictor.predict(replace(entry.layout, rules=())).peak_bytes
        if whole <= self.predictor.hardware.memory_bytes:
            return None
        for other in self.entries:
            if (
                other.candidate.compiled is None
                or other.layout.input_specs() == entry.layout.input_specs()
            ):
                continue
            self._compile(other, to_run=True)
            if self._compiled_here(other):
                return other
        raise LookupError(
            "the unsharded function does not fit on one device, and no second layout was compiled"
        )

    def late(self) -> bool:
        """True after the deadline (`time.monotonic`)."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def measure(self, entries: Sequence[Entry]) -> None:
        """Measures candidates against each other, round by round."""
        self.compile(entries)
        alive = [c for c in entries if not c.candidate.rejected and not self.too_large(c)]
        if not alive or (
            all(c.candidate.measured is not None for c in alive) and not self.shared.again
        ):
            return

        def best_s() -> float | None:
            return min(
                (c.candidate.measured.median_s for c in alive if c.candidate.measured is not None),
                default=None,
            )

        self.shared.group("measure", alive, lambda: self._measure(alive), best_s)

    def _measure(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._compile(entry, to_run=True)
        by_name = {c.candidate.name: c for c in entries if self._compiled_here(c)}
        while by_name:
            try:
                found = self.runner.measure(
                    {name: c.candidate.key for name, c in by_name.items()},
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
                entry = by_name[name]
                entry.candidate = replace(
                    entry.candidate, status=Status.MEASURED, measured=measured
                )
                self.progress.say(
                    f"{name}: measured {seconds_text(measured.median_s)} ({measured.rounds} rounds)"
                )
            return

    def fastest(self, entries: Sequence[Entry]) -> Entry:
        """The fastest by the clock; those within noise of it are ordered by prediction, then
        canonical form.
        """
        seconds = {
            c.candidate.key: c.candidate.measured.seconds
            for c in entries
            if c.candidate.measured is not None
        }

        def no_slower(mine: Entry, other: Entry) -> bool:
            interval = ratio_interval(seconds[mine.candidate.key], seconds[other.candidate.key])
            return interval.ratio <= NOISE or interval.low <= 1.0

        tied = [
            c for c in entries if all(no_slower(c, other) for other in entries if other is not c)
        ]
        return min(tied or entries, key=lambda c: c.order)

    def _inputs_fit(self, entries: Sequence[Entry]) -> bool:
        memory = self.budget_bytes or self.predictor.hardware.memory_bytes
        need = sum(
            c.candidate.compiled.argument_bytes for c in entries if c.candidate.compiled is not None
        )
        peak = max(
            (c.candidate.compiled.peak_bytes for c in entries if c.candidate.compiled is not None),
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
