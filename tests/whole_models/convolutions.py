"""Convolutional networks: a ResNet with batch norm, a U-Net."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.whole_models.model import Array, Init, Params, WholeModel, cross_entropy, dense, training


def conv(w: Array, x: Array, stride: int = 1) -> Array:
    """Same padding, NHWC."""
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def resnet(
    widths: tuple[int, ...] = (16, 32, 64), size: int = 16, classes: int = 16, batch: int = 32
) -> WholeModel:
    """He et al. (2016): basic blocks, batch norm with running statistics as state of its own; SGD
    with momentum."""
    init = Init()

    def block_params(fan_in: int, width: int) -> Params:
        p = {
            "conv_1": init.normal(3, 3, fan_in, width), "bn_1": init.norm(width),
            "conv_2": init.normal(3, 3, width, width), "bn_2": init.norm(width),
        }  # fmt: skip
        return p if fan_in == width else p | {"skip": init.normal(1, 1, fan_in, width)}

    fans = (widths[0], *widths[:-1])
    params = {
        "stem": init.normal(3, 3, 3, widths[0]),
        "blocks": [block_params(a, b) for a, b in zip(fans, widths, strict=True)],
        "head": init.dense(widths[-1], classes),
    }
    statistics = [
        {
            name: {"mean": np.zeros(w, np.float32), "var": np.ones(w, np.float32)}
            for name in ("bn_1", "bn_2")
        }
        for w in widths
    ]

    def batch_norm(p: Params, old: Params, x: Array) -> tuple[Array, Params]:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, {"mean": mean, "var": var})
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"], new

    def loss(
        params: Params, statistics: Params, images: Array, labels: Array
    ) -> tuple[Array, Params]:
        x, new = conv(params["stem"], images), []
        for i, (p, old) in enumerate(zip(params["blocks"], statistics, strict=True)):
            stride = 1 if i == 0 else 2
            h, bn_1 = batch_norm(p["bn_1"], old["bn_1"], conv(p["conv_1"], x, stride))
            h, bn_2 = batch_norm(p["bn_2"], old["bn_2"], conv(p["conv_2"], jax.nn.relu(h)))
            x = jax.nn.relu(h + (conv(p["skip"], x, stride) if "skip" in p else x))
            new.append({"bn_1": bn_1, "bn_2": bn_2})
        return cross_entropy(dense(params["head"], x.mean((1, 2))), labels), new

    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def resnet_step(
        params: Params, opt_state: Params, statistics: Params, images: Array, labels: Array
    ) -> tuple[Params, Params, Params, Array]:
        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(
            params, statistics, images, labels
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, statistics, value

    state = jax.tree.map(np.asarray, optimizer.init(params))
    images = init.normal(batch, size, size, 3, scale=1.0)
    return WholeModel(
        resnet_step, (params, state, statistics, images, init.integers(classes, batch)), (0, 1, 2)
    )


def unet(
    widths: tuple[int, ...] = (16, 32), bottom: int = 64, size: int = 16, batch: int = 16
) -> WholeModel:
    """Ronneberger et al. (2015): down, bottom, up with skip connections, group norm; pixel labels;
    Adam."""
    init, classes = Init(), 4

    def double_params(fan_in: int, width: int) -> Params:
        return {
            "conv_1": init.normal(3, 3, fan_in, width), "gn_1": init.norm(width),
            "conv_2": init.normal(3, 3, width, width), "gn_2": init.norm(width),
        }  # fmt: skip

    params = {
        "down": [double_params(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True)],
        "bottom": double_params(widths[-1], bottom),
        "up": [
            {"grow": init.normal(2, 2, a, b), **double_params(2 * b, b)}
            for a, b in zip((bottom, *widths[:0:-1]), widths[::-1], strict=True)
        ],
        "head": init.normal(1, 1, widths[0], classes),
    }

    def group_norm(p: Params, x: Array, groups: int = 4) -> Array:
        b, h, w, c = x.shape
        g = x.reshape(b, h, w, groups, c // groups)
        mean, var = g.mean((1, 2, 4), keepdims=True), g.var((1, 2, 4), keepdims=True)
        return ((g - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * p["scale"] + p["shift"]

    def double(p: Params, x: Array) -> Array:
        x = jax.nn.relu(group_norm(p["gn_1"], conv(p["conv_1"], x)))
        return jax.nn.relu(group_norm(p["gn_2"], conv(p["conv_2"], x)))

    def loss(params: Params, images: Array, labels: Array) -> Array:
        x, kept = images, []
        for p in params["down"]:
            x = double(p, x)
            kept.append(x)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = double(params["bottom"], x)
        for p, skip in zip(params["up"], kept[::-1], strict=True):
            x = jax.lax.conv_transpose(
                x, p["grow"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = double(p, jnp.concatenate([skip, x], -1))
        return cross_entropy(conv(params["head"], x), labels)

    images = init.normal(batch, size, size, 3, scale=1.0)
    return training(
        loss, optax.adam(1e-3, eps=1e-5), params, images, init.integers(classes, batch, size, size)
    )
