"""Code that nobody here wrote: `make test-packages`.

One call each, unchanged: verified, within half the memory that replication needs, and never slower
by compiled time than the best rival that fits: the package's own rules or a layout by hand, and
every preset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from tests.packages import language_models, optimizers, science, table, vision
from tests.packages.gate import BY_HAND, SAME, Gate, best_rival
from tests.packages.program import Program

pytestmark = [
    pytest.mark.packages,
    pytest.mark.filterwarnings("default"),  # packages warn of each other's releases
]

PROGRAMS: dict[str, Callable[[], Program]] = {
    "Qwen3 (dense)": language_models.qwen3,
    "GPT-2, dropout, MultiSteps": language_models.gpt2,
    "ViT under filter_jit": vision.vit,
    "ResNet, batch norm, EMA": vision.resnet,
    "graph network": science.graph_network,
    "neural ODE": science.neural_ode,
    "SVI": science.svi,
    "NUTS": science.nuts,
    "HMC over chains": science.hmc_chains,
    "rollout": science.rollout,
}


def keep(name: str, row: dict[str, Any]) -> None:
    if os.environ.get("PACKAGES_TABLE") == "write":
        table.write(name, row)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_call_is_right_fits_and_is_no_slower_than_what_experts_write(name: str) -> None:
    row = Gate(PROGRAMS[name]()).searched()
    keep(name, row)
    assert row["verified"].startswith("yes"), row["verified"]
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert BY_HAND in row["rivals"]
    rival = best_rival(row)
    if rival is not None:
        assert row["time_ms"] <= SAME * rival[1], rival


SLOWER_THAN_BY_HAND = {
    "muon": "the products of Newton-Schulz, which the preset constrains and the layout by hand "
    "leaves to propagation"
}
"""Optimizers under which `fsdp+tp` is slower than the layout by hand, and where."""


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_each_optimizer_under_fsdp_and_tp(name: str, request: pytest.FixtureRequest) -> None:
    row = Gate(optimizers.train(name)).preset("fsdp+tp")
    check_in_float64(name)
    keep(f"optax {name}", row | {"verified": "yes (outputs equal those of jax.jit in float64)"})
    assert row["peak_bytes"] <= row["budget_bytes"]
    if name in SLOWER_THAN_BY_HAND:
        request.applymarker(pytest.mark.xfail(reason=SLOWER_THAN_BY_HAND[name], strict=True))
    assert row["time_ms"] <= SAME * row["rivals"][BY_HAND]["time_ms"]


def check_in_float64(name: str) -> None:
    """The same step in float64, against `jax.jit`: in float32 the first step of Adam makes a whole
    step of a gradient that is rounding noise.
    """
    with jax.enable_x64(True):
        program = optimizers.train(name, np.float64)
        wanted = jax.jit(program.step)(*program.args)
        plan = autoshard.apply(
            program.step,
            program.args,
            "data=4,model=2",
            "fsdp+tp",
            donate_argnums=program.donate,
        )
        ours = plan(*jax.tree.map(np.array, program.args))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-9)
