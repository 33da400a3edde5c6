"""Local search: from good layouts to better ones, one change of the rules at a time.

All starts take each step together, so that what they try is predicted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from autoshard.search.moves import exchanges, neighbours, refinements
from autoshard.search.predicted_layouts import PredictedLayout, PredictedLayouts
from autoshard.search.space import Lists, Space, rules_of

ROUNDS = 12
"""Steps of a descent at most; it ends sooner where no move is better. In the 20 searches that
`proposer` names the best is 6 % slower with 1, and the same from 3 on."""

REFINEMENTS = 3
"""Conditions or occurrences that are added to a rule list at most: each makes it longer to read.
With 1 the best of the 20 is up to 2.5 % slower, with 6 up to 0.5 % faster."""

WORTH = 0.01
"""Share of the step that a condition must save: a rule list that people review pays for each thing
it says. With 0 the best of the 20 is up to 0.5 % faster, and the longest of the five best rule
lists has 3.4 rules in the mean instead of 3.1."""

Moves = Callable[[Lists], Iterable[Lists]]

Late = Callable[[], bool]
"""True once nothing more is to be predicted."""


def never() -> bool:
    """`Late` of a search that takes as long as it takes."""
    return False


class LocalSearch:
    """Descent and refinement in the space of one problem."""

    def __init__(self, space: Space, layouts: PredictedLayouts, late: Late = never) -> None:
        self._space = space
        self._layouts = layouts
        self._late = late

    def descend(self, starts: Sequence[PredictedLayout]) -> list[PredictedLayout]:
        """What each start comes to by the best change of its rules, until none is better.

        The rules of one mesh axis change, axis by axis; where that helps no more, those of two.
        """
        bests = list(starts)
        going = list(range(len(bests)))
        for _ in range(ROUNDS):
            before = list(bests)
            for axis in self._space.able:
                if self._late():
                    return bests
                self._step(bests, going, partial(neighbours, self._space, axis=axis))
            stuck = [i for i in going if bests[i] is before[i]]
            self._step(bests, stuck, partial(exchanges, self._space))
            improved = [i for i in going if bests[i] is not before[i]]
            # Two that meet go on as one.
            going = [i for i in improved if bests[i] not in bests[:i]]
            if not going:
                break
        return bests

    def _step(self, bests: list[PredictedLayout], going: Sequence[int], moves: Moves) -> None:
        """Takes the best move of some of the layouts, where it is better."""
        batches = []
        for i in going:
            lists = self._space.lists(bests[i].rules)
            batches.append([rules_of(moved) for moved in moves(lists)])
        cost = self._layouts.cost
        for i, layout in zip(going, self._layouts.best_of_each(batches), strict=True):
            if layout is not None and cost(layout) < cost(bests[i]):
                bests[i] = layout

    def refine(self, starts: Sequence[PredictedLayout]) -> list[PredictedLayout]:
        """What each start comes to with conditions and occurrences that are worth reading.

        The best one is added each time, until none buys enough.
        """
        bests = list(starts)
        going = list(range(len(bests)))
        for _ in range(REFINEMENTS):
            if self._late():
                break
            batches = [list(refinements(self._space, bests[i].rules)) for i in going]
            better = []
            for i, layout in zip(going, self._layouts.best_of_each(batches), strict=True):
                if layout is not None and self._is_worth_it(layout, bests[i]):
                    bests[i] = layout
                    better.append(i)
            going = better
        return bests

    def _is_worth_it(self, refined: PredictedLayout, start: PredictedLayout) -> bool:
        excess_bytes, time_s, _ = self._layouts.cost(start)
        return self._layouts.cost(refined)[:2] < (excess_bytes, (1 - WORTH) * time_s)
