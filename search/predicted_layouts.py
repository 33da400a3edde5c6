"""Distinct effective layouts, each predicted once, and what decides between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from autoshard.cost_model.predict import Predictor
from autoshard.evidence.candidate import Origin
from autoshard.layout.axis_rule import AxisRule

Cost = tuple[int, float, int]
"""Bytes over the budget, seconds of a step, peak bytes: what is least is best."""


def cost(time_s: float, peak_bytes: int, budget_bytes: int | None) -> Cost:
    """What decides between predictions.

    Those that fit come first, by time, then the others by how far they are over the budget.
    """
    excess_bytes = 0 if budget_bytes is None else max(0, peak_bytes - budget_bytes)
    # Times that differ by what the order of their sums does to floats are equal.
    return excess_bytes, float(f"{time_s:.6g}"), peak_bytes


@dataclass(frozen=True, eq=False, slots=True)
class PredictedLayout:
    """A distinct effective layout.

    Attributes:
        rules: A rule list that gives it.
        name: `fsdp`, or `search-17`.
        origin: Who came upon it first.
        index: Its rows in the `Placements`.
        time_s: Predicted seconds of a step.
        peak_bytes: Predicted peak memory of a device.
    """

    rules: tuple[AxisRule, ...]
    name: str
    origin: Origin
    index: tuple[int, ...]
    time_s: float
    peak_bytes: int


class PredictedLayouts:
    """The layouts of one problem that were predicted so far."""

    def __init__(
        self, predictor: Predictor, budget_bytes: int | None = None, at_most: int | None = None
    ) -> None:
        """None are predicted yet.

        Args:
            predictor: Predicts them.
            budget_bytes: Memory budget per device.
            at_most: How many distinct ones are predicted at most; None for any number.
        """
        self._predictor = predictor
        self._budget_bytes = budget_bytes
        self._at_most = at_most
        self._by_key: dict[tuple[int, ...], PredictedLayout] = {}
        self._searched = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def is_limited(self) -> bool:
        """True where only so many are predicted."""
        return self._at_most is not None

    def predict(
        self,
        batch: Sequence[tuple[AxisRule, ...]],
        names: Sequence[str] = (),
        origin: Origin = Origin.SEARCH,
    ) -> list[PredictedLayout | None]:
        """The effective layout of each rule list; None for what is over the limit.

        Args:
            batch: The rule lists. Those not predicted before are predicted together.
            names: Names for what is new; without them it is numbered.
            origin: Of what is new.
        """
        if not batch:
            return []
        placements = self._predictor.placements
        index = placements.of_rules(batch)
        keys = placements.keys(index)
        new = self._new(keys)
        if new:
            # [new layouts, mesh axes + 1]: their rows.
            new_index = index[list(new.values())]
            predictions = self._predictor.predict_many(new_index)
            rows = zip(
                new.items(),
                new_index.tolist(),
                predictions.time_s.tolist(),
                predictions.peak_bytes.tolist(),
                strict=True,
            )
            for (key, position), row, time_s, peak_bytes in rows:
                self._searched += origin is Origin.SEARCH
                name = names[position] if names else f"search-{self._searched}"
                self._by_key[key] = PredictedLayout(
                    batch[position], name, origin, tuple(row), time_s, peak_bytes
                )
        return [self._by_key.get(key) for key in keys]

    def _new(self, keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Position of each key that was not predicted before, up to the limit."""
        left = len(keys)
        if self._at_most is not None:
            left = max(0, self._at_most - len(self._by_key))
        new: dict[tuple[int, ...], int] = {}
        for position, key in enumerate(keys):
            if key not in self._by_key and key not in new and len(new) < left:
                new[key] = position
        return new

    def cost(self, layout: PredictedLayout) -> Cost:
        """What decides between layouts; see `cost`."""
        return cost(layout.time_s, layout.peak_bytes, self._budget_bytes)

    def ranked(self) -> list[PredictedLayout]:
        """All layouts, best first; of equal predictions a preset, then fewer rules."""
        return sorted(self._by_key.values(), key=self._rank)

    def _rank(self, layout: PredictedLayout) -> tuple[object, ...]:
        # The text of the rules only makes the order the same in every run.
        return (
            *self.cost(layout),
            layout.origin is Origin.SEARCH,
            len(layout.rules),
            [str(rule) for rule in layout.rules],
        )

    def best(self, count: int) -> list[PredictedLayout]:
        """The best few that do not take as long as a better one."""
        first: dict[object, PredictedLayout] = {}
        for layout in self.ranked():
            excess_bytes, time_s, _ = self.cost(layout)
            first.setdefault((excess_bytes, time_s), layout)
        return list(islice(first.values(), count))

    def best_of_each(
        self, batches: Sequence[Sequence[tuple[AxisRule, ...]]]
    ) -> list[PredictedLayout | None]:
        """The best of each batch, None where nothing was predicted; all are predicted at once."""
        together = iter(self.predict([rules for batch in batches for rules in batch]))
        bests = []
        for batch in batches:
            own = islice(together, len(batch))
            layouts = [layout for layout in own if layout is not None]
            bests.append(min(layouts, key=self.cost, default=None))
        return bests


def distinct(layouts: Iterable[PredictedLayout]) -> list[PredictedLayout]:
    """Each layout once, in order."""
    return list(dict.fromkeys(layouts))
