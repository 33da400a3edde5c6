"""What tensor parallelism and FSDP split by hand, on models of many kinds and every depth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.layout.spec import Spec
from autoshard.search.presets import presets
from tests.stages import array, mesh_of, prepared
from tests.whole_models.registry import MODELS

D, HEADS, K, FF, VOCAB, BATCH, LENGTH = 32, 8, 4, 64, 48, 16, 24
MESH = {"fsdp": 4, "tp": 2}
COLUMNS, ROWS = (("fsdp",), ("tp",)), (("tp",), ("fsdp",))
Tree = Any


def specs_of(made: Prepared, name: str = "fsdp+tp") -> dict[str, Spec]:
    named = {preset.name: preset for preset in presets(made.problem)[0]}
    paths = made.traced.program.input_paths
    return dict(zip(paths, Layout(made.problem, named[name].rules).input_specs(), strict=True))


def step_of(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """One step of gradient descent; an optimizer with states of its own changes nothing here."""

    def step(params: Tree, *batch: Any) -> Any:
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def of_loss(loss: Callable[..., jax.Array], params: Tree, *batch: Any, **mesh: int) -> Prepared:
    made = mesh_of(**(mesh or MESH))
    return prepared(step_of(loss), (params, *batch), made, donate_argnums=0)


def tokens() -> jax.ShapeDtypeStruct:
    return array(BATCH, LENGTH, dtype=np.int32)


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def squares(x: jax.Array) -> jax.Array:
    return (x * x).sum()


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Queries in groups, one group for each of the heads of keys and values."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    weights = jax.nn.softmax(jnp.einsum("bqhgk,bshk->bhgqs", grouped, k))
    return jnp.einsum("bhgqs,bshk->bqhgk", weights, v).reshape(q.shape)


# Depth --------------------------------------------------------------------------------------------


def decoder(layers: int, kv_heads: int = HEADS, **more: tuple[int, ...]) -> Tree:
    layer = {
        "q": (D, HEADS, K),
        "k": (D, kv_heads, K),
        "v": (D, kv_heads, K),
        "o": (HEADS, K, D),
        "gate": (D, FF),
        "up": (D, FF),
        "down": (FF, D),
        "scale": (D,),
    }
    own = [{name: array(*shape) for name, shape in layer.items()} for _ in range(layers)]
    return {"layers": own, "embed": array(VOCAB, D), "head": array(D, VOCAB)} | {
        name: array(*shape) for name, shape in more.items()
    }


def block(w: Tree, x: jax.Array) -> jax.Array:
    h = norm(x) * w["scale"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
    x = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), w["o"])
    h = norm(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def decoder_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = jax.checkpoint(block)(w, x)
    else:
        body = jax.checkpoint(lambda x, w: (block(w, x), None))
        x, _ = jax.lax.scan(body, x, params["layers"])
    return cross_entropy(norm(x) @ params["head"], tokens)


def check_decoder(specs: dict[str, Spec], layer: str, stacked: int = 0) -> None:
    left = ((),) * stacked
    for name in ("q", "k", "v"):
        assert specs[f"{layer}/{name}"] == (*left, ("fsdp",), ("tp",), ())
    assert specs[f"{layer}/o"] == (*left, ("tp",), (), ("fsdp",))
    assert specs[f"{layer}/gate"] == specs[f"{layer}/up"] == left + COLUMNS
    assert specs[f"{layer}/down"] == left + ROWS
    assert specs["params/embed"] == ROWS
    assert specs["params/head"] == COLUMNS
    assert specs["batch/0"] == (("fsdp",), ())


@pytest.mark.parametrize("layers", [1, 2, 9, 24])
def test_the_rules_are_the_same_at_every_depth(layers: int) -> None:
    specs = specs_of(of_loss(decoder_loss, decoder(layers), tokens()))
    for layer in range(layers):
        check_decoder(specs, f"params/layers/{layer}")


@pytest.mark.parametrize("layers", [1, 24])
def test_a_scan_has_the_rules_of_layers_that_are_written_out(layers: int) -> None:
    params = decoder(layers)
    params["layers"] = jax.tree.map(
        lambda *leaves: array(layers, *leaves[0].shape), *params["layers"]
    )
    specs = specs_of(of_loss(decoder_loss, params, tokens()))
    check_decoder(specs, "params/layers", stacked=1)


def test_a_large_vocabulary_hides_no_layer() -> None:
    params = decoder(1) | {"embed": array(65536, D), "head": array(D, 65536)}
    check_decoder(specs_of(of_loss(decoder_loss, params, tokens())), "params/layers/0")


# Attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "tp", "split"), [(4, 2, True), (2, 2, True), (2, 4, False), (1, 2, False)]
)
def test_heads_of_keys_and_values_where_they_divide(kv_heads: int, tp: int, split: bool) -> None:
    made = of_loss(decoder_loss, decoder(2, kv_heads), tokens(), fsdp=8 // tp, tp=tp)
    specs = specs_of(made, "tp")
    layer = "params/layers/1"
    assert specs[f"{layer}/q"] == ((), ("tp",), ())
    assert specs[f"{layer}/o"] == (("tp",), (), ())
    assert specs[f"{layer}/k"] == ((), ("tp",) if split else (), ())
    assert specs[f"{layer}/gate"] == ((), ("tp",))


def test_repeated_heads_of_keys_and_values() -> None:
    def loss(p: Tree, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        k, v = (jnp.repeat(heads, 2, axis=2) for heads in (k, v))
        return squares(x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"]))

    shapes = {"q": (D, 8, K), "k": (D, 4, K), "v": (D, 4, K), "o": (8, K, D)}
    params = {name: array(*shape) for name, shape in shapes.items()}
    specs = specs_of(of_loss(loss, params, array(BATCH, LENGTH, D)), "tp")
    assert specs["params/q"] == specs["params/k"] == specs["params/v"] == ((), ("tp",), ())
    assert specs["params/o"] == (("tp",), (), ())


def test_multi_head_latent_attention_keeps_the_latent_whole() -> None:
    """DeepSeek-V2 (2024), section 2.1: heads go over the mesh axis, what they unpack does not."""

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        latent = norm(x @ p["down"])
        k, v = (jnp.einsum("btc,chk->bthk", latent, p[name]) for name in ("up_k", "up_v"))
        return squares(x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"]))

    shapes = {"q": (D, 8, K), "down": (D, 16), "up_k": (16, 8, K), "up_v": (16, 8, K)}
    params = {name: array(*shape) for name, shape in (shapes | {"o": (8, K, D)}).items()}
    specs = specs_of(of_loss(loss, params, array(BATCH, LENGTH, D)), "tp")
    assert specs["params/down"] == ((), ())
    assert specs["params/up_k"] == specs["params/up_v"] == ((), ("tp",), ())
    assert specs["params/o"] == (("tp",), (), ())


def test_adapters_follow_the_weights_beside_them() -> None:
    """Hu et al. (2021), LoRA: the sum of both paths is no residual stream."""

    def loss(trained: Tree, frozen: Tree, x: jax.Array) -> jax.Array:
        h = norm(x)
        h = jax.nn.gelu(h @ frozen["up"] + h @ trained["a"] @ trained["b"])
        return squares(x + h @ frozen["down"])

    trained = {"a": array(D, 4), "b": array(4, FF)}
    frozen = {"up": array(D, FF), "down": array(FF, D)}
    specs = specs_of(of_loss(loss, trained, frozen, array(BATCH, LENGTH, D)), "tp")
    assert specs["batch/0/up"] == ((), ("tp",))
    assert specs["batch/0/down"] == (("tp",), ())
    assert specs["params/b"] == ((), ("tp",))
    assert specs["params/a"] == ((), ())


# Other architectures ------------------------------------------------------------------------------


def test_experts_are_split_inside_and_routers_not() -> None:
    for name in ("moe_one_hot", "moe_sorted"):
        model = MODELS[name]()
        made = prepared(model.step, model.args, mesh_of(**MESH), donate_argnums=model.donate)
        specs = specs_of(made)
        assert specs["params/blocks/0/w1"] == ((), *COLUMNS), name
        assert specs["params/blocks/0/w2"] == ((), *ROWS), name
        assert specs["params/blocks/0/router"] == (("fsdp",), ()), name


def test_experts_one_by_one() -> None:
    """As tunix has them outside of kernels: slices of stacked weights, in a loop."""

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x @ p["router"])
        experts = [jax.nn.silu(x @ p["w1"][i]) @ p["w2"][i] for i in range(4)]
        mixed = jnp.einsum("btde,bte->btd", jnp.stack(experts, -1), weights)
        return cross_entropy(norm(x + mixed) @ p["head"], jnp.zeros(x.shape[:2], int))

    shapes = {"router": (D, 4), "w1": (4, D, FF), "w2": (4, FF, D), "head": (D, VOCAB)}
    params = {name: array(*shape) for name, shape in shapes.items()}
    specs = specs_of(of_loss(loss, params, array(BATCH, LENGTH, D)), "tp")
    assert specs["params/w1"] == ((), (), ("tp",))
    assert specs["params/w2"] == ((), ("tp",), ())
    assert specs["params/router"] == ((), ())
    assert specs["params/head"] == ((), ("tp",))


CONVOLUTIONAL_ROWS = ((), (), ("tp",), ("fsdp",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {"0/c_attn/w": COLUMNS, "1/c_proj/w": ROWS, "1/c_fc/w": COLUMNS}),
        ("vit", {"0/q": (*COLUMNS, ()), "1/fc_1/w": COLUMNS, "1/fc_2/w": ROWS}),
        ("resnet", {"0/conv_2": CONVOLUTIONAL_ROWS, "2/conv_2": CONVOLUTIONAL_ROWS}),
        ("state_space", {"0/in_x": COLUMNS, "0/in_gate": COLUMNS, "0/out": ROWS}),
        ("diffusion", {"0/q": (*COLUMNS, ()), "1/fc_1/w": COLUMNS, "1/fc_2/w": ROWS}),
    ],
)
def test_blocks_are_split_by_columns_then_rows(name: str, expected: dict[str, Spec]) -> None:
    model = MODELS[name]()
    made = prepared(model.step, model.args, mesh_of(**MESH), donate_argnums=model.donate)
    specs = specs_of(made)
    for path, spec in expected.items():
        assert specs[f"params/blocks/{path}"] == spec, path


def test_an_encoder_and_its_decoder() -> None:
    model = MODELS["encoder_decoder"]()
    made = prepared(model.step, model.args, mesh_of(**MESH), donate_argnums=model.donate)
    specs = specs_of(made)
    for attention in ("encoder/0/self", "decoder/0/self", "decoder/0/cross"):
        assert specs[f"params/{attention}/k"] == (*COLUMNS, ()), attention
        assert specs[f"params/{attention}/o"] == (("tp",), (), ("fsdp",)), attention
    for stack in ("encoder", "decoder"):
        assert specs[f"params/{stack}/0/ff/wi"] == COLUMNS
        assert specs[f"params/{stack}/0/ff/wo"] == ROWS
    assert specs["params/shared"] == ROWS, "the vocabulary, in encoder, decoder and head"


def test_a_decode_step() -> None:
    model = MODELS["kv_cache_decoding"]()
    made = prepared(model.step, model.args, mesh_of(**MESH), donate_argnums=model.donate)
    specs = specs_of(made)
    assert specs["cache/k"] == ((), ("fsdp",), (), ("tp",), ())
    assert specs["params/layers/wq"] == ((), *COLUMNS, ())
    assert specs["params/layers/w2"] == ((), *ROWS)
    assert specs["params/head"] == COLUMNS, "though what it says is the next token's embedding"


def test_a_deep_mlp_alternates() -> None:
    def loss(weights: Tree, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return squares(x)

    sizes = [D, 64, 96, 64, 96, 64, D]
    weights = [array(*pair) for pair in pairwise(sizes)]
    specs = specs_of(of_loss(loss, weights, array(BATCH, D)), "tp")
    expected = [((), ("tp",)), (("tp",), ())] * 3
    assert [specs[f"params/{i}"] for i in range(6)] == expected


@pytest.mark.parametrize("shape", [(D, 2 * FF), (D, 2, FF)])
def test_fused_gates(shape: tuple[int, ...]) -> None:
    def loss(p: Tree, x: jax.Array) -> jax.Array:
        h = jnp.tensordot(norm(x), p["up"], 1).reshape(*x.shape[:2], 2, FF)
        return squares(x + (jax.nn.silu(h[:, :, 0]) * h[:, :, 1]) @ p["down"])

    params = {"up": array(*shape), "down": array(FF, D)}
    specs = specs_of(of_loss(loss, params, array(BATCH, LENGTH, D)), "tp")
    assert specs["params/up"] == (*((),) * (len(shape) - 1), ("tp",))
    assert specs["params/down"] == (("tp",), ())


@pytest.mark.parametrize("shape", [(D, 3 * D), (D, 3, HEADS, K)])
def test_fused_queries_keys_and_values(shape: tuple[int, ...]) -> None:
    def loss(p: Tree, x: jax.Array) -> jax.Array:
        fused = jnp.tensordot(norm(x), p["qkv"], 1).reshape(*x.shape[:2], 3, HEADS, K)
        mixed = attend(*(fused[:, :, i] for i in range(3))).reshape(x.shape)
        return squares(x + mixed @ p["o"])

    params = {"qkv": array(*shape), "o": array(D, D)}
    specs = specs_of(of_loss(loss, params, array(BATCH, LENGTH, D)), "tp")
    assert specs["params/o"] == (("tp",), ())
    split = {2: ((), ("tp",)), 4: ((), (), ("tp",), ())}
    assert specs["params/qkv"] == split[len(shape)]


def test_tables_are_split_by_rows() -> None:
    """Naumov et al. (2019), DLRM: what is looked up has no residual stream behind it."""

    def loss(p: Tree, ids: jax.Array) -> jax.Array:
        x = jnp.concatenate([p[name][ids[:, i]] for i, name in enumerate(("users", "items"))], -1)
        return squares(jax.nn.relu(x @ p["w1"]) @ p["w2"])

    shapes = {"users": (512, 8), "items": (1024, 8), "w1": (16, FF), "w2": (FF, 4)}
    params = {name: array(*shape) for name, shape in shapes.items()}
    specs = specs_of(of_loss(loss, params, array(BATCH, 2, dtype=np.int32)), "tp")
    assert specs["params/users"] == specs["params/items"] == (("tp",), ())
    assert specs["params/w1"] == ((), ("tp",))
    assert specs["params/w2"] == (("tp",), ())


def test_an_embedding_by_one_hot() -> None:
    def loss(p: Tree, tokens: jax.Array) -> jax.Array:
        x = jax.nn.one_hot(tokens, VOCAB) @ p["embed"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return squares(x)

    params = {"embed": array(VOCAB, D), "up": array(D, FF), "down": array(FF, D)}
    specs = specs_of(of_loss(loss, params, tokens()))
    assert specs["params/embed"] == ROWS
    assert specs["params/up"] == COLUMNS


# Libraries ----------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(D, name="down")(nn.gelu(nn.Dense(FF, name="up")(nn.LayerNorm()(x))))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, D, name="embed")(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm()(x))


def test_linen() -> None:
    model = LinenModel()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 4), int))
    optimizer = optax.adamw(1e-3)

    def step(variables: Tree, state: Tree, tokens: jax.Array) -> Any:
        def loss(variables: Tree) -> jax.Array:
            return cross_entropy(model.apply(variables, tokens), tokens)

        updates, state = optimizer.update(jax.grad(loss)(variables), state, variables)
        return optax.apply_updates(variables, updates), state

    args = (variables, jax.eval_shape(optimizer.init, variables), tokens())
    specs = specs_of(prepared(step, args, mesh_of(**MESH), donate_argnums=(0, 1)))
    for i in range(2):
        own = f"variables/params/LinenBlock_{i}"
        assert specs[f"{own}/attention/query/kernel"] == (*COLUMNS, ())
        assert specs[f"{own}/attention/out/kernel"] == (("tp",), (), ("fsdp",))
        assert specs[f"{own}/up/kernel"] == COLUMNS
        assert specs[f"{own}/up/bias"] == (("tp",),)
        assert specs[f"{own}/down/kernel"] == ROWS
    assert specs["variables/params/embed/embedding"] == ROWS
    assert specs["variables/params/head/kernel"] == COLUMNS


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.up = nnx.Linear(D, FF, rngs=rngs)
        self.down = nnx.Linear(FF, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def test_nnx() -> None:
    def make() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Embed(VOCAB, D, rngs=rngs), nnx.List(NnxBlock(rngs) for _ in range(2))

    graph, state = nnx.split(nnx.eval_shape(make))

    def loss(state: Tree, tokens: jax.Array) -> jax.Array:
        embed, blocks = nnx.merge(graph, state)
        x = embed(tokens)
        for layer in blocks:
            x = layer(x)
        return cross_entropy(embed.attend(x), tokens)

    specs = specs_of(of_loss(loss, state, tokens()))
    for i in range(2):
        own = f"params/1/{i}"
        assert specs[f"{own}/attention/key/kernel/value"] == (*COLUMNS, ())
        assert specs[f"{own}/attention/out/kernel/value"] == (("tp",), (), ("fsdp",))
        assert specs[f"{own}/up/kernel/value"] == COLUMNS
        assert specs[f"{own}/down/kernel/value"] == ROWS
    assert specs["params/0/embedding/value"] == ROWS, "tied"


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, key=key)
        self.up = eqx.nn.Linear(D, FF, key=key)
        self.down = eqx.nn.Linear(FF, D, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x, x, x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def test_equinox_keeps_its_weights_transposed() -> None:
    made = [EquinoxBlock(jax.random.key(0)) for _ in range(2)]
    arrays, static = eqx.partition(made, eqx.is_array)

    def loss(arrays: Tree, x: jax.Array) -> jax.Array:
        for layer in eqx.combine(arrays, static):
            x = jax.vmap(layer)(x)
        return squares(x)

    specs = specs_of(of_loss(loss, arrays, array(BATCH, LENGTH, D)))
    for i in range(2):
        own = f"params/{i}"
        assert specs[f"{own}/attention/query_proj/weight"] == ROWS
        assert specs[f"{own}/attention/output_proj/weight"] == COLUMNS
        assert specs[f"{own}/up/weight"] == ROWS
        assert specs[f"{own}/down/weight"] == COLUMNS


@pytest.mark.parametrize("total", [jnp.sum, jnp.mean, squares])
@pytest.mark.parametrize("returns_gradients", [False, True])
def test_the_gradient_of_a_plain_sum_leaves_the_batch_to_data(
    total: Callable[[jax.Array], jax.Array], returns_gradients: bool
) -> None:
    """What the backward pass makes of ones and parameters has the batch, and is no weight."""

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bld,dhk->blhk", x, p[name]) for name in "qkv")
        return total(jnp.einsum("blhk,hkd->bld", attend(q, k, v), p["o"]))

    params = {name: array(D, HEADS, K) for name in "qkv"} | {"o": array(HEADS, K, D)}
    args = params, array(BATCH, LENGTH, D)
    made = prepared(jax.grad(loss), args, mesh_of(**MESH)) if returns_gradients else None
    specs = specs_of(made or of_loss(loss, *args), "tp")
    data = {spec for path, spec in specs.items() if path.rpartition("/")[2] not in "qkvo"}
    assert data == {(("fsdp",), (), ())}
    assert {specs[path] for path in specs if path[-1] in "qkv"} == {((), ("tp",), ())}
