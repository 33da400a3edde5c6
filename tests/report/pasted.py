"""Writes constraints into a model's source by program, and compiles the function that comes out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.evidence.collectives import Collective, summarise
from autoshard.plan import Plan
from autoshard.report.minimise import MinimalConstraints
from autoshard.report.source_expressions import paste


def pasted_module(minimal: MinimalConstraints, source: Path, folder: Path) -> ModuleType:
    """The module of a source file with the constraints pasted into its text."""
    edits = minimal.edits()
    assert set(edits) <= {str(source)}, "the model's constraints are in one file"
    path = folder / f"{source.stem}_pasted.py"
    path.write_text(paste(source.read_text(), edits.get(str(source), [])))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def compiled_collectives(
    plan: Plan, fn: Callable[..., Any], args: Any, donated: Any
) -> tuple[Collective, ...]:
    """Collectives of a function compiled as a user would: jit, the plan's shardings at its edges,
    no tool."""
    with jax.set_mesh(plan.mesh.auto):
        step = jax.jit(
            fn,
            in_shardings=plan.in_shardings,
            out_shardings=plan.out_shardings,
            donate_argnums=donated,
        )
        text = step.lower(*args).compile().as_text()
    return summarise(read_collectives(text or "", plan.mesh.axes))
