"""The tasks of a study, shared by any number of workers: each is claimed by one, and recorded once.

A claim on a task is an Optuna trial in state RUNNING. A storage numbers the trials of a study in
one order that all see, so of several claims on a task the one with the lowest number holds; the
others withdraw. A claim ends in one of three ways, and the storage sees to it that it is one only:
its worker records a result (COMPLETE, or PRUNED where the candidate was rejected), its worker
releases it, or another worker finds it stale (FAIL), and the task is free again.

Stale is a claim whose heartbeat has not changed for a lease, by the watch of the one who looks (see
`lease_watch`). A result that comes after that is recorded if the task is still free, else dropped.

What a worker can do is its capabilities, and a task asks for one. Users write them as what a worker
is needed for: `--needs compile,measure`, or `needs = ["compile", "measure"]` in a job file.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoshard.errors import StudyError
from autoshard.processes.process_group import LOST
from autoshard.search.study.claims import (
    CLAIM,
    ENDED,
    RELEASED,
    STALE,
    WITHDRAWN,
    Claim,
    Claims,
    claim_of,
    record_attributes,
    record_of,
)
from autoshard.search.study.heartbeat import Heartbeat
from autoshard.search.study.lease_watch import LEASE_S, LeaseWatch
from autoshard.search.study.machine_lock import MachineLock
from autoshard.search.study.storage import (
    PATIENCE_S,
    close_storage,
    open_storage,
    patiently,
    study_id_of,
)
from autoshard.search.study.task_id import TaskId

log = logging.getLogger("autoshard.jobs")

_T = TypeVar("_T")

Capability = Literal["predict", "compile", "measure"]
CAPABILITIES: tuple[Capability, ...] = ("predict", "compile", "measure")

POLL_S = 1.0
"""How often a worker that waits reads the study, at the longest. Chosen by hand: little against a
compilation, rare enough for a file that sixteen workers read; tests use shorter leases, of which an
eighth is the limit."""

POLLS_PER_LEASE = 8
"""A worker that waits reads the study at least this often in a lease, or it would not see that
heartbeats change. Chosen by hand; it is what makes tests with a lease of 2 s quick."""

MAX_DEATHS = 4
"""A task on which this many workers died is not tried again: it is what they died of. Chosen by
hand: one death may be the machine's fault. `test_a_candidate_that_kills_its_workers_is_given_up`
and its like count them."""


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
class Task:
    """How a task is done by this worker.

    Attributes:
        run: Does it.
        give_up: What is recorded where workers keep dying on it; takes the reason.
        capability: What a worker must be able to do.
        title: For people.
        single_candidate: It is about one candidate, which is to blame for what goes wrong.
    """

    run: Callable[[], Result]
    give_up: Callable[[str], Result]
    capability: Capability
    title: str
    single_candidate: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """The task that this worker is at, and the trial by which it holds it."""

    trial_id: int
    task_id: TaskId
    task: Task


class TaskQueue:
    """A study's tasks as one worker sees them; a context manager."""

    def __init__(
        self,
        where: str | None,
        study: str = "",
        *,
        capabilities: Sequence[Capability] = CAPABILITIES,
        lease_s: float = LEASE_S,
        patience_s: float = PATIENCE_S,
        limit_s: float | None = None,
        create: bool = True,
    ) -> None:
        """Connects.

        Args:
            where: See `storage.open_storage`; None for this process's memory.
            study: Its name.
            capabilities: Tasks that ask for these are done here; for others this worker waits.
            lease_s: See `lease_watch`.
            patience_s: How long the storage may be away.
            limit_s: A task on the devices that takes longer has failed, and this process is ended,
                since nothing else can stop what runs there. None for as long as it takes.
            create: Make the study where there is none.

        Raises:
            StudyError: If there is no such study and none is to be made, or the storage cannot be
                used.
        """
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.capabilities = tuple(capabilities)
        self.alone = where is None
        self._where, self._lease_s = where, lease_s
        self._patience_s, self._limit_s = patience_s, limit_s
        self._heartbeat: Heartbeat | None = None
        self._entered = False
        self._watch, self._lock = LeaseWatch(), MachineLock()
        self._waiting = False
        self._held: _Held | None = None
        self._storage: BaseStorage
        if where is None:
            self._storage = InMemoryStorage()
            directions = [StudyDirection.MINIMIZE]
            self._study_id = self._storage.create_new_study(directions, study or None)
            return

        # Nobody has claimed anything yet: a wrong address is not worth the whole patience.
        self._storage = open_storage(where, patience_s=min(patience_s, LEASE_S))
        study_id = study_id_of(self._storage, study, create=create, patience_s=patience_s)
        if study_id is None:
            raise StudyError(
                f"there is no study {study!r} in the storage. Start it with: autoshard search "
                f"--study."
            )
        self._study_id = study_id

    def __enter__(self) -> TaskQueue:
        self._entered = True
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

    # Values and tasks -----------------------------------------------------------------------------

    def setdefault(self, name: TaskId, value: Any) -> Any:
        """The value that the study has under a name, as `dict.setdefault` does: the first writer
        wins, for ever.

        Args:
            name: Of the value.
            value: Written where there is none yet; plain builtins.
        """
        results = self.read().results
        if name not in results:
            # Others may write at the same time: then the first trial with a result counts for all.
            attributes = {
                CLAIM: self._new_claim(name, str(name)).attribute(),
                **record_attributes(value),
            }
            self._create_trial(TrialState.PRUNED, attributes)
            results = self.read().results
        return record_of(results[name])

    def run(
        self, tasks: Mapping[TaskId, Task], stop: Callable[[], bool] = lambda: False
    ) -> dict[TaskId, Any]:
        """Does tasks, or waits for the workers who do; each is done once in the life of the study.

        Args:
            tasks: By name, the most urgent first.
            stop: True once no more is to be started.

        Returns:
            The records of all of them, as they stand in the study; after `stop`, of those that have
            one.
        """
        outrun = False
        while True:
            claims = self.read()
            left = {
                task_id: task for task_id, task in tasks.items() if task_id not in claims.results
            }
            if not left or stop():
                return {task_id: claims.record(task_id) for task_id in tasks if task_id not in left}

            self._free_stale(claims)
            task_id = self._startable(left, claims, spread_out=outrun)
            if task_id is None:
                self._wait(claims, list(left.values()))
                continue
            try:
                outrun = not self._attempt(task_id, left[task_id], claims.deaths[task_id])
            finally:
                self._lock.release()

    def _startable(
        self, left: Mapping[TaskId, Task], claims: Claims, *, spread_out: bool
    ) -> TaskId | None:
        """The first task that may start here now, with the machine's lock taken if it measures.

        Args:
            left: What has no result yet, the most urgent first.
            claims: Which of them others hold.
            spread_out: Try any of them first: another worker has just taken the most urgent one,
                as happens where several start at once.
        """
        free = []
        for task_id, task in left.items():
            if task_id not in claims.live and task.capability in self.capabilities:
                free.append(task_id)
        if spread_out and free:
            free.insert(0, random.choice(free))
        for task_id in free:
            # A search of its own waits for nobody: whoever starts two at once on a machine is
            # told by the clock.
            if self.alone or left[task_id].capability != "measure" or self._lock.take():
                return task_id
        return None

    def _attempt(self, task_id: TaskId, task: Task, deaths: int) -> bool:
        """Claims a task and does it; False where another worker holds it."""
        trial_id = self._claim(task_id, task.title)
        if trial_id is None:
            return False
        self._waiting = False
        held = _Held(trial_id, task_id, task)
        if deaths >= MAX_DEATHS:  # claimed all the same, so that one worker records it
            result = task.give_up(f"{deaths} workers ended while they were at it")
        else:
            result = self._run_held(held)
        self._finish(held, result)
        return True

    def _run_held(self, held: _Held) -> Result:
        self._held = held
        try:
            with self._time_limit(held.task):
                try:
                    return held.task.run()
                except BaseException as error:
                    self._end(held.trial_id, RELEASED)
                    log.info("released: %s (%s)", held.task.title, type(error).__name__)
                    raise
        finally:
            self._held = None

    @contextmanager
    def _time_limit(self, task: Task) -> Iterator[None]:
        """Within it this process is ended if a task on the devices takes longer than the limit."""
        if self._limit_s is None or task.capability != "measure":
            yield
            return
        timer = threading.Timer(self._limit_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        log.error("a task on the devices took longer than %g s; this process ends", self._limit_s)
        try:
            self.abandon(f"running failed: it took longer than {self._limit_s:g} s")
        finally:
            os._exit(LOST)

    def abandon(self, reason: str | None) -> None:
        """Ends the task in hand, whose process is about to end; may be called from another thread.

        Args:
            reason: Why the task failed: recorded where it is about one candidate, else this counts
                as a death. None where the task is not at fault; then it is released.
        """
        held = self._held
        if held is None:
            return
        if reason is None:
            self._end(held.trial_id, RELEASED)
        elif held.task.single_candidate:
            self._finish(held, held.task.give_up(reason))
        else:
            self._end(held.trial_id, STALE)

    # Claims ---------------------------------------------------------------------------------------

    def _claim(self, task_id: TaskId, title: str) -> int | None:
        """Claims a task; the trial that holds it, None where it is another worker's."""
        self._start_heartbeat()
        claim = self._new_claim(task_id, title)
        # A storage has no compare-and-swap: claim first, then see by the numbers who was first.
        self._create_trial(TrialState.RUNNING, {CLAIM: claim.attribute()})
        trials = self.trials()
        holder = Claims.of(trials).live.get(task_id)
        holds = holder is not None and claim_of(holder) == claim
        held_id = holder._trial_id if holder is not None and holds else None

        for trial in reversed(trials):
            # More than one is ours where the storage's answer was lost and it was asked again.
            ours = not trial.state.is_finished() and claim_of(trial) == claim
            if ours and trial._trial_id != held_id:
                self._end(trial._trial_id, WITHDRAWN)
        if held_id is None:
            return None
        if self._heartbeat is not None:
            self._heartbeat.keep_alive(held_id)
        log.info("claimed: %s", title)
        return held_id

    def _start_heartbeat(self) -> None:
        # Not before the first claim: who only reads (`autoshard status`) needs none.
        if self._entered and self._heartbeat is None and self._where is not None:
            self._heartbeat = Heartbeat(self._where, self._lease_s)
            self._heartbeat.wait()

    def _new_claim(self, task_id: TaskId, title: str) -> Claim:
        return Claim(task_id, title, self.owner, uuid.uuid4().hex, self._lease_s)

    def _create_trial(self, state: TrialState, attributes: dict[str, Any]) -> None:
        template = create_trial(state=state, user_attrs=attributes)
        self._ask(lambda: self._storage.create_new_trial(self._study_id, template))

    def _end(self, trial_id: int, how: str) -> bool:
        """Ends a claim without a result; False where it has ended already."""

        def end() -> bool:
            try:
                # In this order: a finished trial takes no attributes any more.
                self._storage.set_trial_user_attr(trial_id, ENDED, how)
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                return False
            return True

        if self._heartbeat is not None and how != STALE:  # a stale claim may be another worker's
            self._heartbeat.keep_alive(None)
        return self._ask(end)

    def _finish(self, held: _Held, result: Result) -> None:
        """Records a result; one that comes late is recorded if nobody else has the task, else
        dropped.
        """
        task_id, title = held.task_id, held.task.title
        if self._record(held.trial_id, result):
            log.info("done: %s", title)
        else:
            again = None if task_id in self.read().results else self._claim(task_id, title)
            if again is not None and self._record(again, result):
                log.info("done, late: %s", title)
            else:
                log.warning("dropped a late result: %s is with another worker now", title)
        if self._heartbeat is not None:
            self._heartbeat.keep_alive(None)

    def _record(self, trial_id: int, result: Result) -> bool:
        """Writes a result into a claim; False where the claim was found stale before."""
        state = TrialState.PRUNED if result.seconds is None else TrialState.COMPLETE
        values = None if result.seconds is None else [result.seconds]
        attributes = record_attributes(result.record)

        def write() -> bool:
            try:
                for name, text in attributes.items():
                    self._storage.set_trial_user_attr(trial_id, name, text)
                self._storage.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                # Ours, if the answer to an earlier try was lost; else it was found stale.
                return self._storage.get_trial(trial_id).state == state
            return True

        return self._ask(write)

    def _free_stale(self, claims: Claims) -> None:
        """Ends claims that are stale."""
        for trial in self._watch.stale(claims.live.values(), time.monotonic()):
            if self._end(trial._trial_id, STALE):
                claim = claim_of(trial)
                title, owner = ("?", "?") if claim is None else (claim.title, claim.owner)
                log.warning(
                    "stale: %s, no heartbeat from %s for its lease; it is free again", title, owner
                )

    def _wait(self, claims: Claims, left: Sequence[Task]) -> None:
        if not self._waiting:
            self._waiting = True
            log.info(
                "waiting %s: %d tasks left, %d claimed",
                self._what_for(claims, left),
                len(left),
                len(claims.live),
            )
        longest_s = min(POLL_S, self._lease_s / POLLS_PER_LEASE)
        time.sleep(longest_s * random.uniform(0.5, 1.0))  # workers that start together drift apart

    def _what_for(self, claims: Claims, left: Sequence[Task]) -> str:
        """What this worker waits for."""
        missing = {task.capability for task in left} - set(self.capabilities)
        if missing:
            return f"for a worker that can {', '.join(sorted(missing))}"
        if not claims.live:
            return f"for another process that measures on this machine (it holds {self._lock.path})"
        return "for other workers"
