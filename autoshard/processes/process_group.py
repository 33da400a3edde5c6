"""What the processes of one search agree on: small values by way of jax's coordination service,
never of devices.

All processes of a mesh call the same search. The first of them leads: it decides and says what is
done next, the others do the same (see `evaluate.multiprocess`). A search is a sequence of
operations, an operation a sequence of rounds; in each round every process posts a value and reads
those of all others, so that all continue from the same values. Nothing is waited for without a
limit, and a process that fails or leaves says so, on which the others leave the operation as well.

One thing cannot be left: a program on the devices that waits for a process which failed before it
got there. A thread watches for that. It ends the process, after telling why, since nothing else
can; a supervisor may start it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec

from autoshard.text import first_line, one_line

log = logging.getLogger("autoshard.jobs")

_T = TypeVar("_T")

LOST = 70
"""Exit code of a process that lost the others of its group (EX_SOFTWARE of sysexits.h)."""

LIMIT_S = 600.0
"""How long a process waits for another's answer. Chosen by hand: they differ by what is compiled
and loaded, minutes at most; tests set their own."""

GRACE_S = 60.0
"""How much longer a program may run on the devices once another process is known to have failed in
the operation. Chosen by hand: long against a program's run, which may end well; tests set their
own."""

POLL_S = 1.0
"""How often what others announced is looked up while a value is waited for. Chosen by hand: a
request to the coordination service takes under a millisecond; tests set 0.02."""

_ANNOUNCEMENT_CHARS = 2000
"""An error's text is cut here: enough for a reason, and compilers write megabytes. Chosen by hand;
no test depends on it."""


class GroupEnded(BaseException):
    """The group of processes is no more. No candidate is at fault: as an interruption, it passes
    `except Exception`.
    """


class LeftError(Exception):
    """Another process left this operation; the text says why."""


class ProcessFailedError(Exception):
    """What all processes ran failed on one of them; the text says on which and why."""


class Store(Protocol):
    """Keys and values that all processes see."""

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, once."""

    def get(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key, waited for; None where it is not there after the limit."""

    def below(self, prefix: str) -> dict[str, bytes]:
        """Values by key of all keys with a prefix."""

    def count(self, key: str) -> int:
        """Adds one to a number, and says what it is now."""

    def delete(self, prefix: str) -> None:
        """Forgets all keys with a prefix that ends in a slash."""


class Peers(Protocol):
    """The processes that run something together."""

    def run_on_all(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives on each process; an exception on any of them is one on all."""


class SingleProcess:
    """A process without peers."""

    def run_on_all(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives here."""
        return [run()]


SINGLE_PROCESS = SingleProcess()


class _Position(NamedTuple):
    """How far a process has come: the number of its operation, and the rounds done in it."""

    operation: int
    round: int


@dataclass(frozen=True, slots=True)
class _Absence:
    """Why another process will not take part in a round.

    Attributes:
        reason: What it said.
        failed: Whether it failed in this operation; else it ended for reasons of its own.
    """

    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class _Stuck:
    """Since when this process has waited in vain, by a clock that never goes back."""

    position: _Position
    since_s: float


class ProcessGroup:
    """One search as one of its processes sees it; a context manager."""

    def __init__(
        self,
        store: Store,
        own: int,
        members: Sequence[int],
        *,
        limit_s: float = LIMIT_S,
        grace_s: float = GRACE_S,
        on_lost: Callable[[str, bool], None] = lambda reason, failed: None,
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Joins nothing yet.

        Args:
            store: Seen by all.
            own: Number of this process.
            members: Numbers of all; the least one leads.
            limit_s: See `LIMIT_S`.
            grace_s: See `GRACE_S`.
            on_lost: Called from another thread before this process ends because it waits for others
                in vain, with the reason, and whether that is what failed in the operation (else
                they left for reasons of their own).
            on_interrupt: Called from another thread of the leader when another process was
                interrupted.
        """
        self.own, self.members, self.limit_s = own, tuple(sorted(members)), limit_s
        self.on_lost, self.on_interrupt = on_lost, on_interrupt
        self._store, self._grace_s = store, grace_s
        self._at = _Position(0, 0)
        self._on_devices = False
        self._broken = ""
        self._closed = threading.Event()
        self._stderr = -1

    @property
    def leads(self) -> bool:
        """True in the process that decides."""
        return self.own == self.members[0]

    def __enter__(self) -> ProcessGroup:
        group = "autoshard/" + "-".join(map(str, self.members))
        # Searches of the same processes follow each other, in the same order on all of them, so
        # counting them gives each keys of its own.
        with _ended_if_away():
            number = self._store.count(f"{group}/count/{self.own}")
        self._prefix = f"{group}/{number}/"
        self._previous = f"{group}/{number - 1}/"
        self._stderr = os.dup(2)  # file descriptor 2 itself is captured now and then
        self._watcher = threading.Thread(
            target=self._watch, name="autoshard-process-group", daemon=True
        )
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._announce("end", _reason(error))
        self._closed.set()
        self._watcher.join(2 * POLL_S)
        os.close(self._stderr)
        self._stderr = -1

    # Operations and rounds ------------------------------------------------------------------------

    @contextmanager
    def operation(self, *, on_devices: bool) -> Iterator[None]:
        """One operation. An exception that leaves it on this process makes the others leave it.

        Args:
            on_devices: Something is run in it that waits for the other processes.
        """
        if self._broken:
            raise GroupEnded(self._broken)
        self._at = _Position(self._at.operation + 1, 0)
        self._on_devices = on_devices
        try:
            yield
        except (LeftError, ProcessFailedError):
            raise
        except BaseException as error:
            if self.leads or isinstance(error, Exception):  # else this process ends, and says so
                self._announce(f"{self._at.operation}/left", _reason(error))
            raise
        finally:
            self._on_devices = False
        self._forget_previous()

    def _forget_previous(self) -> None:
        """Deletes what was posted in the operation before: all have come to the end of this one, so
        all have read it.
        """
        if not self.leads:
            return
        before = self._at.operation - 1
        with suppress(RuntimeError):
            self._store.delete(f"{self._prefix}{before}/" if before else self._previous)

    def gather_from_all(self, value: _T, failure: str = "") -> list[tuple[str, _T]]:
        """A round: (why it failed, value) of each process, in the order of their numbers.

        Args:
            value: Of this process; plain builtins.
            failure: Why there is none.

        Raises:
            LeftError: If a process left the operation.
            GroupEnded: If a process ended, or does not answer within the limit.
        """
        operation, round_ = self._at.operation, self._at.round + 1
        self._at = _Position(operation, round_)  # before posting: the watcher looks at the next one
        place = f"{self._prefix}{operation}/{round_}/"
        self._put(f"{place}{self.own}", msgspec.msgpack.encode((failure, value)))
        answers: list[tuple[str, _T]] = []
        for member in self.members:
            if member == self.own:
                answers.append((failure, value))
            else:
                answer = msgspec.msgpack.decode(self._await(f"{place}{member}", member))
                answers.append(tuple(answer))
        return answers

    def run_on_all(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives on each process, as plain builtins; see `Peers`.

        Raises:
            ProcessFailedError: If it failed on any of them.
        """
        error: Exception | None = None
        value: Any = None
        failure = ""
        try:
            value = run()
        except (LeftError, ProcessFailedError):  # from a round within: all have heard of it
            raise
        except Exception as caught:
            error, failure = caught, _reason(caught)
        try:
            answers = self.gather_from_all(value, failure)
        except GroupEnded as ended:
            if not failure:
                raise
            # The others waited in vain for what failed here: that is what is at fault.
            self._broken = str(ended)
            raise ProcessFailedError(f"on process {self.own}: {failure}") from error
        for member, (text, _) in zip(self.members, answers, strict=True):
            if text:
                raise ProcessFailedError(f"on process {member}: {text}") from error
        return [answer for _, answer in answers]

    def check_same(self, facts: dict[str, str]) -> None:
        """Makes sure that all processes were called alike, in an operation of its own.

        Args:
            facts: What must be the same, by name.

        Raises:
            GroupEnded: If they were not; the difference is named.
        """
        with self.operation(on_devices=False):
            answers = [answer for _, answer in self.gather_from_all(facts)]
        leader, first = self.members[0], answers[0]
        for member, other in zip(self.members, answers, strict=True):
            differences = []
            for name, value in other.items():
                if first.get(name) != value:
                    differences.append(
                        f"{name}: {value!r} there, {first.get(name)!r} on process {leader}"
                    )
            if differences:
                raise GroupEnded(
                    f"process {member} was called for something else ({'; '.join(differences)})"
                )

    # Commands -------------------------------------------------------------------------------------

    def command(self, name: str, **arguments: Any) -> None:
        """Says what the operation that was just entered is; for the leader."""
        self._put(f"{self._prefix}{self._at.operation}/command", _encoded(name, arguments))

    def last_command(self, name: str, **arguments: Any) -> None:
        """Says that there are no further operations, and what came of them; for the leader."""
        if not self._broken:
            self._put(f"{self._prefix}{self._at.operation + 1}/command", _encoded(name, arguments))

    def next_command(self, check: Callable[[], bool] = lambda: False) -> tuple[str, dict[str, Any]]:
        """What the next operation is; for the others. It is waited for as long as the leader lives:
        it may wait for workers.

        Args:
            check: Called every second; True once this process was interrupted, which the leader is
                then told.
        """
        key, leader = f"{self._prefix}{self._at.operation + 1}/command", self.members[0]
        announced = False
        while True:
            if check() and not announced:
                announced = True
                self._announce("interrupt", "interrupted")
            command = self._get(key)
            if command is not None:
                name, arguments = msgspec.msgpack.decode(command)
                return name, arguments
            ends = self._announced("end")
            if leader in ends and self._get(key) is None:  # its last command came before its end
                raise GroupEnded(f"process {leader} ended the search ({ends[leader]})")

    # Waiting --------------------------------------------------------------------------------------

    def _await(self, key: str, member: int) -> bytes:
        """A value of another process.

        Raises:
            LeftError: If a process left the operation.
            GroupEnded: If one ended, or this one does not answer.
        """
        until_s = time.monotonic() + self.limit_s
        while True:
            # The value first: who posted it and then left or ended has still answered.
            value = self._get(key)
            if value is not None:
                return value
            for who, why in self._announced(f"{self._at.operation}/left").items():
                raise LeftError(f"process {who} left: {why}")
            for who, why in self._announced("end").items():
                raise GroupEnded(f"process {who} ended the search ({why})")
            if time.monotonic() > until_s:
                raise GroupEnded(f"process {member} has not answered for {self.limit_s:g} s")

    def _get(self, key: str) -> bytes | None:
        with _ended_if_away():
            return self._store.get(key, POLL_S)

    def _put(self, key: str, value: bytes) -> None:
        with _ended_if_away():
            self._store.put(key, value)

    def _announce(self, topic: str, text: str) -> None:
        with suppress(RuntimeError):  # announced already, or nobody is left to hear it
            key = f"{self._prefix}{topic}/{self.own}"
            self._store.put(key, text[:_ANNOUNCEMENT_CHARS].encode())

    def _announced(self, topic: str) -> dict[int, str]:
        """What other processes announced, by their number."""
        with _ended_if_away():
            announcements = self._store.below(f"{self._prefix}{topic}/")
        texts: dict[int, str] = {}
        for key, text in announcements.items():
            member = int(key.rpartition("/")[2])
            if member != self.own:
                texts[member] = text.decode(errors="replace")
        return texts

    # Watching -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends this process once it is stuck on its devices; tells the leader of interruptions."""
        stuck: _Stuck | None = None
        interrupted = False
        while not self._closed.wait(POLL_S):
            try:
                if self.leads and not interrupted and self._announced("interrupt"):
                    interrupted = True
                    self.on_interrupt()
                stuck = self._stuck(stuck)
            except (GroupEnded, RuntimeError):
                continue  # the main thread finds out as well; where it cannot, jax ends the process

    def _stuck(self, before: _Stuck | None) -> _Stuck | None:
        """Whether this process waits for one that will not come, and since when; does not return
        once that has lasted for the grace period.
        """
        at = self._at
        absence = self._absence(at) if self._on_devices else None
        now_s = time.monotonic()
        # This process may have come further while the store was asked.
        if absence is None or self._at != at or not self._on_devices:
            return None
        if before is None or before.position != at:
            return _Stuck(at, now_s)
        if now_s - before.since_s > self._grace_s:
            self._abort(absence)
        return before

    def _absence(self, at: _Position) -> _Absence | None:
        """Why another process will not take part in the round that this one is on its way to; None
        if it may.
        """
        next_round = f"{self._prefix}{at.operation}/{at.round + 1}/"
        for key, posted in self._store.below(next_round).items():
            failure = msgspec.msgpack.decode(posted)[0]
            if failure:
                return _Absence(f"on process {key.rpartition('/')[2]}: {failure}", failed=True)
        for member, why in self._announced(f"{at.operation}/left").items():
            return _Absence(f"process {member} left ({why})", failed=True)
        for member, why in self._announced("end").items():
            return _Absence(f"process {member} ended ({why})", failed=False)
        return None

    def _abort(self, absence: _Absence) -> NoReturn:
        """Ends this process, in which a program waits for devices of another process and would for
        ever.
        """
        text = (
            f"process {self.own} is stuck on its devices since another process failed, and ends: "
            f"{absence.reason}"
        )
        self._announce("end", text)
        # Whatever fails from here on, the process ends: nothing is to keep its devices.
        with suppress(Exception):
            log.error("%s", text)
            self.on_lost(absence.reason, absence.failed)
        with suppress(OSError):
            os.write(self._stderr, f"autoshard: {text}\n".encode())
        os._exit(LOST)  # an exception would not reach the thread that waits in C++


@contextmanager
def _ended_if_away() -> Iterator[None]:
    """Within it, a coordination service that does not answer ends the group."""
    try:
        yield
    except RuntimeError as error:
        raise GroupEnded(f"jax's coordination service does not answer ({_reason(error)})") from None


def _encoded(name: str, arguments: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([name, arguments])


def _reason(error: BaseException) -> str:
    """An error in one line; the end of the group says itself who is at fault."""
    return first_line(str(error)) if isinstance(error, GroupEnded) else one_line(error)
