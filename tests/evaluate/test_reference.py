"""Who is wrong where a layout differs from the unsharded function: a third opinion decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.axes.axis_classes import axis_classes
from autoshard.evaluate.verification.inputs import inputs_for
from autoshard.evaluate.verification.reference import (
    OP_BY_OP,
    Reference,
    ReferenceFunction,
    Verdict,
    unsharded,
)
from autoshard.layout.mesh import resolve_mesh
from tests.stages import mesh_of, traced

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


def shifted_rows(x: jax.Array) -> jax.Array:
    """XLA:CPU updates `base` in place while it still reads it (openxla/xla#49176)."""
    base = x + np.int32(1)
    return base.at[1:].set(base[:-1]).reshape((1, *base.shape))


def shifted_floats(x: jax.Array) -> jax.Array:
    base = x * 2.0
    return base.at[2:].set(base[:-2]).reshape((1, *base.shape))


def shifted_stack(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    base = x + np.int32(7)
    return base.at[:, 1:].set(base[:, :-1]).reshape((1, *base.shape)), x.sum()


def numpy_of(name: str, x: np.ndarray) -> np.ndarray:
    base = {"rows": x + 1, "floats": x * 2, "stack": x + 7}[name]
    out = base.copy()
    if name == "rows":
        out[1:] = base[:-1]
    elif name == "floats":
        out[2:] = base[:-2]
    else:
        out[:, 1:] = base[:, :-1]
    return out[None]


INTEGERS = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
SHIFTED: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "rows": (shifted_rows, INTEGERS),
    "floats": (shifted_floats, INTEGERS.astype(np.float32) + 0.5),
    "stack": (shifted_stack, INTEGERS),
}


def reference(fn: Callable[..., Any], *args: Any, **others: Any) -> Reference:
    """The reference of a function; `others` replace ways of running it."""
    found = traced(fn, *args)
    inputs, mesh = inputs_for(found.call, found.program), resolve_mesh(mesh_of(data=8))
    ways = vars(unsharded(found, inputs, mesh)) | others
    return Reference(ReferenceFunction(**ways), axis_classes(found.program), inputs)


def always(*outputs: Any) -> Callable[..., Sequence[Any]]:
    return lambda *_: outputs


@pytest.mark.parametrize(("off", "is_wrong"), [(2e-5, False), (2e-3, True)])
def test_other_kernels_in_the_whole_function_are_no_miscompilation(
    off: float, is_wrong: bool
) -> None:
    """One element is off by some roundings of sums at the scale of the output, or by many."""
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((256, 8)).astype(np.float32)
    exact = np.asarray(x @ w)
    compiled = exact.copy()
    compiled[3, 5] += off * np.abs(exact).max()
    made = reference(jnp.matmul, x, w, run=always(jnp.asarray(compiled)))
    assert (made.against == OP_BY_OP) == is_wrong
    assert bool(made.finding) == is_wrong
    assert made.compare([exact])[1]
    assert made.compare([compiled])[1] != is_wrong


@pytest.mark.parametrize("name", SHIFTED)
def test_where_the_compiler_gets_the_function_wrong_it_is_said_and_right_layouts_pass(
    name: str,
) -> None:
    fn, x = SHIFTED[name]
    wanted = numpy_of(name, x)
    found = reference(fn, x)
    first = jax.tree.leaves(jax.jit(fn)(x))[0]
    compiler_is_right = np.array_equal(first, wanted)
    np.testing.assert_array_equal(found.outputs[0], wanted)
    assert (found.against == OP_BY_OP) == (not compiler_is_right)
    assert found.compare([wanted, *found.outputs[1:]])[1]
    if not compiler_is_right:
        assert "gets the unsharded function wrong" in found.finding
        assert not found.compare([first, *found.outputs[1:]])[1]


def test_a_search_over_a_function_that_the_compiler_gets_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = np.array_equal(jax.jit(shifted_rows)(INTEGERS), numpy_of("rows", INTEGERS))
    plan = autoshard.optimize(
        shifted_rows,
        (INTEGERS,),
        mesh_of(data=4, model=2),
        pins={"x": P("data")},
        effort=autoshard.Effort(compiled=2, measured=0),
        progress=False,
    )
    np.testing.assert_array_equal(plan(INTEGERS), numpy_of("rows", INTEGERS))
    assert plan.verified
    said = "gets the unsharded function wrong"
    assert any(said in note for note in plan.notes) == (not right)
    assert (said in str(plan.verified)) == (not right)
    assert (said in caplog.text) == (not right)


def test_the_layout_is_wrong_where_the_third_opinion_is_with_the_function() -> None:
    found = reference(lambda x: jnp.sin(x) @ x.T, X)
    wrong = [found.outputs[0] * 1.01]
    assert not found.compare(wrong)[1]
    assert found.arbitrate(wrong) is Verdict.LAYOUT
    assert found.against == "unsharded function"
    assert not found.compare(wrong)[1]


def test_the_function_is_wrong_where_the_third_opinion_is_with_the_layout() -> None:
    bad = always(X + 1)
    found = reference(lambda x: x * 2, X, run=bad, each_alone=bad)  # wrong in both ways alike
    right = [X * 2]
    assert not found.compare(right)[1]
    assert found.arbitrate(right) is Verdict.REFERENCE
    assert "gets the unsharded function wrong: out differs by" in found.finding
    assert found.compare(right)[1]
    assert not found.compare([X + 1])[1], "what agreed with the wrong function does no longer"


def test_nothing_is_decided_where_all_three_differ() -> None:
    bad = always(X + 1)
    found = reference(lambda x: x * 2, X, run=bad, each_alone=bad)
    other = [X + 2]
    assert found.arbitrate(other) is Verdict.UNDECIDED
    assert "agrees with neither" in found.finding
    assert found.compare([X + 1])[1]


def test_nothing_is_decided_where_there_is_no_third_opinion() -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    found = reference(lambda x: x * 2, X, op_by_op=fails)
    assert found.arbitrate([X]) is Verdict.UNDECIDED
    assert "no room" in found.finding


def test_equations_by_themselves_that_the_compiler_gets_wrong_are_not_used() -> None:
    found = reference(lambda x: x @ x.T, X, each_alone=always(X @ X.T + 1))
    assert found.against == "unsharded function"
    assert not found.finding
    assert found.compare([X @ X.T])[1]
    assert not found.compare([X @ X.T + 1])[1]


def test_without_equations_by_themselves_moved_inputs_say_what_rounding_does() -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    found = reference(lambda x: x @ x.T, X, each_alone=fails)
    assert found.compare([X @ X.T])[1]
    assert not found.compare([X @ X.T * 1.001])[1]


# Noise


def logistic(scale: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A first Adam step from zeros: each picture and its negative, so the gradient is rounding
    noise and nothing else."""
    optimizer = optax.adam(1e-3)

    def step(w: jax.Array, state: Any, pixels: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(optax.sigmoid_binary_cross_entropy((pixels / scale) @ w, y))

        value, gradient = jax.value_and_grad(loss)(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (512, 64)).astype(np.int8)
    w = np.zeros(64, np.float32)
    x = rng.permutation(np.concatenate([x, -x]))
    return step, (w, jax.tree.map(np.asarray, optimizer.init(w)), x, np.ones(1024, np.int32))


@pytest.mark.parametrize("scale", [127.0, 3.0])
def test_a_gradient_of_nothing_but_noise_rejects_nothing_right(scale: float) -> None:
    step, args = logistic(scale)
    found = reference(step, *args)
    mesh = mesh_of(data=8)
    split = NamedSharding(mesh, P("data"))
    whole = NamedSharding(mesh, P())
    run = jax.jit(step, in_shardings=(whole, whole, split, split))
    outputs = jax.tree.leaves(run(*args))
    assert np.abs(np.asarray(outputs[0]) - found.outputs[0]).max() > 1e-4, "steps of another sign"
    verified, agrees = found.compare(outputs)
    assert agrees, verified
    outputs[-1] = outputs[-1] * 1.0001  # the loss is no noise
    assert not found.compare(outputs)[1]


def test_positions_in_floats_are_not_moved() -> None:
    """Moved by a rounding, a position would be cut to the one before it."""
    positions = np.arange(1, 17, dtype=np.float32)

    def read(table: jax.Array, positions: jax.Array) -> jax.Array:
        return table[(positions - 1).astype(jnp.int32)]

    table = np.arange(16, dtype=np.int32)
    found = reference(read, table, positions)
    assert found.compare([table])[1]
    assert not found.compare([np.roll(table, 1)])[1]


def test_copies_that_should_be_equal_are_all_compared() -> None:
    found = reference(lambda x: x * 2, X)
    mesh = mesh_of(data=8)
    copies = [jax.device_put(X * 2, device) for device in mesh.devices.flat]
    whole = NamedSharding(mesh, P())

    def outputs(copies: Sequence[jax.Array]) -> list[jax.Array]:
        return [jax.make_array_from_single_device_arrays(X.shape, whole, copies)]

    assert found.compare(outputs(copies))[1]
    copies[5] = jax.device_put(X * 2.01, mesh.devices.flat[5])
    assert not found.compare(outputs(copies))[1]


def test_single_devices_are_read_whole() -> None:
    found = reference(lambda x: x * 2, X)
    alone = jax.device_put(X * 2, SingleDeviceSharding(jax.devices()[3]))
    assert found.compare([alone])[1]


# What compilers got wrong (jax 0.10 on CPU: a dynamic update, then one of a fixed slot, of a
# dimension that is split; a clamped dynamic slice whose result is split)


def sink(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, new, (0, position)).at[:, 0].set(1.0)


def window(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice(cache, (0, position + 8), (4, 8)) * 2.0 + new.sum()


@pytest.mark.parametrize("fn", [sink, window])
@pytest.mark.parametrize("spec", [P(None, "b"), P(None, "a"), P(None, ("a", "b")), P("a", "b")])
def test_a_layout_is_accepted_if_its_numbers_are_right_and_only_then(
    fn: Callable[..., jax.Array], spec: P
) -> None:
    cache = np.arange(64, dtype=np.float32).reshape(4, 16) + 1
    new, position = np.full((4, 2), 9, np.float32), np.int32(5)
    wanted = cache.copy()
    if fn is sink:
        wanted[:, 5:7], wanted[:, 0] = 9, 1
    else:
        wanted = 2 * cache[:, 8:] + new.sum()
    mesh = mesh_of(a=4, b=2)
    split, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    run = jax.jit(fn, in_shardings=(split, whole, whole), out_shardings=split)
    output = run(cache, new, position)
    right = np.array_equal(output, wanted)
    assert reference(fn, cache, new, position).compare([output])[1] == right
    if fn is sink and spec == P(None, "b"):
        assert right == (jax.__version_info__ >= (0, 12)), "wrong in jax 0.10"
