"""The search space: every point is a rule list, and rule lists of the space are points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.layout.axis_rule import OPTIMIZER, AxisRule, Scope
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.search.moves import exchanges, neighbours, refinements
from autoshard.search.presets import find_parts, presets
from autoshard.search.space import (
    MAX_LOGICAL_AXES,
    PLACES,
    Space,
    every_list,
    make_space,
    rules_of,
)
from tests.models import decoder_args, decoder_step
from tests.stages import array, mesh_of, prepared

ARGS = decoder_args(layers=3, heads=6, d=96)


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared(decoder_step, ARGS, mesh_of(data=4, model=2), donate_argnums=(0, 1))


@pytest.fixture(scope="module")
def space(decoder: Prepared) -> Space:
    return make_space(decoder.problem, find_parts(decoder.problem).residual)


def points(space: Space) -> st.SearchStrategy[dict[str, str | int]]:
    return st.fixed_dictionaries(
        {name: st.sampled_from(choices) for name, choices in space.parameters().items()}
    )


@given(data=st.data())
def test_a_point_is_a_rule_list_that_encodes_to_the_same_layout(
    space: Space, data: st.DataObject
) -> None:
    lists = space.decode(data.draw(points(space)))
    again = space.encode(lists)
    assert again is not None
    assert rules_of(space.decode(again)) == rules_of(lists)
    assert set(again) == set(space.parameters())
    assert all(again[name] in choices for name, choices in space.parameters().items())


@given(data=st.data())
def test_rules_come_by_mesh_axis_and_place_and_the_optimizer_last(
    space: Space, data: st.DataObject
) -> None:
    point = data.draw(points(space))
    lists = space.decode(point)
    assert len(lists) == len(space.able)
    for rules in lists:
        everywhere = [r for r in rules if r.where != OPTIMIZER]
        assert rules[: len(everywhere)] == tuple(everywhere)
        assert len({r.mesh_axis for r in rules}) <= 1
        places = [int(point[f"{r.mesh_axis} {r.logical_axis}"]) for r in everywhere]
        assert places == sorted(places)
    assert len(set(rules_of(lists))) == sum(
        bool(value) * (len(space.optimizer_axes) if name.endswith("(optimizer)") else 1)
        for name, value in point.items()
        if name != "first"
    )
    Layout(space.problem, rules_of(lists))  # binds


@given(data=st.data())
def test_lists_of_a_rule_list_say_the_same(space: Space, data: st.DataObject) -> None:
    lists = space.decode(data.draw(points(space)))
    rules = rules_of(lists)
    again = rules_of(space.lists(rules))
    assert Layout(space.problem, again).key() == Layout(space.problem, rules).key()


def test_nothing_assigned_is_replication(space: Space) -> None:
    point = space.encode(((), ()))
    assert point is not None
    assert rules_of(space.decode(point)) == ()


def test_presets_are_in_the_space(decoder: Prepared, space: Space) -> None:
    named, _ = presets(decoder.problem)
    expressed = {p.name for p in named if space.encode(space.lists(p.rules)) is not None}
    assert {"replicated", "dp", "zero1", "fsdp", "tp"} <= expressed
    for preset in named:
        point = space.encode(space.lists(preset.rules))
        if point is not None:
            same = Layout(decoder.problem, rules_of(space.decode(point))).key()
            assert same == Layout(decoder.problem, preset.rules).key(), preset.name


@pytest.mark.parametrize(
    "rules",
    [
        (AxisRule("tokens.0", "data", "last"),),
        (AxisRule("tokens.0", "data", where=Scope.parse("with emb.1")),),
        (AxisRule("tokens.0", "data", where=Scope.parse("without emb.1")),),
        (AxisRule("emb.1", "data", where=OPTIMIZER), AxisRule("tokens.0", "data", where=OPTIMIZER)),
        (AxisRule("nobody", "data"),),
    ],
)
def test_what_the_space_cannot_say_is_no_point(space: Space, rules: tuple[AxisRule, ...]) -> None:
    assert space.encode(space.lists(rules)) is None


def test_only_what_some_size_allows_is_offered(decoder: Prepared, space: Space) -> None:
    sizes = {
        logical_axis.name: logical_axis.sizes for logical_axis in decoder.problem.logical_axes.axes
    }
    assert 0 < len(space.logical_axes) <= MAX_LOGICAL_AXES
    heads = [logical_axis for logical_axis in space.logical_axes if sizes[logical_axis] == (6,)]
    assert heads
    assert set(heads) <= set(space.able["model"])
    assert not set(heads) & set(space.able["data"]), "4 does not divide 6 heads"
    scanned = {
        logical_axis.name
        for logical_axis in decoder.problem.logical_axes.axes
        if logical_axis.scanned
    }
    assert not scanned & set(space.logical_axes)


def test_mesh_axes_of_one_device_and_optimizer_rules_without_state(decoder: Prepared) -> None:
    made = prepared(decoder_step, ARGS, mesh_of(data=4, one=1), donate_argnums=(0, 1))
    space = make_space(made.problem)
    assert set(space.able) == {"data"}
    assert set(space.parameters()) == {
        f"data {logical_axis}" for logical_axis in space.able["data"]
    }
    assert space.parameters()[f"data {space.able['data'][0]}"] == tuple(range(PLACES + 1))


@given(data=st.data())
def test_neighbours_differ_in_one_mesh_axis(space: Space, data: st.DataObject) -> None:
    lists = space.decode(data.draw(points(space)))
    before = {r for r in rules_of(lists) if r.mesh_axis != "data"}
    found = [rules_of(other) for other in neighbours(space, lists, "data")]
    assert len(set(found)) == len(found)
    assert rules_of(lists) not in found
    assert all({r for r in rules if r.mesh_axis != "data"} == before for rules in found)


@given(data=st.data())
def test_exchanges_are_in_the_space(space: Space, data: st.DataObject) -> None:
    for other in exchanges(space, space.decode(data.draw(points(space)))):
        Layout(space.problem, rules_of(other))
        for rules in other:
            assert len({r.mesh_axis for r in rules}) <= 1
            assert all(
                r.logical_axis in space.able[r.mesh_axis] for r in rules if r.where != OPTIMIZER
            )
            assert len(set(rules)) == len(rules)


def test_every_list_is_every_order_of_every_choice(decoder: Prepared) -> None:
    made = prepared(lambda w, x: x @ w, (array(8, 12), array(16, 8)), mesh_of(data=4, model=2))
    space = make_space(made.problem)
    logical_axes = space.able["model"]
    found = every_list(space, "model", 1000)
    assert found is not None
    assert (
        len(set(found))
        == len(found)
        == sum(math.perm(len(logical_axes), n) for n in range(len(logical_axes) + 1))
    )
    assert every_list(space, "model", len(found) - 1) is None


def test_refinements_are_rule_lists_one_step_away(space: Space) -> None:
    start = (AxisRule("tokens.0", "data"), AxisRule("emb.1", "data"))
    found = list(refinements(space, start))
    assert found
    assert len(set(found)) == len(found)
    for rules in found:
        Layout(space.problem, rules)
        changed = [r for r in rules if r not in start]
        assert len(changed) == 1, "one rule is new or changed"
        assert len(rules) - len(start) in (0, 1)
        assert changed[0].occurrence == "last" or changed[0].where.is_condition
