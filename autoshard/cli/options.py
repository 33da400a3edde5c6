"""Arguments and options that several commands have, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

What = Annotated[
    str,
    typer.Argument(
        help="A job file (autoshard.toml), or a factory: pkg.module:factory or file.py:factory"
    ),
]
Factory = Annotated[
    str,
    typer.Argument(
        help="pkg.module:factory (or file.py:factory) that returns (fn, example_args) or a dict of "
        "optimize's arguments"
    ),
]
Table = Annotated[Path, typer.Argument(help="A spec table.")]

# What to search for ----------------------------------------------------------------------------

Mesh = Annotated[
    str | None, typer.Option(help="Mesh over the local devices, such as data=4,model=2.")
]
Target = Annotated[str | None, typer.Option(help="Hardware that is not here, such as tpu:v5e:4x4.")]
Hardware = Annotated[str | None, typer.Option(help="Preset, or a file written by calibration.")]
CpuDevices = Annotated[int | None, typer.Option(help="Work on this many CPU devices.")]
Distributed = Annotated[
    str | None,
    typer.Option(
        help="One of several processes that search together: auto (SLURM, Open MPI, Kubernetes, "
        "Cloud TPU), or HOST:PORT,COUNT,NUMBER."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of the sampler.")]

# The study -------------------------------------------------------------------------------------

Storage = Annotated[
    str | None,
    typer.Option(
        envvar="AUTOSHARD_STORAGE",
        help="journal:PATH, sqlite:///PATH, postgresql://... or grpc://host:port.",
    ),
]
Study = Annotated[str | None, typer.Option(help="Name of the study in the storage.")]
SharedCompiled = Annotated[
    int | None,
    typer.Option("--compiled", help="Candidates to compile, by all workers together."),
]
Measured = Annotated[int | None, typer.Option(help="Candidates to measure.")]
Lease = Annotated[
    float | None,
    typer.Option(help="Seconds without a sign of life after which a worker has lost its task."),
]

# What comes out --------------------------------------------------------------------------------

Out = Annotated[Path | None, typer.Option(help="Where to save the spec table.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]
