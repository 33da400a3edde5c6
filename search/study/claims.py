"""Claims on tasks and their results, as trials of a study; what they mean is in `task_queue`."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autoshard.errors import StudyError
from autoshard.search.study.task_id import TaskId

StudyTrial = FrozenTrial
"""A task's claim or result; what it means is in the docstring of `task_queue`."""

CLAIM = "claim"
"""One attribute for all of a claim: a database takes several statements for each."""

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
        live: The claim that holds a task.
        deaths: How often workers died on a task.
    """

    results: Mapping[TaskId, FrozenTrial]
    live: Mapping[TaskId, FrozenTrial]
    deaths: Counter[TaskId]

    @classmethod
    def of(cls, trials: Sequence[FrozenTrial]) -> Claims:
        """Reads the trials of a study in order of number; of two claims the first holds."""
        results: dict[TaskId, FrozenTrial] = {}
        unfinished: dict[TaskId, FrozenTrial] = {}
        deaths: Counter[TaskId] = Counter()
        for trial in trials:
            attribute = _claim_attribute(trial)  # no `Claim` for each of thousands
            if attribute is None:
                continue
            task, _ = attribute
            if trial.state == TrialState.FAIL:
                deaths[task] += trial.user_attrs.get(ENDED) == STALE
            elif trial.state.is_finished():
                results.setdefault(task, trial)
            else:
                unfinished.setdefault(task, trial)

        live = {task: trial for task, trial in unfinished.items() if task not in results}
        return cls(results, live, deaths)

    def record(self, task: TaskId) -> Any:
        """What was recorded of a task.

        Raises:
            StudyError: If it cannot be read.
        """
        return record_of(self.results[task])


def record_of(trial: FrozenTrial) -> Any:
    """The record in a finished trial.

    Raises:
        StudyError: If it cannot be read.
    """
    parts: list[str] = []
    while isinstance(part := trial.user_attrs.get(f"record.{len(parts)}"), str):
        parts.append(part)
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError) as error:
        claim = claim_of(trial)
        task = "anything" if claim is None else repr(str(claim.task))
        raise StudyError(
            f"trial {trial.number} of the study has no readable record of {task} ({error}). "
            f"Was it written by something else? Choose another --study name."
        ) from None


def record_attributes(record: Any) -> dict[str, str]:
    """A record as attributes of a trial, in parts that every storage takes."""
    text = json.dumps(record, separators=(",", ":"))
    starts = range(0, len(text), RECORD_PART_CHARS)
    return {
        f"record.{i}": text[start : start + RECORD_PART_CHARS] for i, start in enumerate(starts)
    }
