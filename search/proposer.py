"""Stage 6: proposes candidates. One Optuna study per search, ask and tell, told the predicted time.

Presets are enqueued first, then what coordinate descent finds from the best of them (one role's assignment or rank at
a time, by the predictor); the sampler (TPE, multivariate) goes on from there, descent follows again, and the best two
are refined with conditions, which the sampler does not see. The same effective layout is never predicted twice.

The objective is the predicted time; a candidate over the memory budget is told with its excess as a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import optuna

from autoshard.constrain import constraints_for
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.layout import AxisRule, Layout, Problem
from autoshard.search.presets import Preset, find_parts, presets
from autoshard.search.space import RANKS, Point, Space, make_space, refinements
from autoshard.search.storage import Evidence, open_study
from autoshard.trial import Skipped

ASKS = 120
ROUNDS = 4
REFINED = 2
REFINEMENTS = 3
WORTH = 0.01
"""Share of the step that a condition must save: a rule list that people review pays for each thing it says."""

READABLE = 16
SEARCH = "search"


@dataclass(frozen=True, eq=False)
class Proposal:
    """A distinct effective layout with its prediction.

    Attributes:
        name: `fsdp`, or `search-17`.
        origin: `preset:fsdp`, or `search`.
        layout: With constraints stated inside.
        key: Its effective layout.
        prediction: The model's word.
    """

    name: str
    origin: str
    layout: Layout
    key: str
    prediction: Prediction

    def excess_bytes(self, budget_bytes: int | None) -> int:
        """Predicted bytes over the budget, 0 where it fits."""
        return 0 if budget_bytes is None else max(0, self.prediction.peak_bytes - budget_bytes)

    def order(self, budget_bytes: int | None) -> tuple[int, float, int]:
        """Order of candidates: those that fit by time, then the others by how far they are over the budget.

        Times that differ by what the order of their sums does to floats are equal.
        """
        time_s = float(f"{self.prediction.time_s:.6g}")
        return self.excess_bytes(budget_bytes), time_s, self.prediction.peak_bytes


@dataclass(frozen=True, eq=False)
class Proposals:
    """All distinct layouts proposed, best first, and the presets that were skipped.

    Attributes:
        ranked: Those that fit the budget by predicted time, then the others by predicted peak.
        skipped: Presets that make no sense here.
        evidence: What the study already knows of candidates.
        evaluations: How many predictions were made.
        interrupted: True if Ctrl-C ended the proposing early.
    """

    ranked: tuple[Proposal, ...]
    skipped: tuple[Skipped, ...]
    evidence: Evidence
    evaluations: int
    interrupted: bool = False


def propose(
    problem: Problem,
    predictor: Predictor,
    identity: Mapping[str, str],
    *,
    budget_bytes: int | None = None,
    storage: str | Path | None = None,
    study_name: str | None = None,
    seed: int = 0,
    asks: int = ASKS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Proposals:
    """Proposes and predicts candidates.

    Args:
        problem: The problem.
        predictor: Predicts them.
        identity: What the study is for (`program`, `mesh`, versions).
        budget_bytes: Memory budget per device.
        storage: Where the study lives; None for memory.
        study_name: Its name.
        seed: Of the sampler.
        asks: How many points the sampler is asked for.
        on_progress: Called with (done, of).

    Returns:
        Distinct layouts, best first.
    """
    named, skipped = presets(problem, predictor.sent_bytes)
    parts = find_parts(problem)
    has_optimizer = any(p.name == "zero1" for p in named)
    space = make_space(problem, parts.residual if has_optimizer else ())
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=20)
    study = open_study(storage, study_name, {**identity, "space": repr(sorted(space.parameters()))}, sampler)
    search = _Search(problem, predictor, space, study, budget_bytes)
    same = [
        Skipped(p.name, f"here it is the same layout as {first}")
        for p in named
        if (first := search.preset(p)) != p.name
    ]
    interrupted = False
    try:
        search.run(asks, on_progress)
    except KeyboardInterrupt:
        interrupted = True
    search.shorten()
    return Proposals(search.ranked(), (*skipped, *same), Evidence(study), search.evaluations, interrupted)


class _Search:
    def __init__(
        self, problem: Problem, predictor: Predictor, space: Space, study: optuna.Study, budget_bytes: int | None
    ) -> None:
        self._problem, self._predictor, self._space, self._study = problem, predictor, space, study
        self._budget_bytes = budget_bytes
        self._found: dict[str, Proposal] = {}
        self._count = 0
        self.evaluations = 0

    def run(self, asks: int, on_progress: Callable[[int, int], None] | None) -> None:
        """What an earlier run found, descent from the best presets, the sampler, descent from the best of all."""
        self.replay()
        for start in self.best(3):
            self.descend(start)
        if self._space.roles:
            for done in range(self.remaining(asks)):
                self.ask()
                if on_progress is not None:
                    on_progress(done + 1, asks)
            for start in self.best(2):
                self.descend(start)
            for start in self._unlike(self.best(len(self._found)), REFINED):
                self.refine(start)

    def _unlike(self, proposals: Iterable[Proposal], count: int) -> tuple[Proposal, ...]:
        """The first few that do not move the same data as an earlier one."""
        first: dict[object, Proposal] = {}
        for proposal in proposals:
            first.setdefault(proposal.prediction.collectives, proposal)
        return tuple(first.values())[:count]

    def refine(self, start: Proposal) -> None:
        """Adds conditions and occurrences, the best one each time, until none buys enough to be worth reading."""
        best = start
        for _ in range(REFINEMENTS):
            tried = [self._searched(rules) for rules in refinements(self._space, best.layout.rules)]
            found = min(tried, key=self._cost, default=best)
            excess, time_s, _ = self._cost(best)
            if self._cost(found)[:2] >= (excess, (1 - WORTH) * time_s):
                break
            best = found

    def _evaluate(self, rules: Sequence[AxisRule], name: str, origin: str) -> Proposal:
        layout = Layout(self._problem, tuple(rules))
        key = layout.key()
        if key not in self._found:
            self.evaluations += 1
            self._found[key] = Proposal(name, origin, layout, key, self._predictor.predict(layout))
        return self._found[key]

    def _searched(self, rules: Sequence[AxisRule]) -> Proposal:
        before = len(self._found)
        proposal = self._evaluate(rules, f"search-{self._count + 1}", SEARCH)
        self._count += len(self._found) - before
        return proposal

    def preset(self, preset: Preset) -> str:
        """Evaluates a preset and enqueues it where the space can express it; the name its layout has."""
        proposal = self._evaluate(preset.rules, preset.name, f"preset:{preset.name}")
        point = self._space.encode(preset.rules)
        if point is not None:
            self._record(point, proposal)
        return proposal.name

    def _record(self, point: Point, proposal: Proposal) -> None:
        self._study.enqueue_trial(dict(point), skip_if_exists=True)
        waiting = self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING])
        if waiting:
            self._tell(self._study.ask(), proposal, point)

    def _tell(self, trial: optuna.Trial, proposal: Proposal | None, expected: Point | None) -> None:
        point = {
            name: trial.suggest_categorical(name, list(choices)) for name, choices in self._space.parameters().items()
        }
        if proposal is None or point != expected:
            proposal = self._searched(self._space.decode(cast(Point, point)))
        trial.set_user_attr("key", proposal.key)
        trial.set_user_attr("rules", [str(rule) for rule in proposal.layout.rules])
        if self._budget_bytes is not None:
            trial.set_constraint("memory", float(proposal.prediction.peak_bytes - self._budget_bytes))
        self._study.tell(trial, proposal.prediction.time_s)

    def replay(self) -> None:
        """Takes in what an earlier run of this study asked for."""
        for trial in self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]):
            if set(self._space.parameters()) <= set(trial.params):
                self._searched(self._space.decode(cast(Point, trial.params)))

    def remaining(self, asks: int) -> int:
        """How many asks are left of the study's budget."""
        return max(0, asks - len(self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])))

    def ask(self) -> None:
        """Asks the sampler for one point and tells its predicted time."""
        self._tell(self._study.ask(), None, None)

    def _cost(self, proposal: Proposal) -> tuple[int, float, int]:
        return proposal.order(self._budget_bytes)

    def ranked(self) -> tuple[Proposal, ...]:
        """Everything found, best first; of equal predictions a preset, then fewer rules, then by key."""
        return tuple(
            sorted(
                self._found.values(),
                key=lambda p: (*self._cost(p), p.origin == SEARCH, len(p.layout.rules), p.key),
            )
        )

    def shorten(self) -> None:
        """The best of those that were searched lose the rules that do nothing, and are then often one of the others."""
        for proposal in [p for p in self.ranked() if p.origin == SEARCH][:READABLE]:
            short = without_idle_rules(proposal.layout)
            if short.key() == proposal.key:
                self._found[proposal.key] = replace(proposal, layout=short)
            else:
                del self._found[proposal.key]
                self._evaluate(short.rules, proposal.name, SEARCH)

    def best(self, count: int) -> tuple[Proposal, ...]:
        """The best few that the space can express."""
        return tuple(p for p in self.ranked() if self._space.encode(p.layout.rules) is not None)[:count]

    def descend(self, start: Proposal) -> None:
        """Coordinate descent from a proposal: the best change of one role at a time, until nothing improves."""
        point = self._space.encode(start.layout.rules)
        if point is None:
            return
        current, best = dict(point), start
        for _ in range(ROUNDS):
            improved = False
            for name in self._neighbourhood(current):
                for change in name:
                    trial = {**current, **change}
                    proposal = self._searched(self._space.decode(trial))
                    if self._cost(proposal) < self._cost(best):
                        current, best, improved = trial, proposal, True
            if not improved:
                break
        if best is not start:
            self._record(current, best)

    def _neighbourhood(self, point: Mapping[str, str | int]) -> Iterable[list[dict[str, str | int]]]:
        """For each role, its changes: another assignment at the front, at the back, or at the rank it has."""
        for role in self._space.roles:
            assign, rank = f"assign {role}", f"rank {role}"
            ranks = {0, int(point[rank]), RANKS - 1}
            yield [
                {assign: choice, rank: level}
                for choice in self._space.assignments[role]
                for level in sorted(ranks if choice != "-" else {int(point[rank])})
            ]
        if self._space.optimizer_roles:
            yield [{"optimizer": choice} for choice in self._space.parameters()["optimizer"]]


def without_idle_rules(layout: Layout) -> Layout:
    """The same compiled program from as few of its rules: later ones go first, each that states nothing."""

    def stated(rules: tuple[AxisRule, ...]) -> object:
        fewer = replace(layout, rules=rules)
        return fewer.input_specs(), fewer.output_specs(), constraints_for(fewer)

    rules = layout.rules
    wanted = stated(rules)
    for number in reversed(range(len(rules))):
        fewer = rules[:number] + rules[number + 1 :]
        if stated(fewer) == wanted:
            rules = fewer
    return replace(layout, rules=rules)
