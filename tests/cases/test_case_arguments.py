"""Whatever `jax.jit` takes: odd leaves, odd containers, statics, donation, arrays that lie
elsewhere."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same import (
    assert_same,
    floats,
    integers,
    mesh_of,
    pin_and_compare,
    plain,
    replicated_bytes,
    search,
    search_and_compare,
    split_leaves,
)

import autoshard

MESH = {"a": 4, "b": 2}


# Scalars


def update(state, x, rate, step):
    return {
        "w": state["w"] - rate * (x.T @ x),
        "count": state["count"] + step,
        "ema": state["ema"] * 0.9,
    }


def scalar_args(rate: Any = 0.1, step: Any = 1):
    state = {"w": floats(8, 8), "count": jnp.zeros((), jnp.int32), "ema": np.float32(1.5)}
    return state, floats(16, 8), rate, step


@pytest.mark.parametrize(
    ("rate", "step"),
    [(0.1, 1), (np.float32(0.1), np.int32(1)), (jnp.float32(0.1), True), (jnp.asarray(0.1), 1)],
)
def test_scalars_among_matrices(rate, step):
    plan = search_and_compare(update, scalar_args(rate, step), mesh_of(**MESH))
    for path in ("state/count", "state/ema", "rate", "step"):
        assert plan.specs[path] == P()
    pin_and_compare(
        update, scalar_args(rate, step), mesh_of(**MESH), {"state/w": P("a", "b"), "x": P("a")}
    )


def test_a_scalar_cannot_be_pinned_to_an_axis():
    with pytest.raises(autoshard.SpecError, match=r"rate is float32\[\].*0 dimensions"):
        search(update, scalar_args(), mesh_of(**MESH), pins={"rate": P("a")})


def test_python_scalars_stay_weak():
    def scale(x, by):
        return x * by

    x = jnp.asarray(floats(8, 4), jnp.bfloat16)
    plan = search_and_compare(scale, (x, 0.5), mesh_of(**MESH))
    assert plan(x, 2.5).dtype == jnp.bfloat16
    assert plan(x, np.float32(0.5)).dtype == jnp.float32, "a strong scalar is another signature"


# Keys


def noisy(key, keys, x):
    per_row = jax.vmap(lambda k: jax.random.uniform(k, (x.shape[1],)))(keys)
    return x + jax.random.normal(key, x.shape) + per_row, jax.random.split(key, 2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_in_and_out(impl):
    args = (
        jax.random.key(0, impl=impl),
        jax.random.split(jax.random.key(1, impl=impl), 8),
        floats(8, 16),
    )
    plan = search_and_compare(noisy, args, mesh_of(**MESH))
    assert plan.specs["key"] == P()
    pin_and_compare(noisy, args, mesh_of(**MESH), {"keys": P("a"), "x": P("a", "b")})


def test_typed_keys_as_carried_state():
    def step(state, x):
        key, use = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + x.mean(0) + jax.random.normal(use, (16,))}

    state = {"key": jax.random.key(3), "w": np.zeros(16, np.float32)}
    plan = search_and_compare(step, (state, floats(8, 16)), mesh_of(**MESH), donate_argnums=0)
    placed, x = plan.place("state", state), floats(8, 16)
    want = state
    for _ in range(3):
        placed, want = plan(placed, x), jax.jit(step)(want, x)
    assert_same(placed, want)


def dropout(rng, w, x):
    use, rest = jax.random.split(rng)
    return jnp.where(jax.random.bernoulli(use, 0.8, x.shape), x @ w, 0.0), rest


def test_raw_key_is_data_of_size_two():
    args = np.array([0, 7], np.uint32), floats(16, 16), floats(8, 16)
    plan = search_and_compare(dropout, args, mesh_of(a=2, b=4))
    assert plan.specs["rng"] == P(), "two numbers are not worth splitting"
    pin_and_compare(dropout, args, mesh_of(a=2, b=4), {"rng": P("a")})
    pin_and_compare(dropout, args, mesh_of(a=2, b=4), {"w": P(None, "b"), "x": P("a")})


# Statics and keywords


def repeated(x, w, n_steps, *, act="relu", scale=1.0):
    for _ in range(n_steps):
        x = getattr(jax.nn, act)(x @ w) * scale
    return x


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": (2,), "static_argnames": ("act",)},
        {"static_argnums": 2, "static_argnames": "act"},
        {"static_argnames": ("n_steps", "act")},
    ],
)
def test_statics_by_position_and_name(options):
    args, kwargs = (floats(8, 16), floats(16, 16, scale=0.3), 3), {"act": "tanh", "scale": 0.5}
    plan = search_and_compare(repeated, args, mesh_of(**MESH), kwargs=kwargs, **options)
    assert set(plan.specs) == {"x", "w", "scale"}
    again = plan(args[0], args[1], 2, act="gelu", scale=0.5)
    assert_same(again, plain(repeated, (*args[:2], 2), {"act": "gelu", "scale": 0.5}, **options))


def test_a_string_that_is_not_static_is_kept_aside():
    plan = search(
        repeated, (floats(8, 16), floats(16, 16, scale=0.3), 3), mesh_of(**MESH), static_argnums=2
    )
    assert plan(floats(8, 16), floats(16, 16), 3, act="tanh").shape == (8, 16)


def test_any_number_of_positional_and_keyword_arguments():
    def total(first, *rest, bias, **named):
        return first @ sum(rest) + bias + sum(named[k] for k in sorted(named))

    args = floats(8, 16), floats(16, 4), floats(16, 4, seed=1)
    kwargs = {"bias": floats(4), "u": floats(8, 4), "v": 1.5}
    plan = search_and_compare(total, args, mesh_of(**MESH), kwargs=kwargs)
    assert set(plan.specs) == {"first", "rest/0", "rest/1", "bias", "u", "v"}


# Containers


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("w", "b"), meta_fields=("act", "depth")
)
@dataclasses.dataclass
class Block:
    w: Any
    b: Any
    act: str = "tanh"
    depth: int = 2


class Momentum(NamedTuple):
    mu: Any
    count: Any


def test_dataclass_and_named_tuple():
    def step(block, opt, x):
        for _ in range(block.depth):
            x = getattr(jnp, block.act)(x @ block.w + block.b)
        new = dataclasses.replace(block, w=block.w - 0.1 * opt.mu)
        return x, new, Momentum(opt.mu * 0.9, opt.count + 1)

    args = (
        Block(floats(8, 8, scale=0.3), floats(8)),
        Momentum(floats(8, 8, seed=4), np.int32(0)),
        floats(16, 8),
    )
    plan = search_and_compare(step, args, mesh_of(**MESH))
    _, block, opt = plan(*args)
    assert isinstance(block, Block)
    assert (block.act, block.depth) == ("tanh", 2)
    assert isinstance(opt, Momentum)
    pins = {"block/w": P(None, "b"), "block/b": P("b"), "opt/mu": P(None, "b"), "x": P("a")}
    pin_and_compare(step, args, mesh_of(**MESH), pins)


def test_paths_stay_injective(tmp_path):
    def chain(tree, x):
        for leaf in jax.tree.leaves(tree):
            x = jnp.tanh(x @ leaf)
        return x

    def w(seed):
        return floats(8, 8, seed=seed, scale=0.3)  # a chain of large ones would amplify rounding

    tree = {
        "x/y": w(1), "x": {"y": w(2)}, "0": w(3), "l": {0: w(4)}, "m": [w(5)], "n.v": w(6),
        "od": collections.OrderedDict(b=w(7), a=w(8)), "weird['k']": w(9),
    }  # fmt: skip
    plan = search_and_compare(chain, (tree, w(0)), mesh_of(**MESH))
    assert len(plan.specs) == 10
    flat, nested = "tree['x/y']", "tree['x']['y']"
    pins = {flat: P("a"), nested: P(None, "b"), "x": P("a")}
    plan = pin_and_compare(chain, (tree, w(0)), mesh_of(**MESH), pins)
    plan.table.save(tmp_path / "chain.json")
    again = autoshard.apply(chain, (tree, w(0)), mesh_of(**MESH), tmp_path / "chain.json")
    assert again.specs == plan.specs
    renamed = {("z" if key == "0" else key): leaf for key, leaf in tree.items()}
    with pytest.raises(autoshard.TableError, match=r"tree/0.*tree/z"):
        autoshard.apply(chain, (renamed, w(0)), mesh_of(**MESH), tmp_path / "chain.json")


def test_holes_and_empty_containers():
    def forward(tree, x, nothing):
        assert nothing is None
        return x @ tree["w"], {"none": None, "empty": ()}, [*tree["list"]]

    tree = {"w": floats(16, 8), "none": None, "list": [], "tuple": (), "dict": {}}
    search_and_compare(forward, (tree, floats(8, 16), None), mesh_of(**MESH))


# Modules


class Net(nnx.Module):
    def __init__(self, rngs):
        self.l1 = nnx.Linear(8, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.l2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.l2(self.drop(nnx.relu(self.l1(x))))


def test_nnx_state_with_keys_and_counters():
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        net = nnx.merge(graph, jax.tree.map(lambda a: a, state))
        return net(x), nnx.state(net)

    before = jax.tree.map(lambda a: a, state)
    plan = search_and_compare(step, (state, floats(8, 8)), mesh_of(**MESH), carry={0: 1})
    assert_same(state, before)
    _, new = plan(state, floats(8, 8))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    kernel = next(path for path in plan.specs if "l1" in path and "kernel" in path)
    assert plan.table.inputs[kernel].spec == next(
        leaf.spec
        for path, leaf in plan.table.outputs.items()
        if path.endswith(kernel.removeprefix("state/"))
    )
    assert_same(
        plan(new, floats(8, 8)), jax.jit(step)(jax.jit(step)(state, floats(8, 8))[1], floats(8, 8))
    )


def test_nnx_module_passed_directly():
    def forward(net, x):
        return nnx.relu(net.l1(x)).sum(-1)

    search_and_compare(forward, (Net(nnx.Rngs(0)), floats(8, 8)), mesh_of(**MESH))


def test_equinox_module_with_callables_inside():
    def forward(mlp, x):
        return jax.vmap(mlp)(x), mlp

    mlp = eqx.nn.MLP(8, 4, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    plan = search_and_compare(forward, (mlp, floats(16, 8)), mesh_of(**MESH), reference=forward)
    _, returned = plan(mlp, floats(16, 8))
    assert returned.activation is mlp.activation
    placed = plan.place("mlp", mlp)
    assert placed.activation is mlp.activation
    assert_same(plan(placed, floats(16, 8))[0], jax.vmap(mlp)(floats(16, 8)))


def test_optax_state_passed_alone():
    adam = optax.adam(1e-2)
    params = {"w": floats(8, 16), "b": floats(16)}

    def step(state, grads):
        return adam.update(grads, state, params)

    state = adam.init(params)
    search_and_compare(
        step, (state, jax.tree.map(np.ones_like, params)), mesh_of(**MESH), donate_argnums=0
    )


# The same array twice, donation


def tied(params, x):
    h = (x @ params["embed"]) @ params["w"]
    return jax.tree.map(lambda a: a * 0.99, params), (h @ params["unembed"].T).sum()


def tied_params():
    shared = jnp.asarray(floats(16, 8, scale=0.2))
    return {"embed": shared, "unembed": shared, "w": jnp.asarray(floats(8, 8, scale=0.2))}


@pytest.mark.parametrize("pins", [None, {"params/embed": P("a"), "params/unembed": P("a")}])
def test_one_array_twice_in_a_donated_tree(pins):
    params, mesh = tied_params(), mesh_of(**MESH)
    want = plain(tied, (params, floats(4, 16)))
    plan = search(tied, (params, floats(4, 16)), mesh, donate_argnums=0, pins=pins)
    assert_same(plan(params, floats(4, 16)), want)
    assert not params["w"].is_deleted(), "it was moved, so the caller's own array lives"
    placed = plan.place(0, params)
    new, _ = plan(placed, floats(4, 16))
    assert placed["w"].is_deleted()
    assert_same(params, tied_params())
    assert_same(plan(new, floats(4, 16))[0], jax.tree.map(lambda a: a * 0.99, want[0]))


def test_one_placed_array_given_to_a_donated_and_another_argument():
    def step(old, reference):
        return old * 0.5 + reference

    x = jnp.asarray(floats(8, 8))
    plan = search(step, (x, x), mesh_of(**MESH), donate_argnums=0)
    x = jax.device_put(x, plan.in_shardings[0])
    assert_same(plan(x, x), jnp.asarray(floats(8, 8)) * 1.5)
    assert not x.is_deleted()


# Dtypes and sizes


def test_numpy_64_bits_booleans_and_lists():
    def select(pair, mask, index):
        return jnp.where(mask, jnp.asarray(pair[0]) * pair[1], 0.0), jnp.sum(index)

    pair = [floats(8, 4, dtype=np.float64), np.arange(32, dtype=np.float64).reshape(8, 4)]
    args = pair, np.arange(32).reshape(8, 4) % 3 == 0, np.arange(16)
    plan = search_and_compare(select, args, mesh_of(**MESH))
    assert {leaf.dtype for leaf in plan.table.inputs.values()} == {"float32", "bool", "int32"}
    pins = {"pair/0": P("a"), "pair/1": P("a"), "mask": P("a"), "index": P("b")}
    pin_and_compare(select, args, mesh_of(**MESH), pins)


REFUSES_4_BITS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="compiled programs of jax 0.10.2 refuse sharded 4-bit arguments",
)


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "bool",
        "complex64",
        pytest.param("int4", marks=REFUSES_4_BITS),
    ],
)
def test_small_and_complex_dtypes(dtype):
    def forward(x, w):
        wide = jnp.complex64 if dtype == "complex64" else jnp.float32
        return (x.astype(wide) @ w.astype(wide)), x

    x = jnp.asarray(integers(2, 8, 16)).astype(dtype)
    w = jnp.asarray(integers(2, 16, 8)).astype(dtype)
    search_and_compare(forward, (x, w), mesh_of(**MESH))


def test_zero_sized_arrays():
    def forward(x, none, empty):
        return (
            jnp.concatenate([x, none]) @ jnp.concatenate([empty, jnp.ones((16, 8))], axis=0),
            none,
            none.sum(),
        )

    args = floats(8, 16), np.zeros((0, 16), np.float32), np.zeros((0, 8), np.float32)
    search_and_compare(forward, args, mesh_of(**MESH))


def test_arguments_that_nothing_reads():
    def forward(x, unused, w):
        return x @ w

    plan = search_and_compare(
        forward, (floats(8, 16), floats(64, 64), floats(16, 8)), mesh_of(**MESH)
    )
    assert "unused" in plan.specs


# Where arrays lie


@pytest.mark.parametrize("spec", [P("q", "p"), P(None, ("p", "q")), P()])
def test_arguments_committed_to_another_mesh(spec):
    def forward(w, x):
        return jnp.tanh(x @ w)

    elsewhere = NamedSharding(mesh_of(p=2, q=4), spec)
    x = jax.device_put(floats(8, 16), elsewhere)
    want = plain(forward, (floats(16, 16), floats(8, 16)))
    search_and_compare(forward, (floats(16, 16), x), mesh_of(**MESH), reference=lambda w, x: want)
    assert x.sharding == elsewhere
    plan = autoshard.apply(
        forward, (floats(16, 16), x), mesh_of(**MESH), [], pins={"w": P(None, "b"), "x": P("a")}
    )
    assert_same(plan(floats(16, 16), x), want)


def test_arguments_committed_to_one_device():
    def forward(w, x):
        return jnp.tanh(x @ w)

    w = jax.device_put(floats(16, 16), jax.devices()[3])
    search_and_compare(forward, (w, floats(8, 16)), mesh_of(**MESH))
    assert w.sharding.device_set == {jax.devices()[3]}


# Abstract arguments


def lookup(params, ids):
    return jax.nn.softmax(params["emb"][ids] @ params["w"]).sum()


def lookup_args():
    sds = jax.ShapeDtypeStruct
    return {"emb": sds((64, 16), jnp.bfloat16), "w": sds((16, 64), jnp.float32)}, sds(
        (8, 4), jnp.int32
    )


def test_abstract_arguments_are_searched_verified_and_run_later():
    plan = search(lookup, lookup_args(), mesh_of(**MESH))
    assert plan.verified
    real = (
        {"emb": jnp.asarray(floats(64, 16), jnp.bfloat16), "w": floats(16, 64)},
        integers(64, 8, 4),
    )
    assert_same(plan(*real), plain(lookup, real), jnp.bfloat16)
    pins = {"params/emb": P("a"), "params/w": P(None, "b"), "ids": P("a")}
    pinned = autoshard.apply(lookup, lookup_args(), mesh_of(**MESH), [], pins=pins)
    assert_same(pinned(*real), plain(lookup, real), jnp.bfloat16)


def test_abstract_keys_and_booleans():
    def forward(key, mask, x):
        return jnp.where(mask, x, jax.random.normal(key, x.shape))

    sds = jax.ShapeDtypeStruct
    args = jax.eval_shape(lambda: jax.random.key(0)), sds((8, 8), bool), sds((8, 8), jnp.float32)
    plan = search(forward, args, mesh_of(**MESH))
    real = jax.random.key(5), integers(2, 8, 8).astype(bool), floats(8, 8)
    assert_same(plan(*real), plain(forward, real))


# Captured constants, odd outputs


def test_large_captured_constant_is_noted_with_its_bytes():
    table = floats(512, 512, scale=0.05)

    def forward(x, w):
        return jnp.tanh(x @ table) @ w

    plan = search_and_compare(forward, (floats(8, 512), floats(512, 16)), mesh_of(**MESH))
    assert any("1048576 bytes" in note and "float32[512, 512]" in note for note in plan.notes)
    pin_and_compare(forward, (floats(8, 512), floats(512, 16)), mesh_of(**MESH), {"x": P("a")})


def test_small_captured_constants_are_not_worth_a_word():
    table = floats(16, 16)
    plan = search_and_compare(lambda x: x @ table, (floats(8, 16),), mesh_of(**MESH))
    assert not plan.notes


def test_forwarded_duplicated_and_literal_outputs():
    def odd(x, y):
        z = x + y
        return z, z, x, 3, (), {"flag": True}

    args = floats(8, 4), floats(8, 4, seed=1)
    plan = search_and_compare(odd, args, mesh_of(**MESH))
    assert list(plan.table.outputs) == ["out/0", "out/1", "out/2", "out/3", "out/5/flag"]
    pin_and_compare(odd, args, mesh_of(**MESH), {"x": P("a"), "y": P("a")})


def test_outputs_that_are_no_arrays():
    def forward(x):
        return {"y": x * 2, "name": "forward", "act": jnp.tanh}

    plan = search_and_compare(forward, (floats(8, 8),), mesh_of(**MESH), reference=forward)
    assert plan(floats(8, 8))["name"] == "forward"


def test_donated_argument_forwarded_as_it_is():
    def step(state, x):
        return state, (state["w"] * x).sum()

    state = {"w": floats(8, 8), "k": np.int32(3)}
    plan = search_and_compare(step, (state, floats(8, 8)), mesh_of(**MESH), donate_argnums=0)
    placed = plan.place(0, state)
    for _ in range(3):
        placed, _ = plan(placed, floats(8, 8))
    assert_same(placed, jax.tree.map(jnp.asarray, state))


def test_budget_of_half_splits_the_arguments():
    mesh, args = mesh_of(**MESH), scalar_args()
    budget = replicated_bytes(update, args, mesh) // 2
    assert split_leaves(search(update, args, mesh, memory_budget_bytes=budget))
