"""The tasks of a study, shared by any number of workers: each is claimed by one, and recorded once.

A claim on a task is an Optuna trial in state RUNNING. A storage numbers the trials of a study in
one order that all see, so of several claims on a task the one with the lowest number holds; the
others withdraw. A claim ends in one of three ways, and the storage sees to it that it is one only:
its worker records a result (COMPLETE, or PRUNED where the candidate was rejected), its worker
releases it, or another worker finds it stale (FAIL), and the task is free again.

Stale is a claim whose heartbeat has not changed for a lease, by the watch of the one who looks (see
`lease_watch`). A result that comes after that is recorded if the task is still free, else dropped.
The heartbeat stops at a task's time limit, whatever its worker is at. A record that is damaged, or
another claim's, counts as none: its task is done again.

What a worker can do is its capabilities, and a task asks for one. Users write them as what a worker
is needed for: `--needs compile,measure`, or `needs = ["compile", "measure"]` in a job file.
"""

from __future__ import annotations

import json
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
    DECIDED,
    ENDED,
    RECORD_PART_CHARS,
    RELEASED,
    STALE,
    WITHDRAWN,
    Claim,
    Claims,
    RecordReader,
    claim_of,
    record_attributes,
)
from autoshard.search.study.heartbeat import Alive, Heartbeat
from autoshard.search.study.lease_watch import LEASE_S, LeaseWatch
from autoshard.search.study.machine_lock import MachineLock
from autoshard.search.study.storage import (
    PATIENCE_S,
    close_storage,
    open_storage,
    patiently,
    resolved,
    study_id_of,
)
from autoshard.search.study.task_id import TaskId, TaskKind

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


LIMIT_S = 3600.0
"""A task without a limit of its own is shown to be alive for this long, then another worker may
have it. Nothing that was ever seen to end took longer. Chosen by hand; tests set limits."""

FAILURES = {"compile": "compilation failed", "measure": "running failed"}
"""What failed where a task about one candidate took too long."""


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
        capability: What a worker must be able to do; None for what any can.
        title: For people.
        single_candidate: It is about one candidate, which is to blame for what goes wrong.
    """

    run: Callable[[], Result]
    give_up: Callable[[str], Result]
    capability: Capability | None
    title: str
    single_candidate: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """The task that this worker is at, and the trial and claim by which it holds it."""

    trial_id: int
    claim: Claim
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
        read_only: bool = False,
    ) -> None:
        """Connects.

        Args:
            where: See `storage.open_storage`; None for this process's memory.
            study: Its name.
            capabilities: Tasks that ask for these are done here; for others this worker waits.
            lease_s: See `lease_watch`.
            patience_s: How long the storage may be away.
            limit_s: A task that takes longer has failed, and this process is ended, since nothing
                else can stop what runs on devices or in a compiler. None for as long as it takes;
                then others may have the task after `LIMIT_S`.
            create: Make the study where there is none.
            read_only: Only read: make neither files nor tables.

        Raises:
            StudyError: If there is no such study and none is to be made, or the storage cannot be
                used.
        """
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.capabilities = tuple(capabilities)
        self.alone = where is None
        self._where, self._lease_s = None if where is None else resolved(where), lease_s
        self._patience_s, self._limit_s = patience_s, limit_s
        self._heartbeat: Heartbeat | None = None
        self._entered = False
        self._watch, self._lock = LeaseWatch(), MachineLock()
        self._waiting = False
        self._held: _Held | None = None
        self._reader = RecordReader()
        self._warned: set[int] = set()
        self.decided: dict[str, Any] = {}
        self._storage: BaseStorage
        if where is None:
            self._storage = InMemoryStorage()
            directions = [StudyDirection.MINIMIZE]
            self._study_id = self._storage.create_new_study(directions, study or None)
            return

        # Nobody has claimed anything yet: a wrong address is not worth the whole patience.
        self._storage = open_storage(
            where, patience_s=min(patience_s, LEASE_S), read_only=read_only
        )
        create = create and not read_only
        study_id = study_id_of(self._storage, study, create=create, patience_s=patience_s)
        if study_id is None:
            close_storage(self._storage)
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
        claims = Claims.of(self.trials(), self._reader)
        for number, fault in claims.unreadable.items():
            if number not in self._warned:
                self._warned.add(number)
                log.warning("%s; it counts as not done", fault)
        return claims

    def trials(self) -> list[FrozenTrial]:
        """The study's trials; not to be changed.

        Raises:
            StudyError: If the study is no longer there.
        """
        try:
            return self._ask(lambda: self._storage.get_all_trials(self._study_id, deepcopy=False))
        except KeyError:
            raise StudyError(
                "the study is no longer in its storage, which was emptied or replaced. Put it "
                "back, or start again."
            ) from None

    def note(self, name: str, value: Any = None) -> Any:
        """What the study has under a name, beside its tasks: the last writer wins.

        Args:
            name: Of the note.
            value: Written, unless it is None; plain builtins.
        """
        if value is not None:
            self._ask(lambda: self._storage.set_study_user_attr(self._study_id, name, value))
        return self._ask(lambda: self._storage.get_study_user_attrs(self._study_id)).get(name)

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
        records = self.read().records
        if name not in records:
            # Others may write at the same time: then the first trial with a result counts for all.
            claim = self._new_claim(name, str(name))
            attributes = {CLAIM: claim.attribute(), **record_attributes(claim, value)}
            self._create_trial(TrialState.PRUNED, attributes)
            records = self.read().records
        return records[name]

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
            if task_id not in claims.live and task.capability in (None, *self.capabilities):
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
        held = self._claim(task_id, task)
        if held is None:
            return False
        self._waiting = False
        if deaths >= MAX_DEATHS:  # claimed all the same, so that one worker records it
            result = task.give_up(f"{deaths} workers ended while they were at it")
        else:
            result = self._run_held(held)
        self._finish(held, result)
        return True

    def _run_held(self, held: _Held) -> Result:
        self._held = held
        try:
            with self._time_limit():
                try:
                    return held.task.run()
                except BaseException as error:
                    self._end(held.trial_id, held.claim, RELEASED)
                    log.info("released: %s (%s)", held.task.title, type(error).__name__)
                    raise
        finally:
            self._held = None

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Within it this process is ended if a task takes longer than the limit. Where no thread
        gets to run, the process for the heartbeat ends it a lease later.
        """
        if self._limit_s is None:
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
        log.error("a task took longer than %g s; this process ends", self._limit_s)
        held = self._held
        failure = FAILURES.get(str(held and held.task.capability), "it failed")
        try:
            self.abandon(f"{failure}: it took longer than {self._limit_s:g} s")
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
            self._end(held.trial_id, held.claim, RELEASED)
        elif held.task.single_candidate:
            self._finish(held, held.task.give_up(reason))
        else:
            self._end(held.trial_id, held.claim, STALE)

    # Claims ---------------------------------------------------------------------------------------

    def _claim(self, task_id: TaskId, task: Task) -> _Held | None:
        """Claims a task; None where it is another worker's."""
        self._start_heartbeat()
        claim = self._new_claim(task_id, task.title)
        # A storage has no compare-and-swap: claim first, then see by the numbers who was first.
        decided = self._decided_so_far()
        self._create_trial(TrialState.RUNNING, {CLAIM: claim.attribute(), DECIDED: decided})
        trials = self.trials()
        holder = Claims.of(trials, self._reader).live.get(task_id)
        holds = holder is not None and claim_of(holder) == claim
        held_id = holder._trial_id if holder is not None and holds else None

        for trial in reversed(trials):
            # More than one is ours where the storage's answer was lost and it was asked again.
            ours = not trial.state.is_finished() and claim_of(trial) == claim
            if ours and trial._trial_id != held_id:
                self._end(trial._trial_id, claim, WITHDRAWN)
        if held_id is None:
            return None
        self._keep_alive(Alive(held_id, claim.nonce, self._limit_s or LIMIT_S, bool(self._limit_s)))
        log.log(_level(task_id), "claimed: %s", task.title)
        return _Held(held_id, claim, task_id, task)

    def _decided_so_far(self) -> dict[str, Any]:
        """What is stated in a claim of what was decided before."""
        decided = {}
        for name, value in self.decided.items():
            short = len(json.dumps(value)) <= RECORD_PART_CHARS // 4
            decided[name] = value if short else None
        return decided

    def _keep_alive(self, alive: Alive | None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.keep_alive(alive)

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

    def _is(self, trial_id: int, claim: Claim) -> bool:
        """True if a trial is this claim; another is where the storage was put back to an earlier
        state.
        """
        try:
            return claim_of(self._storage.get_trial(trial_id)) == claim
        except KeyError:
            return False

    def _end(self, trial_id: int, claim: Claim, how: str) -> bool:
        """Ends a claim without a result; False where it has ended already."""

        def end() -> bool:
            try:
                if not self._is(trial_id, claim):
                    return False
                # In this order: a finished trial takes no attributes any more.
                self._storage.set_trial_user_attr(trial_id, ENDED, how)
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                return False
            return True

        if how != STALE:  # a stale claim may be another worker's
            self._keep_alive(None)
        return self._ask(end)

    def _finish(self, held: _Held, result: Result) -> None:
        """Records a result; one that comes late is recorded if nobody else has the task, else
        dropped.
        """
        task_id, title = held.task_id, held.task.title
        if self._record(held, result):
            log.log(_level(task_id), "done: %s", title)
        else:
            again = None
            if task_id not in self.read().results:
                again = self._claim(task_id, held.task)
            if again is not None and self._record(again, result):
                log.info("done, late: %s", title)
            else:
                log.warning("dropped a late result: %s is with another worker now", title)
        self._keep_alive(None)

    def _record(self, held: _Held, result: Result) -> bool:
        """Writes a result into a claim; False where the claim was found stale before."""
        state = TrialState.PRUNED if result.seconds is None else TrialState.COMPLETE
        values = None if result.seconds is None else [result.seconds]
        trial_id, attributes = held.trial_id, record_attributes(held.claim, result.record)

        def write() -> bool:
            if not self._is(trial_id, held.claim):
                return False
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
            claim = claim_of(trial)
            if claim is not None and self._end(trial._trial_id, claim, STALE):
                log.warning(
                    "stale: %s, no heartbeat from %s for its lease; it is free again",
                    claim.title,
                    claim.owner,
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
        needed = {task.capability for task in left if task.capability is not None}
        missing = needed - set(self.capabilities)
        if missing:
            return f"for a worker that can {', '.join(sorted(missing))}"
        if not claims.live:
            return f"for another process that measures on this machine (it holds {self._lock.path})"
        return "for other workers"


def _level(task_id: TaskId) -> int:
    """Of the log: choices take no time."""
    return logging.DEBUG if task_id.kind is TaskKind.CHOICE else logging.INFO
