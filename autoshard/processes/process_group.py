"""What the processes of one search agree on: small values by way of jax's coordination service,
never of devices.

All processes of a mesh call the same search. The first of them leads: it decides and says what is
done next, the others do it along with it (see `multihost`). A search is a sequence of steps, a step
a sequence of turns; at each turn every process posts a value and reads those of all others, so that
all continue from the same values. Nothing is waited for without a limit, and a process that fails
or leaves says so, on which the others leave the step as well.

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
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from autoshard.text import first_line, one_line

log = logging.getLogger("autoshard.jobs")

_T = TypeVar("_T")

LOST = 70
"""Exit code of a process that lost the others of its group (EX_SOFTWARE of sysexits.h)."""

LIMIT_S = 600.0
"""How long a process waits for another's answer; they differ by what is compiled and loaded,
minutes at most."""

GRACE_S = 60.0
"""How much longer a program may run on the devices once another process is known to have failed in
it."""

POLL_S = 1.0


class GroupEnded(BaseException):
    """The group of processes is no more. No candidate is at fault: as an interruption, it passes
    `except Exception`.
    """


class LeftError(Exception):
    """Another process left this step; the text says why."""


class ProcessFailedError(Exception):
    """What all processes did together failed on one of them; the text says on which and why."""


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
    """The processes that do something together."""

    def together(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives on each process; an exception on any of them is one on all."""


class Alone:
    """One process."""

    def together(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives here."""
        return [run()]


ALONE = Alone()


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
                in vain, with the reason, and whether that is what failed in the step (else they
                left for reasons of their own).
            on_interrupt: Called from another thread of the leader when another process was
                interrupted.
        """
        self.own, self.members, self.limit_s = own, tuple(sorted(members)), limit_s
        self.on_lost, self.on_interrupt = on_lost, on_interrupt
        self._store, self._grace_s = store, grace_s
        self._at = (0, 0)
        self._watched = False
        self._broken = ""
        self._closed = threading.Event()
        self._stderr = -1

    @property
    def leads(self) -> bool:
        """True in the process that decides."""
        return self.own == self.members[0]

    def __enter__(self) -> ProcessGroup:
        group = "autoshard/" + "-".join(map(str, self.members))
        try:
            number = self._store.count(f"{group}/count/{self.own}")
        except RuntimeError as error:
            raise GroupEnded(
                f"jax's coordination service does not answer ({_one_line(error)})"
            ) from None
        self._prefix = f"{group}/{number}/"
        self._previous = f"{group}/{number - 1}/"
        self._stderr = os.dup(2)  # file descriptor 2 itself is captured now and then
        self._watcher = threading.Thread(
            target=self._watch, name="autoshard-agreement", daemon=True
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
            self._say("end", _one_line(error))
        self._closed.set()
        self._watcher.join(2 * POLL_S)
        os.close(self._stderr)
        self._stderr = -1

    # Steps and turns ------------------------------------------------------------------------------

    @contextmanager
    def step(self, *, on_devices: bool) -> Iterator[None]:
        """One step. An exception that leaves it on this process makes the others leave it.

        Args:
            on_devices: Something is run in it that waits for the other processes.
        """
        if self._broken:
            raise GroupEnded(self._broken)
        self._at = self._at[0] + 1, 0
        self._watched = on_devices
        try:
            yield
        except (LeftError, ProcessFailedError):
            raise
        except BaseException as error:
            if self.leads or isinstance(error, Exception):  # else this process ends, and says so
                self._say(f"{self._at[0]}/left", _one_line(error))
            raise
        finally:
            self._watched = False
        # all have come to the end of this step, so all have read what was posted in the one before
        if self.leads:
            with suppress(RuntimeError):
                self._store.delete(
                    f"{self._prefix}{self._at[0] - 1}/" if self._at[0] > 1 else self._previous
                )

    def gather(self, value: _T, failed: str = "") -> list[tuple[str, _T]]:
        """A turn: (why it failed, value) of each process, in the order of their numbers.

        Args:
            value: Of this process; plain builtins.
            failed: Why there is none.

        Raises:
            LeftError: If a process left the step.
            Ended: If a process ended, or does not answer within the limit.
        """
        step, turn = self._at
        self._at = step, turn + 1
        place = f"{self._prefix}{step}/{turn + 1}/"
        self._put(f"{place}{self.own}", msgspec.msgpack.encode((failed, value)))
        answers: list[tuple[str, _T]] = []
        for member in self.members:
            if member == self.own:
                answers.append((failed, value))
            else:
                answers.append(
                    tuple(msgspec.msgpack.decode(self._await(f"{place}{member}", member)))
                )
        return answers

    def together(self, run: Callable[[], _T]) -> list[_T]:
        """What this gives on each process, as plain builtins; see `Peers`.

        Raises:
            ProcessFailedError: If it failed on any of them.
        """
        error: Exception | None = None
        value: Any = None
        failed = ""
        try:
            value = run()
        except (LeftError, ProcessFailedError):  # a turn within: all are told already
            raise
        except Exception as caught:
            error, failed = caught, _one_line(caught)
        try:
            answers = self.gather(value, failed)
        except GroupEnded as ended:
            if not failed:
                raise
            self._broken = str(
                ended
            )  # the others waited in vain for what failed here: that is what is at fault
            raise ProcessFailedError(f"on process {self.own}: {failed}") from error
        for member, (text, _) in zip(self.members, answers, strict=True):
            if text:
                raise ProcessFailedError(f"on process {member}: {text}") from error
        return [found for _, found in answers]

    def same(self, what: dict[str, str]) -> None:
        """Makes sure that all processes were called alike, in a step of its own.

        Raises:
            Ended: If they were not; the difference is named.
        """
        with self.step(on_devices=False):
            answers = [value for _, value in self.gather(what)]
        first = answers[0]
        for member, other in zip(self.members, answers, strict=True):
            differs = [f"{k}: {v!r} there, {first.get(k)!r} on process {self.members[0]}" for k, v in other.items()
                       if first.get(k) != v]  # fmt: skip
            if differs:
                raise GroupEnded(
                    f"process {member} was called for something else ({'; '.join(differs)})"
                )

    # Commands -------------------------------------------------------------------------------------

    def command(self, what: str, **arguments: Any) -> None:
        """Says what the step that was just entered is; for the leader."""
        self._put(f"{self._prefix}{self._at[0]}/command", msgspec.msgpack.encode([what, arguments]))

    def last_command(self, what: str, **arguments: Any) -> None:
        """Says that there are no further steps, and what came of them; for the leader."""
        if not self._broken:
            self._put(
                f"{self._prefix}{self._at[0] + 1}/command",
                msgspec.msgpack.encode([what, arguments]),
            )

    def next_command(self, check: Callable[[], bool] = lambda: False) -> tuple[str, dict[str, Any]]:
        """What the next step is; for the others. It is waited for as long as the leader lives: it
        may wait for workers.

        Args:
            check: Called every second; True once this process was interrupted, which the leader is
                then told.
        """
        key, leader, told = f"{self._prefix}{self._at[0] + 1}/command", self.members[0], False
        while True:
            if check() and not told:
                told = True
                self._say("interrupt", "interrupted")
            found = self._get(key)
            if found is not None:
                name, arguments = msgspec.msgpack.decode(found)
                return name, arguments
            ends = self._said("end")
            if leader in ends and self._get(key) is None:  # its last command came before its end
                raise GroupEnded(f"process {leader} ended the search ({ends[leader]})")

    # Waiting --------------------------------------------------------------------------------------

    def _await(self, key: str, member: int) -> bytes:
        """A value of another process.

        Raises:
            LeftError: If a process left the step.
            Ended: If one ended, or this one does not answer.
        """
        step, until = self._at[0], time.monotonic() + self.limit_s
        while True:
            found = self._get(key)
            if found is not None:
                return found
            for who, why in self._said(f"{step}/left").items():
                raise LeftError(f"process {who} left: {why}")
            for who, why in self._said("end").items():
                raise GroupEnded(f"process {who} ended the search ({why})")
            if time.monotonic() > until:
                raise GroupEnded(f"process {member} has not answered for {self.limit_s:g} s")

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, POLL_S)
        except RuntimeError as error:
            raise GroupEnded(
                f"jax's coordination service does not answer ({_one_line(error)})"
            ) from None

    def _put(self, key: str, value: bytes) -> None:
        try:
            self._store.put(key, value)
        except RuntimeError as error:
            raise GroupEnded(
                f"jax's coordination service does not answer ({_one_line(error)})"
            ) from None

    def _say(self, what: str, text: str) -> None:
        with suppress(RuntimeError):  # said already, or nobody is left to hear it
            self._store.put(f"{self._prefix}{what}/{self.own}", text[:2000].encode())

    def _said(self, what: str) -> dict[int, str]:
        """What others said, by their number."""
        try:
            found = self._store.below(f"{self._prefix}{what}/")
        except RuntimeError as error:
            raise GroupEnded(
                f"jax's coordination service does not answer ({_one_line(error)})"
            ) from None
        by_member = {
            int(key.rpartition("/")[2]): value.decode(errors="replace")
            for key, value in found.items()
        }
        return {member: text for member, text in by_member.items() if member != self.own}

    # Watching -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        stuck: tuple[tuple[int, int], float] | None = None
        interrupted = False
        while not self._closed.wait(POLL_S):
            try:
                if self.leads and not interrupted and self._said("interrupt"):
                    interrupted = True
                    self.on_interrupt()
                at = self._at
                why, failed = self._missing(at) if self._watched else ("", False)
            except (GroupEnded, RuntimeError):
                continue  # the main thread finds out as well; where it cannot, jax ends the process
            now_s = time.monotonic()
            if not why or self._at != at or not self._watched:
                stuck = None
            elif stuck is None or stuck[0] != at:
                stuck = at, now_s
            elif now_s - stuck[1] > self._grace_s:
                self._lose(why, failed)

    def _missing(self, at: tuple[int, int]) -> tuple[str, bool]:
        """Why another process will not take part in the turn that this one is on its way to, empty
        if it may; and whether it failed in this step.
        """
        step, turn = at
        for key, posted in self._store.below(f"{self._prefix}{step}/{turn + 1}/").items():
            failed = msgspec.msgpack.decode(posted)[0]
            if failed:
                return f"on process {key.rpartition('/')[2]}: {failed}", True
        for member, why in self._said(f"{step}/left").items():
            return f"process {member} left ({why})", True
        for member, why in self._said("end").items():
            return f"process {member} ended ({why})", False
        return "", False

    def _lose(self, why: str, failed: bool) -> NoReturn:
        """Ends this process, in which a program waits for devices of another process and would for
        ever.
        """
        text = f"process {self.own} is stuck on its devices since another process failed, and ends: {why}"
        self._say("end", text)
        with suppress(Exception):
            log.error("%s", text)
            self.on_lost(why, failed)
        with suppress(OSError):
            os.write(self._stderr, f"autoshard: {text}\n".encode())
        os._exit(LOST)


def _one_line(error: BaseException) -> str:
    return first_line(str(error)) if isinstance(error, GroupEnded) else one_line(error)
