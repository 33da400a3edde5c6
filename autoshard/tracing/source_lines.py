"""Where in the user's code an equation comes from."""

from __future__ import annotations

from autoshard.jax_internals import jaxprs
from autoshard.tracing.program import Eqn


def frames_of(eqn: Eqn) -> tuple[tuple[str, int, int, int, int], ...]:
    """File, first line and column, last line and column of each call an equation was made in,
    innermost first.

    Frames of jax itself are left out; columns are UTF-8 bytes from 0, as in `ast`.
    """
    return jaxprs.frames_of(eqn.origin)


def name_stack_of(eqn: Eqn) -> str:
    """Name scopes and transformations an equation was made under
    (`transpose(jvp(loss))/rematted_computation`).
    """
    return str(eqn.origin.source_info.name_stack)


def source_line(eqn: Eqn) -> str:
    """`file.py:line` of the user's code an equation came from, "" where jax kept none."""
    name, line = jaxprs.source_of(eqn.origin)
    return f"{name.rsplit('/', 1)[-1]}:{line}" if name else ""
