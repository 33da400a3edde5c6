"""Predicted bytes of each primitive with a rule against compiled ones: nothing that XLA gathers is
predicted as local, and what runs by pieces needs no collective and computes the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_bytes import GOLDEN, UNCOMPILED, compiled, layouts, predictor, setting
from jax import lax
from jax.sharding import Mesh
from rule_cases import CASES, Case, primitives
from rule_check import application

import autoshard
from autoshard.axes.pieces import runs_by_pieces
from autoshard.axes.sharding_rules import FactorKind, known_primitives
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import cpu
from autoshard.cost_model.predict import Predictor
from autoshard.tracing.primitives import BY_PIECES
from tests.benchmarks.evidence_store import by_kind
from tests.stages import QUICKLY, layout_of, prepared

ROWS = json.loads(GOLDEN.read_text()).get(jax.__version__)
COMPILED = [case for case in CASES if case.primitive not in UNCOMPILED]
SAMPLED = 6
"""Cases that the suite compiles anew, drawn by a fixed seed; all of them where slow tests run."""

OTHERWISE = {
    "ragged_dot_general[batch]": "a few bytes of group sizes, which XLA does not need",
    "ragged_dot_general[contracting]": "a few bytes of group sizes, which XLA exchanges as it needs them",
    "select_and_scatter": "halos of operand and windows, which are predicted as whole shards",
    "select_and_scatter_add": "halos of operand and windows, which are predicted as whole shards",
    "select_and_gather_add": "halos of operand and windows, which are predicted as whole shards",
    "slice[every other]": "shards that end within a stride are exchanged, the result is small",
    "reduce_and": "XLA:CPU has no all_reduce of integers for it: the layout is rejected",
    "reduce_or": "XLA:CPU has no all_reduce of integers for it: the layout is rejected",
    "reduce_xor": "XLA:CPU has no all_reduce of integers for it: the layout is rejected",
    "random_gamma": "a byte in every round of a loop that ends when all devices are done",
}
"""Cases with rows whose bytes are predicted otherwise than compiled, and why."""
if jax.__version__.startswith("0.10."):
    OTHERWISE["ragged_dot_general"] = "a few bytes of group sizes, which this XLA exchanges"


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    if ROWS is None:
        pytest.skip(f"no saved rows of jax {jax.__version__}")
    return ROWS


def differing(case: Case, rows: dict[str, Any]) -> list[str]:
    """Rows of a case whose bytes are not predicted as compiled."""
    made = setting(case)
    predict = predictor(made)
    wrong = []
    for rule, layout in layouts(made):
        predicted = by_kind(predict.predict(layout).collectives)
        saved = rows[f"{case} {rule}"]
        if predicted != saved:
            wrong.append(f"{case} {rule}: predicted {predicted}, compiled {saved}")
    return wrong


def test_what_is_compiled_is_predicted(rows: dict[str, Any]) -> None:
    differs = set()
    wrong = []
    for case in COMPILED:
        of_case = differing(case, rows)
        if of_case and str(case) in OTHERWISE:
            differs.add(str(case))
        else:
            wrong += of_case
    assert not wrong, "\n".join(wrong)
    assert differs == set(OTHERWISE)


def compare(case: Case, rows: dict[str, Any]) -> None:
    made = setting(case)
    for rule, layout in layouts(made):
        assert compiled(made, layout) == rows[f"{case} {rule}"], f"{case} {rule}"


@pytest.mark.parametrize("case", random.Random(0).sample(COMPILED, SAMPLED), ids=str)
def test_sampled_rows_are_what_is_compiled(case: Case, rows: dict[str, Any]) -> None:
    compare(case, rows)


@pytest.mark.slow
def test_all_rows_are_what_is_compiled(rows: dict[str, Any]) -> None:
    for case in COMPILED:
        compare(case, rows)


# By pieces ----------------------------------------------------------------------------------------

PIECES = [
    case
    for case in COMPILED
    if case.primitive in BY_PIECES or "groups" in case.note
    if case.primitive != "cholesky_update"  # has no batch
]


def test_what_runs_by_pieces_has_a_case() -> None:
    without = BY_PIECES - {case.primitive for case in CASES} - {"geqp3"}  # no host lowers that
    assert not without & primitives().keys()


@pytest.mark.parametrize("case", PIECES, ids=str)
def test_pieces_need_no_collective_and_give_the_whole(case: Case) -> None:
    app = case.make(np.random.default_rng(0))
    assert runs_by_pieces(app.eqn)
    made = setting(case)
    (eqn,) = made.problem.program.eqns
    rule = made.problem.logical_axes.classes.rules[eqn.index]
    whole = app.primitive.bind(*app.operands, **app.primitive.get_bind_params(app.eqn.params))
    whole = list(whole) if app.primitive.multiple_results else [whole]
    cut = 0
    for _, layout in layouts(made):
        spec = layout.factor_sharding(eqn).spec
        if not any(
            axes and rule.kinds[f] is FactorKind.PASS_THROUGH for f, axes in enumerate(spec)
        ):
            continue
        cut += 1
        assert compiled(made, layout) == {}
        built = autoshard.compiler.compile.build(made.traced, layout, made.request.mesh)
        for got, want in zip(built.jitted(*app.operands), whole, strict=True):
            np.testing.assert_allclose(got, want, rtol=case.tolerance, atol=case.tolerance)
    assert cut


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def conv(groups: int, **params: Any) -> Callable[..., Any]:
    def apply(x: Any, kernel: Any) -> Any:
        layout = {"dimension_numbers": ("NWC", "WIO", "NWC"), "window_strides": (1,)}
        return lax.conv_general_dilated(
            x, kernel, padding=[(2, 0)], feature_group_count=groups, **layout, **params
        )

    return apply


def step(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent through a layer."""

    def update(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean((jnp.tanh(apply(x, weights)) - y) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    return update


def router(x: Any, gate: Any) -> Any:
    """The places of tokens among those of their experts."""
    weights, experts = lax.top_k(jax.nn.softmax(x @ gate), 2)
    chosen = jax.nn.one_hot(experts, gate.shape[1]).sum(-2)
    return jnp.cumsum(chosen, axis=1) * chosen, weights


def sampler(logits: Any, noise: Any) -> Any:
    values, tokens = lax.top_k(logits, 8)
    choice = jnp.argmax(values + noise, axis=-1)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]


def whiten(x: Any) -> Any:
    factor = jnp.linalg.cholesky(jnp.swapaxes(x, -1, -2) @ x + 4 * jnp.eye(x.shape[-1]))
    return lax.linalg.triangular_solve(factor, x, left_side=False, lower=True)


NEIGHBOURS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "sampler": (sampler, (f32(16, 64), f32(16, 8)), ["logits.0->data", "logits.0->model"]),
    "sampler, vocabulary": (sampler, (f32(16, 64), f32(16, 8)), ["logits.0->data", "logits.1->model"]),
    "router": (router, (f32(8, 16, 8), f32(8, 4)), ["x.0->data", "x.0->model"]),
    "sort of keys and values, transposed": (
        lambda k, v: lax.sort((k.T, v.T), dimension=0, num_keys=1),
        (f32(16, 6), f32(16, 6)),
        ["k.0->data", "k.0->model"],
    ),
    "argsort of halves": (lambda x: jnp.argsort(x.astype(jnp.bfloat16)), (f32(16, 6),), ["x.0->data"]),
    "cumulative, reversed": (lambda x: lax.cumlogsumexp(x, 1, reverse=True), (f32(8, 6, 4),), ["x.0->data", "x.2->model"]),
    "gradient of a cumulative maximum": (jax.grad(lambda x: (lax.cummax(x, 1) ** 2).sum()), (f32(8, 6),), ["x.0->data", "x.0->model"]),
    "fft of images": (lambda x: jnp.abs(jnp.fft.rfft2(x)), (f32(8, 8, 6),), ["x.0->data", "x.0->model"]),
    "fft, its gradient": (jax.grad(lambda x: jnp.abs(jnp.fft.fft(x, axis=1)).sum()), (f32(8, 6, 4),), ["x.0->data", "x.2->model"]),
    "causal depthwise, step": (step(conv(8)), (f32(3, 1, 8), f32(16, 12, 8), f32(16, 12, 8)), ["x.0->data", "x.0->model"]),
    "causal depthwise, step by channels": (step(conv(8)), (f32(3, 1, 8), f32(16, 12, 8), f32(16, 12, 8)), ["x.0->data", "weights.2->model"]),
    "groups, step": (step(conv(4)), (f32(3, 2, 16), f32(16, 12, 8), f32(16, 12, 16)), ["x.0->data", "x.0->model"]),
    "convolution of each sample, step": (
        step(jax.vmap(lambda x, k: conv(1)(x[None], k)[0])),
        (f32(8, 3, 4, 8), f32(8, 12, 4), f32(8, 12, 8)),
        ["weights.0->data", "weights.0->model"],
    ),
    "solve": (
        lambda a, b: jax.scipy.linalg.cho_solve((jnp.tril(a) + 4 * jnp.eye(4), True), b),
        (f32(8, 4, 4), f32(8, 4, 2)),
        ["a.0->data", "a.0->model"],
    ),
    "whiten, its gradient": (jax.grad(lambda x: whiten(x).sum()), (f32(8, 6, 4),), ["x.0->data", "x.0->model"]),
    "eigenvalues": (lambda x: jnp.linalg.eigvalsh(x + jnp.swapaxes(x, 1, 2)), (f32(8, 4, 4),), ["x.0->data"]),
    "qr in a loop": (
        lambda x: lax.scan(lambda x, _: (jnp.linalg.qr(x)[0] * 2, None), x, None, length=3)[0],
        (f32(8, 6, 4),),
        ["x.0->data", "x.0->model"],
    ),
    "gamma": (jax.grad(lambda x: jax.scipy.special.gammainc(2.0, x * x + 1).sum()), (f32(8, 6),), ["x.0->data", "x.1->model"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours(name: str, mesh_4x2: Mesh) -> None:
    fn, args, rules = NEIGHBOURS[name]
    made = prepared(fn, args, mesh_4x2)
    layout = layout_of(made, *rules)
    predict = Predictor(made.problem, cpu, made.traced.call.donated, CPU)
    predicted = by_kind(predict.predict(layout).collectives)
    built = autoshard.compiler.compile.build(made.traced, layout, made.request.mesh)
    evidence = autoshard.compiler.compile.compile_built(
        built, made.request.mesh, compiler_options=QUICKLY
    ).evidence
    assert predicted == by_kind(evidence.collectives)

    rng = np.random.default_rng(0)
    values = [rng.normal(size=arg.shape).astype(arg.dtype) for arg in args]
    got, want = built.jitted(*values), jax.tree.leaves(jax.jit(fn)(*values))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-4, atol=1e-4
        )


def test_known_primitives_run_by_pieces() -> None:
    assert known_primitives().keys() >= BY_PIECES
    assert not runs_by_pieces(application("conv_general_dilated", conv(1), np.ones((1, 4, 2)), np.ones((3, 2, 2))).eqn)  # fmt: skip
