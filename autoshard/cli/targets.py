"""`autoshard capture-target`: the GPUs of this machine, written down for planning elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import jax
import typer

from autoshard.errors import TargetError
from autoshard.jax_internals import executables


def capture_target(
    out: Annotated[Path, typer.Option(help="Where to write the description (text).")],
) -> None:
    """Writes a description of this machine's GPUs; plan for them elsewhere with --target
    gpu:FILE:HOSTSxGPUS.
    """
    devices = jax.local_devices()
    description = executables.gpu_target_config(devices)
    if description is None:
        raise TargetError(
            f"capture-target describes the GPUs of the machine it runs on, but jax sees "
            f"{len(devices)} {devices[0].platform} devices here. Run it on a machine with GPUs, "
            f"with jax[cuda12] installed."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(description, encoding="utf-8")
    typer.echo(
        f"{out}: {devices[0].device_kind}. Plan for it with --target gpu:{out}:1x{len(devices)}."
    )
