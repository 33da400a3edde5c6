"""Compiled and partitioned evidence of layouts, kept in a JSON-lines file: compiles are costly and
repeat exactly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from autoshard.compiler.compile import CompilerOptions, build, compile_built
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.shardy.partition import Partitioned, partition
from tests.stages import QUICKLY

Evidence = dict[str, Any]
"""`compiled` and `partitioned` bytes by kind, `memory` by part; or `failed`, the reason."""


def key_of(made: Prepared, layout: Layout) -> str:
    """Digest of what the compiler is given: program, shardings, constraints, donation, jax."""
    given = (
        made.traced.program.fingerprint,
        sorted(layout.problem.mesh_axes.items()),
        layout.input_specs(),
        layout.output_specs(),
        repr(constraints_for(layout)),
        made.traced.call.donated,
        jax.__version__,
    )
    return hashlib.blake2b(repr(given).encode(), digest_size=12).hexdigest()


def gather(
    made: Prepared, layout: Layout, options: CompilerOptions | None = None
) -> tuple[Evidence, Any]:
    """Partitions and compiles a layout; the evidence, and the executable."""
    mesh = made.request.mesh
    built = build(made.traced, layout, mesh)
    try:
        parted = partition(built.lower(), mesh.axes)
        compiled = compile_built(built, mesh, compiler_options=options)
    except Exception as error:  # a layout that does not compile is evidence too
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}, None
    evidence: Evidence = {
        "compiled": by_kind(compiled.evidence.collectives),
        "partitioned": by_kind(parted.collectives) if isinstance(parted, Partitioned) else None,
        "memory": memory_of(compiled.evidence),
        "compile_s": compiled.evidence.compile_s,
    }
    return evidence, compiled


def by_kind(collectives: Any) -> dict[str, int]:
    """Bytes one device sends, by kind."""
    found: dict[str, int] = {}
    for one in collectives:
        found[one.kind] = found.get(one.kind, 0) + one.bytes
    return found


def memory_of(evidence: CompiledEvidence) -> dict[str, int]:
    """The compiled program's bytes per device, by part."""
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
    return {name: getattr(evidence, name) for name in names}


class EvidenceStore:
    """Reads a file of evidence, and appends what is found out anew."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Evidence] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._known[row.pop("key")] = row

    def known(self, made: Prepared, layout: Layout) -> bool:
        """True if nothing need be compiled."""
        return key_of(made, layout) in self._known

    def of(self, made: Prepared, layout: Layout) -> Evidence:
        """The evidence of a layout; compiled now unless it is known."""
        key = key_of(made, layout)
        if key not in self._known:
            self._known[key], _ = gather(made, layout, QUICKLY)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, **self._known[key]}) + "\n")
        return self._known[key]
