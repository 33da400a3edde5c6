"""How the whole models are searched: the mesh, the hardware, the effort."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import autoshard
from autoshard.cost_model.hardware.hardware import Hardware, Link, tpu_v5e
from tests.whole_models.model import WholeModel

SHRUNK = 64
"""The models are about this much narrower, and their batches this much smaller, than what people
train."""

SCALE_MODEL = replace(
    tpu_v5e,
    name="scale model of a v5e",
    peak_flops_per_s={dtype: rate / SHRUNK for dtype, rate in tpu_v5e.peak_flops_per_s.items()},
    link=Link(alpha_s=0.0, bytes_per_s=tpu_v5e.link.bytes_per_s),
    source="tpu_v5e; flops per byte of a width w scale with w, so a device for widths w / 64 does 1 / 64 of the flops; "
    "latency is left out, as it would outweigh everything at toy size",
)


def mesh_of(shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("data", "model")) -> Mesh:
    """A mesh over the 8 CPU devices, axes Auto."""
    return Mesh(
        np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape)
    )


def replicated_peak_bytes(model: WholeModel) -> int:
    """Peak bytes per device of the compiled step with everything replicated."""
    plan = autoshard.apply(model.step, model.args, mesh_of(), [], donate_argnums=model.donate)
    return plan.compile().evidence.peak_bytes


def search(
    model: WholeModel,
    budget_bytes: int | None,
    mesh: Mesh | None = None,
    compiled: int = 3,
    hardware: Hardware = SCALE_MODEL,
) -> autoshard.Plan:
    """The plan found for a model; compiled and verified, not measured."""
    return autoshard.optimize(
        model.step,
        model.args,
        mesh_of() if mesh is None else mesh,
        donate_argnums=model.donate,
        hardware=hardware,
        memory_budget_bytes=budget_bytes,
        effort=autoshard.Effort(compiled=compiled, measured=0),
        progress=False,
    )


def winner_of(plan: autoshard.Plan) -> autoshard.Candidate:
    """The trial that won."""
    return next(candidate for candidate in plan.candidates if candidate.status == "winner")
