"""Where in the user's code an equation comes from."""

from __future__ import annotations

from autoshard import compat
from autoshard.program import Eqn


def frames_of(eqn: Eqn) -> tuple[tuple[str, int, int, int, int], ...]:
    """File, first line and column, last line and column of each call an equation was made in,
    innermost first.

    Frames of jax itself are left out; columns are UTF-8 bytes from 0, as in `ast`.
    """
    from jax._src import source_info_util

    frames = source_info_util.user_frames(eqn.origin.source_info.traceback)
    return tuple(
        (f.file_name, f.start_line, f.start_column, f.end_line, f.end_column) for f in frames
    )


def name_stack_of(eqn: Eqn) -> str:
    """Name scopes and transformations an equation was made under
    (`transpose(jvp(loss))/rematted_computation`).
    """
    return str(eqn.origin.source_info.name_stack)


def source_line(eqn: Eqn) -> str:
    """`file.py:line` of the user's code an equation came from, "" where jax kept none."""
    name, line = compat.source_of(eqn.origin)
    return f"{name.rsplit('/', 1)[-1]}:{line}" if name else ""
