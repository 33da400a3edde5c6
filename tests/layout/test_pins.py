"""Pins: what the user fixes stays fixed, and what cannot be is refused with the numbers."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, PathError, SpecError
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.pins import Only, canonical_spec
from autoshard.tracing.program import Value
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import array, layout_of, mesh_of, prepared

AXES = {"data": 4, "model": 2, "one": 1}


def value(*shape: int) -> Value:
    return Value(0, shape, "float32", 4)


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        (P(), ((), ())),
        (P("data"), (("data",), ())),
        (P(None, ("data", "model")), ((), ("data", "model"))),
        (P(("model",), "data"), (("model",), ("data",))),
        (P("one", "model"), ((), ("model",))),
        (P(None, ("model", "one")), ((), ("model",))),
        (P(P.UNCONSTRAINED, "model"), ((), ("model",))),
    ],
)
def test_canonical_form(spec: P, canonical: Any) -> None:
    assert canonical_spec(spec, value(8, 16), AXES, "w") == canonical


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (
            P("data", "model"),
            (512, 1031),
            r"w is float32\[512, 1031\].*dimension 1 \(size 1031\).*'model' \(size 2\)",
        ),
        (P("data", "model"), (512, 1031), r"Pad dimension 1 to 1032, or use P.*\('data'"),
        (
            P(("data", "model")),
            (12, 3),
            r"dimension 0 \(size 12\) over mesh axes \('data', 'model'\) \(size 8\)",
        ),
        (P("date"), (8, 8), r"mesh axis 'date'; the mesh has .*Use data"),
        (P("data", "data"), (8, 8), r"uses mesh axis 'data' twice"),
        (P(None, None, "data"), (8, 8), r"3 entries for 2 dimensions. Use at most 2"),
    ],
)
def test_a_spec_that_does_not_fit(spec: P, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(SpecError, match=re.compile(words, re.DOTALL)):
        canonical_spec(spec, value(*shape), AXES, "w")


entries = st.sampled_from([None, "data", "model", "one", ("data", "model"), ("model", "data")])


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), max_size=3), st.lists(entries, max_size=3))
def test_a_spec_is_taken_exactly_where_it_divides(shape: list[int], parts: list[Any]) -> None:
    used = [a for e in parts if e for a in ((e,) if isinstance(e, str) else e)]
    pieces = [math.prod(AXES[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in parts]
    fits = (
        len(parts) <= len(shape)
        and len(set(used)) == len(used)
        and all(size % n == 0 for size, n in zip(shape, pieces, strict=False))
    )
    try:
        found = canonical_spec(P(*parts), value(*shape), AXES, "w")
    except SpecError:
        assert not fits
    else:
        assert fits
        assert len(found) == len(shape)


MESH = {"data": 4, "model": 2}


def specs(fn: Any, args: Any, rules: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    made = prepared(fn, args, mesh_of(**MESH), **options)
    layout = layout_of(made, *rules)
    program = made.traced.program
    inputs = zip(program.input_paths, layout.input_specs(), strict=True)
    return dict(inputs) | dict(zip(program.output_paths, layout.output_specs(), strict=True))


def test_a_pinned_argument_keeps_its_spec_through_the_step() -> None:
    pins = {"params/w1": P(None, "data"), "x": P("model")}
    found = specs(mlp_step, mlp_args(), ("x.0->data", "b1.0->model"), pins=pins, donate_argnums=0)
    assert found["params/w1"] == ((), ("data",))
    assert found["out/0/w1"] == ((), ("data",)), "what is carried goes in as it came out"
    assert found["x"] == (("model",), ())
    assert found["params/w2"] == (("model",), ()), "others follow the rules"


def test_patterns_match_anywhere_and_exact_paths_win() -> None:
    pins = {"params/w2": P("model"), re.compile(r"w\d$"): P(None, "data")}
    found = specs(mlp_step, mlp_args(), pins=pins)
    assert found["params/w1"] == ((), ("data",))
    assert found["params/w2"] == (("model",), ())
    assert found["params/b1"] == ((),)


@pytest.mark.parametrize(
    ("pins", "error", "words"),
    [
        ({"params/w3": P()}, PathError, r"'params/w3'.*Nearest: params/w"),
        (
            {re.compile("attention"): P()},
            PathError,
            r"'attention', which matches none of the 5 argument leaves",
        ),
        ({"params/b1": P(None, "data")}, SpecError, r"params/b1 is float32\[64\].*2 entries for 1"),
        ({0: P()}, ArgumentError, r"keys are leaf paths"),
        ({"x": "data"}, ArgumentError, r"values jax.sharding.PartitionSpec"),
        ([("x", P())], ArgumentError, r"is a list; use a mapping"),
    ],
)
def test_pins_that_fit_nothing_are_refused(pins: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prepared(mlp_step, mlp_args(), mesh_of(**MESH), pins=pins)


def test_constraints_in_the_function_are_pins_unless_ignored() -> None:
    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ w, P("model", "data"))

    args = (array(8, 4), array(4, 8))
    assert specs(own, args, ("x.0->data",))["out"] == (("model",), ("data",))
    assert specs(own, args, ("x.0->data",), user_constraints="ignore")["out"] == (("data",), ())


def test_constraints_for_another_mesh_say_nothing_here() -> None:
    other = NamedSharding(mesh_of(a=8), P("a"))
    found = specs(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), other), (array(8, 4),))
    assert found["out"] == ((), ())


def test_pins_of_a_table_apply_to_the_leaves_both_have() -> None:
    import autoshard

    table = autoshard.apply(
        decoder_step, decoder_args(), mesh_of(**MESH), "fsdp", donate_argnums=(0, 1)
    ).table

    def evaluate(params: Any, tokens: jax.Array) -> jax.Array:
        return params["emb"][tokens].sum()

    args = ({"emb": decoder_args()[0]["emb"]}, decoder_args()[2])
    made = prepared(evaluate, args, mesh_of(**MESH), pins=table)
    found = dict(zip(made.traced.program.input_paths, layout_of(made).input_specs(), strict=True))
    assert found["params/emb"] == ((), ("data", "model"))
    with pytest.raises(PathError, match=r"none of which this\s+function has"):
        prepared(lambda y: y, (np.ones(8, np.float32),), mesh_of(**MESH), pins=table)


@pytest.mark.parametrize("free", [P.UNCONSTRAINED, None, "data", "model", ("data", "model")])
def test_a_dimension_is_split_only_over_what_it_may(free: Any) -> None:
    made = prepared(
        mlp_step, mlp_args(), mesh_of(data=4, model=2), pins={re.compile("w1"): Only(free, "data")}
    )
    program, rng = made.traced.program, random.Random(0)
    leaf = program.body.inputs[program.input_paths.index("params/w1")]
    pairs = [
        AxisRule(logical_axis.name, axis)
        for logical_axis in made.problem.logical_axes.axes
        for axis in ("data", "model")
    ]
    allowed = (
        {"data", "model"}
        if free is P.UNCONSTRAINED
        else {free} - {None}
        if not isinstance(free, tuple)
        else free
    )
    seen: set[str] = set()
    for _ in range(100):
        spec = Layout(made.problem, tuple(rng.sample(pairs, 4))).fit(leaf).spec
        assert set(spec[1]) <= {"data"}
        seen |= set(spec[0])
    assert seen == set(allowed)


def test_what_may_split_a_leaf_goes_on_to_the_output_it_is_carried_in() -> None:
    made = prepared(
        decoder_step, decoder_args(), mesh_of(data=4, model=2), donate_argnums=(0, 1),
        pins={"params/w1": Only(None, None, "data")},
    )  # fmt: skip
    program = made.traced.program
    leaf = program.input_paths.index("params/w1")
    (output,) = (out for source, out in made.carry if source == leaf)
    disallowed = made.problem.disallowed
    assert (
        disallowed[program.body.outputs[output].index]
        == disallowed[program.body.inputs[leaf].index]
        == (
            ("data", "model"),
            ("data", "model"),
            ("model",),
        )
    )


def test_a_search_finds_the_best_of_what_is_allowed() -> None:
    def found(**pins: Any) -> autoshard.Plan:
        return autoshard.optimize(
            mlp_step,
            mlp_args(batch=64, d=128, h=256),
            mesh_of(data=4, model=2),
            hardware="tpu_v5e",
            progress=False,
            memory_budget_bytes="400KiB",
            effort=autoshard.Effort(compiled=0, measured=0),
            **pins,
        )

    only = {re.compile("w[12]"): Only("model", "model")}
    free, kept = found(), found(pins=only)
    assert any("data" in str(free.specs[path]) for path in ("params/w1", "params/w2"))
    assert not any("data" in str(kept.specs[path]) for path in ("params/w1", "params/w2"))
    assert any("model" in str(kept.specs[path]) for path in ("params/w1", "params/w2"))


def test_an_exact_path_wins_over_a_pattern_whatever_the_pin() -> None:
    def problem(pins: Any) -> Any:
        return prepared(mlp_step, mlp_args(), mesh_of(data=4, model=2), pins=pins).problem

    fixed = problem({"params/w1": P("data"), re.compile("w1"): Only("model")})
    assert len(fixed.pins) == 1
    assert not fixed.disallowed
    free = problem({"params/w1": Only("model"), re.compile("w1"): P("data")})
    assert len(free.disallowed) == 1
    assert not free.pins


@pytest.mark.parametrize(
    ("pins", "error", "words"),
    [
        (
            {"params/w1": Only("date")},
            SpecError,
            r"params/w1 is float32\[32, 64\], but Only\('date'\) names .*Use data",
        ),
        (
            {"params/w1": Only(None, ("model", "nowhere"))},
            SpecError,
            "names mesh axis 'nowhere'; the mesh has",
        ),
        (
            {"params/w1": Only(None, None, "data")},
            SpecError,
            "3 entries for 2 dimensions. Use at most 2",
        ),
        ({"params/w9": Only("data")}, PathError, "no argument leaf. Nearest: .*params/w1"),
        ({re.compile("nothing"): Only("data")}, PathError, "matches none of the"),
        ({"params/w1": ["data"]}, ArgumentError, "PartitionSpec or autoshard.Only"),
    ],
)
def test_what_cannot_be_kept_is_refused(pins: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prepared(mlp_step, mlp_args(), mesh_of(data=4, model=2), pins=pins)
