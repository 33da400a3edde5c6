"""Transformers: GPT-2, Llama, ViT, an encoder-decoder in the manner of T5, a diffusion
transformer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.whole_models.model import (
    Array,
    Init,
    Params,
    WholeModel,
    attention,
    causal_bias,
    cross_entropy,
    dense,
    layer_norm,
    rms_norm,
    training,
)


def gpt2(
    layers: int = 2,
    d: int = 64,
    heads: int = 4,
    vocab: int = 256,
    batch: int = 16,
    length: int = 32,
) -> WholeModel:
    """Radford et al. (2019): learned positions, pre-norm blocks with fused QKV, tied embedding;
    AdamW, clipped."""
    init = Init()

    def block_params() -> Params:
        return {
            "ln_1": init.norm(d), "c_attn": init.dense(d, 3 * d), "c_proj": init.dense(d, d),
            "ln_2": init.norm(d), "c_fc": init.dense(d, 4 * d), "mlp_proj": init.dense(4 * d, d),
        }  # fmt: skip

    params = {
        "wte": init.normal(vocab, d, scale=0.02),
        "wpe": init.normal(length, d, scale=0.02),
        "blocks": [block_params() for _ in range(layers)],
        "ln_f": init.norm(d),
    }

    def block(p: Params, x: Array) -> Array:
        b, t, _ = x.shape
        qkv = dense(p["c_attn"], layer_norm(p["ln_1"], x))
        q, k, v = (a.reshape(b, t, heads, d // heads) for a in jnp.split(qkv, 3, axis=-1))
        x = x + dense(p["c_proj"], attention(q, k, v, causal_bias(t)).reshape(b, t, d))
        return x + dense(p["mlp_proj"], jax.nn.gelu(dense(p["c_fc"], layer_norm(p["ln_2"], x))))

    def loss(params: Params, tokens: Array) -> Array:
        x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
        for p in params["blocks"]:
            x = block(p, x)
        logits = layer_norm(params["ln_f"], x) @ params["wte"].T
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5))
    return training(loss, optimizer, params, init.integers(vocab, batch, length))


def rope(x: Array) -> Array:
    """Rotary positions (Su et al. 2021) of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama(
    layers: int = 4, d: int = 64, heads: int = 8, kv: int = 4, ff: int = 192, vocab: int = 256, batch: int = 16,
    length: int = 32,
) -> WholeModel:  # fmt: skip
    """Touvron et al. (2023): RMSNorm, RoPE, grouped-query attention, SwiGLU; scanned layers,
    rematerialised; AdamW."""
    init, k = Init(), d // heads
    params = {
        "embed": init.normal(vocab, d, scale=0.02),
        "layers": {
            "attn_norm": np.ones((layers, d), np.float32),
            "wq": init.normal(layers, d, heads, k, scale=d**-0.5),
            "wk": init.normal(layers, d, kv, k, scale=d**-0.5),
            "wv": init.normal(layers, d, kv, k, scale=d**-0.5),
            "wo": init.normal(layers, heads, k, d, scale=d**-0.5),
            "mlp_norm": np.ones((layers, d), np.float32),
            "gate": init.normal(layers, d, ff, scale=d**-0.5),
            "up": init.normal(layers, d, ff, scale=d**-0.5),
            "down": init.normal(layers, ff, d, scale=ff**-0.5),
        },
        "norm": np.ones(d, np.float32),
        "head": init.normal(d, vocab),
    }

    def layer(x: Array, p: Params) -> tuple[Array, None]:
        b, t, _ = x.shape
        h = rms_norm(p["attn_norm"], x)
        q = rope(jnp.einsum("btd,dhk->bthk", h, p["wq"])).reshape(b, t, kv, heads // kv, k)
        keys, values = (
            rope(jnp.einsum("btd,dhk->bthk", h, p["wk"])),
            jnp.einsum("btd,dhk->bthk", h, p["wv"]),
        )
        scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, keys) * k**-0.5 + causal_bias(t)
        mixed = jnp.einsum("bgrqs,bsgk->bqgrk", jax.nn.softmax(scores), values).reshape(
            b, t, heads, k
        )
        x = x + jnp.einsum("bthk,hkd->btd", mixed, p["wo"])
        h = rms_norm(p["mlp_norm"], x)
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Params, tokens: Array) -> Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
        logits = rms_norm(params["norm"], x) @ params["head"]
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return training(loss, optax.adamw(1e-3, eps=1e-5), params, init.integers(vocab, batch, length))


def vit(
    layers: int = 2,
    d: int = 64,
    heads: int = 4,
    size: int = 16,
    patch: int = 4,
    classes: int = 16,
    batch: int = 16,
) -> WholeModel:
    """Dosovitskiy et al. (2021): convolution into patches, class token, encoder blocks with biases;
    AdamW."""
    init, k = Init(), d // heads
    tokens = (size // patch) ** 2 + 1

    def block_params() -> Params:
        return {
            "ln_1": init.norm(d), "ln_2": init.norm(d),
            **{name: init.normal(d, heads, k, scale=d**-0.5) for name in ("q", "k", "v")},
            "out": init.normal(heads, k, d, scale=d**-0.5),
            "fc_1": init.dense(d, 4 * d), "fc_2": init.dense(4 * d, d),
        }  # fmt: skip

    params = {
        "patches": init.normal(patch, patch, 3, d),
        "class": np.zeros((1, 1, d), np.float32),
        "positions": init.normal(1, tokens, d, scale=0.02),
        "blocks": [block_params() for _ in range(layers)],
        "ln": init.norm(d),
        "head": init.dense(d, classes),
    }

    def block(p: Params, x: Array) -> Array:
        h = layer_norm(p["ln_1"], x)
        q, keys, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in ("q", "k", "v"))
        x = x + jnp.einsum("bthk,hkd->btd", attention(q, keys, v), p["out"])
        return x + dense(p["fc_2"], jax.nn.gelu(dense(p["fc_1"], layer_norm(p["ln_2"], x))))

    def loss(params: Params, images: Array, labels: Array) -> Array:
        x = jax.lax.conv_general_dilated(
            images,
            params["patches"],
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], -1, d)
        first = jnp.broadcast_to(params["class"], (x.shape[0], 1, d))
        x = jnp.concatenate([first, x], 1) + params["positions"]
        for p in params["blocks"]:
            x = block(p, x)
        return cross_entropy(dense(params["head"], layer_norm(params["ln"], x[:, 0])), labels)

    images = init.normal(batch, size, size, 3, scale=1.0)
    return training(
        loss, optax.adamw(1e-3, eps=1e-5), params, images, init.integers(classes, batch)
    )


def encoder_decoder(
    layers: int = 1, d: int = 64, heads: int = 4, ff: int = 128, vocab: int = 256, batch: int = 16, source: int = 32,
    target: int = 16,
) -> WholeModel:  # fmt: skip
    """Raffel et al. (2020), T5: relative position bias, no biases elsewhere, shared embedding;
    Adafactor."""
    init, k, buckets = Init(), d // heads, 8

    def attention_params() -> Params:
        return {
            **{name: init.normal(d, heads, k, scale=d**-0.5) for name in ("q", "k", "v")},
            "o": init.normal(heads, k, d, scale=d**-0.5),
            "norm": np.ones(d, np.float32),
        }

    def feed_forward_params() -> Params:
        return {"wi": init.normal(d, ff), "wo": init.normal(ff, d), "norm": np.ones(d, np.float32)}

    params = {
        "shared": init.normal(vocab, d, scale=0.05),
        "encoder_bias": init.normal(buckets, heads),
        "decoder_bias": init.normal(buckets, heads),
        "encoder": [
            {"self": attention_params(), "ff": feed_forward_params()} for _ in range(layers)
        ],
        "decoder": [
            {"self": attention_params(), "cross": attention_params(), "ff": feed_forward_params()}
            for _ in range(layers)
        ],
    }

    def relative_bias(table: Array, length: int) -> Array:
        distance = jnp.abs(jnp.arange(length)[:, None] - jnp.arange(length)[None, :])
        return jnp.moveaxis(table[jnp.minimum(distance, buckets - 1)], -1, 0)

    def attend(p: Params, x: Array, memory: Array | None, bias: Array | float) -> Array:
        h = rms_norm(p["norm"], x)
        read = h if memory is None else memory
        q = jnp.einsum("btd,dhk->bthk", h, p["q"])
        keys, values = (jnp.einsum("bsd,dhk->bshk", read, p[name]) for name in ("k", "v"))
        return x + jnp.einsum("bthk,hkd->btd", attention(q, keys, values, bias), p["o"])

    def feed_forward(p: Params, x: Array) -> Array:
        return x + jax.nn.relu(rms_norm(p["norm"], x) @ p["wi"]) @ p["wo"]

    def loss(params: Params, inputs: Array, targets: Array) -> Array:
        x = params["shared"][inputs]
        bias = relative_bias(params["encoder_bias"], inputs.shape[1])
        for p in params["encoder"]:
            x = feed_forward(p["ff"], attend(p["self"], x, None, bias))
        memory = x
        x = params["shared"][targets[:, :-1]]
        bias = relative_bias(params["decoder_bias"], x.shape[1]) + causal_bias(x.shape[1])
        for p in params["decoder"]:
            x = attend(p["cross"], attend(p["self"], x, None, bias), memory, 0.0)
            x = feed_forward(p["ff"], x)
        return cross_entropy(x @ params["shared"].T * d**-0.5, targets[:, 1:])

    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    return training(
        loss,
        optimizer,
        params,
        init.integers(vocab, batch, source),
        init.integers(vocab, batch, target + 1),
    )


def diffusion(
    layers: int = 2,
    d: int = 64,
    heads: int = 4,
    size: int = 16,
    patch: int = 4,
    classes: int = 16,
    batch: int = 16,
) -> WholeModel:
    """Peebles and Xie (2023), DiT: a denoising step, adaLN blocks, noise drawn inside; AdamW and an
    average."""
    init, k, channels = Init(), d // heads, 4
    pieces, per_piece = (size // patch) ** 2, patch * patch * channels

    def block_params() -> Params:
        return {
            "modulation": init.dense(d, 6 * d),
            **{name: init.normal(d, heads, k, scale=d**-0.5) for name in ("q", "k", "v")},
            "out": init.normal(heads, k, d, scale=d**-0.5),
            "fc_1": init.dense(d, 4 * d), "fc_2": init.dense(4 * d, d),
        }  # fmt: skip

    params = {
        "patches": init.dense(per_piece, d),
        "positions": init.normal(pieces, d, scale=0.02),
        "time": [init.dense(32, d), init.dense(d, d)],
        "classes": init.normal(classes, d, scale=0.02),
        "blocks": [block_params() for _ in range(layers)],
        "final": init.dense(d, per_piece),
    }

    def plain_norm(x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def block(p: Params, x: Array, condition: Array) -> Array:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(
            dense(p["modulation"], jax.nn.silu(condition))[:, None, :], 6, axis=-1
        )
        h = plain_norm(x) * (1 + scale_1) + shift_1
        q, keys, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in ("q", "k", "v"))
        x = x + gate_1 * jnp.einsum("bthk,hkd->btd", attention(q, keys, v), p["out"])
        h = plain_norm(x) * (1 + scale_2) + shift_2
        return x + gate_2 * dense(p["fc_2"], jax.nn.gelu(dense(p["fc_1"], h)))

    def denoise(params: Params, x: Array, time: Array, labels: Array) -> Array:
        side = size // patch
        x = (
            x.reshape(-1, side, patch, side, patch, channels)
            .transpose(0, 1, 3, 2, 4, 5)
            .reshape(-1, pieces, per_piece)
        )
        x = dense(params["patches"], x) + params["positions"]
        angles = time[:, None] * 1000.0 ** (-jnp.arange(16) / 16)
        embedded = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        first, second = params["time"]
        condition = dense(second, jax.nn.silu(dense(first, embedded))) + params["classes"][labels]
        for p in params["blocks"]:
            x = block(p, x, condition)
        return dense(params["final"], plain_norm(x))

    def loss(params: Params, images: Array, labels: Array, key: Array) -> Array:
        for_time, for_noise = jax.random.split(key)
        time = jax.random.uniform(for_time, images.shape[:1])
        noise = jax.random.normal(for_noise, images.shape)
        angle = (time * jnp.pi / 2)[:, None, None, None]
        mixed = jnp.cos(angle) * images + jnp.sin(angle) * noise
        side = size // patch
        wanted = noise.reshape(-1, side, patch, side, patch, channels).transpose(0, 1, 3, 2, 4, 5)
        return (
            (denoise(params, mixed, time, labels) - wanted.reshape(-1, pieces, per_piece)) ** 2
        ).mean()

    optimizer = optax.adamw(1e-3, eps=1e-5)

    def diffusion_step(
        params: Params, opt_state: Params, average: Params, images: Array, labels: Array, key: Array
    ) -> tuple[Params, Params, Params, Array]:
        value, grads = jax.value_and_grad(loss)(params, images, labels, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, average, params)
        return params, opt_state, average, value

    state = jax.tree.map(np.asarray, optimizer.init(params))
    average = jax.tree.map(np.copy, params)
    images = init.normal(batch, size, size, channels, scale=1.0)
    key = np.array([0, 7], np.uint32)
    return WholeModel(
        diffusion_step,
        (params, state, average, images, init.integers(classes, batch), key),
        (0, 1, 2),
    )
