"""The tasks of a study, shared by any number of workers: each is claimed by one, and recorded once.

A claim on a task is an Optuna trial in state RUNNING. A storage numbers the trials of a study in
one order that all see, so of several claims on a task the one with the lowest number holds; the
others withdraw. A claim ends in one of three ways, and the storage sees to it that it is one only:
its worker records a result (COMPLETE, or PRUNED where the candidate was rejected), its worker hands
it back, or another worker finds it stale (FAIL), and the task is free again.

Stale is a claim whose beat has not changed for a lease, by the watch of the one who looks: no two
clocks are compared. A result that comes after that is recorded if the task is still free, else
dropped.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoshard.errors import StudyError
from autoshard.processes.process_group import LOST
from autoshard.search.study.claims import CLAIM, Claim, Claims, attributes_of, claim_of, record_of
from autoshard.search.study.heartbeat import BEAT, Heartbeat
from autoshard.search.study.machine_lock import MachineLock
from autoshard.search.study.storage import (
    PATIENCE_S,
    close_storage,
    open_storage,
    patiently,
    study_id_of,
)

log = logging.getLogger("autoshard.jobs")

_T = TypeVar("_T")

Need = Literal["predict", "compile", "measure"]
NEEDS: tuple[Need, ...] = ("predict", "compile", "measure")

LEASE_S = 60.0
"""Long against a storage's hiccups, short against the hours of a job."""

POLL_S = 1.0

DEATHS = 4
"""A task that this many workers died on is not tried again: it is what they died of."""


@dataclass(frozen=True, slots=True)
class Result:
    """What is recorded of a task.

    Attributes:
        record: Plain builtins, for JSON.
        seconds: Of a step, the study's objective; None for what is no evaluation, or was rejected.
    """

    record: Any
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """How a task is done here.

    Attributes:
        run: Does it.
        give_up: What is recorded where workers keep dying on it; takes the reason.
        needs: What it needs of a worker.
        title: For people.
        of_one: It is about one candidate, so that what goes wrong is that one's fault.
    """

    run: Callable[[], Result]
    give_up: Callable[[str], Result]
    needs: Need
    title: str
    of_one: bool = False


@dataclass(eq=False)
class _Watch:
    """When each claim's beat last changed, by this process's own clock."""

    seen: dict[int, tuple[object, float]] = field(default_factory=dict)
    looked_s: float = 0.0

    def stale(self, claims: Iterable[FrozenTrial], now_s: float) -> list[FrozenTrial]:
        """The claims whose beat has not changed for their lease, with this process looking on.

        While the storage was away no beat could be written: time in which nobody looked does not
        count.
        """
        blind_s, self.looked_s = now_s - self.looked_s, now_s
        found = []
        for trial in claims:
            beat = trial.user_attrs.get(BEAT)
            claim = claim_of(trial)
            lease_s = LEASE_S if claim is None else claim.lease_s
            before = self.seen.get(trial._trial_id)
            if before is None or before[0] != beat or blind_s > lease_s:
                self.seen[trial._trial_id] = beat, now_s
            elif now_s - before[1] > lease_s:
                found.append(trial)
        return found


class Tasks:
    """A study's tasks as one worker sees them; a context manager."""

    def __init__(
        self,
        where: str | None,
        study: str = "",
        *,
        needs: Sequence[Need] = NEEDS,
        lease_s: float = LEASE_S,
        patience_s: float = PATIENCE_S,
        limit_s: float | None = None,
        create: bool = True,
    ) -> None:
        """Connects.

        Args:
            where: See `connect.open_storage`; None for this process's memory.
            study: Its name.
            needs: Tasks of these needs are done here; for others this worker waits.
            lease_s: See the module's docstring.
            patience_s: How long the storage may be away.
            limit_s: A task on the devices that takes longer has failed, and this process is ended,
                since nothing else can stop what runs there. None for as long as it takes.
            create: Make the study where there is none.

        Raises:
            StudyError: If there is no such study and none is to be made, or the storage cannot be
                used.
        """
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.needs, self._lease_s, self._patience_s = tuple(needs), lease_s, patience_s
        self._where, self._limit_s = where, limit_s
        self._heartbeat: Heartbeat | None = None
        self._may_beat = False
        self._watch, self._lock = _Watch(), MachineLock()
        self._waiting = False
        self._at: tuple[int, str, Work] | None = None
        self.alone = where is None
        self._storage: BaseStorage
        if where is None:
            self._storage = InMemoryStorage()
            self._study_id = self._storage.create_new_study(
                [StudyDirection.MINIMIZE], study or None
            )
            return
        self._storage = open_storage(where, patience_s=min(patience_s, LEASE_S))
        found = study_id_of(self._storage, study, create=create, patience_s=patience_s)
        if found is None:
            raise StudyError(
                f"there is no study {study!r} in the storage. Start it with: autoshard search "
                f"--study."
            )
        self._study_id = found

    def __enter__(self) -> Tasks:
        self._may_beat = self._where is not None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        close_storage(self._storage)

    # Reading --------------------------------------------------------------------------------------

    def read(self) -> Claims:
        """What the study says now."""
        return Claims.of(self.trials())

    def trials(self) -> list[FrozenTrial]:
        """The study's trials; not to be changed."""
        return self._ask(lambda: self._storage.get_all_trials(self._study_id, deepcopy=False))

    def _ask(self, ask: Callable[[], _T]) -> _T:
        return patiently(ask, self._patience_s, "the storage")

    # Deciding and doing ---------------------------------------------------------------------------

    def decide(self, name: str, value: Any) -> Any:
        """What the study has under a name: the value of the worker who came first, for ever.

        Args:
            name: Of the decision.
            value: Plain builtins.
        """
        known = self.read().results
        if name not in known:
            claim = Claim(name, name, self.owner, uuid.uuid4().hex, self._lease_s)
            attributes = {CLAIM: asdict(claim), **attributes_of(value)}
            template = create_trial(state=TrialState.PRUNED, user_attrs=attributes)
            self._ask(lambda: self._storage.create_new_trial(self._study_id, template))
            known = self.read().results
        return record_of(known[name])

    def run(
        self, works: Mapping[str, Work], stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Does tasks, or waits for the workers who do; each is done once in the life of the study.

        Args:
            works: By task, the most urgent first.
            stop: True once no more is to be started.

        Returns:
            The records of all of them, as they stand in the study; after `stop`, of those that have
            one.
        """
        lost = False
        while True:
            claims = self.read()
            left = [task for task in works if task not in claims.results]
            if not left or stop():
                return {task: claims.record(task) for task in works if task in claims.results}
            self._reap(claims)
            free = [t for t in left if t not in claims.claims and works[t].needs in self.needs]
            if lost and free:  # several start at once; spread out
                free.insert(0, random.choice(free))
            for task in free:
                # A search of its own waits for nobody: whoever starts two at once on a machine is
                # told by the clock.
                if self.alone or works[task].needs != "measure" or self._lock.take():
                    try:
                        lost = not self._attempt(task, works[task], claims.deaths[task])
                    finally:
                        self._lock.release()
                    break
            else:
                self._wait(claims, [works[t] for t in left])

    def _attempt(self, task: str, work: Work, deaths: int) -> bool:
        """Claims a task and does it; False where another holds it."""
        trial_id = self._claim(task, work.title)
        if trial_id is None:
            return False
        self._waiting = False
        if deaths >= DEATHS:
            result = work.give_up(f"{deaths} workers ended while they were at it")
        else:
            self._at = trial_id, task, work
            limit = threading.Timer(self._limit_s or 0.0, self._expire)
            limit.daemon = True
            if self._limit_s is not None and work.needs == "measure":
                limit.start()
            try:
                result = work.run()
            except BaseException as error:
                self._end(trial_id, "handed back")
                log.info("handed back: %s (%s)", work.title, type(error).__name__)
                raise
            finally:
                limit.cancel()
                self._at = None
        self._finish(trial_id, task, work.title, result)
        return True

    def lose(self, reason: str | None) -> None:
        """Ends the task in work, whose process is about to end; may be called from another thread.

        Args:
            reason: Why the task failed: recorded where it is about one candidate, else this counts
                as a death. None where the task is not at fault; then it is handed back.
        """
        if self._at is None:
            return
        trial_id, task, work = self._at
        if reason is None:
            self._end(trial_id, "handed back")
        elif work.of_one:
            self._finish(trial_id, task, work.title, work.give_up(reason))
        else:
            self._end(trial_id, "stale")

    def _expire(self) -> None:
        log.error("a task on the devices took longer than %g s; this process ends", self._limit_s)
        try:
            self.lose(f"running failed: it took longer than {self._limit_s:g} s")
        finally:
            os._exit(LOST)

    def _claim(self, task: str, title: str) -> int | None:
        if self._may_beat and self._heartbeat is None and self._where is not None:
            self._heartbeat = Heartbeat(self._where, self._lease_s)
            self._heartbeat.wait()
        claim = Claim(task, title, self.owner, uuid.uuid4().hex, self._lease_s)
        template = create_trial(state=TrialState.RUNNING, user_attrs={CLAIM: asdict(claim)})
        self._ask(lambda: self._storage.create_new_trial(self._study_id, template))
        trials = self.trials()
        mine = [
            t._trial_id
            for t in reversed(trials)
            if not t.state.is_finished() and claim_of(t) == claim
        ]
        claims = Claims.of(trials)
        holder = claims.claims.get(task)
        if holder is not None and claim_of(holder) == claim:
            for double in mine:  # an answer that was lost was asked for again
                if double != holder._trial_id:
                    self._end(double, "withdrawn")
            if self._heartbeat is not None:
                self._heartbeat.beat_for(holder._trial_id)
            log.info("claimed: %s", title)
            return holder._trial_id
        for trial_id in mine:
            self._end(trial_id, "withdrawn")
        return None

    def _end(self, trial_id: int, how: str) -> bool:
        """Ends a claim without a result; False where it has ended already."""

        def end() -> bool:
            try:
                self._storage.set_trial_user_attr(trial_id, "ended", how)
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                return False
            return True

        if self._heartbeat is not None and how != "stale":
            self._heartbeat.beat_for(None)
        return self._ask(end)

    def _finish(self, trial_id: int, task: str, title: str, result: Result) -> None:
        """Records a result; one that comes late is recorded if nobody else has the task, else
        dropped.
        """
        if self._record(trial_id, result):
            log.info("done: %s", title)
        else:
            again = None if task in self.read().results else self._claim(task, title)
            if again is not None and self._record(again, result):
                log.info("done, late: %s", title)
            else:
                log.warning("dropped a late result: %s is with another worker now", title)
        if self._heartbeat is not None:
            self._heartbeat.beat_for(None)

    def _record(self, trial_id: int, result: Result) -> bool:
        state = TrialState.PRUNED if result.seconds is None else TrialState.COMPLETE
        values = None if result.seconds is None else [result.seconds]
        attributes = attributes_of(result.record)

        def put() -> bool:
            try:
                for name, text in attributes.items():
                    self._storage.set_trial_user_attr(trial_id, name, text)
                self._storage.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                # Ours, if the answer to an earlier try was lost; else it was found stale.
                return self._storage.get_trial(trial_id).state == state
            return True

        return self._ask(put)

    def _reap(self, claims: Claims) -> None:
        """Ends claims that are stale."""
        for trial in self._watch.stale(claims.claims.values(), time.monotonic()):
            if self._end(trial._trial_id, "stale"):
                claim = claim_of(trial)
                title, owner = ("?", "?") if claim is None else (claim.title, claim.owner)
                log.warning(
                    "stale: %s, no beat from %s for its lease; it is free again", title, owner
                )

    def _wait(self, claims: Claims, left: Sequence[Work]) -> None:
        if not self._waiting:
            self._waiting = True
            missing = sorted({w.needs for w in left} - set(self.needs))
            why = f"for a worker that can {', '.join(missing)}" if missing else "for other workers"
            if not missing and not claims.claims:
                why = f"for another process that measures on this machine (it holds {self._lock.path})"
            log.info("waiting %s: %d tasks left, %d claimed", why, len(left), len(claims.claims))
        time.sleep(min(POLL_S, self._lease_s / 8) * random.uniform(0.5, 1.0))
