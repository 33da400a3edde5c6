"""Whole models from public architectures: each is searched, verified, and held against the golden
table."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.whole_models import golden
from tests.whole_models.mixture_of_experts import moe_one_hot, moe_sorted
from tests.whole_models.registry import MODELS
from tests.whole_models.search import search, winner_of

SLOW = {"unet", "diffusion", "encoder_decoder", "state_space"}
MORE_BYTES = 1.10
"""Reorderings by another compiler or sampler move the bytes by a few percent; a lost layout moves
them by more."""


def close(got: Any, want: Any) -> None:
    """Floats to a thousandth of their leaf's scale (Adam divides by roots of tiny second moments),
    integers exactly."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = np.abs(y).max(initial=0.0) if np.issubdtype(y.dtype, np.floating) else 0.0
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS]
)
def test_whole_model(name: str) -> None:
    model, row = MODELS[name](), golden.row_of(name)
    budget_bytes = row["replicated_peak_bytes"] // 2
    plan = search(model, budget_bytes)
    compiled = winner_of(plan).compiled
    assert plan.verified
    assert compiled is not None
    assert compiled.peak_bytes <= budget_bytes
    assert compiled.collective_bytes <= MORE_BYTES * row["compiled_bytes"]
    close(plan(*model.args), jax.jit(model.step)(*model.args))


def test_every_model_was_reviewed_on_both_generations() -> None:
    found = golden.read()
    assert list(found) == list(MODELS)
    for name, entry in found.items():
        assert entry["sentence"], name
        assert {"0.10", "0.12"} <= set(entry["found"]), name
        assert all(
            row["verified"] and row["peak_bytes"] <= row["replicated_peak_bytes"] / 2
            for row in entry["found"].values()
        )
    assert golden.MARKDOWN.read_text() == golden.markdown(found)


def test_both_ways_to_write_the_mixture_of_experts_are_one_model() -> None:
    losses = [jax.jit(model.step)(*model.args)[-1] for model in (moe_one_hot(), moe_sorted())]
    np.testing.assert_allclose(*losses, rtol=1e-5)
