"""What the proposer finds in 200 evaluations, against every rule list of the space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.hardware import Hardware, Link, cpu, hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.layout.prepare import Prepared
from autoshard.search.proposer import Proposals, propose
from tests.models import mlp_args, mlp_step, unrolled_args, unrolled_step
from tests.stages import array, mesh_of, prepared

EVALUATIONS = 200
V5E = hardware_for("tpu_v5e").with_links(
    {axis: Link(alpha_s=0.0, bytes_per_s=9e10) for axis in ("data", "model", "x")}
)
"""Without latency, or replication wins at sizes that can be enumerated."""


def forward(w1: Any, w2: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w1) @ w2


def attention(wq: Any, wk: Any, x: Any) -> Any:
    q, k = jnp.einsum("bsd,dhk->bshk", x, wq), jnp.einsum("bsd,dhk->bshk", x, wk)
    return jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k), -1).sum()


def embedding(table: Any, out: Any, tokens: Any) -> Any:
    logits = table[tokens] @ out
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


def recurrent(w: Any, u: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        return jnp.tanh(h @ w + x @ u), None

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], w.shape[0])), xs)[0]


def experts(gate: Any, w: Any, x: Any) -> Any:
    weight = jax.nn.softmax(x @ gate)
    return jnp.einsum("be,bd,edf->bf", weight, x, w)


def gradient(w: Any, x: Any, y: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)


@dataclass(frozen=True)
class Case:
    """A function small enough that its whole space can be tried."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


CASES = {
    "mlp": Case(mlp_step, mlp_args(batch=64, d=512, h=1024), (0,)),
    "wide mlp": Case(mlp_step, mlp_args(batch=16, d=256, h=4096), (0,)),
    "unrolled": Case(unrolled_step, unrolled_args(3, batch=256, d=128, h=512), (0,)),
    "forward": Case(forward, (array(1024, 4096), array(4096, 1024), array(512, 1024))),
    "long batch": Case(forward, (array(256, 256), array(256, 256), array(65536, 256))),
    "attention": Case(attention, (array(256, 8, 64), array(256, 8, 64), array(8, 128, 256))),
    "embedding": Case(
        embedding, (array(8192, 256), array(256, 8192), array(8, 64, dtype=np.int32))
    ),
    "recurrent": Case(recurrent, (array(512, 512), array(256, 512), array(16, 64, 256))),
    "experts": Case(experts, (array(256, 8), array(8, 256, 1024), array(512, 256))),
    "gradient": Case(gradient, (array(2048, 512), array(128, 2048), array(128, 512)), (0,)),
}
MESHES = {"4x2": {"data": 4, "model": 2}, "8": {"x": 8}, "2x4": {"data": 2, "model": 4}}
HARDWARE = {"4x2": V5E, "8": V5E, "2x4": cpu}


def of_case(case: str, mesh: str) -> Prepared:
    chosen = CASES[case]
    return prepared(chosen.fn, chosen.args, mesh_of(**MESHES[mesh]), donate_argnums=chosen.donate)


def proposals(made: Prepared, hardware: Hardware, **options: Any) -> Proposals:
    predictor = Predictor(
        made.problem, hardware, made.traced.call.donated, backend_for(hardware.name)
    )
    return propose(made.problem, predictor, asks=20, **options)


@pytest.fixture(scope="module")
def best_s() -> dict[tuple[str, str], float]:
    """The best of every rule list there is, by case and mesh."""
    found = {}
    for case in CASES:
        for mesh, hardware in HARDWARE.items():
            every = proposals(of_case(case, mesh), hardware, enumerate_at_most=1_000_000)
            assert every.enumerated
            found[case, mesh] = every.ranked[0].prediction.time_s
            made = of_case(case, mesh)
            least_s = Predictor(
                made.problem, hardware, made.traced.call.donated, backend_for(hardware.name)
            ).least_s()
            assert found[case, mesh] >= least_s * (1 - 1e-9), (
                "no layout there is goes below the bound"
            )
    return found


def misses(best_s: dict[tuple[str, str], float], **options: Any) -> list[tuple[str, str]]:
    """Cases in which the proposer did not find the best."""
    missed = []
    for (case, mesh), best in best_s.items():
        found = proposals(of_case(case, mesh), HARDWARE[mesh], **options)
        assert not found.enumerated
        assert found.evaluations <= options.get("evaluations", 10**6)
        if found.ranked[0].prediction.time_s > best * (1 + 1e-6):
            missed.append((case, mesh))
    return missed


def test_the_proposer_finds_the_best_of_all(best_s: dict[tuple[str, str], float]) -> None:
    assert not misses(best_s, enumerate_at_most=0)


def test_200_evaluations_find_it_nine_times_in_ten(best_s: dict[tuple[str, str], float]) -> None:
    assert len(misses(best_s, enumerate_at_most=0, evaluations=EVALUATIONS)) <= len(best_s) / 10
