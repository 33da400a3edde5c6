"""Tracing: every place of the program is its own, nothing of the function's meaning or metadata is
lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.errors import TraceError
from autoshard.jax_internals.jaxprs import check
from autoshard.tracing.program import Body, MappingKind, Program, Value
from autoshard.tracing.rewrite import as_function, as_reference
from autoshard.tracing.source_lines import source_line
from autoshard.tracing.trace import trace
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import array, call_of, mesh_of, traced

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@jax.custom_jvp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -0.5, 0.5)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), 7.0 * tangents[0]))


@jax.custom_vjp
def scaled(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (5.0 * g,))


SMALL = {"batch": 2, "length": 8, "layers": 2, "d": 8, "heads": 2, "ff": 16, "vocab": 16}


def loops(x: jax.Array) -> jax.Array:
    """A scan, a while, a cond, a remat, a nested jit and both custom rules."""
    y, stack = jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x)
    z = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0, y))[1]
    z = jax.lax.cond(x[0, 0] > 0, lambda a: a + 1, lambda a: a - 1, z)
    return jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)))(z) + jax.jit(jnp.tanh)(
        scaled(clipped(stack)).sum(0)
    )


EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "loops": (loops, (X,)),
    "gradient of loops": (
        jax.grad(lambda x: jax.lax.scan(lambda c, r: (jnp.sin(c * r), c), x[0], x)[1].sum()),
        (X,),
    ),
    "mlp": (mlp_step, mlp_args()),
    "decoder": (decoder_step, decoder_args(**SMALL)),
    "random": (lambda key, x: x + jax.random.normal(key, x.shape), (jax.random.key(0), X)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_traced_program_is_well_typed_and_computes_the_same(name: str) -> None:
    fn, args = EXAMPLES[name]
    result = traced(fn, *args)
    check(result.program.origin)
    run = jax.jit(as_function(result.program.origin, result.program.name))
    got = result.unflatten_outputs(run(*result.call.leaves))
    want = jax.jit(fn)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def bodies_of(program: Program) -> list[Body]:
    return [program.body, *(body for eqn in program.eqns for body in eqn.bodies)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_value_and_equation_has_its_place(name: str) -> None:
    fn, args = EXAMPLES[name]
    program = traced(fn, *args).program
    assert all(value.index == i for i, value in enumerate(program.values))
    assert all(eqn.index == i for i, eqn in enumerate(program.eqns))
    assert [eqn for eqn, _ in program.walk()] == sorted(program.eqns, key=lambda eqn: eqn.index)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_value_is_defined_in_one_place(name: str) -> None:
    fn, args = EXAMPLES[name]
    program = traced(fn, *args).program
    defined: Counter[Value] = Counter()
    used: set[Value] = set()
    for eqn in program.eqns:
        defined.update(eqn.outputs)
        used.update(eqn.inputs)
    for body in bodies_of(program):
        defined.update((*body.inputs, *body.consts))
        used.update(body.outputs)
    assert max(defined.values()) == 1
    assert used - set(defined) == {value for value in program.values if value.literal}


@pytest.mark.parametrize("name", EXAMPLES)
def test_both_ends_of_a_body_mapping_are_alike(name: str) -> None:
    fn, args = EXAMPLES[name]
    program = traced(fn, *args).program
    for mapping in (mapping for eqn in program.eqns for mapping in eqn.mappings):
        assert mapping.outer.shape[mapping.offset :] == mapping.inner.shape
        assert mapping.outer.dtype == mapping.inner.dtype


def test_two_calls_of_one_helper_are_two_places() -> None:
    helper = jax.jit(lambda a: jnp.sin(a) * 2)
    kept = jax.checkpoint(lambda a: jnp.cos(a) * 2)
    program = traced(lambda x, y: (helper(x), helper(y), kept(x), kept(y)), X, X).program
    counts = Counter(e.primitive for e in program.eqns)
    assert counts["sin"] == counts["cos"] == 2
    assert not {"jit", "pjit"} & set(counts)
    first, second = (e for e in program.eqns if e.bodies)
    assert not set(first.bodies[0].inputs) & set(second.bodies[0].inputs)


def test_own_gradient_rules_are_kept() -> None:
    result = traced(lambda x: scaled(clipped(x)).sum(), X)
    primitives = {e.primitive for e in result.program.eqns}
    assert {"custom_jvp_call"} < primitives
    assert any(p.startswith("custom_vjp_call") for p in primitives)
    run = as_function(result.program.origin, "f")
    np.testing.assert_array_equal(jax.grad(lambda x: run(x)[0])(X), np.full_like(X, 35.0))
    np.testing.assert_array_equal(jax.grad(lambda x: clipped(x).sum())(X), np.full_like(X, 7.0))


def test_body_mappings_say_how_a_scan_moves_data() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, row: (c @ w + row, c.sum()), x[0], x)

    program = traced(step, np.eye(3), X).program
    scan = program.body.eqns[-1]
    assert (scan.primitive, scan.bodies[0].trip_count) == ("scan", 4)
    assert Counter((mapping.kind, mapping.offset) for mapping in scan.mappings) == {
        (MappingKind.OPERAND_TO_INVAR, 0): 2,
        (MappingKind.OPERAND_TO_INVAR, 1): 1,
        (MappingKind.OUTVAR_TO_RESULT, 0): 1,
        (MappingKind.OUTVAR_TO_RESULT, 1): 1,
        (MappingKind.CARRY, 0): 1,
    }
    assert {value.shape for value in scan.scanned} == {(4, 3), (4,)}
    ((start, end),) = scan.carries
    assert start.shape == end.shape == (3,)
    assert [trips for eqn, trips in program.walk() if eqn.primitive == "dot_general"] == [4]


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("attention"):
        return jnp.sin(x @ w)  # the line that test_names_and_source_lines_survive looks for


def test_names_and_source_lines_survive() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("model"):
            return jax.jit(layer)(x, w)

    program = traced(step, X, np.eye(3, dtype=np.float32)).program
    (dot,) = (e for e in program.eqns if e.primitive == "dot_general")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    where = next(i for i, line in enumerate(lines, 1) if "the line that test_names" in line)
    assert source_line(dot) == f"{Path(__file__).name}:{where}"
    text = (
        jax.jit(as_function(program.origin, "step"))
        .lower(X, np.eye(3, dtype=np.float32))
        .as_text(debug_info=True)
    )
    assert "model/" in text
    assert "attention/dot_general" in text
    assert "jit_step" in text
    assert program.name == "step"


# The fingerprint


def fingerprint(fn: Callable[..., Any], *args: Any) -> str:
    return traced(fn, *args).program.fingerprint


def test_the_fingerprint_sees_shapes_dtypes_operations_parameters_and_data_flow_only() -> None:
    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        total = x + jnp.sin(y)
        return total.sum(0)

    def renamed(first: jax.Array, second: jax.Array) -> jax.Array:
        wave = jnp.sin(second)
        return jax.jit(lambda a: a.sum(0))(first + wave)

    base = fingerprint(one, array(4, 3), array(4, 3))
    assert fingerprint(renamed, X, X) == base
    changed = (
        fingerprint(one, array(8, 3), array(8, 3)),
        fingerprint(one, array(4, 3, dtype=jnp.bfloat16), array(4, 3, dtype=jnp.bfloat16)),
        fingerprint(lambda x, y: (x + jnp.cos(y)).sum(0), X, X),
        fingerprint(lambda x, y: (x + jnp.sin(y)).sum(1), X, X),
        fingerprint(lambda x, y: (y + jnp.sin(x)).sum(0), X, X),
        fingerprint(lambda x, y: (x + 2 * jnp.sin(y)).sum(0), X, X),
        fingerprint(lambda x, y: (x + 3 * jnp.sin(y)).sum(0), X, X),
    )
    assert len({base, *changed}) == len(changed) + 1


def test_the_fingerprint_sees_the_trip_count_of_a_loop() -> None:
    def run(n: int) -> Callable[..., Any]:
        return lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=n)[0]

    assert fingerprint(run(3), X) != fingerprint(run(4), X)


ELSEWHERE = """
from tests.models import decoder_args, decoder_step
from tests.stages import traced
print(traced(decoder_step, *decoder_args()).program.fingerprint)
"""


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    root = Path(__file__).parents[2]
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint(decoder_step, *decoder_args())


# Constraints, effects, outputs


def test_bare_partition_specs_in_the_model_work_and_can_be_dropped() -> None:
    mesh = mesh_of(data=4, model=2)

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.sin(x), P("data")) * 2

    call = call_of(constrained, (X,))
    kept = trace(constrained, call, mesh)
    assert [e.primitive for e in kept.program.eqns] == ["sin", "sharding_constraint", "mul"]
    dropped = trace(constrained, call, mesh, keep_user_constraints=False)
    assert [e.primitive for e in dropped.program.eqns] == ["sin", "mul"]
    for closed in (kept.program.origin, dropped.program.origin):
        check(closed)
        (result,) = jax.jit(as_function(closed, "f"))(X)
        np.testing.assert_allclose(result, np.sin(X) * 2, rtol=1e-6)


def test_a_jit_with_shardings_of_its_own_stays_a_call() -> None:
    sharding = NamedSharding(mesh_of(data=4), P("data"))
    inner = jax.jit(jnp.sin, out_shardings=sharding)
    program = traced(lambda x: inner(x) + 1, X).program
    (call,) = (e for e in program.eqns if e.bodies)
    assert call.primitive in ("jit", "pjit")


def test_tracing_an_explicit_mesh_happens_under_its_auto_version() -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        result = trace(jnp.sin, call_of(jnp.sin, (X,)), mesh_of(data=4, model=2))
    assert all(not any(v.aval.sharding.spec) for v in result.program.origin.jaxpr.outvars)


def test_prints_can_be_left_out() -> None:
    def chatty(x: jax.Array) -> jax.Array:
        jax.debug.print("x is {}", x[0, 0])
        return x * 2

    closed = as_reference(traced(chatty, X).original)
    check(closed)
    assert [e.primitive.name for e in closed.jaxpr.eqns if "debug" in e.primitive.name] == []
    np.testing.assert_array_equal(jax.jit(as_function(closed, "chatty"))(X)[0], X * 2)


def test_mutable_arrays_made_inside_become_pure_updates() -> None:
    def doubled(x: Any) -> Any:
        state, total = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros(()))

        def body(i: Any, carry: Any) -> Any:
            state[i] = x[i] * 2
            total[...] += jnp.sum(x[i])
            return carry

        jax.lax.fori_loop(0, x.shape[0], body, 0)
        return state[...], total[...]

    result = traced(doubled, jnp.asarray(X))
    check(result.program.origin)
    names = {eqn.primitive for eqn in result.program.eqns}
    assert not names & {"new_ref", "get", "swap", "addupdate", "ref_get", "ref_set"}
    run = jax.jit(as_function(result.program.origin, "doubled"))
    doubles, total = run(X)
    np.testing.assert_array_equal(doubles, X * 2)
    np.testing.assert_allclose(total, X.sum(), atol=1e-6)


def test_mutable_arrays_of_outside_are_refused_by_name() -> None:
    state = jax.new_ref(jnp.zeros(3))

    def counting(x: Any) -> Any:
        state[...] += jnp.sum(x)
        return x + state[...]

    with pytest.raises(
        TraceError, match=r"counting reads or writes a mutable array .*made outside"
    ):
        traced(counting, X)


def test_the_reference_of_verification_is_what_jax_traced() -> None:
    def stated(x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.sin(x), P("data", None))
        return jax.jit(lambda z: jax.lax.with_sharding_constraint(z, P(None, "data")) * 2)(y)

    result = trace(stated, call_of(stated, (X,)), mesh_of(data=2))
    closed = as_reference(result.original)
    check(closed)
    assert "sharding_constraint" not in str(closed)
    np.testing.assert_allclose(
        jax.jit(as_function(closed, "stated"))(X)[0], np.sin(X) * 2, rtol=1e-6
    )


def test_outputs_that_are_no_arrays_come_back_as_they_are() -> None:
    result = traced(lambda x: {"act": jnp.tanh, "n": None, "y": x, "z": "text"}, X)
    assert result.program.output_paths == ("out/y",)
    assert result.unflatten_outputs(["Y"]) == {"act": jnp.tanh, "n": None, "y": "Y", "z": "text"}


def test_what_jax_cannot_trace_is_reported_in_its_own_words() -> None:
    def branchy(x: jax.Array) -> jax.Array:
        return x if x[0, 0] > 0 else -x

    with pytest.raises(
        TraceError, match=r"jax\.jit\(branchy\) fails as well.*TracerBoolConversionError"
    ):
        traced(branchy, X)


def test_ordered_effects_are_refused_on_several_devices_only() -> None:
    def printing(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0], ordered=True)
        return x

    trace(printing, call_of(printing, (X,)), mesh_of(one=1))
    with pytest.raises(TraceError, match=r"printing.*test_trace\.py:\d+.*ordered=False"):
        trace(printing, call_of(printing, (X,)), mesh_of(data=2))


def test_captured_constants_are_listed() -> None:
    table = np.arange(1000, dtype=np.float32)

    def look_up(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c + row * jnp.asarray(table)[3], None), x[0], x)[0]

    assert (1000,) in {v.shape for v in traced(look_up, X).program.captured()}
