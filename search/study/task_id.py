"""Names of a study's tasks: typed in the program, text only in the storage.

| written                      | what is recorded under it                                         |
|------------------------------|-------------------------------------------------------------------|
| `quick KEY`                  | a candidate, compiled quickly for a target                        |
| `compile KEY`                | a candidate, compiled                                             |
| `full KEY`                   | a candidate, compiled for a target as it would run                |
| `verify KEY`                 | a candidate, its outputs compared with a reference                |
| `measure DIGEST [NONCE]`     | candidates that were measured against each other                  |
| `choice PURPOSE N SETTINGS`  | keys of the candidates chosen for a purpose the Nth time          |
| `propose SETTINGS`           | the proposals                                                     |
| `identity`                   | what the study is for                                             |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self


class TaskKind(enum.StrEnum):
    """What a task does; later ones of those about candidates say more of a candidate."""

    QUICK = "quick"
    COMPILE = "compile"
    FULL = "full"
    VERIFY = "verify"
    MEASURE = "measure"
    CHOICE = "choice"
    PROPOSE = "propose"
    IDENTITY = "identity"


COMPILATIONS = (TaskKind.QUICK, TaskKind.COMPILE, TaskKind.FULL)
"""Kinds of which one task is one evaluation of a candidate."""

EVALUATIONS = (*COMPILATIONS, TaskKind.VERIFY, TaskKind.MEASURE)
"""Kinds that record candidates; the later one says more."""


@dataclass(frozen=True, slots=True)
class TaskId:
    """The name of a task.

    Attributes:
        kind: What it does.
        parts: What it does it with; neither empty nor with white space in it.

    >>> str(TaskId(TaskKind.COMPILE, ("3fa9",)))
    'compile 3fa9'
    >>> TaskId.parse("choice smallest 1 9c01").parts
    ('smallest', '1', '9c01')
    """

    kind: TaskKind
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.split() != [part]:
                raise ValueError(f"{part!r} is no part of a task's name")

    def __str__(self) -> str:
        return " ".join((self.kind, *self.parts))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The task of a name as `str` writes it.

        Raises:
            ValueError: If it is no name of a task.
        """
        kind, *parts = text.split(" ")
        return cls(TaskKind(kind), tuple(parts))

    @classmethod
    def choice(cls, purpose: str, number: int, settings: str) -> Self:
        """The choice of candidates for a purpose.

        Args:
            purpose: One word.
            number: Of the choices for this purpose, from 1.
            settings: Digest of what the choice depends on.
        """
        return cls(TaskKind.CHOICE, (purpose, str(number), settings))

    @property
    def key(self) -> str:
        """The candidate's key, of a task about one; else the first part, "" where there is none."""
        return self.parts[0] if self.parts else ""

    @property
    def purpose(self) -> str:
        """Of a choice; "" of other tasks."""
        return self.key if self.kind is TaskKind.CHOICE else ""


IDENTITY = TaskId(TaskKind.IDENTITY)
