"""Axis rules: which axis class goes to which mesh axis, where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autoshard.errors import RuleError

Occurrence = Literal["first", "last"]


EVERYWHERE = "everywhere"


OPTIMIZER = "optimizer"


_TEXT = re.compile(
    r"^\s*(?P<logical axis>\S+?)\s*->\s*(?P<axis>[^\s()@][^()@]*?)(?:\s+\((?P<where>[^)]*)\))?(?:\s+@(?P<occurrence>first|last))?\s*$"
)


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One axis rule.

    Attributes:
        logical_axis: Name of the logical axis.
        mesh_axis: Name of the mesh axis.
        occurrence: Which dimension it takes where the logical axis occurs twice in one value.
        where: `everywhere`, `optimizer` (optimizer state alone: ZeRO-1), `with AXIS` or `without
            ROLE` (true of the other logical axes of the same value).

    >>> str(AxisRule("wq.1", "model"))
    'wq.1->model'
    >>> AxisRule.parse("emb.1->data (optimizer)")
    AxisRule(role='emb.1', mesh_axis='data', occurrence='first', where='optimizer')
    """

    logical_axis: str
    mesh_axis: str
    occurrence: Occurrence = "first"
    where: str = EVERYWHERE

    def __str__(self) -> str:
        where = "" if self.where == EVERYWHERE else f" ({self.where})"
        return f"{self.logical_axis}->{self.mesh_axis}{where}" + (
            "" if self.occurrence == "first" else f" @{self.occurrence}"
        )

    @classmethod
    def parse(cls, text: str) -> AxisRule:
        """Reads what `str` prints.

        Raises:
            RuleError: If the text is no axis rule.
        """
        match = _TEXT.match(text)
        if match is None:
            raise RuleError(
                f"{text!r} is no axis rule. Write 'logical axis->mesh axis', for example 'wq.1->model'."
            )
        occurrence: Occurrence = "last" if match["occurrence"] == "last" else "first"
        return cls(match["role"], match["axis"], occurrence, match["where"] or EVERYWHERE)
