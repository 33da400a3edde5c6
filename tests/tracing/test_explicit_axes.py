"""Programs that are written for Explicit axes: traced under them, searched on Auto axes, and run
where they were written to run."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import TraceError
from autoshard.jax_internals import jaxprs

EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=EXPLICIT)


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"table": (24, 16), "wi": (16, 32), "wo": (32, 16)}
    return {k: (0.3 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 24, (8, 4)).astype(np.int32)


def forward(p: Any, ids: Any) -> Any:
    """Gather, einsum, matmul, reshape and zeros, each saying its sharding."""
    h = p["table"].at[ids].get(out_sharding=P("data", None, None))
    h = h + jnp.zeros(h.shape, out_sharding=P("data", None, None))
    h = jnp.einsum("bsd,df->bsf", h, p["wi"], out_sharding=P("data", None, "model"))
    h = jax.nn.relu(h) + jnp.arange(32, dtype=h.dtype, out_sharding=P("model"))
    h = jnp.matmul(h, p["wo"], out_sharding=P("data", None, None))
    return jax.lax.reshape(h, (32, 16), out_sharding=P("data", None))


def resharded(p: Any, ids: Any) -> Any:
    h = reshard(p["table"], P("model", None)).at[ids].get(out_sharding=P("data"))
    return reshard(h, P(None, None, "model")).sum(0)


def branches(p: Any, ids: Any) -> Any:
    def layer(h: Any, _: Any) -> Any:
        h = jnp.dot(h, p["wi"], out_sharding=P("data", "model"))
        h = jnp.dot(h, p["wo"], out_sharding=P("data", None))
        return h, jnp.sum(h)

    h = forward(p, ids)
    h, sums = jax.lax.scan(jax.checkpoint(layer), h, None, length=2)
    return jax.lax.cond(sums[0] > 0, lambda h: h + 1, lambda h: h * 2, h), sums


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def mapped_inside(mesh: Mesh, p: Any, ids: Any) -> Any:
    """A region that is mapped over all axes, one over one of them, and one of Auto axes."""
    h = forward(p, ids)
    whole = jax.shard_map(
        lambda x: x / jax.lax.psum(jnp.sum(x), ("data", "model")),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )(reshard(h, P("data", "model")))
    part = jax.shard_map(
        lambda x: x - jax.lax.pmean(x, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )(h)
    auto = jax.sharding.auto_axes(lambda x: x[::2].reshape(-1), out_sharding=P("data"))(h)
    return whole, part, auto


def train(optimizer: Any, p: Any, state: Any, ids: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean(clipped(forward(p, ids)) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    updates, state = optimizer.update(grads, state, p)
    return optax.apply_updates(p, updates), state, value


def same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


PROGRAMS: list[tuple[str, Any]] = [
    ("every function that takes out_sharding", lambda mesh: (forward, ())),
    ("reshard", lambda mesh: (resharded, ())),
    ("scan, remat, cond", lambda mesh: (branches, ())),
    ("regions", lambda mesh: (functools.partial(mapped_inside, mesh), ())),
    ("vmap", lambda mesh: (jax.vmap(forward, in_axes=(None, 0)), (3,))),
    ("gradients", lambda mesh: (jax.grad(lambda p, i: jnp.sum(forward(p, i) ** 2)), ())),
    ("jitted", lambda mesh: (jax.jit(forward), ())),
]


@pytest.mark.parametrize("make", [p[1] for p in PROGRAMS], ids=[p[0] for p in PROGRAMS])
@pytest.mark.parametrize("preset", ["replicated", "fsdp+tp"])
def test_outputs_are_those_of_the_function_under_its_own_mesh(
    mesh: Mesh, make: Any, preset: str
) -> None:
    fn, batch = make(mesh)
    p, ids = params(), np.broadcast_to(tokens(), (*batch, *tokens().shape)).copy()
    with jax.set_mesh(mesh):
        wanted = jax.jit(fn)(p, ids)
    plan = autoshard.apply(fn, (p, ids), mesh, preset)
    jaxprs.check(plan.traced.program.origin)
    assert not any("Explicit" in line for line in str(plan.traced.program.origin).splitlines())
    same(plan(p, ids), wanted)
    with jax.set_mesh(mesh):
        same(plan(p, ids), wanted)
        inside = autoshard.apply(fn, (p, ids), mesh, preset)
        same(inside(p, ids), wanted)


def test_what_is_stated_is_a_constraint_and_may_be_ignored(mesh: Mesh) -> None:
    args = params(), tokens()
    plan = autoshard.optimize(
        forward, args, mesh, effort=autoshard.Effort(compiled=2, measured=0), progress=False
    )
    assert plan.verified
    assert "own Explicit axes" in str(plan.verified)
    program = plan.traced.program
    stated = [e for e in program.eqns if e.primitive == "sharding_constraint"]
    assert [e.params["sharding"].spec for e in stated] == [
        P("data", None, None),
        P("data", None, None),
        P("data", None, "model"),
        P("model"),
        P("data", None, None),
        P("data", None),
    ]
    assert plan.out_shardings.spec in (P("data"), P("data", None))

    free = autoshard.apply(forward, args, mesh, "replicated", user_constraints="ignore")
    assert "sharding_constraint" not in {e.primitive for e in free.traced.program.eqns}
    same(free(*args), plan(*args))


@pytest.mark.parametrize("placed", [False, True])
def test_a_training_step_runs_in_its_own_context_step_after_step(mesh: Mesh, placed: bool) -> None:
    optimizer = optax.adamw(1e-2)
    p, ids = jax.tree.map(jnp.asarray, params()), tokens()
    step = functools.partial(train, optimizer)
    with jax.set_mesh(mesh) if placed else contextlib.nullcontext():
        if placed:
            specs = {"table": P("model"), "wi": P("data", "model"), "wo": P(None, "data")}
            p = {k: reshard(v, specs[k]) for k, v in p.items()}
        state = optimizer.init(p)
        plan = autoshard.apply(step, (p, state, ids), mesh, "fsdp+tp")
        ours, theirs = (p, state), (p, state)
        with jax.set_mesh(mesh):
            jitted = jax.jit(step)
        for _ in range(2):
            *ours, value = plan(*ours, ids)
            with contextlib.nullcontext() if placed else jax.set_mesh(mesh):
                *theirs, wanted = jitted(*theirs, ids)
            same(value, wanted)
        same(ours[0], theirs[0])
        assert ours[0]["wi"].sharding.mesh.axis_types == EXPLICIT
    assert jax.typeof(ours[0]["wi"]).sharding.mesh.axis_types == EXPLICIT


def test_axes_of_both_kinds() -> None:
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def fn(p: Any, ids: Any) -> Any:
        h = p["table"].at[ids].get(out_sharding=P("data"))
        h = jax.lax.with_sharding_constraint(h @ p["wi"], P(None, None, "model"))
        return jnp.einsum("bsf,bsg->fg", h, h, out_sharding=P())

    p, ids = params(), tokens()
    with jax.set_mesh(mixed):
        wanted = jax.jit(fn)(p, ids)
    plan = autoshard.apply(fn, (p, ids), mixed, "tp")
    same(plan(p, ids), wanted)
    specs = {
        e.params["sharding"].spec
        for e in plan.traced.program.eqns
        if e.primitive == "sharding_constraint"
    }
    assert P("data") in {P(*(s[:1])) for s in specs}


def test_captured_arrays_of_the_mesh(mesh: Mesh) -> None:
    table = jax.device_put(params()["table"], NamedSharding(mesh, P("data", "model")))

    def fn(ids: Any) -> Any:
        return table.at[ids].get(out_sharding=P("data"))

    with jax.set_mesh(mesh):
        wanted = jax.jit(fn)(tokens())
    same(autoshard.apply(fn, (tokens(),), mesh, "dp")(tokens()), wanted)


class Mlp(nnx.Module):
    """Written as Flax's guide to Explicit sharding writes it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.wi = nnx.Param(init(rngs.params(), (16, 32)), out_sharding=("data", "model"))
        self.wo = nnx.Param(init(rngs.params(), (32, 16)), out_sharding=("model", "data"))

    def __call__(self, x: Any) -> Any:
        h = jnp.matmul(x, self.wi[...], out_sharding=P("data", "model"))
        return jnp.matmul(jax.nn.relu(h), self.wo[...], out_sharding=P("data"))


def nnx_step(model: Mlp, optimizer: Any, x: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def test_modules_are_changed_in_place(mesh: Mesh) -> None:
    x = np.random.default_rng(3).standard_normal((8, 16)).astype(np.float32)
    with jax.set_mesh(mesh):
        theirs = Mlp(nnx.Rngs(0))
        theirs_optimizer = nnx.Optimizer(theirs, optax.adam(1e-2), wrt=nnx.Param)
        ours = Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(ours, optax.adam(1e-2), wrt=nnx.Param)
        xs = reshard(x, P("data"))
        plan = autoshard.apply(nnx_step, (ours, optimizer, xs), mesh, "fsdp")
        for _ in range(2):
            value = plan(ours, optimizer, xs)
            same(value, nnx.jit(nnx_step)(theirs, theirs_optimizer, xs))
        same(ours.wi[...], theirs.wi[...])
        assert int(optimizer.step[...]) == 2


def test_init_that_says_shardings(mesh: Mesh) -> None:
    plan = autoshard.apply(forward, (params(), tokens()), mesh, "fsdp")

    def init() -> Any:
        shapes = {k: v.shape for k, v in params().items()}
        return {k: jnp.ones(s, out_sharding=P("data")) for k, s in shapes.items()}

    made = autoshard.init(plan, init)
    assert jax.tree.map(lambda a: a.sharding, made) == plan.in_shardings[0]


def test_the_functional_form_runs_in_both_contexts(mesh: Mesh) -> None:
    args = params(), tokens()
    plan = autoshard.apply(forward, args, mesh, "fsdp+tp")
    wanted = plan(*args)
    same(jax.jit(plan.fn)(*args), wanted)
    with jax.set_mesh(mesh):
        same(jax.jit(plan.fn)(*args), wanted)


# What is said where it cannot be ------------------------------------------------------------------


def test_sums_left_undone_are_done(mesh: Mesh) -> None:
    def fn(x: Any, w: Any) -> Any:
        y = jnp.einsum("bd,de->be", x, w, out_sharding=P(None, None, unreduced={"data"}))
        return reshard(y, P(None, None))

    sharding = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P("data", None))
    args = tuple(map(jax.device_put, (np.ones((8, 16), np.float32), params()["wi"]), sharding))
    with jax.set_mesh(mesh):
        wanted = jax.jit(fn)(*args)
        same(autoshard.apply(fn, args, mesh, "replicated")(*args), wanted)


def test_what_only_explicit_axes_can_mean_is_named_with_its_line(mesh: Mesh) -> None:
    def fn(x: Any) -> Any:
        partial = jax.shard_map(
            lambda x: jax.lax.pcast(jnp.sum(x, 0), "data", to="unreduced"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(unreduced={"data"}),
        )(x)
        return reshard(partial, P(None))

    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(jax.jit(fn)(x)), np.full(4, 8.0))
        with pytest.raises(
            TraceError, match=r"fn is written for Explicit axes.*shard_map.*\.py:\d+"
        ):
            autoshard.apply(fn, (x,), mesh, "replicated")


def test_both_refusals_are_told(mesh: Mesh) -> None:
    def fn(p: Any, ids: Any) -> Any:
        return jnp.einsum("bd,ef->be", p["wi"], p["wo"], out_sharding=P("data", "data"))

    with pytest.raises(TraceError, match=r"neither under the Explicit axes.*nor under Auto axes"):
        autoshard.apply(fn, (params(), tokens()), mesh, "replicated")


def test_that_jit_fails_as_well_is_said_after_trying(mesh: Mesh) -> None:
    args = params(), tokens()
    with pytest.raises(TraceError, match=r"jax\.jit\(forward\) fails as well, which was tried"):
        autoshard.apply(forward, args, "data=4,model=2", "replicated")
    with (
        jax.set_mesh(mesh),
        pytest.raises(TraceError, match=r"jax\.jit\(forward\) traces it here.*Explicit|Auto"),
    ):
        autoshard.apply(forward, args, "data=4,model=2", "replicated")
