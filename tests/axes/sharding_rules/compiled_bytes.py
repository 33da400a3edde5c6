"""What one device sends for each primitive with a rule, as predicted and as compiled, with each
logical axis of the primitive over a mesh axis.

    JAX_NUM_CPU_DEVICES=2 PYTHONPATH=. python tests/axes/sharding_rules/compiled_bytes.py

compiles all of it (a minute a jax) and writes `tests/golden/compiled_bytes.json`: of every row the
bytes by kind, or why it does not compile. The rows of other releases of jax stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rule_cases import CASES, Case
from run_shards import Application

from autoshard.compiler.compile import build, compile_built
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import cpu
from autoshard.cost_model.predict import Predictor
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from tests.benchmarks.evidence_store import by_kind
from tests.stages import QUICKLY, layout_of, mesh_of, prepared

Bytes = dict[str, int]
"""What one device sends, by kind of collective."""

GOLDEN = Path(__file__).parents[2] / "golden" / "compiled_bytes.json"
SHARDS = 2
"""Devices of the mesh axis: all sizes of the cases are even, or small."""

UNCOMPILED = {
    "mulhi": "XLA does not convert it for more than one device",
    "philox2x32": "XLA does not convert it for more than one device",
    "philox4x32": "XLA does not convert it for more than one device",
    "sharding_constraint": "its sharding is of one device",
}
"""Cases that do not compile for several devices, whatever is split, and why."""


def setting(case: Case) -> Prepared:
    """One application of a primitive as a program, prepared for the mesh axis `x`."""
    app = case.make(np.random.default_rng(0))
    operands = [jax.ShapeDtypeStruct(np.shape(o), _dtype(o)) for o in app.operands]
    return prepared(_function(app), operands, mesh_of(x=SHARDS))


def _dtype(operand: Any) -> Any:
    return operand.dtype if hasattr(operand, "dtype") else np.asarray(operand).dtype


def _function(app: Application) -> Callable[..., Any]:
    def apply(*operands: Any) -> Any:
        params = app.primitive.get_bind_params(dict(app.eqn.params))
        return app.primitive.bind(*operands, **params)

    return apply


def layouts(made: Prepared) -> Iterator[tuple[str, Layout]]:
    """Each distinct layout that sends one logical axis to the mesh axis, with its rule."""
    seen = set()
    for logical_axis in made.problem.logical_axes.axes:
        for occurrence in ("", " @last"):
            rule = f"{logical_axis.name}->x{occurrence}"
            layout = layout_of(made, rule)
            if layout.key() not in seen:
                seen.add(layout.key())
                yield rule, layout


def predictor(made: Prepared) -> Predictor:
    """As `optimize` makes it for CPU devices."""
    return Predictor(made.problem, cpu, made.traced.call.donated, CPU)


def compiled(made: Prepared, layout: Layout) -> Bytes | str:
    """What the compiled program sends; why there is none, where the compiler fails."""
    mesh = made.request.mesh
    try:
        built = build(made.traced, layout, mesh)
        return by_kind(compile_built(built, mesh, compiler_options=QUICKLY).evidence.collectives)
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition(":")[0]


def main() -> None:
    """Writes the rows of this release of jax."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    rows = golden[jax.__version__] = {}
    for case in CASES:
        if case.primitive not in UNCOMPILED:
            made = setting(case)
            for rule, layout in layouts(made):
                rows[f"{case} {rule}"] = compiled(made, layout)
    releases = []
    for release, of_release in sorted(golden.items()):
        lines = [f"{json.dumps(row)}: {json.dumps(sent)}" for row, sent in of_release.items()]
        releases.append(f"{json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n}")
    GOLDEN.write_text("{\n" + ",\n".join(releases) + "\n}\n")


if __name__ == "__main__":
    main()
