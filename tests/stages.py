"""Runs the first stages of the pipeline on a function, for tests of one stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.axes.axis_classes import NO_AXIS, AxisClasses, axis_classes
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import JitOptions, Prepared, make_request, prepare
from autoshard.tracing.jit_options import options_for
from autoshard.tracing.signature import Call, flatten_call
from autoshard.tracing.trace import Traced, trace

QUICKLY = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
"""Compiler options where machine code is not what is read: collectives and memory stay the same."""


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    """An abstract argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh_of(**axes: int) -> Mesh:
    """A mesh with Auto axes over the first CPU devices: `mesh_of(data=4, model=2)`."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def call_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Any = None, **options: Any
) -> Call:
    """A flattened call; `options` are the static and donate arguments of `jax.jit`."""
    return flatten_call(fn, tuple(args), kwargs or {}, options_for(fn, **options))


def traced(fn: Callable[..., Any], *args: Any, **options: Any) -> Traced:
    """`fn` traced for these arguments."""
    return trace(fn, call_of(fn, args, **options))


def prepared(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh | str, **options: Any
) -> Prepared:
    """Everything up to the `Problem`; `options` are those of `optimize`."""
    jit_names = (
        "static_argnums",
        "static_argnames",
        "donate_argnums",
        "donate_argnames",
    )
    jit = JitOptions(**{name: options[name] for name in jit_names if name in options})
    others = {name: value for name, value in options.items() if name not in jit_names}
    request, call = make_request(fn, args, mesh, jit=jit, **others)

    return prepare(request, call)


def layout_of(made: Prepared, *rules: str, inside: bool = True) -> Layout:
    """A layout of axis rules written as text."""
    return Layout(made.problem, tuple(map(AxisRule.parse, rules)), inside)


class Axes:
    """Axis classes of a function, asked for by leaf path: `axes["x"]` is the axes of the dimensions
    of that leaf."""

    def __init__(
        self, fn: Callable[..., Any], *args: Any, carry: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.program = traced(fn, *args).program
        self.classes: AxisClasses = axis_classes(self.program, carry)

    def __getitem__(self, path: str) -> tuple[int, ...]:
        names = (*self.program.input_paths, *self.program.output_paths)
        values = (*self.program.body.inputs, *self.program.body.outputs)
        return self.classes.of_value[values[names.index(path)].index]


__all__ = ["NO_AXIS", "Axes", "array", "call_of", "layout_of", "mesh_of", "prepared", "traced"]
