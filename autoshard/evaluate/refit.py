"""What the evidence so far says of candidates that have less of it: the order in which they go on,
revised.

Programs that were compiled say how far the predicted (or partitioned) collectives are from compiled
ones, and the predicted peak from the compiled peak; programs that were measured, what compiled
seconds come to on the clock. Both are fitted anew whenever more is known (`cost_model.refit`), for
this search only, and nothing of it is kept: the numbers of trials stay what the model, the compiler
and the clock said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from autoshard.cost_model.hardware.refit import Corrections, Parts, parts_of, refit, time_s
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evidence.collectives import Collective

_T = TypeVar("_T")

KNOWN_AT_LEAST = 2
"""Programs of one form (constraints inside, or arguments only) from which it gets factors of its
own."""


class Refit:
    """The evidence of a race, fitted.

    Attributes:
        compiler: What predicted seconds are multiplied by to be compiled ones, by whether
            constraints are inside.
        clock: What compiled seconds are multiplied by to be measured ones.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        """Fits what is known now."""
        self._race = evaluation
        self._overlap = evaluation.predictor.hardware.overlap
        compiled = [c for c in evaluation.entries if c.candidate.compiled is not None]
        self.compiler = _by_form(compiled, self._of_compiler)
        self._peaks = _by_form(compiled, _peak_ratio)
        measured = [
            (self._compiled(c), c.candidate.measured.median_s)
            for c in compiled
            if c.candidate.measured is not None
        ]
        self.clock = refit(measured, self._overlap)

    def time_s(self, entry: Entry) -> float:
        """Seconds of a step by all that is known: measured, else expected of the clock."""
        candidate = entry.candidate
        if candidate.measured is not None:
            return candidate.measured.median_s
        known = candidate.compiled is not None
        parts = self._compiled(entry) if known else self.compiler[entry.layout.inside].scaled(
            self._uncompiled(entry)
        )  # fmt: skip
        return time_s(self.clock.scaled(parts), self._overlap)

    def peak_bytes(self, entry: Entry) -> int:
        """Compiled peak, else what is expected of the compiler."""
        if entry.candidate.compiled is not None:
            return entry.candidate.compiled.peak_bytes
        return int(self._peaks[entry.layout.inside] * entry.proposal.prediction.peak_bytes)

    def order(self, entry: Entry) -> tuple[object, ...]:
        """Order of candidates: those that fit the budget by time, then the others by how far they
        are over it.
        """
        excess = max(
            0, self.peak_bytes(entry) - (self._race.budget_bytes or self.peak_bytes(entry))
        )
        return excess, float(f"{self.time_s(entry):.4g}"), entry.order

    def _of_compiler(self, compiled: Sequence[Entry]) -> Corrections:
        found = [
            (self._uncompiled(c), c.candidate.compiled.time_s)
            for c in compiled
            if c.candidate.compiled is not None
        ]
        return refit(found, self._overlap)

    def _uncompiled(self, entry: Entry) -> Parts:
        """Parts by the best word there is before the compiler's: the partitioner's, else the
        model's.
        """
        prediction, parted = entry.proposal.prediction, entry.candidate.partitioned
        collectives = (
            prediction.collectives if parted is None else self._as_sent(parted.collectives)
        )
        return self._parts(prediction.compute_s, collectives)

    def _compiled(self, entry: Entry) -> Parts:
        found = entry.candidate.compiled
        assert found is not None
        return self._parts(found.compute_s, found.collectives)

    def _as_sent(self, collectives: Sequence[Collective]) -> list[Collective]:
        """The partitioner's collectives as XLA:CPU sends them; see `Race`."""
        if self._race.prepared.request.mesh.platform != "cpu":
            return list(collectives)
        return [
            replace(c, kind="all_reduce", bytes=2 * c.bytes) if c.kind == "reduce_scatter" else c
            for c in collectives
        ]

    def _parts(self, compute_s: float, collectives: Sequence[Collective]) -> Parts:
        predictor = self._race.predictor
        return parts_of(predictor.hardware, predictor.problem.mesh_axes, compute_s, collectives)


def _by_form(compiled: Sequence[Entry], fit: Callable[[Sequence[Entry]], _T]) -> dict[bool, _T]:
    """What is fitted to the candidates of each form; to all of them where one has too few."""
    found = {}
    for inside in (True, False):
        own = [c for c in compiled if c.layout.inside is inside]
        found[inside] = fit(own if len(own) >= KNOWN_AT_LEAST else compiled)
    return found


def _peak_ratio(compiled: Sequence[Entry]) -> float:
    """Median of compiled over predicted peaks; 1 without any."""
    ratios = [
        c.candidate.compiled.peak_bytes / c.proposal.prediction.peak_bytes
        for c in compiled
        if c.candidate.compiled is not None and c.proposal.prediction.peak_bytes
    ]
    return median(ratios) if ratios else 1.0
