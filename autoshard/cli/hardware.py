"""`autoshard calibrate` and `autoshard memory`: what the devices here do, and what a layout holds
on each.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import jax
import typer

from autoshard._apply import apply
from autoshard.cli.factory import FACTORY, call_factory, use_cpu_devices
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.calibrate import ROUNDS, Calibration
from autoshard.cost_model.hardware.calibrate import calibrate as measure_devices
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.cost_model.memory_breakdown import Purpose, breakdown
from autoshard.devices.mesh_text import parse_axes
from autoshard.errors import ArgumentError, HardwareError
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import resolve_mesh
from autoshard.plan import Plan
from autoshard.text import bytes_text

APPLY_TAKES = (
    "fn", "example_args", "example_kwargs", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames",
    "carry", "pins", "user_constraints",
)  # fmt: skip


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
    found = measure_devices(
        over, rounds=rounds, on_progress=lambda text: typer.echo(text, err=True)
    )
    found.hardware.save(out)
    typer.echo(calibration_text(found))
    typer.echo(f"saved to {out}; use it with --hardware {out}")


def calibration_text(found: Calibration) -> str:
    """The fit for people: rates, links, and how far measurements are from it."""
    hardware = found.hardware
    lines = [f"{hardware.name}: {hardware.source}"]
    lines += [
        f"  {d:9} {hardware.flops_per_s(d):10.3g} flops/s reached"
        for d in hardware.peak_flops_per_s
    ]
    lines += [
        f"  memory    {hardware.memory_bytes_per_s:10.3g} bytes/s",
        f"  operation {hardware.op_s:10.3g} s beside its work",
        f"  overlap   {hardware.overlap:10.2f} of the shorter of compute and communication",
    ]
    for axis, link in hardware.links.items():
        lines.append(f"  {axis}: alpha {link.alpha_s:.3g} s, {link.bytes_per_s:.3g} bytes/s")
        lines += [
            f"    {kind:18} alpha {one.alpha_s:.3g} s, {one.bytes_per_s:.3g} bytes/s"
            for kind, one in link.kinds.items()
        ]
    lines.append("  median distance of a measurement from the fit:")
    lines += [f"    {name:24} {share:6.1%}" for name, share in found.residuals().items()]
    lines.append(
        f"  even and odd rounds apart: median {found.spread(0.5):.1%}, worst "
        f"{found.spread(1.0):.1%} "
        f"(noise; where that is much, calibrate again on a quieter machine or with more --rounds)"
    )
    return "\n".join(lines)


def memory(
    factory: Annotated[str, typer.Argument(help=FACTORY)],
    mesh: Annotated[str | None, typer.Option(help="Mesh, such as data=4,model=2.")] = None,
    layout: Annotated[str, typer.Option(help="A preset's name, or a spec table's path.")] = "fsdp",
    cpu_devices: Annotated[int | None, typer.Option(help="Work on this many CPU devices.")] = None,
) -> None:
    """Prints what memory is for at the predicted peak: on one device alone, and on each after
    sharding.
    """
    if mesh is not None:
        use_cpu_devices(
            math.prod(parse_axes(mesh).values()) if cpu_devices is None else cpu_devices
        )
    arguments = call_factory(factory)
    over = mesh or arguments.get("mesh")
    if over is None:
        raise ArgumentError(
            "no mesh: pass --mesh, such as --mesh data=4,model=2, or let the factory give one."
        )
    given = {name: arguments[name] for name in APPLY_TAKES if name in arguments}
    typer.echo(
        memory_text(
            apply(given.pop("fn"), given.pop("example_args"), over, layout, **given), layout
        )
    )


def memory_text(plan: Plan, name: str) -> str:
    """The classic table, predicted: parameters, gradients, optimizer state, activations; one device
    against each.
    """
    donated, backend = plan.traced.call.donated, backend_for(plan.mesh.platform)
    try:
        hardware = hardware_for(plan.mesh.device_kind)
    except HardwareError:
        hardware = hardware_for("cpu")  # memory does not depend on rates
    one, each = (
        breakdown(found, hardware, donated, backend)
        for found in (Layout(plan.layout.problem, ()), plan.layout)
    )
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.axes.items())
    lines = [f"{plan.traced.program.name}, predicted at the peak; {name} on {mesh}"]
    lines.append(f"{'':18}{'one device':>14}{'each of ' + str(plan.mesh.user.size):>14}")
    lines += [f"{p.value:18}{bytes_text(one[p]):>14}{bytes_text(each[p]):>14}" for p in Purpose]
    lines.append(
        f"{'total':18}{bytes_text(sum(one.values())):>14}{bytes_text(sum(each.values())):>14}"
    )
    return "\n".join(lines)
