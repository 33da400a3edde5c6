"""Stage 6: proposes candidates. One Optuna study in memory, ask and tell, told the predicted time.

Small spaces are enumerated. Otherwise descent from the best presets changes the rules of one mesh
axis at a time, all changes predicted at once; the sampler goes on from there, descent follows
again, and the best two are refined with conditions, which the sampler does not see. The same
effective layout is never predicted twice.

The objective is the predicted time; a candidate over the memory budget is told with its excess as a
constraint.

The sampler is multivariate TPE. Alone, without presets and descent, on ten problems whose best is
known (4x2, one seed, `python -m tests.benchmarks.samplers`), the best of 40 and of 200 points takes
longer than the best of all by, in the mean: random 30 % and 14 %, TPE 24 % and 7 %, multivariate
TPE 25 % and 11 % (grouped: the same, as no parameter depends on another), NSGA-II 34 % and 18 %.
Multivariate TPE finds the best itself most often (3 of 10, the others 1) and takes 5 ms a point,
plain TPE 14. None replaces descent, which finds it in all (`tests/search/test_regret.py`); a
Gaussian process needs torch and was not tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, permutations, product
from typing import cast

import numpy as np
import optuna

from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evidence.candidate import Origin, Skipped
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Problem
from autoshard.search.presets import Preset, find_parts, presets
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.search.moves import exchanges, neighbours, refinements
from autoshard.search.space import Lists, Point, Space, every_list, make_space, rules_of

ASKS = 40
ASKED_AT_ONCE = 8
ROUNDS = 12
STARTS = 3
REFINED = 2
REFINEMENTS = 3
WORTH = 0.01
"""Share of the step that a condition must save: a rule list that people review pays for each thing
it says."""

ENUMERATED = 6_000
"""Spaces of at most so many rule lists are tried whole."""

KEPT = 120
"""Layouts that are returned, beside presets and the Pareto set of time and memory."""

READABLE = 16

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").propagate = False


@dataclass(frozen=True, eq=False)
class Proposal:
    """A distinct effective layout with its prediction.

    Attributes:
        name: `fsdp`, or `search-17`.
        origin: A preset (of this name), or the search.
        layout: With constraints stated inside.
        key: Its effective layout.
        prediction: The model's word.
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
        return 0 if budget_bytes is None else max(0, self.prediction.peak_bytes - budget_bytes)

    def order(self, budget_bytes: int | None) -> tuple[int, float, int]:
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
        kept: list[Proposal] = []
        for proposal in sorted(
            self.ranked, key=lambda p: (p.prediction.time_s, p.prediction.peak_bytes)
        ):
            if not kept or proposal.prediction.peak_bytes < kept[-1].prediction.peak_bytes:
                kept.append(proposal)
        return tuple(kept)


def propose(
    problem: Problem,
    predictor: Predictor,
    *,
    budget_bytes: int | None = None,
    seed: int = 0,
    asks: int = ASKS,
    enumerate_at_most: int = ENUMERATED,
    evaluations: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
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
        on_progress: Called with (done, of).

    Returns:
        Distinct layouts, best first.
    """
    parts = find_parts(problem)
    named, skipped = presets(problem, predictor.sent_bytes, parts)
    has_optimizer = any(p.name == "zero1" for p in named)
    space = make_space(problem, parts.residual if has_optimizer else ())
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=10)
    study = optuna.create_study(sampler=sampler)
    search = _Search(problem, predictor, space, study, budget_bytes, evaluations)
    same = [
        Skipped(preset.name, f"here it is the same layout as {first}")
        for preset, first in zip(named, search.presets(named), strict=True)
        if first != preset.name
    ]
    interrupted = enumerated = False
    try:
        enumerated = search.enumerate(enumerate_at_most)
        search.run(asks, on_progress)
    except KeyboardInterrupt:
        interrupted = True
    ranked = search.proposals()
    return Proposals(ranked, (*skipped, *same), search.evaluations, enumerated, interrupted)


@dataclass(eq=False, slots=True)
class _Found:
    """A distinct effective layout."""

    rules: tuple[AxisRule, ...]
    name: str
    origin: Origin
    index: tuple[int, ...]
    time_s: float
    peak_bytes: int


class _Search:
    def __init__(
        self,
        problem: Problem,
        predictor: Predictor,
        space: Space,
        study: optuna.Study,
        budget_bytes: int | None,
        at_most: int | None,
    ) -> None:
        self._problem, self._predictor, self._space, self._study = problem, predictor, space, study
        self._budget_bytes = budget_bytes
        self._at_most = at_most
        self._found: dict[tuple[int, ...], _Found] = {}
        self._searched = 0

    @property
    def evaluations(self) -> int:
        """Distinct effective layouts that were predicted."""
        return len(self._found)

    def run(self, asks: int, on_progress: Callable[[int, int], None] | None) -> None:
        """Descent from the best presets, the sampler, descent from the best of all."""
        self._descend(self._unlike(self._ranked(), STARTS))
        if any(self._space.able.values()):
            self._ask(max(0, asks - len(self._study.get_trials(deepcopy=False))), on_progress)
            self._descend(self._ranked()[:1])
            self._descend(self._refine(self._unlike(self._ranked(), REFINED)))

    def enumerate(self, at_most: int) -> bool:
        """Tries every rule list of a small space; False where the space is larger."""
        by_axis = [every_list(self._space, axis, at_most) for axis in self._space.able]
        orders = list(permutations(range(len(by_axis))))
        total = len(orders)
        for lists in by_axis:
            total *= len(lists) if lists is not None else at_most + 1
        if total > at_most or self._at_most is not None:
            return False
        every = product(*(lists for lists in by_axis if lists is not None))
        self._evaluate([tuple(lists[i] for i in order) for lists in every for order in orders])
        return True

    # Predicting -----------------------------------------------------------------------------------

    def _evaluate(self, batch: Iterable[Lists]) -> list[_Found | None]:
        return self._evaluate_rules([rules_of(lists) for lists in batch])

    def _evaluate_rules(
        self,
        batch: Sequence[tuple[AxisRule, ...]],
        names: Sequence[str] = (),
        origin: Origin = Origin.SEARCH,
    ) -> list[_Found | None]:
        """Predicts layouts, those that are known already from memory; None for what is over the
        limit.
        """
        if not batch:
            return []
        placements = self._predictor.placements
        index = placements.of_rules(batch)
        keys = placements.keys(index)
        left = len(batch) if self._at_most is None else max(0, self._at_most - len(self._found))
        fresh: dict[tuple[int, ...], int] = {}
        for number, key in enumerate(keys):
            if key not in self._found and key not in fresh and len(fresh) < left:
                fresh[key] = number
        if fresh:
            chosen = index[list(fresh.values())]
            predictions = self._predictor.predict_many(chosen)
            times, peaks = predictions.time_s.tolist(), predictions.peak_bytes.tolist()
            for (key, number), row, time_s, peak in zip(
                fresh.items(), chosen.tolist(), times, peaks, strict=True
            ):
                self._searched += origin is Origin.SEARCH
                name = names[number] if names else f"search-{self._searched}"
                self._found[key] = _Found(batch[number], name, origin, tuple(row), time_s, peak)
        return [self._found.get(key) for key in keys]

    def _cost(self, found: _Found) -> tuple[int, float, int]:
        return cost(found.time_s, found.peak_bytes, self._budget_bytes)

    def _ranked(self) -> list[_Found]:
        """Everything found, best first; of equal predictions a preset, then fewer rules."""
        return sorted(
            self._found.values(),
            key=lambda f: (
                *self._cost(f),
                f.origin is Origin.SEARCH,
                len(f.rules),
                list(map(str, f.rules)),
            ),
        )

    def _unlike(self, ranked: Iterable[_Found], count: int) -> list[_Found]:
        """The first few that do not take as long as an earlier one."""
        first: dict[object, _Found] = {}
        for found in ranked:
            first.setdefault(self._cost(found)[:2], found)
            if len(first) == count:
                break
        return list(first.values())

    # Stages ---------------------------------------------------------------------------------------

    def presets(self, named: Sequence[Preset]) -> list[str]:
        """Evaluates presets and tells the study of those that the space can express; the names
        their layouts have.
        """
        found = self._evaluate_rules(
            [p.rules for p in named], [p.name for p in named], Origin.PRESET
        )
        for one in found:
            if one is not None:
                self._record(one)
        return [
            preset.name if one is None else one.name
            for preset, one in zip(named, found, strict=True)
        ]

    def _descend(self, starts: Sequence[_Found]) -> None:
        """Descent: the best change of one mesh axis' rules, axis by axis, then of two, until
        nothing improves.

        All starts take each step together, so that what they try is predicted at once.
        """
        space, bests = self._space, list(starts)
        going = list(range(len(bests)))
        for _ in range(ROUNDS):
            before = list(bests)
            for axis in space.able:
                self._step(bests, going, partial(neighbours, space, axis=axis))
            stuck = [i for i in going if bests[i] is before[i]]
            self._step(bests, stuck, partial(exchanges, space))
            going = [i for i in going if bests[i] is not before[i] and bests[i] not in bests[:i]]
            if not going:
                break
        for best in dict.fromkeys(bests):
            if best not in starts:
                self._record(best)

    def _step(
        self, bests: list[_Found], going: Sequence[int], moves: Callable[[Lists], Iterable[Lists]]
    ) -> None:
        """Takes the best move of some, where one is better."""
        tried = [
            [rules_of(lists) for lists in moves(self._space.lists(bests[i].rules))] for i in going
        ]
        for i, found in zip(going, self._best_of(tried), strict=True):
            if found is not None and self._cost(found) < self._cost(bests[i]):
                bests[i] = found

    def _best_of(self, batches: Sequence[Sequence[tuple[AxisRule, ...]]]) -> list[_Found | None]:
        """The best of each batch, None where nothing was predicted; all are predicted at once."""
        every = iter(self._evaluate_rules([rules for batch in batches for rules in batch]))
        mine = (
            [found for found in islice(every, len(batch)) if found is not None] for batch in batches
        )
        return [min(found, key=self._cost, default=None) for found in mine]

    def _refine(self, starts: Sequence[_Found]) -> list[_Found]:
        """Adds conditions and occurrences, the best one each time, until none buys enough to be
        worth reading.
        """
        bests = list(starts)
        going = list(range(len(bests)))
        for _ in range(REFINEMENTS):
            tried = [list(refinements(self._space, bests[i].rules)) for i in going]
            better = []
            for i, found in zip(going, self._best_of(tried), strict=True):
                excess, time_s, _ = self._cost(bests[i])
                if found is not None and self._cost(found)[:2] < (excess, (1 - WORTH) * time_s):
                    bests[i] = found
                    better.append(i)
            going = better
        return bests

    # The study ------------------------------------------------------------------------------------

    def _record(self, found: _Found) -> None:
        """Tells the study of a layout that it did not ask for, where the space can express it."""
        point = self._space.encode(self._space.lists(found.rules))
        if point is None:
            return
        self._study.enqueue_trial(dict(point), skip_if_exists=True)
        if self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING]):
            trial = self._study.ask()
            self._tell(trial, *self._evaluate([self._space.decode(self._suggested(trial))]))

    def _suggested(self, trial: optuna.Trial) -> Point:
        choices = self._space.parameters()
        return cast(
            Point,
            {
                name: trial.suggest_categorical(name, list(values))
                for name, values in choices.items()
            },
        )

    def _tell(self, trial: optuna.Trial, found: _Found | None) -> None:
        if found is None:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        trial.set_user_attr("rules", [str(rule) for rule in found.rules])
        if self._budget_bytes is not None:
            trial.set_constraint("memory", float(found.peak_bytes - self._budget_bytes))
        self._study.tell(trial, found.time_s)

    def _ask(self, count: int, on_progress: Callable[[int, int], None] | None) -> None:
        """Asks the sampler for points, a few at once, and tells their predicted times."""
        for start in range(0, count, ASKED_AT_ONCE):
            trials = [self._study.ask() for _ in range(min(ASKED_AT_ONCE, count - start))]
            points = [self._suggested(trial) for trial in trials]
            every = self._evaluate([self._space.decode(point) for point in points])
            for number, (trial, found) in enumerate(zip(trials, every, strict=True)):
                self._tell(trial, found)
                if on_progress is not None:
                    on_progress(start + number + 1, count)

    # The answer -----------------------------------------------------------------------------------

    def proposals(self) -> tuple[Proposal, ...]:
        """The best, all presets and the Pareto set, as proposals; the best searched ones without
        idle rules.
        """
        ranked = self._ranked()
        chosen = (
            ranked[:KEPT]
            + [f for f in ranked[KEPT:] if f.origin is not Origin.SEARCH]
            + _pareto(ranked)
        )
        simplifier = RuleSimplifier(self._predictor.placements)
        kept: dict[tuple[int, ...], _Found] = {}
        for number, found in enumerate(dict.fromkeys(chosen)):
            if number < READABLE and found.origin is Origin.SEARCH:
                short = simplifier.simplify(Layout(self._problem, found.rules))
                again = self._evaluate_rules([short.rules], [found.name])[0]
                if again is not None and again.origin is Origin.SEARCH:
                    found = replace(again, rules=short.rules)
            kept.setdefault(found.index, found)
        index = np.array([found.index for found in kept.values()], dtype=np.int32)
        predictions = self._predictor.predict_each(index)
        made: dict[str, Proposal] = {}
        for found, prediction in zip(kept.values(), predictions, strict=True):
            layout = Layout(self._problem, found.rules)
            key = layout.key()
            made.setdefault(key, Proposal(found.name, found.origin, layout, key, prediction))

        def order(proposal: Proposal) -> tuple[object, ...]:
            fewest = len(proposal.layout.rules)
            return (
                *proposal.order(self._budget_bytes),
                proposal.origin is Origin.SEARCH,
                fewest,
                proposal.key,
            )

        return tuple(sorted(made.values(), key=order))


def _pareto(ranked: Iterable[_Found]) -> list[_Found]:
    """Those that no other one beats in both time and peak memory."""
    kept: list[_Found] = []
    for found in sorted(ranked, key=lambda f: (f.time_s, f.peak_bytes)):
        if not kept or found.peak_bytes < kept[-1].peak_bytes:
            kept.append(found)
    return kept


def cost(time_s: float, peak_bytes: int, budget_bytes: int | None) -> tuple[int, float, int]:
    """What decides between predictions: those that fit by time, then the others by how far they are
    over the budget.

    Times that differ by what the order of their sums does to floats are equal.
    """
    excess = 0 if budget_bytes is None else max(0, peak_bytes - budget_bytes)
    return excess, float(f"{time_s:.6g}"), peak_bytes
