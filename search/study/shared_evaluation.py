"""A race shared by workers: its rungs as tasks of a study, its choices as decisions of the first
who makes them.

Every worker climbs the same ladder over the same evidence, so all come to the same winner; who
compiled or measured a candidate does not matter. Without a storage the study is in memory, and its
one worker does everything.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autoshard.cost_model.predict import Predictor
from autoshard.errors import ArgumentError, RuleError, StudyError
from autoshard.evidence.candidate import Candidate, Origin, Skipped
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Problem
from autoshard.search.proposer import Proposal, Proposals
from autoshard.search.study.storage import PATIENCE_S, without_password
from autoshard.search.study.task_queue import LEASE_S, NEEDS, Need, Result, Tasks, Work

log = logging.getLogger("autoshard.jobs")

RUNGS: tuple[str, ...] = ("quick", "compile", "full", "verify", "measure")
"""Of what is recorded of a candidate, the later one says more."""

KEPT = 400
"""Proposals that a study keeps: the best, and besides them every preset and the smallest."""
KEPT_SMALLEST = 40


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
        run_limit_s: Verifying or measuring a candidate that takes longer has failed. What hangs on
            the devices cannot be stopped: this process ends with exit code 70, to be started again.
            None for as long as it takes.
    """

    needs: tuple[Need, ...] = NEEDS
    lease_s: float = LEASE_S
    patience_s: float = PATIENCE_S
    again: bool = False
    run_limit_s: float | None = None

    def __post_init__(self) -> None:
        odd = [need for need in self.needs if need not in NEEDS]
        if odd or not self.needs:
            raise ArgumentError(f"needs={self.needs!r}: choose from {', '.join(NEEDS)}.")
        if not (
            self.lease_s > 0
            and self.patience_s >= 0
            and (self.run_limit_s is None or self.run_limit_s > 0)
        ):
            raise ArgumentError(
                f"{self!r}: lease_s and run_limit_s must be more than 0, patience_s at least 0."
            )


@contextmanager
def join(
    storage: str | Path | None,
    study: str | None,
    sharing: Sharing,
    identity: Mapping[str, str],
    settings: str,
) -> Iterator[Shared]:
    """The study of a search, in memory where no storage is named.

    Args:
        storage: See `search.connect.open_storage`.
        study: Its name; by default one that follows from the identity.
        sharing: What this worker does.
        identity: What the study is for (program, mesh, hardware, versions).
        settings: See `Shared`.

    Raises:
        StudyError: If the stored study is for something else; the difference is named.
    """
    where = None if storage is None else str(storage)
    name = study or f"autoshard-{identity['program'][:12]}-{identity['mesh']}"
    with Tasks(
        where,
        name,
        needs=sharing.needs,
        lease_s=sharing.lease_s,
        patience_s=sharing.patience_s,
        limit_s=sharing.run_limit_s,
    ) as tasks:
        shared = Shared(tasks, settings, again=sharing.again)
        shared.check(identity, f"{name!r} in {where}")
        yield shared


class Racer(Protocol):
    """A candidate, as far as sharing it goes."""

    candidate: Candidate


class Shared:
    """The tasks and decisions of one search."""

    def __init__(self, tasks: Tasks, settings: str = "", *, again: bool = False) -> None:
        """Joins a study.

        Args:
            tasks: Of the study.
            settings: What its choices depend on beyond what the study is for (budget, effort,
                seed); evidence is shared between settings, choices are not.
            again: Measure once more what was measured before.
        """
        self.again = again
        self.tasks = tasks
        self._settings = hashlib.sha256(settings.encode()).hexdigest()[:8]
        self._said: Counter[str] = Counter()

    def check(self, identity: Mapping[str, str], where: str) -> None:
        """Refuses a study that belongs to something else.

        Raises:
            StudyError: Naming the difference.
        """
        stored = self.tasks.decide("identity", dict(identity))
        if stored == dict(identity):
            return
        known = stored if isinstance(stored, dict) else {}
        differs = [
            f"{k}: {known.get(k)!r} there, {v!r} here"
            for k, v in identity.items()
            if known.get(k) != v
        ]
        raise StudyError(
            f"study {without_password(where)} is for something else ({'; '.join(differs)}). "
            f"Choose another --study name, or another storage."
        )

    # Evidence -------------------------------------------------------------------------------------

    def known(self) -> dict[str, Candidate]:
        """What the study has of candidates, by key."""
        claims = self.tasks.read()
        found: dict[str, Candidate] = {}
        for rung in RUNGS:
            for task in claims.results:
                name, _, key = task.partition(" ")
                if name == rung:
                    candidates = [*candidates_of(claims.record(task)).items()]
                    found |= {k: t for k, t in candidates if rung == "measure" or k == key}
        return found

    def each(
        self,
        rung: str,
        racers: Sequence[Racer],
        climb: Callable[[Any], None],
        *,
        needs: Need,
        stop: Callable[[], bool] = lambda: False,
        note: Callable[[], str] = lambda: "",
    ) -> list[str]:
        """Takes candidates up a rung, here or on another worker.

        Args:
            rung: Its name.
            racers: The most urgent first.
            climb: Does it here; sets the candidate's trial.
            needs: What it needs of a worker.
            stop: True once no more is to be started.
            note: What else others should know after one was taken up here; empty for nothing.

        Returns:
            What those who did it noted.
        """

        def work(racer: Racer) -> Work:
            def run() -> Result:
                climb(racer)
                found = racer.candidate.compiled
                seconds = None if found is None or racer.candidate.rejected else found.time_s
                return Result({"candidates": [racer.candidate.to_dict()], "note": note()}, seconds)

            def give_up(reason: str) -> Result:
                return Result(
                    {"candidates": [racer.candidate.reject(reason).to_dict()], "note": ""}
                )

            return Work(run, give_up, needs, f"{rung} {racer.candidate.name}", of_one=True)

        works = {f"{rung} {racer.candidate.key}": work(racer) for racer in racers}
        records = self.tasks.run(works, stop)
        for racer in racers:
            if f"{rung} {racer.candidate.key}" in records:
                _update(racer, candidates_of(records[f"{rung} {racer.candidate.key}"]))
        return [str(note) for r in records.values() if (note := r.get("note"))]

    def group(
        self,
        rung: str,
        racers: Sequence[Racer],
        climb: Callable[[], None],
        seconds: Callable[[], float | None],
    ) -> None:
        """Takes candidates up a rung together, on one worker."""
        digest = hashlib.sha256(
            " ".join(sorted(r.candidate.key for r in racers)).encode()
        ).hexdigest()[:16]

        def run() -> Result:
            climb()
            return Result({"candidates": [r.candidate.to_dict() for r in racers]}, seconds())

        def give_up(reason: str) -> Result:
            return Result({"candidates": [r.candidate.reject(reason).to_dict() for r in racers]})

        task = f"{rung} {digest}" + (f" {uuid.uuid4().hex}" if self.again else "")
        names = ", ".join(r.candidate.name for r in racers)
        records = self.tasks.run({task: Work(run, give_up, "measure", f"{rung} {names}")})
        for racer in racers:
            _update(racer, candidates_of(records[task]))

    def lose(self, reason: str, failed: bool) -> None:
        """Ends the task in work: its process is about to end, because the task `failed` or for
        another reason.
        """
        self.tasks.lose(f"running failed: {reason}" if failed else None)

    # Choices --------------------------------------------------------------------------------------

    def choose(
        self, what: str, candidates: Callable[[], Sequence[Racer]], all_: Sequence[Any]
    ) -> list[Any]:
        """The candidates that were chosen first for this purpose by any worker with these settings,
        in their order.

        Args:
            what: The purpose; a second choice for it is another choice.
            candidates: Chooses; not called where that was done.
            all_: Where the candidates are found by their keys.
        """
        self._said[what] += 1
        name = f"choice {what} {self._said[what]} {self._settings}"
        claims = self.tasks.read()
        if name in claims.results:
            keys = claims.record(name)
        else:
            keys = self.tasks.decide(name, [c.candidate.key for c in candidates()])
        by_key = {c.candidate.key: c for c in all_}
        missing = [key for key in keys if key not in by_key]
        if missing:
            raise StudyError(
                f"the study chose candidates that this process does not have ({missing[0]}, ...); "
                f"were its proposals "
                f"made by another version? Choose another --study name."
            )
        return [by_key[key] for key in keys]

    def propose(
        self, make: Callable[[], Proposals], problem: Problem, predictor: Predictor
    ) -> Proposals:
        """The proposals of the worker who made them; they are predicted anew here, which takes
        little.
        """
        made: list[Proposals] = []

        def run() -> Result:
            found = make()
            if found.interrupted:
                raise KeyboardInterrupt
            made.append(replace(found, ranked=_kept(found.ranked)))
            return Result(_written(made[0]))

        def give_up(reason: str) -> Result:
            raise StudyError(
                f"proposing candidates: {reason}. Run autoshard search without a storage to see "
                f"why."
            )

        if self.tasks.alone:
            return make()
        task = f"propose {self._settings}"
        records = self.tasks.run({task: Work(run, give_up, "predict", "propose candidates")})
        return made[0] if made else _read(records[task], problem, predictor)


def adopted(own: Candidate, stored: Candidate) -> Candidate:
    """What the study has of a candidate, under the name and with the prediction that it has
    here.
    """
    return replace(
        stored,
        name=own.name,
        origin=own.origin,
        preset=own.preset,
        rules=own.rules,
        predicted=own.predicted,
    )


def candidates_of(record: Any) -> dict[str, Candidate]:
    """The trials in a record of a task, by key.

    Raises:
        StudyError: If it has none.
    """
    try:
        candidates = msgspec.convert(record["candidates"], list[Candidate])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise StudyError(
            f"the study has evidence that cannot be read ({error}). Was it written by another "
            f"version of autoshard? "
            f"Choose another --study name."
        ) from None
    return {candidate.key: candidate for candidate in candidates}


def _update(racer: Racer, candidates: Mapping[str, Candidate]) -> None:
    if racer.candidate.key in candidates:
        racer.candidate = adopted(racer.candidate, candidates[racer.candidate.key])


def _kept(ranked: Sequence[Proposal]) -> tuple[Proposal, ...]:
    smallest = sorted(ranked, key=lambda p: (p.prediction.peak_bytes, p.key))[:KEPT_SMALLEST]
    small = {p.key for p in smallest}
    return tuple(
        p for i, p in enumerate(ranked) if i < KEPT or p.preset is not None or p.key in small
    )


def _written(proposals: Proposals) -> dict[str, Any]:
    ranked = [[p.name, p.origin, p.key, *map(str, p.layout.rules)] for p in proposals.ranked]
    skipped = [[s.name, s.reason] for s in proposals.skipped]
    return {"ranked": ranked, "skipped": skipped, "evaluations": proposals.evaluations}


def _read(record: Any, problem: Problem, predictor: Predictor) -> Proposals:
    try:
        ranked = []
        for name, origin, key, *rules in record["ranked"]:
            layout = Layout(problem, tuple(map(AxisRule.parse, rules)))
            ranked.append(
                Proposal(str(name), Origin(origin), layout, str(key), predictor.predict(layout))
            )
        skipped = tuple(Skipped(str(name), str(reason)) for name, reason in record["skipped"])
        evaluations = int(record["evaluations"])
    except (KeyError, TypeError, ValueError, RuleError) as error:
        raise StudyError(
            f"the study has proposals that cannot be read ({type(error).__name__}: {error}). "
            f"Choose another --study name."
        ) from None
    return Proposals(tuple(ranked), skipped, evaluations=evaluations)
