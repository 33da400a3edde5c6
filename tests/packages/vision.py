"""Vision: a ViT of equimo under `eqx.filter_jit`; a ResNet of dm-haiku with batch norm and EMA."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.packages.program import Program


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def labels(classes: int, count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, count).astype(np.int32)


def vit() -> Program:
    import equinox as eqx

    if sys.version_info >= (3, 12):  # the package moved its models; each Python gets its newest
        from equimo.vision.models.vit import VisionTransformer
    else:
        from equimo.models.vit import VisionTransformer

    model = VisionTransformer(
        img_size=16,
        in_channels=3,
        dim=64,
        patch_size=4,
        num_heads=4,
        depths=[2],
        num_classes=16,
        reg_tokens=0,
        proj_drop=0.1,
        key=jax.random.key(0),
    )
    optimizer = optax.adamw(1e-3)

    @eqx.filter_jit
    def train_step(model: Any, opt_state: Any, x: Any, y: Any, key: Any) -> Any:
        def loss(model: Any) -> Any:
            keys = jax.random.split(key, x.shape[0])
            logits = jax.vmap(model)(x, keys)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    state = optimizer.init(eqx.filter(model, eqx.is_array))
    return Program(
        "equimo",
        train_step,
        (model, state, images(32, 3, 16, 16), labels(16, 32), jax.random.key(1)),
        rival={  # weights of Equinox are [out, in]
            "qkv/weight|fc1/weight": P("model", "data"),
            "qkv/bias|fc1/bias": P("model"),
            "attn/proj/weight|fc2/weight": P("data", "model"),
            "head/weight": P("model", "data"),
            "^[xy]$": P("data"),
        },
        donate=(0, 1),
    )


def resnet() -> Program:
    import haiku as hk

    def forward(x: Any, is_training: bool) -> Any:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=16,
            bottleneck=False,
            channels_per_group=(16, 32, 64, 128),
            initial_conv_config={"output_channels": 16, "kernel_shape": 3, "stride": 1},
            use_projection=(False, True, True, True),
        )
        return net(x, is_training=is_training)

    def averaged(params: Any) -> Any:
        return hk.EMAParamsTree(0.99)(params)

    net = hk.transform_with_state(forward)
    ema = hk.transform_with_state(averaged)
    optimizer = optax.sgd(0.1, momentum=0.9)
    x, y = images(16, 16, 16, 3), labels(16, 16)
    params, state = net.init(jax.random.key(0), x, is_training=True)
    _, averages = ema.init(None, params)

    def train_step(params: Any, state: Any, opt_state: Any, averages: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, new_state = net.apply(params, state, None, x, is_training=True)
            value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return value, new_state

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        _, averages = ema.apply(None, averages, None, params)
        return params, state, opt_state, averages, value

    args = params, state, optimizer.init(params), averages, x, y
    return Program(
        "dm-haiku",
        train_step,
        jax.tree.map(jnp.asarray, args),
        rival={
            "initial_conv/w": P(None, None, None, "data"),
            r"conv\w*/w|shortcut_conv": P(None, None, "data", "model"),
            "logits/w": P("data", "model"),
            "^[xy]$": P("data"),
        },
        donate=(0, 1, 2, 3),
    )
