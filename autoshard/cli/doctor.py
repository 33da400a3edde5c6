"""`autoshard doctor`: what this machine has for a search, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import typer

from autoshard.cli.factory import use_cpu_devices
from autoshard.cli.options import AsJson
from autoshard.errors import AutoshardError
from autoshard.search.study.passwords import without_password
from autoshard.search.study.storage import (
    close_storage,
    open_storage,
    study_names,
)
from autoshard.text import BINARY_UNITS, first_line

CONNECT_S = 5.0
"""How long a storage may take to answer: this command is for a user who waits. Chosen by hand; no
test depends on it."""

MIN_FREE_BYTES = BINARY_UNITS["GiB"]
"""Room for temporary files below which a compiler may fail: a dump of a large program and its
spilled buffers are hundreds of MB. Chosen by hand; no test depends on it."""

Level = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing looked at.

    Attributes:
        what: The thing.
        level: `missing` is optional, `broken` is not.
        state: What is there.
        fix: What to do about it; empty where nothing is to be done.
    """

    what: str
    level: Level
    state: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """As `doctor --json` prints it."""
        return {"what": self.what, "level": self.level, "found": self.state, "fix": self.fix}


def examine(storage: str | None) -> list[Diagnosis]:
    """Looks at versions, devices, targets, the storage and the compilation cache.

    Args:
        storage: A storage to connect to, if any.
    """
    diagnoses = [_versions(), _devices(), *_extras(), _cache(), _temporary()]
    return [*diagnoses, _storage(storage)] if storage is not None else diagnoses


def _versions() -> Diagnosis:
    names = ("autoshard", "jax", "jaxlib", "optuna", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Diagnosis("versions", "ok", f"Python {sys.version.split()[0]}, {versions}")


def _devices() -> Diagnosis:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        fix = (
            "Set JAX_PLATFORMS=cpu to work on the host, or mend the driver that the message names."
        )
        return Diagnosis("devices", "broken", first_line(str(error)), fix)
    kind = f"{len(devices)} {devices[0].platform} ({devices[0].device_kind})"
    fix = "A mesh needs several: --cpu-devices 8 makes fake ones to try."
    return Diagnosis("devices", "ok", kind, fix if len(devices) == 1 else "")


@dataclass(frozen=True, slots=True)
class _Extra:
    """An optional part of the installation: what for, the module it brings, and its name."""

    what: str
    module: str
    name: str
    use: str


_EXTRAS = (
    _Extra("TPU targets", "libtpu", "tpu", "compiles for TPUs that are not here"),
    _Extra("PostgreSQL", "psycopg", "postgres", "a shared study on PostgreSQL"),
    _Extra("gRPC proxy", "grpc", "grpc", "a shared study behind Optuna's proxy"),
    _Extra("dashboard", "optuna_dashboard", "report", "a study in the browser"),
)


def _extras() -> list[Diagnosis]:
    diagnoses = []
    for extra in _EXTRAS:
        if importlib.util.find_spec(extra.module) is not None:
            diagnoses.append(Diagnosis(extra.what, "ok", f"{extra.module} is installed"))
        else:
            fix = f"For {extra.use}: pip install 'autoshard[{extra.name}]'"
            diagnoses.append(Diagnosis(extra.what, "missing", f"no {extra.module}", fix))
    return diagnoses


def _cache() -> Diagnosis:
    what = "compilation cache"
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        fix = (
            "Set JAX_COMPILATION_CACHE_DIR, or compilation_cache in the job file; workers may "
            "share it."
        )
        return Diagnosis(what, "missing", "none", fix)
    if Path(folder).is_dir() and not os.access(folder, os.W_OK):
        return Diagnosis(what, "broken", f"{folder} cannot be written", "Name another directory.")
    return Diagnosis(what, "ok", str(folder))


def _temporary() -> Diagnosis:
    what, folder = "temporary files", tempfile.gettempdir()
    file_system = os.statvfs(folder)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes < MIN_FREE_BYTES:
        state = f"{free_bytes // BINARY_UNITS['MiB']} MiB free in {folder}"
        return Diagnosis(what, "broken", state, "Set TMPDIR.")
    return Diagnosis(what, "ok", f"{free_bytes // BINARY_UNITS['GiB']} GiB free in {folder}")


def _storage(where: str) -> Diagnosis:
    shown = without_password(where)
    try:
        storage = open_storage(where, patience_s=CONNECT_S)
        names = study_names(storage)
        close_storage(storage)
    except AutoshardError as error:
        return Diagnosis("storage", "broken", f"{shown}: {error}", "Mend what the message names.")
    return Diagnosis("storage", "ok", f"{shown}, {len(names)} studies")


def doctor(
    storage: Annotated[
        str | None, typer.Option(envvar="AUTOSHARD_STORAGE", help="A storage to connect to.")
    ] = None,
    cpu_devices: Annotated[int | None, typer.Option(help="Look at this many CPU devices.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says what this machine has (jax, devices, targets, storage, cache) and what to do about what
    is missing.
    """
    use_cpu_devices(cpu_devices)
    diagnoses = examine(storage)
    if as_json:
        typer.echo(json.dumps([diagnosis.to_dict() for diagnosis in diagnoses], indent=1))
    else:
        for diagnosis in diagnoses:
            typer.echo(f"{diagnosis.level:8} {diagnosis.what}: {diagnosis.state}")
            if diagnosis.fix:
                typer.echo(f"         {diagnosis.fix}")
    if any(diagnosis.level == "broken" for diagnosis in diagnoses):
        raise typer.Exit(1)
