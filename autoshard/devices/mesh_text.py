"""Meshes as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autoshard.errors import MeshError

if TYPE_CHECKING:
    pass


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
