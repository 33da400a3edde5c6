"""Predictions of many layouts at once are those of each, and dropped program points are never the
peak."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware.hardware import Hardware, Link, h100
from autoshard.cost_model.memory.peak_memory import _possible_maxima
from autoshard.cost_model.predict import Predictor
from autoshard.layout.axis_rule import AxisRule, Occurrence, Scope
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.layout.problem import Problem
from tests.models import decoder_args, decoder_step, unrolled_args, unrolled_step
from tests.stages import array, mesh_of, prepared

SLOW = h100.with_links(
    {"data": Link(alpha_s=1e-6, bytes_per_s=1e9), "model": Link(alpha_s=3e-6, bytes_per_s=7e9)}
)


def random_rules(problem: Problem, count: int) -> list[tuple[AxisRule, ...]]:
    """Rule lists of up to six rules, some under conditions."""
    rng = random.Random(0)
    names = [logical_axis.name for logical_axis in problem.logical_axes.axes]

    def rule() -> AxisRule:
        scopes = ["everywhere"] * 4 + [
            "optimizer",
            f"with {rng.choice(names)}",
            f"without {rng.choice(names)}",
        ]
        occurrence: Occurrence = rng.choice(("first", "first", "last"))
        return AxisRule(
            rng.choice(names),
            rng.choice(list(problem.mesh_axes)),
            occurrence,
            Scope.parse(rng.choice(scopes)),
        )

    return [tuple(rule() for _ in range(rng.randint(0, 6))) for _ in range(count)]


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared(decoder_step, decoder_args(), mesh_of(data=4, model=2), donate_argnums=(0, 1))


def test_a_batch_says_what_each_layout_alone_says(decoder: Prepared) -> None:
    problem = decoder.problem
    batch = random_rules(problem, 60)
    together = Predictor(problem, SLOW, decoder.traced.call.donated)
    many = together.predict_many(together.placements.of_rules(batch))
    for number, rules in enumerate(batch):
        alone = Predictor(problem, SLOW, decoder.traced.call.donated).predict(
            Layout(problem, rules)
        )
        assert many.time_s[number] == pytest.approx(alone.time_s, rel=1e-9)
        assert many.comm_s[number] == pytest.approx(alone.comm_s, rel=1e-9)
        assert many.peak_bytes[number] == pytest.approx(alone.peak_bytes, abs=2)


def test_points_of_like_layers_are_dropped_and_the_peak_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = prepared(
        unrolled_step, unrolled_args(layers=12), mesh_of(data=4, model=2), donate_argnums=0
    )
    problem, donated = setup.problem, setup.traced.call.donated
    pruned = Predictor(problem, h100, donated)
    monkeypatch.setattr(
        "autoshard.cost_model.memory.peak_memory._possible_maxima",
        lambda rows, eqn_class: np.arange(len(rows)),
    )
    whole = Predictor(problem, h100, donated)
    assert pruned.points < 0.7 * whole.points
    batch = random_rules(problem, 200)
    first = pruned.predict_many(pruned.placements.of_rules(batch)).peak_bytes
    second = whole.predict_many(whole.placements.of_rules(batch)).peak_bytes
    assert (first == second).all()


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=60),
    st.data(),
)
def test_a_dropped_row_is_never_the_only_maximum(
    rows: list[list[int]], data: st.DataObject
) -> None:
    table = np.array(rows, dtype=np.float64)
    eqn_class = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    )
    remaining = _possible_maxima(table, eqn_class)
    weights = np.array(data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)))
    assert (table[remaining] @ weights).max() >= (table @ weights).max() - 1e-9


@pytest.mark.parametrize("hardware", [SLOW, h100])
def test_no_layout_is_predicted_below_the_bound(decoder: Prepared, hardware: Hardware) -> None:
    problem = decoder.problem
    predictor = Predictor(problem, hardware, decoder.traced.call.donated)
    batch = random_rules(problem, 500)
    times = predictor.predict_many(predictor.placements.of_rules(batch)).time_s
    assert times.min() >= predictor.least_s() > 0


def test_the_bound_is_met_where_everything_splits_and_nothing_moves() -> None:
    setup = prepared(lambda x, y: x * y + x, (array(64, 8), array(64, 8)), mesh_of(data=4, model=2))
    predictor = Predictor(setup.problem, SLOW, setup.traced.call.donated)
    split = Layout(setup.problem, (AxisRule("x.0", "data"), AxisRule("x.1", "model")))
    assert predictor.predict(split).time_s == pytest.approx(predictor.least_s())


def test_a_copy_that_drops_most_is_not_below_the_bound() -> None:
    """What a copy reads is what it makes, in the bound too."""
    setup = prepared(
        lambda x: jax.lax.pad(x, 0.0, ((0, -4032, 0), (0, 0, 0))),
        (array(4096, 64),),
        mesh_of(data=4),
    )
    predictor = Predictor(setup.problem, SLOW, setup.traced.call.donated)
    assert predictor.predict(Layout(setup.problem, ())).time_s >= predictor.least_s() > 0
