"""`autoshard calibrate` and `memory`: what the devices here do, and what a layout holds on each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from autoshard._apply import apply
from autoshard.cli.factory import call_factory, use_cpu_devices
from autoshard.cli.options import CpuDevices, Factory
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.calibrate import ROUNDS, Calibration
from autoshard.cost_model.hardware.calibrate import calibrate as measure_devices
from autoshard.cost_model.hardware.hardware import Hardware, hardware_for
from autoshard.cost_model.memory_breakdown import Purpose, breakdown
from autoshard.devices.mesh_text import parse_axes
from autoshard.errors import ArgumentError, HardwareError
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import resolve_mesh
from autoshard.plan import Plan
from autoshard.text import bytes_text

APPLY_TAKES = (
    "fn",
    "example_args",
    "example_kwargs",
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "carry",
    "pins",
    "user_constraints",
)
"""Arguments that a factory gives and `memory` hands to `apply`."""


def calibrate(
    out: Annotated[Path, typer.Option(help="Where to write the hardware description (JSON).")],
    mesh: Annotated[
        str | None, typer.Option(help="Such as data=4,model=2; all devices on one axis by default.")
    ] = None,
    cpu_devices: Annotated[int | None, typer.Option(help="Measure this many CPU devices.")] = None,
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds of the clock; more on a busy machine.")
    ] = ROUNDS,
) -> None:
    """Measures matmuls, memory and every collective over each mesh axis; use the file with
    --hardware.
    """
    use_cpu_devices(cpu_devices)
    over = resolve_mesh(mesh or f"devices={len(jax.devices())}").auto
    calibration = measure_devices(
        over, rounds=rounds, on_progress=lambda text: typer.echo(text, err=True)
    )
    calibration.hardware.save(out)
    typer.echo(calibration_text(calibration))
    typer.echo(f"saved to {out}; use it with --hardware {out}")


def calibration_text(calibration: Calibration) -> str:
    """The fit for people: rates, links, and how far measurements are from it."""
    hardware = calibration.hardware
    lines = [f"{hardware.name}: {hardware.source}"]
    for dtype in hardware.peak_flops_per_s:
        lines.append(f"  {dtype:9} {hardware.flops_per_s(dtype):10.3g} flops/s reached")
    lines += [
        f"  memory    {hardware.memory_bytes_per_s:10.3g} bytes/s",
        f"  operation {hardware.op_s:10.3g} s beside its work",
        f"  overlap   {hardware.overlap:10.2f} of the shorter of compute and communication",
    ]
    for axis, link in hardware.links.items():
        lines.append(f"  {axis}: alpha {link.alpha_s:.3g} s, {link.bytes_per_s:.3g} bytes/s")
        for kind, own in link.kinds.items():
            lines.append(f"    {kind:18} alpha {own.alpha_s:.3g} s, {own.bytes_per_s:.3g} bytes/s")
    lines.append("  median distance of a measurement from the fit:")
    for name, share in calibration.residuals().items():
        lines.append(f"    {name:24} {share:6.1%}")
    lines.append(
        f"  even and odd rounds apart: median {calibration.spread(0.5):.1%}, worst "
        f"{calibration.spread(1.0):.1%} (noise; where that is much, calibrate again on a quieter "
        f"machine or with more --rounds)"
    )
    return "\n".join(lines)


def memory(
    factory: Factory,
    mesh: Annotated[str | None, typer.Option(help="Mesh, such as data=4,model=2.")] = None,
    layout: Annotated[str, typer.Option(help="A preset's name, or a spec table's path.")] = "fsdp",
    cpu_devices: CpuDevices = None,
) -> None:
    """Prints what memory is for at the predicted peak: on one device alone, and on each after
    sharding.
    """
    if mesh is not None:
        needed = math.prod(parse_axes(mesh).values())
        use_cpu_devices(needed if cpu_devices is None else cpu_devices)
    arguments = call_factory(factory)
    over = mesh or arguments.get("mesh")
    if over is None:
        raise ArgumentError(
            "no mesh: pass --mesh, such as --mesh data=4,model=2, or let the factory give one."
        )
    taken: dict[str, Any] = {name: arguments[name] for name in APPLY_TAKES if name in arguments}
    plan = apply(**taken, mesh=over, layout=layout)
    typer.echo(memory_text(plan, layout))


def memory_text(plan: Plan, name: str) -> str:
    """The classic table, predicted: parameters, gradients, optimizer state, activations; one device
    against each.
    """
    hardware = _hardware_of(plan)
    donated, backend = plan.traced.call.donated, backend_for(plan.mesh.platform)
    replicated = Layout(plan.layout.problem, ())
    one = breakdown(replicated, hardware, donated, backend)
    each = breakdown(plan.layout, hardware, donated, backend)

    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.axes.items())
    rows = [("", "one device", f"each of {plan.mesh.user.size}")]
    for purpose in Purpose:
        rows.append((purpose.value, bytes_text(one[purpose]), bytes_text(each[purpose])))
    rows.append(("total", bytes_text(sum(one.values())), bytes_text(sum(each.values()))))

    lines = [f"{plan.traced.program.name}, predicted at the peak; {name} on {mesh}"]
    lines += [f"{what:18}{alone:>14}{sharded:>14}" for what, alone, sharded in rows]
    return "\n".join(lines)


def _hardware_of(plan: Plan) -> Hardware:
    try:
        return hardware_for(plan.mesh.device_kind)
    except HardwareError:
        return hardware_for("cpu")  # memory does not depend on rates
