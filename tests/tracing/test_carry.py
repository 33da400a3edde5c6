"""Which outputs feed which inputs of the next step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import ArgumentError
from autoshard.tracing.carry import matching_state, resolve_carry
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import array, traced


def pairs(fn: Any, args: Any, carry: Any = None, **options: Any) -> dict[str, str]:
    """Input leaf path to the output leaf path it becomes."""
    step = traced(fn, *args, **options)
    paths, out_paths = step.program.input_paths, step.program.output_paths
    return {paths[i]: out_paths[o] for i, o in resolve_carry(step, carry)}


def test_donated_arguments_are_matched_by_structure() -> None:
    carried = pairs(decoder_step, decoder_args(), donate_argnums=(0, 1))
    assert carried["params/wq"] == "out/0/wq"
    assert carried["moment/wq"] == "out/1/wq"
    assert len(carried) == 16


def test_nothing_is_assumed_of_what_is_not_donated() -> None:
    assert pairs(decoder_step, decoder_args()) == {}
    assert set(pairs(decoder_step, decoder_args(), donate_argnums=1)) == {
        f"moment/{name}" for name in decoder_args()[1]
    }


def test_a_whole_output_can_be_the_next_state() -> None:
    assert pairs(lambda s: {"a": s["a"] + 1}, ({"a": array(4)},), donate_argnums=0) == {
        "s/a": "out/a"
    }
    assert pairs(lambda x: x * 2, (array(4),), donate_argnums=0) == {"x": "out"}


def test_outputs_by_key_and_non_array_leaves() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return {
            "loss": x.sum(),
            "note": "text",
            "state": {"act": state["act"], "w": state["w"] + 1},
        }

    carried = pairs(step, ({"act": jnp.tanh, "w": array(4)}, array(4)), donate_argnums=0)
    assert carried == {"state/w": "out/state/w"}


def test_a_shape_that_changes_feeds_nothing() -> None:
    assert (
        pairs(lambda s, x: (jnp.concatenate([s, x]), x), (array(4), array(2)), donate_argnums=0)
        == {}
    )
    assert pairs(lambda s: s.astype(jnp.bfloat16), (array(4),), donate_argnums=0) == {}


def test_each_output_feeds_one_argument() -> None:
    carried = pairs(lambda a, b: (a + 1, b + 1), (array(4), array(4)), donate_argnums=(0, 1))
    assert carried == {"a": "out/0", "b": "out/1"}


@pytest.mark.parametrize("carry", [{0: 0}, {"params": 0}, [(0, 0)], (0, 0)])
def test_carry_by_position_or_name(carry: Any) -> None:
    assert pairs(mlp_step, mlp_args(), carry) == {
        f"params/{n}": f"out/0/{n}" for n in ("b1", "w1", "w2")
    }


def test_carry_by_key_of_the_output_and_of_the_whole() -> None:
    def step(w: jax.Array) -> Any:
        return {"next": w + 1, "loss": w.sum()}

    assert pairs(step, (array(4),), {"w": "next"}) == {"w": "out/next"}
    assert pairs(lambda w: w + 1, (array(4),), {"w": "out"}) == {"w": "out"}


@pytest.mark.parametrize(
    ("carry", "words"),
    [
        ({0: 7}, r"the arguments are .*params.* and the outputs \[0, 1, 'out'\]"),
        ({"opt": 0}, r"'opt'"),
        ({0: 1}, r"must have the same structure"),
        ({"x": 1}, r"x is float32\[16, 32\] but out/1 is float32\[\]"),
    ],
)
def test_a_carry_that_cannot_be_is_refused(carry: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pairs(mlp_step, mlp_args(), carry)


def test_state_is_found_without_donation_but_bare_arrays_are_not_guessed() -> None:
    step = traced(mlp_step, *mlp_args())
    assert len(matching_state(step, donated_only=False)) == 3
    residual = traced(lambda x: x + jnp.tanh(x), np.ones((4, 4), np.float32))
    assert matching_state(residual, donated_only=False) == ()
