"""Proposes candidates: distinct effective layouts with their predictions, best first.

Small spaces are enumerated. Otherwise descent from the presets changes the rules of one mesh
axis at a time, all changes predicted at once; the sampler goes on from there, descent follows
again, and the best few are refined with conditions, which the sampler does not see. The same
effective layout is never predicted twice.

The numbers of the search are chosen by hand. What each does to the result was measured on
2026-11-30 in 20 searches (a small decoder, an unrolled MLP, llama, moe_one_hot and recommender of
`tests/whole_models`; meshes 4x2 and 2x2x2; hardware `cpu` and `h100`), and in the 30 searches of
`tests/search/test_regret.py`, where the best of all rule lists is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evidence.candidate import Origin, Skipped
from autoshard.evidence.pareto import pareto
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Problem
from autoshard.search.local_search import LocalSearch
from autoshard.search.predicted_layouts import (
    Cost,
    PredictedLayout,
    PredictedLayouts,
    cost,
    distinct,
)
from autoshard.search.presets import Preset, find_parts, presets
from autoshard.search.sampler import Sampler, Watch
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.search.space import RuleList, Space, every_list, make_space, rules_of

ASKS = 40
"""Points of the study, which are for spaces in which descent gets stuck. In the 20 searches the
best layout is the same with 0 to 200 of them, each of which takes 6 ms."""

STARTS = 8
"""Layouts that the local search descends from: all presets. With 1 it misses the best in one of the
30; with 3 the best of Qwen3-8B (`tests/packages/test_qwen3_8b.py`) is 0.968 of the best preset at 2
layers and 0.959 at 8, with 8 it is 0.960 and 0.935, for twice as many predicted layouts."""

REFINED = 4
"""Layouts that are refined by conditions and occurrences; a later one may overtake the first. With
0 the best is missed in four of the 30, with 2 in one, and it is up to 3 % slower in the 20; 4
predicts half as many layouts again."""

ENUMERATED = 6_000
"""Spaces of at most so many rule lists are tried whole: then nothing better is left. With 0 the
best of the 30 is found as well (`test_the_proposer_finds_the_best_of_all`)."""

KEPT = 120
"""Layouts that are returned, beside presets and the Pareto set of time and memory: far more than
are ever compiled. Each is predicted once more in full: with 1000 a search takes half as long
again."""

READABLE = 16
"""Layouts whose rules are simplified: somewhat more than are compiled (`Effort.compiled`), because
people read the rules of those. With 0 the longest of the five best rule lists has 3.7 rules in the
mean of the 20, instead of 3.1."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A distinct effective layout with its prediction.

    Attributes:
        name: `fsdp`, or `search-17`.
        origin: A preset (of this name), or the search.
        layout: With constraints stated inside.
        key: Its effective layout.
        prediction: From the model.
    """

    name: str
    origin: Origin
    layout: Layout
    key: str
    prediction: Prediction

    @property
    def preset(self) -> str | None:
        """Name of the preset; None for a layout that was searched."""
        return self.name if self.origin is Origin.PRESET else None

    def excess_bytes(self, budget_bytes: int | None) -> int:
        """Predicted bytes over the budget, 0 where it fits."""
        return self.order(budget_bytes)[0]

    def order(self, budget_bytes: int | None) -> Cost:
        """Order of candidates; see `cost`."""
        return cost(self.prediction.time_s, self.prediction.peak_bytes, budget_bytes)


@dataclass(frozen=True, eq=False)
class Proposals:
    """The best distinct layouts, best first, and the presets that were skipped.

    Attributes:
        ranked: Those that fit the budget by predicted time, then the others by how far they are
            over it; the Pareto set of time and memory and all presets are among them.
        skipped: Presets that make no sense here.
        evaluations: How many distinct effective layouts were predicted.
        enumerated: True if every rule list of the space was tried.
        interrupted: True if Ctrl-C ended the proposing early.
    """

    ranked: tuple[Proposal, ...]
    skipped: tuple[Skipped, ...]
    evaluations: int
    enumerated: bool = False
    interrupted: bool = False

    @property
    def pareto(self) -> tuple[Proposal, ...]:
        """Layouts that no other one beats in both predicted time and peak memory, fastest first."""
        return tuple(
            pareto(self.ranked, key=lambda p: (p.prediction.time_s, p.prediction.peak_bytes))
        )


def propose(
    problem: Problem,
    predictor: Predictor,
    *,
    budget_bytes: int | None = None,
    seed: int = 0,
    asks: int = ASKS,
    enumerate_at_most: int = ENUMERATED,
    evaluations: int | None = None,
    watch: Watch | None = None,
) -> Proposals:
    """Proposes and predicts candidates.

    Args:
        problem: The problem.
        predictor: Predicts them.
        budget_bytes: Memory budget per device.
        seed: Of the sampler.
        asks: Points of the study: what it is told of without asking, and what its sampler is asked
            for.
        enumerate_at_most: Spaces of at most so many rule lists are tried whole; 0 for none.
        evaluations: Distinct layouts predicted at most; None for as many as it takes.
        watch: Is told how it goes, and may end it.

    Returns:
        Distinct layouts, best first.
    """
    parts = find_parts(problem)
    named, skipped = presets(problem, parts)
    has_optimizer = any(preset.name == "zero1" for preset in named)
    space = make_space(problem, parts.residual if has_optimizer else ())
    layouts = PredictedLayouts(predictor, budget_bytes, at_most=evaluations)
    sampler = Sampler(space, layouts, budget_bytes=budget_bytes, seed=seed)

    same = _predict_presets(named, layouts, sampler)
    interrupted = enumerated = False
    try:
        watch = watch or Watch()
        enumerated = not watch.late() and _enumerate(space, layouts, enumerate_at_most)
        _search(space, layouts, sampler, asks, watch)
    except KeyboardInterrupt:
        interrupted = True
    proposals = _proposals(problem, predictor, layouts)
    ranked = sorted(proposals, key=lambda proposal: _rank(proposal, budget_bytes))
    return Proposals(tuple(ranked), (*skipped, *same), len(layouts), enumerated, interrupted)


# Stages -------------------------------------------------------------------------------------------


def _predict_presets(
    named: Sequence[Preset], layouts: PredictedLayouts, sampler: Sampler
) -> list[Skipped]:
    """Predicts the presets, and tells the sampler of those that the space can express.

    Returns:
        Those that are the same effective layout as an earlier one.
    """
    rules = [preset.rules for preset in named]
    names = [preset.name for preset in named]
    predicted = layouts.predict(rules, names, Origin.PRESET)
    same = []
    for preset, layout in zip(named, predicted, strict=True):
        if layout is None:
            continue
        sampler.record(layout)
        if layout.name != preset.name:
            reason = f"here it is the same layout as {layout.name}"
            same.append(Skipped(preset.name, reason))
    return same


def _enumerate(space: Space, layouts: PredictedLayouts, at_most: int) -> bool:
    """Tries every rule list of a small space; False where the space is larger."""
    if layouts.is_limited:
        return False
    by_axis: list[list[RuleList]] = []
    for axis in space.able:
        lists = every_list(space, axis, at_most)
        if lists is None:
            return False
        by_axis.append(lists)
    orders = list(permutations(range(len(by_axis))))
    if len(orders) * math.prod(map(len, by_axis)) > at_most:
        return False
    batch = []
    for lists_of_axes in product(*by_axis):
        for order in orders:
            batch.append(rules_of(tuple(lists_of_axes[i] for i in order)))
    layouts.predict(batch)
    return True


def _search(
    space: Space,
    layouts: PredictedLayouts,
    sampler: Sampler,
    asks: int,
    watch: Watch,
) -> None:
    """Descent from the presets, the sampler, descent from the best of all, refinement."""
    local = LocalSearch(space, layouts, watch.late)

    def descend(starts: Sequence[PredictedLayout]) -> None:
        for layout in distinct(local.descend(starts)):
            if layout not in starts:
                sampler.record(layout)

    descend(layouts.best(STARTS))
    if any(space.able.values()):
        sampler.ask(max(0, asks - sampler.points), watch)
        descend(layouts.ranked()[:1])
        descend(local.refine(layouts.best(REFINED)))


# The answer ---------------------------------------------------------------------------------------


def _proposals(problem: Problem, predictor: Predictor, layouts: PredictedLayouts) -> list[Proposal]:
    """The best, all presets and the Pareto set, each effective layout once."""
    chosen = _simplified(problem, predictor, layouts, _chosen(layouts.ranked()))
    # [layouts, mesh axes + 1]: their rows.
    index = np.array([layout.index for layout in chosen], dtype=np.int32)
    proposals: dict[str, Proposal] = {}
    for predicted, prediction in zip(chosen, predictor.predict_each(index), strict=True):
        layout = Layout(problem, predicted.rules)
        key = layout.key()
        proposal = Proposal(predicted.name, predicted.origin, layout, key, prediction)
        proposals.setdefault(key, proposal)
    return list(proposals.values())


def _chosen(ranked: Sequence[PredictedLayout]) -> list[PredictedLayout]:
    presets_beyond = [layout for layout in ranked[KEPT:] if layout.origin is Origin.PRESET]
    front = pareto(ranked, key=lambda layout: (layout.time_s, layout.peak_bytes))
    return distinct([*ranked[:KEPT], *presets_beyond, *front])


def _simplified(
    problem: Problem,
    predictor: Predictor,
    layouts: PredictedLayouts,
    chosen: Iterable[PredictedLayout],
) -> list[PredictedLayout]:
    """The layouts, the best searched ones without idle rules; those that become equal once."""
    simplifier = RuleSimplifier(predictor.placements)
    by_index: dict[tuple[int, ...], PredictedLayout] = {}
    for number, layout in enumerate(chosen):
        if number < READABLE and layout.origin is Origin.SEARCH:
            rules = simplifier.simplify(Layout(problem, layout.rules)).rules
            # What states the same may still be another effective layout, to be predicted anew.
            (simpler,) = layouts.predict([rules], [layout.name])
            if simpler is not None and simpler.origin is Origin.SEARCH:
                layout = replace(simpler, rules=rules)
        by_index.setdefault(layout.index, layout)
    return list(by_index.values())


def _rank(proposal: Proposal, budget_bytes: int | None) -> tuple[object, ...]:
    """Of equal predictions a preset comes first, then fewer rules; the key makes runs alike."""
    is_searched = proposal.origin is Origin.SEARCH
    rules = len(proposal.layout.rules)
    return (*proposal.order(budget_bytes), is_searched, rules, proposal.key)
