"""Language models: Qwen3 of google-tunix, with tunix's own sharding; GPT-2 of transformers (Flax)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.packages.program import Program


def tokens(vocabulary: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def qwen3() -> Program:
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3, RematConfig

    config = ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=192,
        num_heads=8,
        head_dim=16,
        num_kv_heads=4,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        remat_config=RematConfig.DECODER,
    )
    model = Qwen3(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)
    ids = tokens(256, 16, 32)
    positions = np.tile(np.arange(32, dtype=np.int32), (16, 1))
    mask = np.tile(np.tril(np.ones((32, 32), bool)), (16, 1, 1))

    def train_step(model: Any, optimizer: Any, ids: Any, positions: Any, mask: Any) -> Any:
        def loss(model: Any) -> Any:
            logits, _ = model(ids, positions, None, mask)
            return cross_entropy(logits[:, :-1].astype(jnp.float32), ids[:, 1:])

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    own = config.shd_config  # tunix's rules; its optimizer states are sharded as their parameters
    batch = P("fsdp")
    return Program(
        "google-tunix",
        train_step,
        (model, optimizer, ids, positions, mask),
        rival={
            "input_embedding": P(*own.emb_vd),
            "lm_head/w": P(*own.emb_dv),
            "q_proj/w": P(*own.q_weight_dnh),
            "[kv]_proj/w": P(*own.kv_weight_dnh),
            "o_proj/w": P(*own.o_weight_nhd),
            "(gate|up)_proj/kernel": P(*own.ffw_weight_df),
            "down_proj/kernel": P(*own.ffw_weight_fd),
            "norm/w": P(*own.rms_norm_weight),
            "^(ids|positions|mask)": batch,
        },
        axes=("fsdp", "tp"),
    )


def gpt2() -> Program:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.1
    )
    model = FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, 32))
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2)

    def train_step(params: Any, opt_state: Any, ids: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model(ids, params=params, dropout_rng=key, train=True).logits
            return cross_entropy(logits[:, :-1], ids[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return Program(
        "transformers",
        train_step,
        (model.params, optimizer.init(model.params), tokens(256, 16, 32), jax.random.key(1)),
        rival={  # kernels of this model are [out, in]
            "wte/embedding": P("model", "data"),
            "wpe/embedding": P(None, "data"),
            "c_attn/kernel|c_fc/kernel": P("model", "data"),
            "c_proj/kernel": P("data", "model"),
            "c_attn/bias|c_fc/bias": P("model"),
            "^ids": P("data"),
        },
        donate=(0, 1),
    )
