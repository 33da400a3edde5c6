"""The sampler: an Optuna study in memory, ask and tell, told the predicted time.

The objective is the predicted time; a candidate over the memory budget is told with its excess as a
constraint. What presets and the local search come upon is told as well, without being asked for.

The sampler is multivariate TPE. Alone, without presets and local search, on ten problems whose best
is known (4x2, one seed, `python -m tests.benchmarks.samplers`), the best of 40 and of 200 points
takes longer than the best of all by, in the mean: random 30 % and 14 %, TPE 24 % and 7 %,
multivariate TPE 25 % and 11 % (grouped: the same, as no parameter depends on another), NSGA-II 34 %
and 18 %. Multivariate TPE finds the best itself most often (3 of 10, the others 1) and takes 5 ms a
point, plain TPE 14. None replaces the local search, which finds it in all
(`tests/search/test_regret.py`); a Gaussian process needs torch and was not tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import optuna
from optuna.trial import Trial, TrialState

from autoshard.search.local_search import Late, never
from autoshard.search.predicted_layouts import PredictedLayout, PredictedLayouts
from autoshard.search.space import Point, Space, rules_of

ASKED_AT_ONCE = 8
"""Points that are predicted together, in one look-up of tables; the sampler learns only after them.
With 1 the 20 searches that `proposer` names take a third longer, with 32 the best is missed in one
of the 30."""

OnProgress = Callable[[int, int], None]
"""Called with (done, of)."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks on while layouts are proposed.

    Attributes:
        on_progress: Told how many points were asked.
        late: True once no more is to be predicted than the presets.
    """

    on_progress: OnProgress | None = None
    late: Late = never


optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").propagate = False


class Sampler:
    """A study of the points of one space."""

    def __init__(
        self, space: Space, layouts: PredictedLayouts, *, budget_bytes: int | None, seed: int
    ) -> None:
        self._space = space
        self._layouts = layouts
        self._budget_bytes = budget_bytes
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        self._study = optuna.create_study(sampler=sampler)

    @property
    def points(self) -> int:
        """How many points the study was told of."""
        return len(self._study.get_trials(deepcopy=False))

    def record(self, layout: PredictedLayout) -> None:
        """Tells the study of a layout that it did not ask for, where the space can express it."""
        point = self._space.encode(self._space.lists(layout.rules))
        if point is None:
            return
        self._study.enqueue_trial(dict(point), skip_if_exists=True)
        # Nothing waits where the study has this point already.
        if self._study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
            trial = self._study.ask()
            (predicted,) = self._predict([trial])
            self._tell(trial, predicted)

    def ask(self, count: int, watch: Watch) -> None:
        """Asks the sampler for points, a few at once, and tells their predicted times; for none
        once it is late.
        """
        for start in range(0, count, ASKED_AT_ONCE):
            if watch.late():
                return
            trials = [self._study.ask() for _ in range(min(ASKED_AT_ONCE, count - start))]
            layouts = self._predict(trials)
            for done, (trial, layout) in enumerate(zip(trials, layouts, strict=True), start + 1):
                self._tell(trial, layout)
                if watch.on_progress is not None:
                    watch.on_progress(done, count)

    def _predict(self, trials: Sequence[Trial]) -> list[PredictedLayout | None]:
        points = [self._suggested(trial) for trial in trials]
        return self._layouts.predict([rules_of(self._space.decode(point)) for point in points])

    def _suggested(self, trial: Trial) -> Point:
        choices = self._space.parameters()
        return {
            name: cast(str | int, trial.suggest_categorical(name, values))
            for name, values in choices.items()
        }

    def _tell(self, trial: Trial, layout: PredictedLayout | None) -> None:
        if layout is None:
            self._study.tell(trial, state=TrialState.PRUNED)
            return
        trial.set_user_attr("rules", [str(rule) for rule in layout.rules])
        if self._budget_bytes is not None:
            trial.set_constraint("memory", float(layout.peak_bytes - self._budget_bytes))
        self._study.tell(trial, layout.time_s)
