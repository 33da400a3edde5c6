"""Lines of a journal file, and the history that they tell.

A line is a record of Optuna's journal format with two fields more. `at` says where it belongs: its
number among the lines, and how many studies and trials there were before it. `digest` is that of
all before it. So a line that was damaged is known, a line that is there twice counts once, lines
in another order are put back in theirs, and where one is missing the studies and trials after it
keep their numbers: Optuna numbers them by counting, and its other records refer to those numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.storages.journal._storage import JournalOperation
from optuna.trial import TrialState

Record = dict[str, Any]

_DIGEST_FIELD = b',"digest":"'
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose digest is right.

    Attributes:
        record: Of Optuna's journal.
        number: Among all lines.
        studies: How many there were before.
        trials: How many there were before, in all studies.
        digest: Of the line.
    """

    record: Record
    number: int
    studies: int
    trials: int
    digest: bytes


def parse_line(text: bytes) -> Line | None:
    """A line as it was written; None for anything else."""
    body, field_name, rest = text.rpartition(_DIGEST_FIELD)
    digest = _digest(body)
    if not field_name or rest != digest + b'"}\n':
        return None
    try:
        record = json.loads(text)
        number, studies, trials = record["at"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(type(count) is int for count in (number, studies, trials)):
        return None
    return Line(record, number, studies, trials, digest)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode()


@dataclass(eq=False)
class History:
    """What the lines of a journal tell, in order.

    Attributes:
        digests: Of the lines; None for one that is lost.
        records: For Optuna, placeholders of lost studies and trials among them.
        studies: Names.
        trials: Their count, in all studies.
        lost: Lines that are lost.
    """

    digests: list[bytes | None] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    studies: list[str] = field(default_factory=list)
    trials: int = 0
    lost: int = 0

    @classmethod
    def of(cls, lines: Iterable[Line]) -> History:
        """The history of lines in any order, some of them missing or there twice."""
        history = cls()
        # Sorting is stable: of lines with one number the first in the file comes first.
        ordered = sorted(lines, key=lambda line: line.number)
        names: dict[int, str] = {}
        for line in ordered:
            study_id, name = line.record.get("study_id"), line.record.get("study")
            if isinstance(study_id, int) and isinstance(name, str):
                names.setdefault(study_id, name)
        for line in ordered:
            if line.number < len(history.digests):
                continue  # there twice, or written late with a number that another has
            history._fill_up(line, names)
            if history.follows(line):
                history.add(line)
            else:
                history._append(None)
        return history

    def _fill_up(self, line: Line, names: dict[int, str]) -> None:
        """Puts placeholders where what comes before a line is lost."""
        while len(self.digests) < line.number:
            self._append(None)
        while len(self.studies) < line.studies:
            study_id = len(self.studies)
            self._create_study(names.get(study_id, f"lost {study_id}"))
        while self.studies and self.trials < line.trials:
            self.trials += 1
            self.records.append(_placeholder(0))

    def _create_study(self, name: str) -> None:
        self.studies.append(name)
        operation = int(JournalOperation.CREATE_STUDY)
        record = {"op_code": operation, "worker_id": "", "study_name": name, "directions": [1]}
        self.records.append(record)

    def _append(self, digest: bytes | None) -> None:
        self.digests.append(digest)
        self.lost += digest is None

    def follows(self, line: Line) -> bool:
        """True for a line that was written after just this history."""
        here = len(self.digests), len(self.studies), self.trials
        return (line.number, line.studies, line.trials) == here

    def add(self, line: Line) -> None:
        """Adds a line that follows."""
        self._append(line.digest)
        self._count(line.record)
        self.records.append(line.record)

    def _count(self, record: Record) -> None:
        """Counts studies and trials as Optuna does."""
        operation = record.get("op_code")
        if operation == JournalOperation.CREATE_STUDY:
            name = record.get("study_name")
            if name not in self.studies:
                self.studies.append(str(name))
        elif operation == JournalOperation.CREATE_TRIAL:
            self.trials += self._name_of(record) is not None

    def _name_of(self, record: Record) -> str | None:
        """Name of the study that a record is about; None without one."""
        study_id = record.get("study_id")
        if isinstance(study_id, int) and 0 <= study_id < len(self.studies):
            return self.studies[study_id]
        return None

    def lines_after(self, records: Sequence[Record]) -> list[bytes]:
        """Lines of records that are to follow this history, which stays as it is."""
        after = History([], [], list(self.studies), self.trials)
        lines = []
        for number, record in enumerate(records, start=len(self.digests)):
            text: Record = {**record, "at": [number, len(after.studies), after.trials]}
            if record.get("op_code") == JournalOperation.CREATE_TRIAL:
                text["study"] = after._name_of(record)
            body = json.dumps(text, separators=(",", ":"))[:-1].encode()
            lines.append(body + _DIGEST_FIELD + _digest(body) + b'"}\n')
            after._count(record)
        return lines


def placeholder_of(record: Record) -> Record | None:
    """What takes the number of a trial whose record Optuna does not understand; None for a record
    of anything else.
    """
    study_id = record.get("study_id")
    if record.get("op_code") != JournalOperation.CREATE_TRIAL or not isinstance(study_id, int):
        return None
    return _placeholder(study_id)


def _placeholder(study_id: int) -> Record:
    return {
        "op_code": int(JournalOperation.CREATE_TRIAL),
        "worker_id": "",
        "study_id": study_id,
        "datetime_start": None,
        "state": int(TrialState.FAIL),
    }
