"""Proposing: presets and more, each effective layout once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autoshard.cost_model.hardware.hardware import Link, h100
from autoshard.cost_model.predict import Predictions, Predictor
from autoshard.layout.prepare import Prepared
from autoshard.search.presets import ORDER
from autoshard.search.proposer import Proposals, propose
from autoshard.search.sampler import Watch
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import mesh_of, prepared

FREE = h100.with_links({name: Link(alpha_s=0.0, bytes_per_s=1e11) for name in ("data", "model")})
ASKS = 15


class Counting(Predictor):
    """Remembers what it was asked."""

    def __init__(self, made: Prepared) -> None:
        super().__init__(made.problem, FREE, made.traced.call.donated)
        self.asked: Counter[tuple[int, ...]] = Counter()

    def predict_many(self, index: NDArray[np.int32]) -> Predictions:
        self.asked.update(self.placements.keys(index))
        return super().predict_many(index)


@pytest.fixture(scope="module")
def mlp() -> Prepared:
    return prepared(
        mlp_step, mlp_args(batch=64, d=64, h=256), mesh_of(data=4, model=2), donate_argnums=0
    )


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared(decoder_step, decoder_args(), mesh_of(data=4, model=2), donate_argnums=(0, 1))


def search(made: Prepared, **options: Any) -> tuple[Proposals, Counting]:
    predictor = Counting(made)
    return propose(
        made.problem, predictor, **{"asks": ASKS, "enumerate_at_most": 0, **options}
    ), predictor


@pytest.fixture(scope="module")
def found(decoder: Prepared) -> tuple[Proposals, Counting]:
    return search(decoder)


def test_no_effective_layout_is_predicted_twice(found: tuple[Proposals, Counting]) -> None:
    proposals, predictor = found
    assert set(predictor.asked.values()) == {1}
    assert (
        proposals.evaluations == len(predictor.asked) >= len(proposals.ranked)
    )  # shortened rule lists may be one
    assert len({p.key for p in proposals.ranked}) == len(proposals.ranked)
    assert len({p.name for p in proposals.ranked}) == len(proposals.ranked)


def test_every_preset_is_proposed_or_skipped_with_a_reason(
    found: tuple[Proposals, Counting],
) -> None:
    proposals, _ = found
    named = {p.name for p in proposals.ranked if p.preset == p.name}
    skipped = {s.name: s.reason for s in proposals.skipped}
    assert named | set(skipped) == set(ORDER)
    assert all(skipped.values())


def test_best_first_and_better_than_every_preset(found: tuple[Proposals, Counting]) -> None:
    times = [float(f"{p.prediction.time_s:.6g}") for p in found[0].ranked]
    assert times == sorted(times)
    assert any(p.origin == "search" for p in found[0].ranked[:3])


def test_rules_of_a_proposal_make_its_prediction(
    found: tuple[Proposals, Counting], decoder: Prepared
) -> None:
    for proposal in found[0].ranked[:5]:
        again = Predictor(decoder.problem, FREE, decoder.traced.call.donated).predict(
            proposal.layout
        )
        assert again.collective_bytes == proposal.prediction.collective_bytes
        assert again.time_s == pytest.approx(proposal.prediction.time_s)


def test_the_same_seed_proposes_the_same(mlp: Prepared) -> None:
    first, second = search(mlp)[0], search(mlp)[0]
    assert [(p.name, p.key) for p in first.ranked] == [(p.name, p.key) for p in second.ranked]


def test_what_fits_the_budget_comes_first(mlp: Prepared) -> None:
    smallest = min(p.prediction.peak_bytes for p in search(mlp)[0].ranked)
    budget = int(1.2 * smallest)
    ranked = search(mlp, budget_bytes=budget)[0].ranked
    fits = [p.prediction.peak_bytes <= budget for p in ranked]
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    assert not fits[-1]
    over = [p.excess_bytes(budget) for p in ranked]
    assert over == sorted(over), "then the nearest misses"


def test_ctrl_c_keeps_what_was_found(mlp: Prepared) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    proposals, _ = search(mlp, watch=Watch(on_progress=stop))
    assert proposals.interrupted
    assert {"dp", "fsdp", "tp"} <= {p.name for p in proposals.ranked}


@pytest.mark.parametrize("questions", [0, 1, 3])
def test_a_proposer_that_is_out_of_time_keeps_the_presets(mlp: Prepared, questions: int) -> None:
    asked = 0

    def late() -> bool:
        nonlocal asked
        asked += 1
        return asked > questions

    whole, _ = search(mlp, enumerate_at_most=0)
    proposals, _ = search(mlp, enumerate_at_most=0, watch=Watch(late=late))
    assert not proposals.interrupted
    assert {"dp", "fsdp", "tp"} <= {p.name for p in proposals.ranked}
    assert proposals.evaluations < whole.evaluations


def test_nothing_to_search_is_no_error() -> None:
    made = prepared(lambda x: x + 1, (3.0,), mesh_of(data=4, model=2))
    proposals, _ = search(made)
    assert [p.name for p in proposals.ranked] == ["replicated"]
    assert isinstance(proposals.ranked[0].layout.rules, tuple)
