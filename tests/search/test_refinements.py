"""Rules beyond the sampled space: conditions and last occurrences; and rule lists without what says
nothing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.axes.argument_groups import Group
from autoshard.layout.axis_rule import EVERYWHERE, AxisRule, Scope
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.layout.placements import Placements
from autoshard.search.moves import refinements
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.search.space import make_space
from tests.models import decoder_args, decoder_step


def problem_of(fn, args, **options):
    return autoshard.apply(fn, args, "data=4,model=2", [], **options).layout.problem


def test_a_logical_axis_that_meets_itself_may_take_its_last_occurrence():
    problem = problem_of(lambda w: w @ w.T @ w, (np.ones((8, 16), np.float32),))
    rules = (AxisRule("w.0", "data"),)
    assert (AxisRule("w.0", "data", "last"),) in set(refinements(make_space(problem), rules))


def test_no_two_conditions_on_one_rule_give_the_same_layout():
    problem = problem_of(decoder_step, decoder_args(), donate_argnums=(0, 1))
    rules = (AxisRule("tokens.0", "data"), AxisRule("w1.2", "model"))
    for number in range(len(rules)):
        changed = [
            r
            for r in refinements(make_space(problem), rules)
            if len(r) == 2 and r[number].where != EVERYWHERE
        ]
        keys = [Layout(problem, r).key() for r in changed]
        assert len(keys) == len(set(keys))
        assert Layout(problem, rules).key() not in keys


def test_a_new_rule_comes_under_a_condition_first_or_after_its_logical_axis():
    problem = problem_of(decoder_step, decoder_args(), donate_argnums=(0, 1))
    rules = (AxisRule("tokens.0", "data"), AxisRule("w1.2", "model"))
    longer = [r for r in refinements(make_space(problem), rules) if len(r) > 2]
    assert longer
    for changed in longer:
        (new,) = set(changed) - set(rules)
        assert new.where.is_condition
        place = changed.index(new)
        assert place == 0 or changed[place - 1].logical_axis == new.logical_axis


def test_rules_that_state_nothing_go_and_the_program_stays():
    problem = problem_of(decoder_step, decoder_args(), donate_argnums=(0, 1))
    said = (AxisRule("tokens.0", "data"), AxisRule("w1.2", "model"))
    idle = (
        AxisRule("tokens.0", "data"),
        AxisRule("w1.2", "model", where=Scope.parse("with emb.0")),
    )
    layout = Layout(problem, (*said, *idle))
    short = RuleSimplifier(Placements(problem)).simplify(layout)
    assert short.rules == said
    assert short.input_specs() == layout.input_specs()
    assert constraints_for(short) == constraints_for(layout)


def test_in_a_decode_step_the_cache_is_data_and_the_weights_are_parameters():
    def decode(params, cache, x):
        cache = jnp.concatenate([cache[:, 1:], (x @ params["k"])[:, None]], 1)
        weights = jnp.einsum("bd,btd->bt", x @ params["q"], cache)
        return cache, jnp.einsum("bt,btd->bd", weights, cache) @ params["o"]

    weight = np.ones((16, 16), np.float32)
    args = (
        {"k": weight, "q": weight, "o": weight},
        np.ones((8, 32, 16), np.float32),
        np.ones((8, 16), np.float32),
    )
    groups = problem_of(decode, args, donate_argnums=1).groups.of_input
    assert groups == (Group.PARAMETER,) * 3 + (Group.DATA,) * 2
