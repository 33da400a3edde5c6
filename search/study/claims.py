"""Claims on tasks and their results, as trials of a study; what they mean is in `task_queue`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autoshard.errors import StudyError
from autoshard.search.study.task_id import TaskId

StudyTrial = FrozenTrial
"""A task's claim or result; what it means is in the docstring of `task_queue`."""

CLAIM = "claim"
"""One attribute for all of a claim: a database takes several statements for each."""

DECIDED = "decided"
"""Attribute of a claim: what its worker had decided, or found decided, before. So a decision whose
own record is lost is known for as long as anything is left that follows from it."""

ENDED = "ended"
"""Attribute of a claim that ended without a result: how it did."""

STALE = "stale"
"""Its worker is taken to have died on the task."""

RELEASED = "released"
"""Its worker stopped, and the task is not to blame."""

WITHDRAWN = "withdrawn"
"""Another worker holds the task."""

RECORD_PART_CHARS = 60_000
"""Characters of a record in one attribute. MySQL's TEXT holds 65,535 bytes, and records are ASCII
(`json.dumps`); `test_the_first_value_of_a_name_stays` writes one of several parts."""


DIGEST_CHARS = 16
"""Of the digest before a record; a multiple of 2. Chosen by hand: as long as a candidate's key."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has a task, or had it.

    Attributes:
        task: The task.
        title: The same for people.
        owner: Host and process.
        nonce: Tells two claims of a process apart.
        lease_s: Without a heartbeat for this long it is stale.
    """

    task: TaskId
    title: str
    owner: str
    nonce: str
    lease_s: float

    def attribute(self) -> dict[str, Any]:
        """As an attribute of a trial."""
        return {**asdict(self), "task": str(self.task)}


_FIELDS = frozenset(field.name for field in fields(Claim))


@functools.lru_cache(maxsize=2**16)  # a worker that waits reads thousands of claims every second
def _parsed(task: str) -> TaskId | None:
    try:
        return TaskId.parse(task)
    except ValueError:
        return None


def _claim_attribute(trial: FrozenTrial) -> tuple[TaskId, dict[str, Any]] | None:
    """The task and the written fields of a claim; None for a trial that is something else."""
    written = trial.user_attrs.get(CLAIM)
    if not isinstance(written, dict) or written.keys() != _FIELDS:
        return None
    if not isinstance(written["task"], str):
        return None
    task = _parsed(written["task"])
    return None if task is None else (task, written)


def claim_of(trial: FrozenTrial) -> Claim | None:
    """The claim that a trial is; None for a trial that is something else."""
    attribute = _claim_attribute(trial)
    if attribute is None:
        return None
    task, written = attribute
    return Claim(**{**written, "task": task})


@dataclass(frozen=True)
class Claims:
    """The tasks of a study, as its trials state them.

    Attributes:
        results: The trial that records a task's result.
        records: What was recorded.
        live: The claim that holds a task.
        deaths: How often workers died on a task.
        unreadable: Why a record counts as none, by number of its trial.
        decided: Decisions by name of their task, as claims made afterwards state them; None for one
            that was too long to be stated.
    """

    results: Mapping[TaskId, FrozenTrial]
    records: Mapping[TaskId, Any]
    live: Mapping[TaskId, FrozenTrial]
    deaths: Counter[TaskId]
    unreadable: Mapping[int, str]
    decided: Mapping[str, Any]

    @classmethod
    def of(cls, trials: Sequence[FrozenTrial], reader: RecordReader | None = None) -> Claims:
        """Reads the trials of a study in order of number; of two claims the first holds."""
        reader = reader or RecordReader()
        results: dict[TaskId, FrozenTrial] = {}
        records: dict[TaskId, Any] = {}
        unfinished: dict[TaskId, FrozenTrial] = {}
        deaths: Counter[TaskId] = Counter()
        unreadable: dict[int, str] = {}
        decided: dict[str, Any] = {}
        for trial in trials:
            attribute = _claim_attribute(trial)  # no `Claim` for each of thousands
            if attribute is None:
                continue
            task, _ = attribute
            _add_decided(decided, trial)
            if trial.state == TrialState.FAIL:
                deaths[task] += trial.user_attrs.get(ENDED) == STALE
            elif not trial.state.is_finished():
                unfinished.setdefault(task, trial)
            elif task not in results:
                record, fault = reader.read(trial)
                if fault:
                    unreadable[trial.number] = fault
                else:
                    results[task], records[task] = trial, record

        live = {task: trial for task, trial in unfinished.items() if task not in results}
        return cls(results, records, live, deaths, unreadable, decided)

    def record(self, task: TaskId) -> Any:
        """What was recorded of a task."""
        return self.records[task]


def _add_decided(decided: dict[str, Any], trial: FrozenTrial) -> None:
    written = trial.user_attrs.get(DECIDED)
    if isinstance(written, dict):
        for name, value in written.items():
            if decided.get(name) is None:
                decided[name] = value


@dataclass(eq=False)
class RecordReader:
    """Reads the record of each finished trial once: they stay as they are."""

    _read: dict[int, tuple[FrozenTrial, Any, str]] = field(default_factory=dict)

    def read(self, trial: FrozenTrial) -> tuple[Any, str]:
        """The record, and why there is none that counts; "" where there is."""
        before = self._read.get(trial._trial_id)
        if before is None or before[0] is not trial:
            try:
                before = trial, record_of(trial), ""
            except StudyError as error:
                before = trial, None, str(error)
            self._read[trial._trial_id] = before
        return before[1], before[2]


def record_of(trial: FrozenTrial) -> Any:
    """The record in a finished trial.

    Raises:
        StudyError: If it cannot be read, or was written for another claim.
    """
    parts: list[str] = []
    while isinstance(part := trial.user_attrs.get(f"record.{len(parts)}"), str):
        parts.append(part)
    digest, text = "".join(parts)[:DIGEST_CHARS], "".join(parts)[DIGEST_CHARS:]
    claim = claim_of(trial)
    task = "anything" if claim is None else repr(str(claim.task))
    try:
        if claim is None or digest != _digest(claim, text):
            raise ValueError("it is damaged, or another claim's" if parts else "it is missing")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StudyError(
            f"trial {trial.number} of the study has no readable record of {task} ({error})"
        ) from None


def record_attributes(claim: Claim, record: Any) -> dict[str, str]:
    """A record as attributes of the trial that is this claim, in parts that every storage takes."""
    text = json.dumps(record, separators=(",", ":"))
    text = _digest(claim, text) + text
    starts = range(0, len(text), RECORD_PART_CHARS)
    return {
        f"record.{i}": text[start : start + RECORD_PART_CHARS] for i, start in enumerate(starts)
    }


def _digest(claim: Claim, text: str) -> str:
    """Of a record under its claim: it counts for this one only, in whatever trial it is found."""
    whole = "\n".join((str(claim.task), claim.nonce, text)).encode()
    return hashlib.blake2b(whole, digest_size=DIGEST_CHARS // 2).hexdigest()
