"""Advice: what a change of the program would gain, against the same program with that change
made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.report.advice import Advised, advise, find_fused, separated
from autoshard.search.proposer import propose
from autoshard.text import parse_bytes
from autoshard.tracing.source_lines import name_stack_of
from tests.stages import array, mesh_of, prepared

D, F, HEADS, SIZE, BATCH, TIME = 256, 512, 8, 32, 16, 64
V5E = hardware_for("tpu_v5e")
FREE = replace(V5E, link=replace(V5E.link, alpha_s=0.0))


def advised(fn: Any, *args: Any, **options: Any) -> Advised:
    step = prepared(fn, args, mesh_of(data=2, model=4), **options)
    backend = backend_for("tpu")
    predictor = Predictor(step.problem, FREE, step.traced.call.donated, backend)
    best = propose(step.problem, predictor, asks=0).ranked[0]
    return Advised(step, best.layout, FREE, backend, None, best.prediction)


def picked(y: Any) -> Any:
    y = y.reshape(BATCH, TIME, 3, HEADS, SIZE)
    return tuple(y[:, :, i] for i in range(3))


CUTS: dict[str, Callable[[Any], Any]] = {
    "split": lambda y: jnp.split(y, 3, -1),
    "slices": lambda y: (y[..., :D], y[..., D : 2 * D], y[..., 2 * D :]),
    "picked": picked,
}


def train(block: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(p: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: (block(p, x) ** 2).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    return step


def attention(parts: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def block(p: Any, x: Any) -> Any:
        q, k, v = (part.reshape(BATCH, TIME, HEADS, SIZE) for part in parts(p, x))
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return x + jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ p["o"]

    return train(block)


FUSED = {"qkv": array(D, 3 * D), "o": array(D, D)}
APART = {"q": array(D, D), "k": array(D, D), "v": array(D, D), "o": array(D, D)}
X = array(BATCH, TIME, D)


@pytest.fixture(scope="module")
def apart() -> Advised:
    return advised(attention(lambda p, x: [x @ p[n] for n in "qkv"]), APART, X, donate_argnums=0)


@pytest.mark.parametrize("cut", CUTS)
def test_fused_projections_without_the_moves_cost_what_separate_ones_do(
    cut: str, apart: Advised
) -> None:
    case = advised(attention(lambda p, x: CUTS[cut](x @ p["qkv"])), FUSED, X, donate_argnums=0)
    fused = find_fused(case.prepared.problem)
    prediction = case.best_of(separated(case.prepared.problem, fused, case.prepared.carry))
    assert prediction.collective_bytes == pytest.approx(apart.prediction.collective_bytes, rel=0.02)
    assert prediction.time_s == pytest.approx(apart.prediction.time_s, rel=0.1)
    lines = advise(case)
    assert bool(lines) == (prediction.time_s < 0.98 * case.prediction.time_s)
    if lines:
        assert lines[0].startswith(
            "store the parts of p/qkv (dimension 1: "
            + ("3 parts" if cut == "picked" else "256 + 256 + 256")
        )
        assert "% of the predicted step" in lines[0]
    assert (
        lines or cut == "picked"
    )  # there the axis that is split goes to another dimension, which is as good here


def test_separate_projections_get_no_advice(apart: Advised) -> None:
    assert advise(apart) == ()


def test_gate_and_up_in_one_array() -> None:
    def block(p: Any, x: Any) -> Any:
        gate, up = jnp.split(x @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    case = advised(
        train(block), {"gate_up": array(D, 2 * F), "down": array(F, D)}, X, donate_argnums=0
    )
    (line,) = advise(case)
    assert "p/gate_up (dimension 1: 512 + 512)" in line


def test_a_vocabulary_that_nothing_divides_is_to_be_padded() -> None:
    def loss(p: Any, tokens: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(p["embed"][tokens]) @ p["head"])[..., 0])

    def step(p: Any, tokens: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, tokens))

    def case(vocabulary: int) -> Advised:
        p = {"embed": array(vocabulary, D), "head": array(D, vocabulary)}
        return advised(step, p, array(64, 32, dtype=np.int32), donate_argnums=0)

    odd, even = case(5003), case(5120)
    lines = advise(odd)
    assert len(lines) == 1
    assert lines[0].startswith(
        "pad dimension 0 of p/embed, dimension 1 of p/head from 5003 to 5120: it would save"
    )
    assert even.prediction.time_s < 0.9 * odd.prediction.time_s
    assert advise(even) == ()


def test_a_function_that_needs_its_size_gets_no_advice_to_pad() -> None:
    def fn(w: Any, x: Any) -> Any:
        return x @ w + jnp.arange(1003.0)

    assert advise(advised(fn, array(D, 1003), array(BATCH, D))) == ()


def test_an_argument_that_comes_back_is_to_be_donated() -> None:
    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w - x.T @ (x @ w), state)

    args = {name: array(2048, 2048) for name in "uvw"}, array(8, 2048)
    (line,) = advise(advised(step, *args))
    assert line.startswith(
        "donate argument 0, which the function returns anew (donate_argnums): it would save"
    )
    assert "% of the predicted peak memory" in line
    assert advise(advised(step, *args, donate_argnums=0)) == ()


def test_a_plan_carries_and_prints_its_advice() -> None:
    step = attention(lambda p, x: CUTS["split"](x @ p["qkv"]))
    plan = autoshard.optimize(
        step,
        (FUSED, X),
        mesh_of(data=2, model=4),
        donate_argnums=0,
        hardware=FREE,
        progress=False,
        effort=autoshard.Effort(compiled=1, measured=0),
    )
    assert len(plan.advice) == 1
    assert f"advice: {plan.advice[0]}" in plan.notes
    assert plan.advice[0] in str(plan).replace("\n", " ")


# What helps nobody --------------------------------------------------------------------------------


def halves(x: Any) -> tuple[Any, Any]:
    return x[..., : SIZE // 2], x[..., SIZE // 2 :]


ROTATIONS: dict[str, Callable[[Any], Any]] = {
    "slices": halves,
    "split": lambda x: tuple(jnp.split(x, 2, -1)),
}


def rotary(x: Any, cut: Callable[[Any], Any]) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] * jnp.exp(-jnp.arange(SIZE // 2) / 4.0)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = cut(x)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotated(cut: Callable[[Any], Any], remat: bool, heads: int, shared: int) -> Any:
    def block(p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        q, k = rotary(q, cut), rotary(k, cut)
        k, v = (jnp.repeat(part, heads // shared, 2) for part in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        return x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["o"])

    return train(jax.checkpoint(block) if remat else block)


@pytest.mark.parametrize("cut", ROTATIONS)
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize(("heads", "shared"), [(8, 8), (3, 1)])
def test_rotary_halves_are_joined_again_and_stay_in_one_array(
    cut: str, remat: bool, heads: int, shared: int
) -> None:
    weights = {
        "q": array(D, heads, SIZE),
        "k": array(D, shared, SIZE),
        "v": array(D, shared, SIZE),
        "o": array(heads, SIZE, D),
    }
    case = advised(rotated(ROTATIONS[cut], remat, heads, shared), weights, X, donate_argnums=0)
    problem = case.prepared.problem
    fused = find_fused(problem)
    assert any(f.parts == (SIZE // 2, SIZE // 2) for f in fused)
    edited = separated(problem, fused, case.prepared.carry)
    rules, changed = problem.logical_axes.classes.rules, edited.logical_axes.classes.rules
    joins = [
        eqn.index
        for eqn in problem.program.eqns
        if eqn.primitive == "concatenate" and "transpose(" not in name_stack_of(eqn)
    ]
    assert joins
    assert all(changed[i].kinds == rules[i].kinds for i in joins), "what is joined again is paid"
    assert advise(case) == ()


def sample(mass: Any, position: Any, noise: Any) -> Any:
    """Steps of a Hamiltonian sampler, whose momentum goes through a mass matrix."""
    momentum = noise @ mass
    for _ in range(3):
        momentum = momentum - 0.01 * jax.grad(lambda q: jnp.sum(jnp.log1p(q**2)))(position)
        position = position + 0.01 * momentum @ (mass @ mass.T)
    return mass, position


def adapt(mean: Any, covariance: Any, draws: Any) -> Any:
    """Welford's update of a mass matrix, and its inverse."""
    away = draws - mean
    covariance = covariance + (away.T @ away - covariance) / 8
    return mean + away.mean(0), covariance, draws @ jnp.linalg.inv(covariance + jnp.eye(len(mean)))


@pytest.mark.parametrize("size", [101, 1003])
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (sample, lambda n: (array(n, n), array(64, n), array(64, n))),
        (adapt, lambda n: (array(n), array(n, n), array(64, n))),
    ],
    ids=["sample", "adapt"],
)
def test_a_mass_matrix_is_not_padded_where_the_peak_would_rise(
    fn: Any, args: Any, size: int
) -> None:
    case = advised(fn, *args(size), donate_argnums=(0, 1))
    lines = advise(case)
    assert not any(line.startswith("pad") and peak_rises(line) for line in lines)
    assert not any(line.startswith("store") for line in lines)


def peak_rises(line: str) -> bool:
    before, after = re.findall(r"peak (\S+ \S+) -> (\S+ [^)\s]+)", line)[0]
    return parse_bytes(after) > parse_bytes(before)  # type: ignore[operator]


def test_a_change_that_costs_memory_gets_no_advice() -> None:
    """The same steps at the size that would be advised, for a plan that needs less than they do."""
    odd = advised(sample, array(1003, 1003), array(64, 1003), array(64, 1003))
    padded = advised(sample, array(1008, 1008), array(64, 1008), array(64, 1008))
    assert "of the predicted step" in odd.step_gain(padded.prepared.problem)
    smaller = replace(odd, prediction=replace(odd.prediction, peak_bytes=2**20))
    assert smaller.step_gain(padded.prepared.problem) == ""


def test_what_a_better_search_would_gain_is_no_advice(apart: Advised) -> None:
    """A plan that was chosen for its compiled program is slower by prediction than the best."""
    slow = replace(
        apart.prediction,
        time_s=2 * apart.prediction.time_s,
        peak_bytes=2 * apart.prediction.peak_bytes,
    )
    assert replace(apart, prediction=slow).step_gain(apart.prepared.problem) == ""
    assert advise(replace(apart, prediction=slow)) == ()
