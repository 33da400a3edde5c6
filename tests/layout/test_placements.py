"""Placements of many layouts at once say what first-fit says of each, column by column."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Scope, ScopeKind
from autoshard.layout.layout import Layout
from autoshard.layout.pins import Only
from autoshard.layout.placements import OPEN, Placements
from autoshard.layout.prepare import Prepared
from autoshard.layout.problem import Fit, Problem
from autoshard.tracing import build_program
from tests.models import decoder_args, decoder_step
from tests.stages import array, mesh_of, prepared


@pytest.fixture(scope="module")
def decoders() -> list[Prepared]:
    """Widths that all mesh axes, some of them, and only one by one divide; and leaves kept from
    some mesh axes."""
    sizes = [
        {"heads": 4, "d": 64},
        {"heads": 6, "d": 96},
        {"heads": 2, "d": 36, "batch": 4},
        {"heads": 2, "d": 36},
    ]
    meshes = [
        {"data": 4, "model": 2},
        {"data": 2, "model": 2, "third": 2},
        *[{"data": 2, "model": 4}] * 2,
    ]
    pins = [
        None,
        None,
        None,
        {re.compile("w[12]"): Only(None, "data"), re.compile("wq"): Only(None, "model", None)},
    ]
    return [
        prepared(
            decoder_step, decoder_args(**size), mesh_of(**axes), donate_argnums=(0, 1), pins=pin
        )
        for size, axes, pin in zip(sizes, meshes, pins, strict=True)
    ]


def rule_lists(problem: Problem) -> st.SearchStrategy[tuple[AxisRule, ...]]:
    names = st.sampled_from([logical_axis.name for logical_axis in problem.logical_axes.axes])
    scoped = st.one_of(
        st.sampled_from([EVERYWHERE, EVERYWHERE, OPTIMIZER]),
        st.builds(Scope, st.sampled_from([ScopeKind.WITH, ScopeKind.WITHOUT]), names),
    )
    rule = st.builds(
        AxisRule,
        names,
        st.sampled_from(list(problem.mesh_axes)),
        st.sampled_from(["first", "last"]),
        scoped,
    )
    return st.lists(rule, max_size=7).map(tuple)


def fit_of(
    placements: Placements, index: np.ndarray, column: int
) -> tuple[dict[int, list[str]], bool]:
    """Mesh axes of each dimension, major first, and whether the dimensions without one are open."""
    dims = [int(rows.array[n, column]) for rows, n in zip(placements.rows, index, strict=True)]
    order = placements.orders[dims.pop()]
    found: dict[int, list[str]] = {}
    for axis in order:
        if dims[axis] >= 0:
            found.setdefault(dims[axis], []).append(placements.axes[axis])
    return found, OPEN in dims


@pytest.mark.parametrize("number", range(4))
@given(data=st.data())
def test_many_at_once_are_fitted_as_one_by_one(
    decoders: list[Prepared], number: int, data: st.DataObject
) -> None:
    problem = decoders[number].problem
    placements = Placements(problem)
    batch = data.draw(st.lists(rule_lists(problem), min_size=1, max_size=5))
    for rules, index in zip(batch, placements.of_rules(batch), strict=True):
        layout = Layout(problem, rules)
        assert (placements.of_layout(layout) == placements.of_layout(Layout(problem, rules))).all()
        for column, signature in enumerate(problem.signatures):
            fit: Fit = layout.fit_signature(signature)
            found, opened = fit_of(placements, index, column)
            assert {d: list(axes) for d, axes in enumerate(fit.spec) if axes} == found
            left = any(not axes for axes in fit.spec)
            assert bool(fit.open_dims) == (opened and left)


@given(data=st.data())
def test_equal_keys_are_equal_layouts(decoders: list[Prepared], data: st.DataObject) -> None:
    problem = decoders[0].problem
    placements = Placements(problem)
    batch = data.draw(st.lists(rule_lists(problem), min_size=2, max_size=8))
    keys = placements.keys(placements.of_rules(batch))
    effective = [Layout(problem, rules).key() for rules in batch]
    for i in range(len(batch)):
        for j in range(i):
            if keys[i] == keys[j]:
                assert effective[i] == effective[j]


def test_a_pinned_value_stays_where_it_is() -> None:
    made = prepared(
        lambda w, x: jnp.tanh(x @ w),
        (array(8, 16), array(4, 8)),
        mesh_of(data=4, model=2),
        pins={"w": P(None, "model")},
    )
    placements = Placements(made.problem)
    (w, x) = made.problem.program.body.inputs
    index = placements.of_rules([(AxisRule("w.0", "model"), AxisRule("x.0", "data"))])[0]
    assert fit_of(placements, index, placements.value_column(w)) == ({1: ["model"]}, False)
    assert fit_of(placements, index, placements.value_column(x)) == (
        {0: ["data"], 1: ["model"]},
        False,
    )


@pytest.mark.parametrize("leaves", [1, 63, 64, 65, 128, 129, 1000])
def test_an_equation_of_so_many_factors_is_split_as_first_fit_says(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them is beyond what a byte holds from 65 matrices on."""
    # As one equation, which the operands of a kernel or of foreign code are anyway.
    monkeypatch.setattr(build_program, "OPERANDWISE", frozenset())
    made = prepared(jax.lax.optimization_barrier, ([array(8, 4)] * leaves,), mesh_of(data=4))
    (eqn,) = made.problem.program.eqns
    logical_axes = [axis for axis, _ in made.problem.logical_axes.factors(eqn)]
    name = made.problem.logical_axes.axes[logical_axes[-2]].name
    rules = (AxisRule.parse(f"{name}->data"),)

    placements = Placements(made.problem)
    index = placements.of_rules([rules])[0]
    assert index.tolist() == placements.of_layout(Layout(made.problem, rules)).tolist()
    split = int(placements.rows[0].array[index[0], placements.factor_column(eqn)])
    assert logical_axes[split] == logical_axes[-2]
    if logical_axes.count(logical_axes[-2]) == 1:
        assert split == 2 * (leaves - 1)


def test_there_may_be_more_orders_of_mesh_axes_than_a_byte_holds() -> None:
    made = prepared(lambda x: x + 1, (array(64, 64),), mesh_of(data=8))
    mesh = dict.fromkeys("abcdef", 2)  # 720 orders
    problem = dataclasses.replace(made.problem, mesh_axes=mesh)
    placements = Placements(problem)
    for names in ("abcdef", "fedcba", "facebd"):
        rules = tuple(AxisRule.parse(f"x.0->{name}") for name in names)
        index = placements.of_rules([rules])[0]
        assert index.tolist() == placements.of_layout(Layout(problem, rules)).tolist()
        column = placements.value_column(problem.program.body.inputs[0])
        order = placements.orders[int(placements.rows[-1].array[index[-1], column])]
        assert "".join("abcdef"[axis] for axis in order) == names
