"""What the evidence so far says of candidates that have less of it: the order in which they go on.

Programs that were compiled say how far the predicted (or partitioned) collectives are from compiled
ones, and the predicted peak from the compiled peak; programs that were measured, how far compiled
seconds are from measured ones. Both are fitted anew whenever more is known
(`cost_model.hardware.refit`), for this search only, and nothing of it is kept: the numbers of
candidates stay what the model, the compiler and the clock said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from autoshard.cost_model.hardware.refit import Corrections, refit
from autoshard.cost_model.hardware.step_components import StepComponents, step_components
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evidence.collectives import Collective

_T = TypeVar("_T")

PROGRAMS_OF_A_FORM = 2
"""Programs of one form (constraints inside, or arguments only) from which it gets corrections of
its own: one program cannot be told from its noise. `tests/evaluate/test_refit_order.py` counts
them."""


class Refit:
    """Predictions corrected by the evidence of an evaluation.

    Attributes:
        to_compiled: What predicted seconds are multiplied by to be compiled ones, by whether
            constraints are inside.
        to_measured: What compiled seconds are multiplied by to be measured ones.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        """Fits what is known now."""
        self._setting = evaluation.setting
        self._overlap = self._setting.predictor.hardware.overlap
        compiled = [entry for entry in evaluation.entries if entry.compiled is not None]
        self.to_compiled = _by_form(compiled, self._fit_to_compiled)
        self._peak_ratio = _by_form(compiled, _median_peak_ratio)
        measured = []
        for entry in compiled:
            if entry.candidate.measured is not None:
                components = self._compiled(entry)
                measured.append((components, entry.candidate.measured.median_s))
        self.to_measured = refit(measured, self._overlap)

    def time_s(self, entry: Entry) -> float:
        """Seconds of a step: measured, else what is expected to be measured."""
        if entry.candidate.measured is not None:
            return entry.candidate.measured.median_s
        if entry.compiled is not None:
            components = self._compiled(entry)
        else:
            corrections = self.to_compiled[entry.layout.inside]
            components = corrections.scaled(self._uncompiled(entry))
        return self.to_measured.scaled(components).step_s(self._overlap)

    def peak_bytes(self, entry: Entry) -> int:
        """Compiled peak, else what is expected of the compiler."""
        if entry.compiled is not None:
            return entry.compiled.peak_bytes
        ratio = self._peak_ratio[entry.layout.inside]
        return int(ratio * entry.proposal.prediction.peak_bytes)

    def order(self, entry: Entry) -> tuple[object, ...]:
        """Order of candidates: those that fit the budget by time, then the others by how far they
        are over it.
        """
        peak_bytes = self.peak_bytes(entry)
        excess = max(0, peak_bytes - (self._setting.budget_bytes or peak_bytes))
        return excess, float(f"{self.time_s(entry):.4g}"), entry.order

    def _fit_to_compiled(self, compiled: Sequence[Entry]) -> Corrections:
        programs = []
        for entry in compiled:
            if entry.compiled is not None:
                programs.append((self._uncompiled(entry), entry.compiled.time_s))
        return refit(programs, self._overlap)

    def _uncompiled(self, entry: Entry) -> StepComponents:
        """Components of the step by the partitioned program, else as predicted."""
        prediction, partitioned = entry.proposal.prediction, entry.candidate.partitioned
        if partitioned is None:
            return self._components(prediction.compute_s, prediction.collectives)
        sent = self._setting.backend.as_sent(partitioned.collectives)
        return self._components(prediction.compute_s, sent)

    def _compiled(self, entry: Entry) -> StepComponents:
        assert entry.compiled is not None
        return self._components(entry.compiled.compute_s, entry.compiled.collectives)

    def _components(self, compute_s: float, collectives: Sequence[Collective]) -> StepComponents:
        predictor = self._setting.predictor
        return step_components(
            predictor.hardware, predictor.problem.mesh_axes, compute_s, collectives
        )


def _by_form(compiled: Sequence[Entry], fit: Callable[[Sequence[Entry]], _T]) -> dict[bool, _T]:
    """What is fitted to the candidates of each form; to all of them where one has too few."""
    fitted = {}
    for inside in (True, False):
        own = [entry for entry in compiled if entry.layout.inside is inside]
        fitted[inside] = fit(own if len(own) >= PROGRAMS_OF_A_FORM else compiled)
    return fitted


def _median_peak_ratio(compiled: Sequence[Entry]) -> float:
    """Median of compiled over predicted peaks; 1 without any."""
    ratios = []
    for entry in compiled:
        predicted_bytes = entry.proposal.prediction.peak_bytes
        if entry.compiled is not None and predicted_bytes:
            ratios.append(entry.compiled.peak_bytes / predicted_bytes)
    return median(ratios) if ratios else 1.0
