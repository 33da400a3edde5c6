"""A group of processes: here they are threads, over a dictionary in the place of jax's coordination
service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from autoshard.processes import process_group
from autoshard.processes.process_group import (
    LOST,
    GroupEnded,
    LeftError,
    ProcessFailedError,
    ProcessGroup,
)


class Memory:
    """Keys and values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if key in self.values:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, limit_s)
            return self.values.get(key)

    def below(self, prefix: str) -> dict[str, bytes]:
        with self._changed:
            return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def count(self, key: str) -> int:
        with self._changed:
            number = int(self.values.get(key, b"0")) + 1
            self.values[key] = str(number).encode()
            return number

    def delete(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self.values if key.startswith(prefix)]:
                del self.values[key]


class Exited(BaseException):
    """In the place of the end of a process."""


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "POLL_S", 0.02)


def search(
    *processes: Callable[[ProcessGroup], Any], store: Memory | None = None, **options: Any
) -> list[Any]:
    """What each process gives, or the exception that it ends with."""
    known = Memory() if store is None else store

    def run(number: int) -> Any:
        try:
            with ProcessGroup(
                known, number, range(len(processes)), **{"limit_s": 10.0, **options}
            ) as joined:
                return processes[number](joined)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(run, range(len(processes))))


def operation(run: Callable[[], Any]) -> Callable[[ProcessGroup], Any]:
    def process(joined: ProcessGroup) -> Any:
        with joined.operation(on_devices=True):
            return joined.run_on_all(run)

    return process


def failing() -> None:
    raise MemoryError("full")


def test_all_get_the_values_of_all_in_order() -> None:
    found = search(*(operation(lambda n=number: n) for number in range(4)))  # type: ignore[misc]
    assert found == [[0, 1, 2, 3]] * 4


def test_a_failure_anywhere_is_one_everywhere_and_they_go_on() -> None:
    def process(run: Callable[[], Any]) -> Callable[[ProcessGroup], Any]:
        def work(joined: ProcessGroup) -> Any:
            with pytest.raises(ProcessFailedError, match="on process 1: MemoryError: full"):
                operation(run)(joined)
            return operation(lambda: "fine")(joined)

        return work

    assert search(process(lambda: 1), process(failing), process(lambda: 3)) == [["fine"] * 3] * 3


def test_one_that_leaves_an_operation_makes_the_others_leave_it() -> None:
    def leave(joined: ProcessGroup) -> Any:
        with pytest.raises(ValueError, match="odd"), joined.operation(on_devices=True):
            raise ValueError("odd")
        return operation(lambda: 1)(joined)

    def follow(joined: ProcessGroup) -> Any:
        with pytest.raises(LeftError, match="process 0 left: ValueError: odd"):
            operation(lambda: 0)(joined)
        return operation(lambda: 2)(joined)

    assert search(leave, follow) == [[1, 2], [1, 2]]


def test_a_process_that_is_preempted_ends_the_search_and_fails_no_layout() -> None:
    def preempted(joined: ProcessGroup) -> Any:
        with joined.operation(on_devices=True):
            raise SystemExit(143)

    leader, _ = search(operation(lambda: 0), preempted)
    assert isinstance(leader, GroupEnded)
    assert "process 1 ended the search (SystemExit: 143)" in str(leader)


def test_nobody_is_waited_for_without_a_limit() -> None:
    found, _ = search(operation(lambda: 0), lambda joined: time.sleep(0.5), limit_s=0.1)
    assert isinstance(found, GroupEnded)
    assert "process 1 has not answered for 0.1 s" in str(found)


def test_the_leaders_last_word_is_heard_before_its_end() -> None:
    def lead(joined: ProcessGroup) -> Any:
        joined.last_command("failed", text="nothing fits")
        raise ValueError("nothing fits")

    assert search(lead, lambda joined: joined.next_command())[1] == (
        "failed",
        {"text": "nothing fits"},
    )


def test_what_was_read_is_forgotten_and_searches_follow_each_other() -> None:
    store = Memory()

    def process(joined: ProcessGroup) -> Any:
        return [operation(lambda: 1)(joined) for _ in range(50)]

    for _ in range(3):
        assert search(process, process, store=store) == [[[1, 1]] * 50] * 2
    assert len(store.values) < 15


@pytest.mark.parametrize(
    ("failed", "why"), [(True, "MemoryError: full"), (False, "SystemExit: 143")]
)
def test_one_that_is_stuck_since_another_failed_says_so_and_ends(
    failed: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other one failed at is to blame for it; that it was pre-empted is nobody's fault."""
    ended = threading.Event()
    lost: list[Any] = []

    def end(code: int) -> None:
        lost.append(code)
        ended.set()
        time.sleep(1)

    monkeypatch.setattr("os._exit", end)

    def stuck(joined: ProcessGroup) -> Any:
        joined.on_lost = lambda reason, at_fault: lost.extend([reason, at_fault])
        with joined.operation(on_devices=True):
            assert ended.wait(20)  # a program on the devices
            return "stuck"

    def fails(joined: ProcessGroup) -> Any:
        with joined.operation(on_devices=True):
            if not failed:
                raise SystemExit(143)
            return joined.run_on_all(failing)

    _, other = search(stuck, fails, grace_s=0.2)
    reason, at_fault, code = lost
    assert why in reason
    assert (at_fault, code) == (failed, LOST)
    if failed:
        assert isinstance(
            other, ProcessFailedError
        )  # the layout is to blame; the next step finds the group ended
