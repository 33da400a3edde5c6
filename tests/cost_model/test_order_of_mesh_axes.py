"""The order of mesh axes along a dimension decides which device holds which piece; what XLA sends,
the model prices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.step_time.reshard import permuted_axes

CASES = {
    "an axis comes before the one that stays": (P("b"), P(("a", "b")), True),
    "an axis comes after it": (P("b"), P(("b", "a")), False),
    "the first axis goes": (P(("a", "b")), P("b"), True),
    "the last axis goes": (P(("b", "a")), P("b"), False),
    "two axes change places": (P(("a", "b")), P(("b", "a")), True),
    "two axes change dimension together": (P(("a", "b")), P(None, ("a", "b")), False),
    "and change places": (P(("a", "b")), P(None, ("b", "a")), True),
    "one joins another's dimension": (P("a", "b"), P(("a", "b")), False),
    "in front of it": (P("a", "b"), P(("b", "a")), True),
    "one leaves another's dimension": (P(("a", "b")), P("a", "b"), False),
    "from in front of it": (P(("a", "b")), P("b", "a"), True),
}


def canonical(spec: P) -> tuple[tuple[str, ...], ...]:
    entries = [*spec, None, None][:2]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


@pytest.mark.parametrize("what", CASES)
def test_a_permute_is_priced_exactly_where_xla_sends_one(what: str) -> None:
    have, want, shuffled = CASES[what]
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    copy = jax.jit(
        lambda x: x * 1.0,
        in_shardings=NamedSharding(mesh, have),
        out_shardings=NamedSharding(mesh, want),
    )
    text = copy.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text()
    assert ("collective-permute" in text) == shuffled
    assert bool(permuted_axes(canonical(have), canonical(want))) == shuffled
