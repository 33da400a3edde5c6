"""The constraint pass: factor shardings, then results in their own specs, anywhere in the program;
and the same function afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.jax_internals.jaxprs import check
from autoshard.layout.constraints import constraints_for, placed
from autoshard.layout.prepare import Prepared
from autoshard.tracing.primitives import ANCHORS
from autoshard.tracing.rewrite import (
    Constraints,
    EqnConstraints,
    as_function,
    insert_constraints,
)
from tests.models import decoder_args, decoder_loss, decoder_step, mlp_args, mlp_step
from tests.stages import array, layout_of, mesh_of, prepared

U = P.UNCONSTRAINED
RNG = np.random.default_rng(0)
X, W = (0.4 * RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 4), (4, 4)))
SMALL = {"batch": 4, "length": 8, "layers": 2, "d": 16, "heads": 2, "ff": 32, "vocab": 32}
MESH = {"data": 4, "model": 2}


def stated(made: Prepared, *rules: str, inside: bool = True) -> list[tuple[str, str, P]]:
    """(primitive, place, spec) of every constraint."""
    layout = layout_of(made, *rules, inside=inside)
    return [(c.primitive, c.place, c.spec) for c in placed(layout, constraints_for(layout))]


def constrained(made: Prepared, *rules: str) -> Callable[..., Any]:
    """The function with the constraints inside, its jaxpr checked."""
    mesh = made.request.mesh
    closed = insert_constraints(
        made.traced.program, constraints_for(layout_of(made, *rules)), mesh.auto
    )
    check(closed)
    flat = as_function(closed, made.traced.program.name)
    return lambda *args: made.traced.unflatten_outputs(flat(*jax.tree.leaves(args)))


# What is stated


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def test_operands_as_the_factors_are_split_and_the_result_once_where_its_own_spec_agrees() -> None:
    made = prepared(matmul, (array(8, 4), array(4, 6)), mesh_of(**MESH))
    assert stated(made, "x.0->data", "w.1->model") == [
        ("dot_general", "operand 0", P("data")),
        ("dot_general", "operand 1", P(None, "model")),
        ("dot_general", "result 0 as computed", P("data", "model")),
    ]


def test_the_own_spec_of_a_result_is_stated_after_its_factor_sharding_where_they_differ() -> None:
    made = prepared(matmul, (array(8, 4), array(4, 8)), mesh_of(**MESH))
    assert stated(made, "x.1->data", "w.1->data", "w.1->model") == [
        ("dot_general", "operand 0", P(None, "data")),
        ("dot_general", "operand 1", P("data", "model")),
        ("dot_general", "result 0 as computed", P(None, "model")),
        ("dot_general", "result 0 as stored", P(None, ("data", "model"))),
    ]


def test_megatron_splits_the_sum_and_leaves_the_result_whole() -> None:
    made = prepared(lambda x, w: jnp.tanh(x) @ w, (array(8, 4), array(4, 6)), mesh_of(**MESH))
    assert [spec for _, _, spec in stated(made, "x.1->model")] == [
        P(None, "model"),
        P("model"),
        P(),
    ]


def test_arguments_only_states_nothing_inside() -> None:
    made = prepared(matmul, (array(8, 4), array(4, 6)), mesh_of(**MESH))
    assert stated(made, "x.0->data", inside=False) == []


def attention(q: jax.Array, k: jax.Array) -> jax.Array:
    batch, length, heads, size = q.shape
    groups = k.shape[2]
    return jnp.einsum(
        "bqgrd,bsgd->bgrqs", q.reshape(batch, length, groups, heads // groups, size), k
    )


def test_two_key_value_heads_on_a_four_way_axis_are_left_to_the_partitioner() -> None:
    made = prepared(attention, (array(4, 8, 8, 16), array(4, 8, 2, 16)), mesh_of(data=2, model=4))
    found = stated(made, "q.0->data", "q.2->model")
    assert found
    for _, place, spec in found:
        rank = 4 if place == "operand 1" else 5
        entries = list(spec) + [None] * (rank - len(spec))
        heads = entries.index(U) if U in entries else -1
        assert heads >= 0, f"{place}: {spec} pins the heads replicated"
        assert "data" in entries
    # Where the axis divides, it is used and nothing is left open.
    made = prepared(attention, (array(4, 8, 8, 16), array(4, 8, 4, 16)), mesh_of(data=2, model=4))
    assert all(
        U not in spec and "model" in spec for _, _, spec in stated(made, "q.0->data", "q.2->model")
    )


def test_indices_of_a_gather_and_what_it_picks_from_are_stated_as_well() -> None:
    made = prepared(
        lambda e, t: e[t], (array(64, 16), array(8, 4, dtype=np.int32)), mesh_of(**MESH)
    )
    found = {
        (primitive, place): spec
        for primitive, place, spec in stated(made, "t.0->data", "e.1->model")
    }
    assert found["gather", "operand 0"][1] == "model"
    assert found["gather", "operand 1"][0] == "data"
    assert found["gather", "result 0 as computed"] == P("data", None, "model")


def test_loop_carries_are_stated_in_their_own_spec() -> None:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    made = prepared(loop, (array(3, 4, 4), array(8, 4)), mesh_of(**MESH))
    assert ("scan", "carry 0", P("data")) in stated(made, "x.0->data")


def test_every_anchor_of_a_train_step_is_stated_with_its_line() -> None:
    made = prepared(decoder_step, decoder_args(**SMALL), mesh_of(**MESH))
    layout = layout_of(made, "tokens.0->data", "emb.1->data")
    anchors = [e for e in made.traced.program.eqns if e.primitive in ANCHORS]
    constraints = constraints_for(layout)
    assert {e.index for e in anchors} == set(constraints.eqns)
    lines = [c.source for c in placed(layout, constraints) if c.primitive in ANCHORS]
    assert len(lines) > 2 * len(anchors)
    assert all(line.startswith("models.py:") for line in lines)


# The function afterwards


def loops(w: jax.Array, x: jax.Array) -> jax.Array:
    """Contractions in a scan, a while, a cond, a remat and a custom rule."""
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, w]))[0]
    x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]
    x = jax.lax.cond(x[0, 0] > 0, lambda x, w: x @ w, lambda x, w: x @ w.T, x, w)
    x = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)
    return jax.nn.relu(own(x, w))


@jax.custom_vjp
def own(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


own.defvjp(
    lambda x, w: (own(x, w), (x, w)), lambda saved, g: (3.0 * g @ saved[1].T, saved[0].T @ g)
)


def several_at_once(w: jax.Array, x: jax.Array) -> Any:
    """Equations of several arrays, each for itself, inside a loop and outside."""
    x, w = jax.lax.optimization_barrier((x @ w, w))

    def layer(c: Any, _: Any) -> Any:
        h, w = jax.lax.optimization_barrier((jnp.tanh(c[0] @ c[1]), c[1]))
        return (h, w), None

    return jax.device_put(jax.lax.scan(layer, (x, w), None, length=2)[0])


def grads(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h = jax.lax.scan(
            jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, jnp.stack([w, w])
        )[0]
        return jnp.sum(own(h, w) ** 2)

    return jax.value_and_grad(loss)(w)


EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "loops": (loops, (W, X), ("x.0->data", "w.0->model")),
    "several at once": (several_at_once, (W, X), ("x.0->data", "w.0->model")),
    "gradients": (grads, (W, X), ("x.0->data", "w.0->model")),
    "mlp": (mlp_step, mlp_args(), ("x.0->data", "b1.0->model", "w1.0->data")),
    "decoder": (
        decoder_step,
        decoder_args(**SMALL),
        ("tokens.0->data", "w1.2->model", "emb.1->data", "wk.2->model"),
    ),
    "gather": (lambda e, t: e[t].sum(0), (W, np.arange(3)), ("e.0->data", "e.1->model")),
    "scatter": (
        lambda x, w: x.at[jnp.array([1, 3])].add(w[:2]),
        (X, W),
        ("x.0->data", "x.1->model"),
    ),
    "convolution": (
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"),
        (np.ones((4, 2, 6, 6), np.float32), np.ones((4, 2, 3, 3), np.float32)),
        ("x.0->data", "k.0->model"),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_constrained_program_is_well_typed_and_computes_the_same(name: str) -> None:
    fn, args, rules = EXAMPLES[name]
    made = prepared(fn, args, mesh_of(**MESH))
    assert len(constraints_for(layout_of(made, *rules)))
    got, want = jax.jit(constrained(made, *rules))(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, want)


def test_the_original_program_stays_as_it_is() -> None:
    made = prepared(loops, (W, X), mesh_of(**MESH))
    before = str(made.traced.program.origin)
    constrained(made, "x.0->data", "w.0->model")
    assert str(made.traced.program.origin) == before
    assert "sharding_constraint" not in before


def test_the_constrained_function_is_differentiable_as_the_original_is() -> None:
    made = prepared(loops_without_while, (W, X), mesh_of(**MESH))
    ours = jax.jit(jax.grad(lambda w, x: constrained(made, "x.0->data", "w.0->model")(w, x).sum()))(
        W, X
    )
    theirs = jax.grad(lambda w, x: loops_without_while(w, x).sum())(W, X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def loops_without_while(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, w]))[0]
    return own(jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w), w)


def test_the_constrained_function_can_be_mapped() -> None:
    made = prepared(loops, (W, X), mesh_of(**MESH))
    run = constrained(made, "x.0->data", "w.0->model")
    stacked = np.stack([X, -X, 2 * X])
    ours = jax.jit(jax.vmap(run, in_axes=(None, 0)))(W, stacked)
    theirs = jax.vmap(loops, in_axes=(None, 0))(W, stacked)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_resharded_value_keeps_its_readers() -> None:
    """The raw result gets the fresh variable: what reads the result reads the last constraint."""
    made = prepared(lambda x, w: jnp.sin(x @ w), (array(8, 4), array(4, 8)), mesh_of(**MESH))
    (dot,) = (e for e in made.traced.program.eqns if e.primitive == "dot_general")
    specs = (P("data"), P(None, "model"))
    closed = insert_constraints(
        made.traced.program,
        Constraints({dot.index: EqnConstraints(results={0: specs})}),
        made.request.mesh.auto,
    )
    check(closed)
    first, raw, resharded, last = closed.jaxpr.eqns
    assert [e.primitive.name for e in closed.jaxpr.eqns] == [
        "dot_general", "sharding_constraint", "sharding_constraint", "sin",
    ]  # fmt: skip
    assert (raw.invars, resharded.invars, last.invars) == (
        first.outvars,
        raw.outvars,
        resharded.outvars,
    )
    assert (raw.params["sharding"].spec, resharded.params["sharding"].spec) == specs


def test_the_compiled_program_moves_what_was_stated() -> None:
    """Weight gathering on the batch axis: FSDP's weights are brought together, activations
    never."""
    args = (array(64, 32), array(32, 32))
    made = prepared(lambda x, w: jnp.tanh(x @ w) @ w, args, mesh_of(data=8))
    run = jax.jit(
        constrained(made, "x.0->data", "x.1->data"),
        in_shardings=tuple(jax.NamedSharding(mesh_of(data=8), P("data")) for _ in args),
    )
    text = run.lower(*args).compile().as_text()
    assert "all-gather" in text
    assert "all-reduce" not in text
    assert "all-to-all" not in text


def test_forward_losses_of_a_sharded_decoder_agree() -> None:
    params, _, tokens = decoder_args(**SMALL)
    made = prepared(decoder_loss, (params, tokens), mesh_of(**MESH))
    run = constrained(made, "tokens.0->data", "w1.2->model", "wk.2->model", "emb.0->model")
    np.testing.assert_allclose(
        jax.jit(run)(params, tokens), decoder_loss(params, tokens), rtol=1e-5
    )
