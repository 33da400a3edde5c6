"""The command that says what this machine has for a search, and what to do about what is
missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import typer

from autoshard.cli.factory import use_cpu_devices
from autoshard.errors import AutoshardError
from autoshard.search.study.storage import (
    close_storage,
    open_storage,
    study_names,
    without_password,
)

CONNECT_S = 5.0

Level = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: The thing.
        level: `missing` is optional, `broken` is not.
        found: What is there.
        fix: What to do about it; empty where nothing is to be done.
    """

    what: str
    level: Level
    found: str
    fix: str = ""


def examine(storage: str | None) -> list[Finding]:
    """Looks at versions, devices, targets, the storage and the compilation cache.

    Args:
        storage: A storage to connect to, if any.
    """
    findings = [_versions(), _devices(), *_extras(), _cache(), _temporary()]
    return [*findings, _storage(storage)] if storage is not None else findings


def _versions() -> Finding:
    names = ("autoshard", "jax", "jaxlib", "optuna", "numpy")
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Finding("versions", "ok", f"Python {sys.version.split()[0]}, {found}")


def _devices() -> Finding:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        fix = (
            "Set JAX_PLATFORMS=cpu to work on the host, or mend the driver that the message names."
        )
        return Finding("devices", "broken", str(error).splitlines()[0], fix)
    kind = f"{len(devices)} {devices[0].platform} ({devices[0].device_kind})"
    if len(devices) == 1:
        return Finding(
            "devices", "ok", kind, "A mesh needs several: --cpu-devices 8 makes fake ones to try."
        )
    return Finding("devices", "ok", kind)


def _extras() -> list[Finding]:
    extras = (
        ("TPU targets", "libtpu", "tpu", "compiles for TPUs that are not here"),
        ("PostgreSQL", "psycopg", "postgres", "a shared study on PostgreSQL"),
        ("gRPC proxy", "grpc", "grpc", "a shared study behind Optuna's proxy"),
        ("dashboard", "optuna_dashboard", "report", "a study in the browser"),
    )
    return [
        Finding(what, "ok", f"{module} is installed")
        if importlib.util.find_spec(module) is not None
        else Finding(
            what, "missing", f"no {module}", f"For {use}: pip install 'autoshard[{extra}]'"
        )
        for what, module, extra, use in extras
    ]


def _cache() -> Finding:
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        fix = "Set JAX_COMPILATION_CACHE_DIR, or compilation_cache in the job file; workers may share it."
        return Finding("compilation cache", "missing", "none", fix)
    if Path(folder).is_dir() and not os.access(folder, os.W_OK):
        return Finding(
            "compilation cache", "broken", f"{folder} cannot be written", "Name another directory."
        )
    return Finding("compilation cache", "ok", str(folder))


def _temporary() -> Finding:
    folder = tempfile.gettempdir()
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < 2**30:
        return Finding(
            "temporary files", "broken", f"{free_bytes >> 20} MiB free in {folder}", "Set TMPDIR."
        )
    return Finding("temporary files", "ok", f"{free_bytes >> 30} GiB free in {folder}")


def _storage(where: str) -> Finding:
    shown = without_password(where)
    try:
        storage = open_storage(where, patience_s=CONNECT_S)
        names = study_names(storage)
        close_storage(storage)
    except AutoshardError as error:
        return Finding("storage", "broken", f"{shown}: {error}", "Mend what the message names.")
    return Finding("storage", "ok", f"{shown}, {len(names)} studies")


def doctor(
    storage: Annotated[
        str | None, typer.Option(envvar="AUTOSHARD_STORAGE", help="A storage to connect to.")
    ] = None,
    cpu_devices: Annotated[int | None, typer.Option(help="Look at this many CPU devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Says what this machine has (jax, devices, targets, storage, cache) and what to do about what
    is missing.
    """
    use_cpu_devices(cpu_devices)
    findings = examine(storage)
    if as_json:
        sys.stdout.write(json.dumps([asdict(f) for f in findings], indent=1) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{finding.level:8} {finding.what}: {finding.found}\n")
            if finding.fix:
                sys.stdout.write(f"         {finding.fix}\n")
    if any(finding.level == "broken" for finding in findings):
        raise typer.Exit(1)
