"""Compiles the small CPU programs that `test_hlo.py` reads: `python make_programs.py`, once per jax
release.

The TPU and GPU programs beside them were compiled for a v5e:2x4 and an 8 x H100 topology from
functions like the first and the third of these (with wider shapes), then reduced to the lines that
matter here.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, D_MODEL, D_FF, BATCH = 5, 16, 32, 8


def fsdp_scan(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step of a scanned two-layer MLP: parameters sharded over both axes, the batch over
    `data`."""

    def loss(weights: Any, x: Any) -> Any:
        def block(h: Any, w: Any) -> Any:
            return jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None

        return jnp.mean(jax.lax.scan(block, x, weights)[0] ** 2)

    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "up": array((LAYERS, D_MODEL, D_FF), None, "data", "model"),
        "down": array((LAYERS, D_FF, D_MODEL), None, "model", "data"),
    }
    return step, (weights, array((BATCH, D_MODEL), "data"))


def loops(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A contraction over a sharded dimension in scan(4) in scan(3), then in a loop whose end
    depends on data."""
    replicated = NamedSharding(mesh, P())

    def step(x: Any, w: Any) -> Any:
        def inner(h: Any, _: None) -> Any:
            return jnp.tanh(jax.lax.with_sharding_constraint(h @ w, replicated)), None

        def outer(h: Any, _: None) -> Any:
            return jax.lax.scan(inner, h, None, length=4)[0] + 1.0, None

        y = jax.lax.scan(outer, x, None, length=3)[0]
        return jax.lax.while_loop(lambda h: h.sum() > 0, lambda h: inner(h, None)[0] - 0.5, y)

    return step, (
        jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=replicated),
        jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("model"))),
    )


def moves(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Every kind of collective, by hand in a shard_map and by the partitioner (cond, roll,
    sort)."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", None),
        check_vma=False,
    )
    def by_hand(x: Any) -> Any:
        y = jax.lax.psum(x, "model")
        y = jax.lax.ppermute(y, "model", [(0, 1), (1, 0)])
        y = y + jax.lax.all_gather(x, "data")[0].sum()
        y = y + jax.lax.all_to_all(x, "data", 0, 1, tiled=True).sum()
        return y + jax.lax.psum_scatter(x, ("data", "model"), scatter_dimension=0, tiled=True).sum()

    def step(x: Any, i: Any) -> Any:
        y = by_hand(x)
        rows = NamedSharding(mesh, P(("model", "data"), None))
        square = jax.lax.cond(
            i > 0, lambda y: jax.lax.with_sharding_constraint(y @ y.T, rows), lambda y: y @ y.T, y
        )
        return square, jnp.roll(x, 3, 0), jnp.sort(x, axis=0)

    x = jax.ShapeDtypeStruct(
        (64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
    )
    return step, (x, jax.ShapeDtypeStruct((), jnp.int32))


PROGRAMS = {"fsdp_scan": fsdp_scan, "loops": loops, "moves": moves}

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    the_mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
    for name, make in PROGRAMS.items():
        fn, args = make(the_mesh)
        text = jax.jit(fn).lower(*args).compile().as_text() or ""
        text = text.replace(__file__, "make_programs.py")
        target = pathlib.Path(__file__).with_name(f"cpu_{name}_jax{jax.__version__}.txt")
        target.write_text(text)
