"""The search space: every point is a rule list, and rule lists of the space are points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.layout import OPTIMIZER, AxisRule, Layout
from autoshard.prepare import Prepared
from autoshard.search.presets import find_parts, presets
from autoshard.search.space import MAX_ROLES, RANKS, Space, make_space, refinements
from tests.models import decoder_args, decoder_step
from tests.stages import mesh_of, prepared

ARGS = decoder_args(layers=3, heads=6, d=96)


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared(decoder_step, ARGS, mesh_of(data=4, model=2), donate_argnums=(0, 1))


@pytest.fixture(scope="module")
def space(decoder: Prepared) -> Space:
    return make_space(decoder.problem, find_parts(decoder.problem).residual)


def points(space: Space) -> st.SearchStrategy[dict[str, str | int]]:
    return st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in space.parameters().items()})


@given(data=st.data())
def test_a_point_is_a_rule_list_that_encodes_to_the_same_layout(space: Space, data: st.DataObject) -> None:
    rules = space.decode(data.draw(points(space)))
    again = space.encode(rules)
    assert again is not None
    assert space.decode(again) == rules
    assert set(again) == set(space.parameters())
    assert all(again[name] in choices for name, choices in space.parameters().items())


@given(data=st.data())
def test_rules_come_by_rank_and_the_optimizer_last(space: Space, data: st.DataObject) -> None:
    point = data.draw(points(space))
    rules = space.decode(point)
    everywhere = [r for r in rules if r.where != OPTIMIZER]
    ranks = [int(point[f"rank {r.role}"]) for r in everywhere]
    assert ranks == sorted(ranks)
    assert rules[: len(everywhere)] == tuple(everywhere)
    for role in space.roles:
        axes = [r.mesh_axis for r in everywhere if r.role == role]
        assert ",".join(axes) == str(point[f"assign {role}"]).replace("-", "")
    Layout(space.problem, rules)  # binds


def test_nothing_assigned_is_replication(space: Space) -> None:
    point = space.encode(())
    assert point is not None
    assert space.decode(point) == ()


def test_presets_are_in_the_space(decoder: Prepared, space: Space) -> None:
    named, _ = presets(decoder.problem, len)
    expressed = {p.name for p in named if space.encode(p.rules) is not None}
    assert {"replicated", "dp", "zero1", "fsdp", "tp"} <= expressed
    for preset in named:
        point = space.encode(preset.rules)
        if point is not None:
            same = Layout(decoder.problem, space.decode(point)).key()
            assert same == Layout(decoder.problem, preset.rules).key(), preset.name


@pytest.mark.parametrize(
    "rules",
    [
        (AxisRule("tokens.0", "data", "last"),),
        (AxisRule("tokens.0", "data", where="with emb.1"),),
        (AxisRule("tokens.0", "data", where="without emb.1"),),
        (AxisRule("emb.1", "data", where=OPTIMIZER), AxisRule("tokens.0", "data", where=OPTIMIZER)),
        (AxisRule("nobody", "data"),),
    ],
)
def test_what_the_space_cannot_say_is_no_point(space: Space, rules: tuple[AxisRule, ...]) -> None:
    assert space.encode(rules) is None


def test_only_what_some_size_allows_is_offered(decoder: Prepared, space: Space) -> None:
    sizes = {role.name: role.sizes for role in decoder.problem.roles.roles}
    assert 0 < len(space.roles) <= MAX_ROLES
    for role in space.roles:
        choices = space.assignments[role]
        assert choices[0] == "-"
        if sizes[role] == (6,):
            assert choices == ("-", "model"), "4 does not divide 6 heads"
    assert any(sizes[role] == (6,) for role in space.roles)
    scanned = {role.name for role in decoder.problem.roles.roles if role.scanned}
    assert not scanned & set(space.roles)


def test_mesh_axes_of_one_device_and_optimizer_rules_without_state(decoder: Prepared) -> None:
    made = prepared(decoder_step, ARGS, mesh_of(data=4, one=1), donate_argnums=(0, 1))
    space = make_space(made.problem)
    assert all("one" not in choice for choices in space.assignments.values() for choice in choices)
    assert "optimizer" not in space.parameters()
    assert set(space.parameters()) == {f"{what} {role}" for role in space.roles for what in ("assign", "rank")}
    assert space.parameters()[f"rank {space.roles[0]}"] == tuple(range(RANKS))


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
        assert changed[0].occurrence == "last" or changed[0].where.split(" ")[0] in ("with", "without")
