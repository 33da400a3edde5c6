"""What workers of one search share: evidence of candidates, decisions of the first who makes them,
and the proposals.

Who evaluates which candidate is told by `evaluate.shared_evaluator`; every worker goes through the
same selection with the same evidence, so all come to the same winner.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from autoshard.cost_model.predict import Predictor
from autoshard.errors import ArgumentError, RuleError, StudyError
from autoshard.evidence.candidate import Candidate, Origin, Skipped
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Problem
from autoshard.search.proposer import Proposal, Proposals
from autoshard.search.study.lease_watch import LEASE_S
from autoshard.search.study.passwords import without_password
from autoshard.search.study.storage import PATIENCE_S
from autoshard.search.study.task_id import EVALUATIONS, IDENTITY, TaskId, TaskKind
from autoshard.search.study.task_queue import CAPABILITIES, Capability, Result, Task, TaskQueue

log = logging.getLogger("autoshard.jobs")

ANSWER = "answer"
"""Under this name a study has the winner of the search that ended last."""

KEPT = 400
"""Proposals that a study keeps: the best, and besides them every preset and the smallest. Some ten
times what is ever compiled, and 100 kB in the storage; `tests/jobs/test_workers.py` goes through
them."""

_PARTS_OF_NAME = ("program", "leaf names", "jax", "autoshard")
"""Of the identity of a study: what decides which proposals and evidence can be read at all."""

_NAME_DIGITS = 16
"""Hexadecimal, 64 bits: names that collide are found out by the identity, but then a study must be
named by hand. Chosen by hand; no test depends on it."""

KEPT_SMALLEST = 40
"""For searches in which nothing fits: `selection` then compiles a dozen of the smallest."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a worker takes part in a stored study.

    Attributes:
        needs: What it does: `predict` (any machine), `compile` (any machine with the devices or the
            target), `measure` (the real devices, also for verifying; one worker at a time on a
            machine). For the rest it waits for others.
        lease_s: A worker that shows no life for this long has lost its task.
        patience_s: How long the storage may be away, and other processes of one search may take to
            answer.
        again: Measure once more what was measured before, on this machine.
        run_limit_s: A task (proposing, compiling, verifying, measuring) that takes longer has
            failed. What hangs in the compiler or on the devices cannot be stopped: this process
            ends with exit code 70, to be started again. None for as long as it takes; other workers
            may then have the task after an hour.
    """

    needs: tuple[Capability, ...] = CAPABILITIES
    lease_s: float = LEASE_S
    patience_s: float = PATIENCE_S
    again: bool = False
    run_limit_s: float | None = None

    def __post_init__(self) -> None:
        odd = [need for need in self.needs if need not in CAPABILITIES]
        if odd or not self.needs:
            raise ArgumentError(f"needs={self.needs!r}: choose from {', '.join(CAPABILITIES)}.")
        limits_hold = self.lease_s > 0 and self.patience_s >= 0
        if not limits_hold or (self.run_limit_s is not None and self.run_limit_s <= 0):
            raise ArgumentError(
                f"{self!r}: lease_s and run_limit_s must be more than 0, patience_s at least 0."
            )


def study_name(identity: Mapping[str, str]) -> str:
    """The name of the study of a search where the user gives none.

    Another program, other leaf names and other versions each have a study of their own; a search
    on other hardware or under another budget comes to the same one, which then says what differs.

    Args:
        identity: What the study is for; `_stages` writes it.
    """
    of_name = "\n".join(identity[part] for part in _PARTS_OF_NAME)
    digest = hashlib.sha256(of_name.encode()).hexdigest()[:_NAME_DIGITS]
    return f"autoshard-{digest}-{identity['mesh']}"


@contextmanager
def join(
    storage: str | Path | None,
    study: str | None,
    sharing: Sharing,
    identity: Mapping[str, str],
    settings: str,
) -> Iterator[SharedStudy]:
    """The study of a search, in memory where no storage is named.

    Args:
        storage: See `search.study.storage.open_storage`.
        study: Its name; by default that of `study_name`.
        sharing: What this worker does.
        identity: What the study is for (program, mesh, hardware, versions).
        settings: See `SharedStudy`.

    Raises:
        StudyError: If the stored study is for something else; the difference is named.
    """
    where = None if storage is None else str(storage)
    name = study or study_name(identity)
    with TaskQueue(
        where,
        name,
        capabilities=sharing.needs,
        lease_s=sharing.lease_s,
        patience_s=sharing.patience_s,
        limit_s=sharing.run_limit_s,
    ) as queue:
        shared = SharedStudy(queue, settings, again=sharing.again)
        shared.check(identity, f"{name!r} in {where}")
        yield shared


class SharedStudy:
    """The evidence and the decisions of one search, as its workers share them."""

    def __init__(self, queue: TaskQueue, settings: str = "", *, again: bool = False) -> None:
        """Joins a study.

        Args:
            queue: The tasks of the study.
            settings: What its choices depend on beyond what the study is for (budget, effort,
                seed); evidence is shared between settings, choices are not.
            again: Measure once more what was measured before.
        """
        self.again = again
        self.queue = queue
        self._settings = hashlib.sha256(settings.encode()).hexdigest()[:8]
        self._choices: Counter[str] = Counter()

    def check(self, identity: Mapping[str, str], where: str) -> None:
        """Refuses a study that belongs to something else.

        Raises:
            StudyError: Naming the difference.
        """
        claims = self.queue.read()
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:8]
        lost = IDENTITY not in claims.results and claims.decided.get(str(IDENTITY)) is not None
        if lost and claims.decided[str(IDENTITY)] != digest:
            raise StudyError(
                f"study {without_password(where)} is for something else; the record of what for is "
                f"damaged. Choose another --study name, or another storage."
            )
        stored = self.queue.setdefault(IDENTITY, dict(identity))
        if stored == dict(identity):
            self.queue.decided[str(IDENTITY)] = digest
            return
        there = stored if isinstance(stored, dict) else {}
        differences = []
        for name, here in identity.items():
            if there.get(name) != here:
                differences.append(f"{name}: {there.get(name)!r} there, {here!r} here")
        raise StudyError(
            f"study {without_password(where)} is for something else ({'; '.join(differences)}). "
            f"Choose another --study name, or another storage."
        )

    def known(self) -> dict[str, Candidate]:
        """What the study has of candidates, by key."""
        claims = self.queue.read()
        known: dict[str, Candidate] = {}
        for kind in EVALUATIONS:
            for task in claims.results:
                if task.kind is not kind:
                    continue
                for key, candidate in candidates_of(claims.record(task)).items():
                    if kind is TaskKind.MEASURE or key == task.key:  # a measurement is of several
                        known[key] = candidate
        return known

    def choose(self, purpose: str, choice: Callable[[], Sequence[str]]) -> list[str]:
        """Keys of the candidates that any worker with these settings chose first for a purpose.

        Args:
            purpose: What for; a second choice for it is another choice.
            choice: Chooses; not called where that was done.

        Raises:
            StudyError: If it was done, and both its record and what claims state of it are lost:
                from what is known by now another choice might follow.
        """
        self._choices[purpose] += 1
        name = TaskId.choice(purpose, self._choices[purpose], self._settings)
        claims = self.queue.read()
        stated = claims.decided.get(str(name))
        if name in claims.results or str(name) not in claims.decided:
            keys = self._chosen(name, choice)
        elif stated is not None:
            log.warning("the record of %r is lost; it is restored from a claim", str(name))
            keys = self.queue.setdefault(name, stated)
        else:
            raise StudyError(
                f"the study is damaged: which candidates were chosen ({str(name)!r}) is lost, and "
                f"workers have gone on from it. Put back an earlier copy of the storage, or choose "
                f"another --study name."
            )
        self.queue.decided[str(name)] = keys
        return keys

    def _chosen(self, name: TaskId, choice: Callable[[], Sequence[str]]) -> list[str]:
        """The record of a choice, made here if nobody did; one worker at a time chooses, so there
        is one record.
        """

        def give_up(reason: str) -> Result:
            raise StudyError(
                f"choosing candidates: {reason}. Run autoshard search without a storage to see why."
            )

        title = f"choose candidates ({name.purpose})"
        task = Task(lambda: Result(list(choice())), give_up, None, title)
        keys: list[str] = self.queue.run({name: task})[name]
        return keys

    def conclude(self, winner: Candidate) -> None:
        """Notes the answer of this search, for `autoshard status`; the last one stands."""
        if not self.queue.alone:
            self.queue.note(ANSWER, winner.to_dict())

    def propose(
        self, make: Callable[[], Proposals], problem: Problem, predictor: Predictor
    ) -> Proposals:
        """The proposals of the worker who made them; they are predicted anew here, which takes
        little.
        """
        if self.queue.alone:
            return make()
        own: list[Proposals] = []

        def run() -> Result:
            proposals = make()
            if proposals.interrupted:
                raise KeyboardInterrupt
            own.append(replace(proposals, ranked=_kept(proposals.ranked)))
            return Result(_written(own[0]))

        def give_up(reason: str) -> Result:
            raise StudyError(
                f"proposing candidates: {reason}. Run autoshard search without a storage to see "
                f"why."
            )

        task = TaskId(TaskKind.PROPOSE, (self._settings,))
        records = self.queue.run({task: Task(run, give_up, "predict", "propose candidates")})
        return own[0] if own else _read(records[task], problem, predictor)

    def abandon(self, reason: str, failed: bool) -> None:
        """Ends the task in work: its process is about to end, because the task `failed` or for
        another reason.
        """
        self.queue.abandon(f"running failed: {reason}" if failed else None)


def candidates_of(record: Any) -> dict[str, Candidate]:
    """The candidates in a record of a task, by key.

    Raises:
        StudyError: If it has none.
    """
    try:
        candidates = msgspec.convert(record["candidates"], list[Candidate])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise StudyError(
            f"the study has evidence that cannot be read ({error}). Was it written by another "
            f"version of autoshard? Choose another --study name."
        ) from None
    return {candidate.key: candidate for candidate in candidates}


def _kept(ranked: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """The proposals that a study keeps."""
    by_peak = sorted(ranked, key=lambda p: (p.prediction.peak_bytes, p.key))
    smallest = {p.key for p in by_peak[:KEPT_SMALLEST]}
    others = [p for p in ranked[KEPT:] if p.preset is not None or p.key in smallest]
    return (*ranked[:KEPT], *others)


def _written(proposals: Proposals) -> dict[str, Any]:
    """Proposals as plain builtins."""
    ranked = [[p.name, p.origin, p.key, *map(str, p.layout.rules)] for p in proposals.ranked]
    skipped = [[s.name, s.reason] for s in proposals.skipped]
    return {"ranked": ranked, "skipped": skipped, "evaluations": proposals.evaluations}


def _read(record: Any, problem: Problem, predictor: Predictor) -> Proposals:
    """What `_written` wrote, predicted anew.

    Raises:
        StudyError: If it is something else.
    """
    try:
        ranked = []
        for name, origin, key, *rules in record["ranked"]:
            layout = Layout(problem, tuple(map(AxisRule.parse, rules)))
            prediction = predictor.predict(layout)
            ranked.append(Proposal(str(name), Origin(origin), layout, str(key), prediction))
        skipped = tuple(Skipped(str(name), str(reason)) for name, reason in record["skipped"])
        evaluations = int(record["evaluations"])
    except (KeyError, TypeError, ValueError, RuleError) as error:
        raise StudyError(
            f"the study has proposals that cannot be read ({type(error).__name__}: {error}). Was "
            f"it written by another version of autoshard? Choose another --study name."
        ) from None
    return Proposals(tuple(ranked), skipped, evaluations=evaluations)
