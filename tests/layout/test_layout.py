"""Axis rules to specs: first-fit with divisibility."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.errors import RuleError
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Scope, ScopeKind
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.layout.spec import Spec, shard_count, to_partition_spec
from tests.models import decoder_args, decoder_step
from tests.stages import array, layout_of, mesh_of, prepared

AXES = {"data": 4, "model": 2, "one": 1}


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    args = decoder_args(batch=8, length=24, layers=2, d=48, heads=6, ff=96, vocab=100)
    return prepared(decoder_step, args, mesh_of(data=4, model=2, one=1), donate_argnums=(0, 1))


def specs_of(made: Prepared, *rules: str) -> dict[str, Spec]:
    return dict(
        zip(made.traced.program.input_paths, layout_of(made, *rules).input_specs(), strict=True)
    )


# Rules as text

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./\[\]'#]{0,8}", fullmatch=True).filter(
    lambda n: "->" not in n
)
mesh_axis_names = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
wheres = st.one_of(
    st.sampled_from([EVERYWHERE, OPTIMIZER]),
    st.builds(Scope, st.sampled_from([ScopeKind.WITH, ScopeKind.WITHOUT]), names),
)
axis_rules = st.builds(AxisRule, names, mesh_axis_names, st.sampled_from(["first", "last"]), wheres)


@given(axis_rules)
def test_a_rule_is_read_as_it_is_printed(rule: AxisRule) -> None:
    assert AxisRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["", "wq.1", "->data", "wq.1->", "wq.1->data (optimizer", "wq.1->data @middle"]
)
def test_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"no axis rule. Write 'logical axis->mesh axis'"):
        AxisRule.parse(text)


@pytest.mark.parametrize("scope", ["sometimes", "with", "optimizer emb.0", "everywhere else"])
def test_a_scope_that_says_nothing_is_refused(scope: str) -> None:
    with pytest.raises(RuleError, match="Use 'everywhere', 'optimizer', 'with AXIS'"):
        AxisRule.parse(f"emb.0->model ({scope})")


def test_a_scope_may_be_text() -> None:
    rule = AxisRule("emb.0", "model", "last", "with mlp.1")  # type: ignore[arg-type]
    assert rule.where == Scope.parse("with mlp.1")
    assert AxisRule.parse(str(rule)) == rule
    for nonsense in ("sometimes", 5, None):
        with pytest.raises(RuleError, match="Use 'everywhere', 'optimizer', 'with AXIS'"):
            AxisRule("emb.0", "model", where=nonsense)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (AxisRule("emb.0", "modle"), r"mesh axis 'modle', but the mesh has .*'model'"),
        (AxisRule("enb.0", "model"), r"logical axis 'enb.0'.*Nearest: .*emb\.0"),
        (AxisRule("emb.0", "model", where=Scope.parse("with nobody")), r"logical axis 'nobody'"),
    ],
)
def test_a_rule_that_names_nothing_is_refused(
    decoder: Prepared, rule: AxisRule, words: str
) -> None:
    with pytest.raises(RuleError, match=words):
        Layout(decoder.problem, (rule,))


# First-fit


@st.composite
def rule_lists(draw: st.DrawFn) -> tuple[str, ...]:
    logical_axis = st.sampled_from(LOGICAL_AXIS_NAMES)
    where = st.one_of(
        st.just(""),
        st.just(" (optimizer)"),
        st.builds(lambda w, r: f" ({w} {r})", st.sampled_from(["with", "without"]), logical_axis),
    )
    one = st.builds(
        lambda logical_axis, axis, where, last: f"{logical_axis}->{axis}{where}{last}",
        logical_axis, st.sampled_from(list(AXES)), where, st.sampled_from(["", " @last"]),
    )  # fmt: skip
    return tuple(draw(st.lists(one, max_size=8)))


LOGICAL_AXIS_NAMES = ["emb.0", "emb.1", "wk.2", "w1.2", "tokens.0", "tokens.1"]


@given(rules=rule_lists())
def test_every_spec_fits_whatever_the_rules(decoder: Prepared, rules: tuple[str, ...]) -> None:
    layout = layout_of(decoder, *rules)
    problem = decoder.problem
    fits = [(s[1], layout.fit_signature(s)) for s in problem.signatures]
    fits += [(v.shape, layout.fit(v)) for v in problem.program.values]
    for shape, fit in fits:
        used = [a for axes in fit.spec for a in axes]
        assert len(fit.spec) == len(shape)
        assert len(set(used)) == len(used), "no mesh axis twice in one value"
        assert "one" not in used, "a mesh axis of one device splits nothing"
        for size, axes in zip(shape, fit.spec, strict=True):
            assert size % math.prod(AXES[a] for a in axes) == 0
        assert not any(fit.spec[d] for d in fit.open_dims), "what is split is not open"


@given(rules=rule_lists(), more=rule_lists())
def test_equal_keys_are_equal_layouts_and_nothing_else(
    decoder: Prepared, rules: tuple[str, ...], more: tuple[str, ...]
) -> None:
    a, b = layout_of(decoder, *rules), layout_of(decoder, *more)

    def effective(layout: Layout) -> Any:
        problem = decoder.problem
        values = [layout.fit(v) for v in problem.program.values]
        return values, [layout.factor_sharding(e) for e in problem.program.eqns]

    assert (a.key() == b.key()) == (effective(a) == effective(b))
    assert a.key() != layout_of(decoder, *rules, inside=False).key()


@given(rules=rule_lists())
def test_rules_that_change_nothing_do_not_change_the_key(
    decoder: Prepared, rules: tuple[str, ...]
) -> None:
    same = (*rules, *rules, "emb.0->one")
    assert layout_of(decoder, *rules).key() == layout_of(decoder, *same).key()


def test_the_first_rule_that_fits_takes_the_mesh_axis(decoder: Prepared) -> None:
    assert specs_of(decoder, "emb.1->data", "emb.0->data")["params/emb"] == ((), ("data",))
    assert specs_of(decoder, "emb.0->data", "emb.1->data")["params/emb"] == (("data",), ())
    assert specs_of(decoder, "emb.0->model", "emb.1->data")["params/emb"] == (("model",), ("data",))


def test_what_a_mesh_axis_does_not_divide_goes_to_the_next_rule(decoder: Prepared) -> None:
    specs = specs_of(decoder, "wk.2->data", "emb.1->data")  # 6 heads, 4 devices
    assert specs["params/wk"] == ((), ("data",), (), ())
    assert specs["params/emb"] == ((), ("data",))


def test_two_mesh_axes_on_one_dimension_must_divide_it_together(decoder: Prepared) -> None:
    specs = specs_of(decoder, "emb.0->data", "emb.0->model", "emb.1->model")  # 100 = 4 * 25
    assert specs["params/emb"] == (("data",), ("model",))
    assert specs_of(decoder, "emb.1->model", "emb.1->data")["params/emb"] == ((), ("model", "data"))


def test_rules_for_the_optimizer_state_alone(decoder: Prepared) -> None:
    specs = specs_of(decoder, "emb.1->data (optimizer)")
    assert specs["params/emb"] == ((), ())
    assert specs["moment/emb"] == ((), ("data",))


def test_with_and_without_another_logical_axis(decoder: Prepared) -> None:
    specs = specs_of(decoder, "emb.1->data (with w1.2)", "emb.1->model (without w1.2)")
    assert specs["params/w1"] == ((), ("data",), ())
    assert specs["params/emb"] == ((), ("model",))
    assert specs["params/wk"] == ((), ("model",), (), ())


def conflict() -> Prepared:
    return prepared(
        lambda x: jnp.einsum("qk,sk->qs", x, x), (array(8, 4),), mesh_of(data=4, model=2)
    )


@pytest.mark.parametrize(
    ("occurrence", "spec"), [("first", (("data",), ())), ("last", ((), ("data",)))]
)
def test_a_conflict_takes_the_occurrence_it_says(occurrence: str, spec: Spec) -> None:
    made = conflict()
    (layout,) = (Layout(made.problem, (AxisRule("x.0", "data", occurrence),)),)  # type: ignore[arg-type]
    assert layout.output_specs() == (spec,)
    assert layout.input_specs() == ((("data",), ()),)


def test_the_second_rule_of_a_conflict_goes_to_the_other_occurrence_if_it_says_so() -> None:
    made = conflict()
    assert layout_of(made, "x.0->data", "x.0->model @last").output_specs() == (
        (("data",), ("model",)),
    )


# Open dimensions


def grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bghd,bgsd->bghs", q, k)


def test_where_a_mesh_axis_fits_nowhere_the_rest_is_open() -> None:
    made = prepared(grouped, (array(8, 2, 4, 16), array(8, 2, 32, 16)), mesh_of(model=4, data=2))
    layout = layout_of(made, "q.0->data", "q.1->model")
    (out,) = made.problem.program.body.outputs
    fit = layout.fit(out)
    assert fit.spec == (("data",), (), (), ())
    assert fit.open_dims == {1, 2, 3}
    partition_spec = to_partition_spec(fit.spec, fit.open_dims)
    assert partition_spec == P("data", P.UNCONSTRAINED, P.UNCONSTRAINED, P.UNCONSTRAINED)
    assert layout.output_specs() == (fit.spec,), (
        "arguments and outputs are replicated there, jit takes no open specs"
    )


def test_where_another_rule_takes_the_mesh_axis_nothing_is_open() -> None:
    made = prepared(grouped, (array(8, 2, 4, 16), array(8, 2, 32, 16)), mesh_of(model=4, data=2))
    fit = layout_of(made, "q.1->model", "q.2->model").fit(made.problem.program.body.outputs[0])
    assert fit.spec == ((), (), ("model",), ())
    assert not fit.open_dims


# Pins, specs, counts


def test_a_pin_decides_whatever_the_rules_say() -> None:
    made = prepared(
        lambda w, x: x @ w,
        (array(8, 4), array(16, 8)),
        mesh_of(data=4, model=2),
        pins={"w": P("model", None)},
    )
    layout = layout_of(made, "x.0->data", "w.0->data")
    assert layout.input_specs() == ((("model",), ()), (("data",), ()))


specs = st.lists(st.sampled_from([(), ("data",), ("model",), ("data", "model")]), max_size=4).map(
    tuple
)


@given(specs)
def test_a_partition_spec_names_the_same_axes(spec: Spec) -> None:
    made = to_partition_spec(spec)
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in made]
    assert entries == list(spec)[: len(entries)]
    assert not any(spec[len(entries) :])
    assert not entries or entries[-1]


def test_shard_counts_multiply() -> None:
    assert shard_count((("data",), (), ("model",)), AXES) == 8
    assert shard_count((), AXES) == 1


def test_scalars_and_empty_programs_have_layouts() -> None:
    made = prepared(lambda x: x, (np.float32(1),), mesh_of(data=4))
    assert layout_of(made).input_specs() == ((),)
