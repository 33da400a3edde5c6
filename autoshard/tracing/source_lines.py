"""Where in the user's code an equation comes from."""

from __future__ import annotations

from autoshard.jax_internals import jaxprs
from autoshard.tracing.program import Eqn


def frames_of(eqn: Eqn) -> tuple[tuple[str, int, int, int, int], ...]:
    """File and extent of each call an equation was traced in, innermost first.

    The extent: first line, first column, last line, last column. Frames of jax itself are left out;
    lines count from 1, columns are UTF-8 bytes from 0, as in `ast`.
    """
    return jaxprs.frames_of(eqn.origin)


def name_stack_of(eqn: Eqn) -> str:
    """Name scopes and transformations around it (`transpose(jvp(loss))/rematted_computation`)."""
    return jaxprs.name_stack_of(eqn.origin)


def source_line(eqn: Eqn) -> str:
    """`file.py:line` of the user's code an equation came from, "" where jax kept none."""
    name, line = jaxprs.source_of(eqn.origin)
    return f"{name.rsplit('/', 1)[-1]}:{line}" if name else ""
