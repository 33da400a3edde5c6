"""A cache on disk of what compiled programs say: compiling for a target takes seconds to minutes.

(jax's own persistent cache writes programs for such targets and cannot read them back.) One small
JSON file a program, named by a digest of all that it depends on. A file that is missing, cut short
or of another form is compiled anew and written over; a folder that cannot be written to costs the
cache, never the search.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from autoshard.compiler.compile import Reading
from autoshard.devices.target import Target

MAX_FILE_BYTES = 2**24
"""Of a file: the largest program that was read has 40 kB of figures. What is larger is compiled
anew; without it test_what_is_read_is_bounded fails."""

FORMAT = 2
"""Version of the files, and of how a program's text is read: raise it where `hlo_collectives` or
`hlo_cycles` reads another number from the same text."""

_COMPILERS = ("jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""Packages whose version decides what comes out."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The compiler refuses a program that does not fit into the memory of a device.

    Attributes:
        needed_bytes: What it needs.
        available_bytes: What there is.
    """

    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One file: a program's figures, or that it does not fit."""

    reading: Reading | None = None
    refusal: Refusal | None = None


def default_folder() -> Path:
    """`autoshard` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "autoshard"


def program_key(
    text: str, options: Mapping[str, Any], mesh_axes: Mapping[str, int], target: Target
) -> str:
    """Digest of what the outcome of a compilation depends on.

    Args:
        text: StableHLO of the program, with its shardings and donated arguments.
        options: Of the compiler.
        mesh_axes: The names that collectives are read with.
        target: What it is compiled for.
    """
    parts = {
        "format": FORMAT,
        "program": hashlib.sha256(text.encode()).hexdigest(),
        "options": sorted((name, str(value)) for name, value in options.items()),
        "flags": [os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")],
        "mesh": list(mesh_axes.items()),
        "target": msgspec.to_builtins(target),
        "versions": [jax.__version__, *map(_version, _COMPILERS)],
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class CompileCache:
    """A folder of outcomes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "compiled"

    def get(self, key: str) -> Stored | None:
        """The outcome under a key, None where there is none that can be read."""
        try:
            with self._path(key).open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                return None
            stored = msgspec.json.decode(text, type=Stored)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return stored if stored.reading is not None or stored.refusal is not None else None

    def put(self, key: str, stored: Stored) -> None:
        """Writes an outcome; the file appears whole or not at all."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                file.write(msgspec.json.encode(stored))
            Path(file.name).replace(path)
        except OSError:
            return

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
