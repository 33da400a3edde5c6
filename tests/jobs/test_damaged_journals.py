"""A journal that three workers wrote, damaged in every way: what is done with it afterwards gives
the answer of the undamaged one, or an error that names the damage. Never another answer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from autoshard import _optimize, _stages
from autoshard.cli import jobs
from autoshard.cli.job_file import read_job
from autoshard.cli.jobs import run_here
from autoshard.errors import AutoshardError
from autoshard.search.study import lease_watch, shared_study, task_queue
from autoshard.search.study.claims import Claim, claim_of
from autoshard.search.study.heartbeat import Alive
from tests.jobs import stand_in
from tests.jobs.crew import claims_of
from tests.jobs.test_workers import ENVIRONMENT, autoshard, said

EDITS_IN_THE_SUITE, EDITS = 100, 2000
LEASE_S = 0.02


def job_in(folder: Path, compiled: int = 6, measured: int = 2) -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(stand_in.FACTORY)
    job = stand_in.JOB.format(
        compiled=compiled, measured=measured, storage="journal:study.log", lease_s=20.0
    )
    (folder / "autoshard.toml").write_text(job)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that three workers have done."""
    folder = job_in(tmp_path_factory.mktemp("journals") / "written")
    command = [sys.executable, "-m", "tests.jobs.stand_in", "worker", "autoshard.toml"]
    environment = {**ENVIRONMENT, stand_in.TEAM: "3", "TMPDIR": str(folder)}
    environment.pop("XDG_RUNTIME_DIR", None)
    team = []
    for _ in range(3):
        team.append(
            subprocess.Popen(
                [*command, "--restarts", "0"],
                cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    for worker in team:
        _, text = worker.communicate(timeout=300)
        assert worker.returncode == 0, text
    owners = {claim_of(t).owner for t in claims_of(where(folder), "mlp").results.values()}  # type: ignore[union-attr]
    assert len(owners) == 3
    return folder


def where(folder: Path) -> str:
    return f"journal:{folder / 'study.log'}"


class NoHeartbeat:
    """In one process there is nobody to show it to."""

    def __init__(self, where: str, lease_s: float) -> None:
        pass

    def wait(self) -> None:
        pass

    def keep_alive(self, alive: Alive | None) -> None:
        pass

    def close(self) -> None:
        pass


def short_claim(trial: FrozenTrial) -> Claim | None:
    """A claim of which a worker is stale at once: none of them lives any more."""
    claim = claim_of(trial)
    return None if claim is None else replace(claim, lease_s=LEASE_S)


def once(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what its key says, called once for each."""
    results: dict[Any, Any] = {}

    def made(*args: Any, **kwargs: Any) -> Any:
        what = key(*args)
        if what not in results:
            results[what] = make(*args, **kwargs)
        return results[what]

    return made


def in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, and what dead workers held is free at once."""
    monkeypatch.setattr(task_queue, "Heartbeat", NoHeartbeat)
    monkeypatch.setattr(task_queue, "LEASE_S", LEASE_S)
    monkeypatch.setattr(task_queue, "POLL_S", LEASE_S / 4)
    monkeypatch.setattr(lease_watch, "claim_of", short_claim)
    monkeypatch.setattr(jobs, "use_cpu_devices", lambda count: None)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)


@pytest.fixture
def cheap_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of which commands run in this process in little time: what does not depend on the
    journal is done once."""
    folder = job_in(tmp_path / "job")
    in_this_process(folder, monkeypatch)
    for owner, name, value in stand_in.PATCHES:
        monkeypatch.setattr(owner, name, value)
    for owner, name, key in (
        (_optimize, "prepare_search", lambda *_: ""),
        (_stages, "propose", lambda *_: ""),
        (_stages, "Predictor", lambda *_: ""),
        (shared_study, "_read", lambda record, *_: json.dumps(record)),
    ):
        monkeypatch.setattr(owner, name, once(getattr(owner, name), key))
    return folder


def outcome(folder: Path) -> tuple[Any, str]:
    """The answer of `worker` and `finish`, or the error of either."""
    (folder / "table.json").unlink(missing_ok=True)
    job = read_job("autoshard.toml", {})
    try:
        run_here(job, progress=False)
        run_here(job.updated({"out": "table.json"}), again=True, progress=False)
    except AutoshardError as error:
        return None, str(error)
    table = json.loads((folder / "table.json").read_text())
    return (table["rules"], table["inputs"]), ""


Damage = Callable[[random.Random, bytes], bytes]


def junk(chance: random.Random, whole: bytes) -> bytes:
    at = chance.randrange(len(whole) - 4)
    return whole[:at] + chance.randbytes(4) + whole[at + 4 :]


def one_bit(chance: random.Random, whole: bytes) -> bytes:
    at = chance.randrange(len(whole))
    return whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]


def digits(chance: random.Random, whole: bytes) -> bytes:
    """A number is another one: still a line of JSON."""
    places = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    at = chance.choice(places)
    return whole[:at] + str((whole[at] - 47) % 10).encode() + whole[at + 1 :]


def cut_out(chance: random.Random, whole: bytes) -> bytes:
    start, end = sorted(chance.choices(range(len(whole)), k=2))
    return whole[:start] + whole[min(end, start + len(whole) // 4) :]


def cut_off(chance: random.Random, whole: bytes) -> bytes:
    return whole[: chance.randrange(len(whole))]


def by_lines(change: Callable[[random.Random, list[bytes]], None]) -> Damage:
    def damage(chance: random.Random, whole: bytes) -> bytes:
        lines = whole.splitlines(keepends=True)
        change(chance, lines)
        return b"".join(lines)

    return damage


def drop(chance: random.Random, lines: list[bytes]) -> None:
    del lines[chance.randrange(len(lines))]


def drop_some(chance: random.Random, lines: list[bytes]) -> None:
    start = chance.randrange(len(lines))
    del lines[start : start + chance.randint(2, 20)]


def repeat(chance: random.Random, lines: list[bytes]) -> None:
    lines.insert(chance.randrange(len(lines)), chance.choice(lines))


def swap(chance: random.Random, lines: list[bytes]) -> None:
    i, j = chance.sample(range(len(lines)), 2)
    lines[i], lines[j] = lines[j], lines[i]


def shuffle(chance: random.Random, lines: list[bytes]) -> None:
    start = chance.randrange(len(lines) - 5)
    some = lines[start : start + 20]
    chance.shuffle(some)
    lines[start : start + 20] = some


def another_kind(chance: random.Random, lines: list[bytes]) -> None:
    odd = [b'{"op_code":99}', b'{"op_code":4}', b'{"op_code":4,"study_id":0}', b'{"op_code":"4"}']
    lines[chance.randrange(len(lines))] = chance.choice(odd) + b"\n"


def join_lines(chance: random.Random, lines: list[bytes]) -> None:
    at = chance.randrange(len(lines))
    lines[at] = lines[at].rstrip(b"\n")


DAMAGES: tuple[Damage, ...] = (
    junk, one_bit, digits, cut_out, cut_off,
    *map(by_lines, (drop, drop_some, repeat, swap, shuffle, another_kind, join_lines)),
)  # fmt: skip


def check(folder: Path, damaged: bytes, expected: Any, what: object) -> bool:
    """Whether a damaged journal gives the answer; else its error must say that it is damaged."""
    (folder / "study.log").write_bytes(damaged)
    answer, error = outcome(folder)
    if answer is None:
        assert "damage" in error, (what, error)
        return False
    assert answer == expected, what
    return True


def check_random(folder: Path, written: Path, count: int, seed: int) -> None:
    whole = (written / "study.log").read_bytes()
    (folder / "study.log").write_bytes(whole)
    expected, _ = outcome(folder)
    assert expected
    same = 0
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        damage = DAMAGES[number % len(DAMAGES)]
        same += check(folder, damage(chance, whole), expected, (seed, number, damage))
    print(f"{count} damaged journals: {same} with the answer, {count - same} with an error")
    assert same > 0.9 * count


def test_a_damaged_journal_gives_the_answer_or_an_error(written: Path, cheap_job: Path) -> None:
    check_random(cheap_job, written, EDITS_IN_THE_SUITE, 1)


@pytest.mark.slow
def test_two_thousand_damaged_journals_give_the_answer_or_an_error(
    written: Path, cheap_job: Path
) -> None:
    check_random(cheap_job, written, EDITS, 2)


@pytest.mark.slow
def test_every_line_in_turn(written: Path, cheap_job: Path) -> None:
    """Missing, with junk in it, with another number in it, twice: one after the other."""
    whole = (written / "study.log").read_bytes()
    (cheap_job / "study.log").write_bytes(whole)
    expected, _ = outcome(cheap_job)
    lines = whole.splitlines(keepends=True)
    same = 0
    for at, line in enumerate(lines):
        middle = len(line) // 2
        for other in (
            b"",
            line[:middle] + b"\x00\xff{]" + line[middle + 4 :],
            line.replace(b"1", b"2", 1),
            line * 2,
        ):
            damaged = b"".join([*lines[:at], other, *lines[at + 1 :]])
            same += check(cheap_job, damaged, expected, (at, other))
    print(f"{len(lines)} lines: {same} of {4 * len(lines)} with the answer")
    assert same == 4 * len(lines)


@pytest.mark.slow
def test_ten_damaged_journals_with_real_compilations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stands in for anything but the clock: nothing is measured."""
    written = job_in(tmp_path / "written", compiled=4, measured=0)
    team = [autoshard(written, "worker", "autoshard.toml") for _ in range(3)]
    for worker in team:
        said(worker)
    folder = job_in(tmp_path / "job", compiled=4, measured=0)
    in_this_process(folder, monkeypatch)
    check_random(folder, written, 10, 3)
