"""What a study's trials say of its tasks: claims, results, deaths of workers. What they mean is in
`tasks`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autoshard.errors import StudyError

StudyTrial = FrozenTrial
"""A task's claim or result; what it means is in the docstring of `tasks`."""

CLAIM = "claim"
"""One attribute for all of a claim: a database takes several statements for each."""

PART = 60_000
"""Characters of an attribute; MySQL's TEXT holds 65,535 bytes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has a task, or had it.

    Attributes:
        task: The task.
        title: The same for people.
        owner: Host and process.
        nonce: Tells two claims of a process apart.
        lease_s: Without a beat for this long it is stale.
    """

    task: str
    title: str
    owner: str
    nonce: str
    lease_s: float


_FIELDS = frozenset(field.name for field in fields(Claim))


def _written_claim(trial: FrozenTrial) -> dict[str, Any] | None:
    written = trial.user_attrs.get(CLAIM)
    return written if isinstance(written, dict) and written.keys() == _FIELDS else None


def claim_of(trial: FrozenTrial) -> Claim | None:
    """The claim that a trial is; None for a trial that is something else."""
    written = _written_claim(trial)
    return None if written is None else Claim(**written)


@dataclass(frozen=True)
class Claims:
    """What a study's trials say: results, live claims, and how often workers died on a task; by
    task.
    """

    results: Mapping[str, FrozenTrial]
    claims: Mapping[str, FrozenTrial]
    deaths: Counter[str]
    titles: Mapping[str, str]

    @classmethod
    def of(cls, trials: Sequence[FrozenTrial]) -> Claims:
        """Reads the trials of a study, in the order of their numbers."""
        results: dict[str, FrozenTrial] = {}
        claims: dict[str, FrozenTrial] = {}
        titles: dict[str, str] = {}
        deaths: Counter[str] = Counter()
        for trial in trials:
            claim = _written_claim(trial)  # no object for each of thousands
            if claim is None:
                continue
            task = claim["task"]
            titles.setdefault(task, claim["title"])
            if trial.state == TrialState.FAIL:
                deaths[task] += trial.user_attrs.get("ended") == "stale"
            elif trial.state.is_finished():
                results.setdefault(task, trial)
            else:
                claims.setdefault(task, trial)
        return cls(results, {t: c for t, c in claims.items() if t not in results}, deaths, titles)

    def record(self, task: str) -> Any:
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
        task = "anything" if claim is None else repr(claim.task)
        raise StudyError(
            f"trial {trial.number} of the study has no readable record of {task} ({error}). "
            f"Was it written by something else? Choose another --study name."
        ) from None


def attributes_of(record: Any) -> dict[str, str]:
    """A record as attributes of a trial, in parts that every storage takes."""
    text = json.dumps(record, separators=(",", ":"))
    return {
        f"record.{i}": text[i * PART : (i + 1) * PART] for i in range(max(1, -(-len(text) // PART)))
    }
