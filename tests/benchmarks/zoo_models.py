"""Models at the sizes at which people train and serve them, arguments abstract: nothing here is
ever executed.

All is float32: the rates of a GPU for it are half of those for bfloat16, and so are the bytes, so
compute and communication stand to each other as in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.stages import array
from tests.whole_models.model import WholeModel

Tree = Any
TOKENS = 2048
"""Length of the sequences that are trained on."""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a Llama-shaped decoder; the defaults are Llama-3-8B's (Llama 3, 2024, table 3)."""

    layers: int = 32
    d: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ff: int = 14336
    vocab: int = 128256
    experts: int = 0
    batch: int = 16
    micro_batches: int = 1

    def params(self) -> Tree:
        """Layers stacked for a scan."""
        n, d, k = self.layers, self.d, self.d // self.heads
        of_expert = (self.experts,) if self.experts else ()
        layers = {
            "wq": array(n, d, self.heads, k),
            "wk": array(n, d, self.kv_heads, k),
            "wv": array(n, d, self.kv_heads, k),
            "wo": array(n, self.heads, k, d),
            "norm": array(n, 2, d),
            "gate": array(n, *of_expert, d, self.ff),
            "up": array(n, *of_expert, d, self.ff),
            "down": array(n, *of_expert, self.ff, d),
        }
        if self.experts:
            layers["router"] = array(n, d, self.experts)
        return {
            "embed": array(self.vocab, d),
            "head": array(d, self.vocab),
            "norm": array(d),
            "layers": layers,
        }


def rms(x: Any, scale: Any) -> Any:
    """Root mean square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def attend(w: Tree, x: Any) -> Any:
    """Causal attention of grouped queries."""
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in ("wq", "wk", "wv"))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    mixed = jnp.einsum("bgrst,btgk->bsgrk", jax.nn.softmax(scores), v)
    return jnp.einsum("bshk,hkd->bsd", mixed.reshape(*x.shape[:2], *w["wo"].shape[:2]), w["wo"])


def feed_forward(w: Tree, x: Any) -> Any:
    """A gated layer."""
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def mixture(w: Tree, x: Any) -> Any:
    """Two experts a token, dispatched by one-hot products (GShard, 2020); a tenth of room to
    spare."""
    experts = w["router"].shape[-1]
    room = int(1.1 * 2 * x.shape[1] / experts)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
    wanted = jax.nn.one_hot(chosen, experts)  # batch, token, choice, expert
    place = jnp.cumsum(wanted.sum(2), 1)[:, :, None] * wanted - 1
    sent = jax.nn.one_hot(place, room).sum(2)  # batch, token, expert, place
    combine = sent * jnp.einsum("bsc,bsce->bse", weights, wanted)[..., None]
    h = jnp.einsum("bsep,bsd->ebpd", sent, x)
    h = jax.nn.silu(jnp.einsum("ebpd,edf->ebpf", h, w["gate"])) * jnp.einsum(
        "ebpd,edf->ebpf", h, w["up"]
    )
    return jnp.einsum("ebpf,efd,bsep->bsd", h, w["down"], combine)


def training(sizes: Decoder) -> WholeModel:
    """A train step with AdamW; layers scanned and rematerialised, micro-batches accumulated."""
    optimizer, params = optax.adamw(1e-3), sizes.params()

    @jax.checkpoint
    def layer(x: Any, w: Tree) -> tuple[Any, None]:
        x = x + attend(w, rms(x, w["norm"][0]))
        h = rms(x, w["norm"][1])
        return x + (mixture(w, h) if sizes.experts else feed_forward(w, h)), None

    def loss(params: Tree, tokens: Any) -> Any:
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = rms(x, params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def gradient(params: Tree, tokens: Any) -> Tree:
        if sizes.micro_batches == 1:
            return jax.grad(loss)(params, tokens)

        def micro(total: Tree, some: Any) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, some)), None

        batches = tokens.reshape(sizes.micro_batches, -1, tokens.shape[1])
        return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), batches)[0]

    def train_step(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(gradient(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    return WholeModel(
        train_step, (params, state, array(sizes.batch, TOKENS, dtype=np.int32)), (0, 1)
    )


def multi_query_decoding() -> WholeModel:
    """One token of PaLM-62B's shape (2022, table 1): one key-value head, so that only the batch
    splits the cache."""
    n, d, heads, k, ff, batch, length = 64, 8192, 32, 256, 32768, 256, 2048
    params = {
        "wq": array(n, d, heads, k),
        "wkv": array(n, d, 2, k),
        "wo": array(n, heads, k, d),
        "gate": array(n, d, ff),
        "up": array(n, d, ff),
        "down": array(n, ff, d),
        "norm": array(n, d),
    }

    def decode(params: Tree, cache: Any, x: Any) -> tuple[Any, Any]:
        def layer(x: Any, both: Tree) -> tuple[Any, Any]:
            w, cache = both
            h = rms(x, w["norm"])
            cache = jnp.concatenate(
                [cache[:, 1:], jnp.einsum("bd,dck->bck", h, w["wkv"])[:, None]], 1
            )
            q = jnp.einsum("bd,dhk->bhk", h, w["wq"])
            weights = jax.nn.softmax(jnp.einsum("bhk,btk->bht", q, cache[:, :, 0]) * k**-0.5)
            mixed = jnp.einsum("bht,btk->bhk", weights, cache[:, :, 1])
            return x + jnp.einsum("bhk,hkd->bd", mixed, w["wo"]) + feed_forward(w, h), cache

        x, cache = jax.lax.scan(layer, x, (params, cache))
        return cache, x

    return WholeModel(decode, (params, array(n, batch, length, 2, k), array(batch, d)), (1,))


def recurrent() -> WholeModel:
    """Backpropagation through 2,048 steps of a recurrent net with a square weight of 8,192."""
    params = {"w": array(8192, 8192), "u": array(2048, 8192)}

    def train_step(params: Tree, xs: Any) -> Tree:
        def loss(p: Tree) -> Any:
            def cell(h: Any, x: Any) -> tuple[Any, None]:
                return jnp.tanh(h @ p["w"] + x @ p["u"]), None

            return jnp.mean(jax.lax.scan(cell, jnp.zeros((xs.shape[1], 8192)), xs)[0] ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    return WholeModel(train_step, (params, array(2048, 1024, 2048)), (0,))


def recommender() -> WholeModel:
    """26 features of four million rows in one table, and two layers; Adagrad."""
    rows, width, features, hidden, batch = 26 * 4 * 2**20, 64, 26, 2048, 65536
    params = {
        "table": array(rows, width),
        "w1": array(features * width, hidden),
        "w2": array(hidden, hidden),
    }
    optimizer = optax.adagrad(1e-2)

    def train_step(params: Tree, state: Tree, ids: Any, clicks: Any) -> tuple[Tree, Tree]:
        def loss(p: Tree) -> Any:
            x = p["table"][ids].reshape(ids.shape[0], -1)
            logits = (jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"])).mean(-1)
            return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    args = (
        params,
        jax.eval_shape(optimizer.init, params),
        array(batch, features, dtype=np.int32),
        array(batch),
    )
    return WholeModel(train_step, args, (0, 1))


def residual_mlp() -> WholeModel:
    """24 residual blocks written out, plain descent: nothing but products and elementwise
    operations."""
    blocks = {str(i): {"up": array(8192, 32768), "down": array(32768, 8192)} for i in range(24)}

    def train_step(params: Tree, x: Any, y: Any) -> tuple[Tree, Any]:
        def loss(p: Tree) -> Any:
            h = x
            for block in p.values():
                h = h + jnp.tanh(h @ block["up"]) @ block["down"]
            return jnp.mean((h - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return WholeModel(train_step, (blocks, array(16384, 8192), array(16384, 8192)), (0,))


MODELS: Mapping[str, Callable[[], WholeModel]] = MappingProxyType(
    {
        "llama_8b": lambda: training(Decoder()),
        "llama_70b": lambda: training(Decoder(80, 8192, 64, 8, 28672, batch=128)),
        "grouped_queries": lambda: training(
            Decoder(28, 4096, 32, 2, 13696, 65024)
        ),  # ChatGLM2-6B's shape
        "mixtral": lambda: training(Decoder(vocab=32000, experts=8, batch=64)),
        "gradient_accumulation": lambda: training(Decoder(micro_batches=4, batch=64)),
        "multi_query_decoding": multi_query_decoding,
        "recurrent": recurrent,
        "recommender": recommender,
        "residual_mlp": residual_mlp,
    }
)
