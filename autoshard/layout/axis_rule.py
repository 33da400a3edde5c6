"""Axis rules: which logical axis goes to which mesh axis, and where."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Literal

from autoshard.arguments import check_kind
from autoshard.errors import RuleError

Occurrence = Literal["first", "last"]


class ScopeKind(enum.StrEnum):
    """Where an axis rule holds, but for the logical axis that a condition names."""

    EVERYWHERE = "everywhere"
    OPTIMIZER = "optimizer"
    WITH = "with"
    WITHOUT = "without"


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an axis rule holds.

    Attributes:
        kind: Everywhere, in the optimizer alone (its state, and what is computed from that before
            it meets the parameters: ZeRO-1), or in values that have (`WITH`) or do not have
            (`WITHOUT`) another logical axis.
        logical_axis: The other logical axis of a condition, "" without one.

    >>> str(Scope.parse("with emb.1")), Scope.parse("everywhere") == EVERYWHERE
    ('with emb.1', True)
    """

    kind: ScopeKind
    logical_axis: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.logical_axis}".rstrip()

    @property
    def is_condition(self) -> bool:
        """True where the scope depends on another logical axis of the same value."""
        return self.kind in (ScopeKind.WITH, ScopeKind.WITHOUT)

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Reads what `str` prints.

        Raises:
            RuleError: If the text is no scope.
        """
        kind, _, logical_axis = text.partition(" ")
        if kind in set(ScopeKind):
            scope = cls(ScopeKind(kind), logical_axis)
            if scope.is_condition == bool(logical_axis):
                return scope
        raise RuleError(
            f"({text}) does not say where a rule holds. Use 'everywhere', 'optimizer', "
            f"'with AXIS' or 'without AXIS'."
        )


EVERYWHERE = Scope(ScopeKind.EVERYWHERE)
OPTIMIZER = Scope(ScopeKind.OPTIMIZER)

# `logical axis->mesh axis (scope) @occurrence`. `axes.logical_axes` replaces the characters that
# would be ambiguous here (spaces, parentheses, `@` and `->`) in the names that it gives.
_TEXT = re.compile(
    r"\s*(?P<logical_axis>\S+?)\s*->\s*(?P<mesh_axis>[^\s()@][^()@]*?)"
    r"(?:\s+\((?P<where>[^)]*)\))?"
    r"(?:\s+@(?P<occurrence>first|last))?\s*"
)


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One axis rule.

    Attributes:
        logical_axis: Name of the logical axis.
        mesh_axis: Name of the mesh axis.
        occurrence: Which dimension it takes where the logical axis occurs twice in one value.
        where: In which values it holds; text is read by `Scope.parse`.

    >>> str(AxisRule("wq.1", "model"))
    'wq.1->model'
    >>> AxisRule.parse("emb.1->data (optimizer)").where == OPTIMIZER
    True
    """

    logical_axis: str
    mesh_axis: str
    occurrence: Occurrence = "first"
    where: Scope = EVERYWHERE

    def __post_init__(self) -> None:
        axes: tuple[object, ...] = (self.logical_axis, self.mesh_axis)
        for axis in axes:
            if not isinstance(axis, str) or not axis:
                raise RuleError(
                    f"AxisRule({self.logical_axis!r}, {self.mesh_axis!r}): both axes are names, "
                    f"such as AxisRule('wq.1', 'model')."
                )
        if self.occurrence not in ("first", "last"):
            raise RuleError(f"occurrence={self.occurrence!r}; use 'first' or 'last'.")
        where: object = self.where
        if not isinstance(where, Scope):
            object.__setattr__(self, "where", Scope.parse(str(where)))

    def __str__(self) -> str:
        text = f"{self.logical_axis}->{self.mesh_axis}"
        if self.where != EVERYWHERE:
            text += f" ({self.where})"
        if self.occurrence != "first":
            text += f" @{self.occurrence}"
        return text

    @classmethod
    def parse(cls, text: str) -> AxisRule:
        """Reads what `str` prints.

        Raises:
            RuleError: If the text is no axis rule.
        """
        check_kind("text", text, str, "text such as 'wq.1->model'", RuleError)
        match = _TEXT.fullmatch(text)
        if match is None:
            raise RuleError(
                f"{text!r} is no axis rule. Write 'logical axis->mesh axis', for example "
                f"'wq.1->model'."
            )
        occurrence: Occurrence = "last" if match["occurrence"] == "last" else "first"
        where = Scope.parse(match["where"]) if match["where"] else EVERYWHERE
        return cls(match["logical_axis"], match["mesh_axis"], occurrence, where)
