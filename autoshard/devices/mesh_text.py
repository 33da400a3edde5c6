"""Meshes as text: `data=4,model=2`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoshard.errors import MeshError

_AXIS = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\d+)\s*$")


def parse_axes(text: str) -> dict[str, int]:
    """Axis sizes of a mesh string.

    >>> parse_axes("data=4,model=2")
    {'data': 4, 'model': 2}

    Raises:
        MeshError: If the text is not `name=size,name=size`.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.match(part)
        if match is None or int(match[2]) < 1 or match[1] in axes:
            raise MeshError(
                f"mesh={text!r}: cannot read {part!r}. Write distinct names with sizes >= 1, such "
                f"as 'data=4,model=2'."
            )
        axes[match[1]] = int(match[2])
    return axes


def axes_text(axes: Mapping[str, int]) -> str:
    """A mesh string of axis sizes.

    >>> axes_text({"data": 4, "model": 2})
    'data=4,model=2'
    """
    return ",".join(f"{name}={size}" for name, size in axes.items())
