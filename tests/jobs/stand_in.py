"""The command line with evaluations that cost nothing: what is found of a candidate is a pure
function of its key, and no two candidates have the same. Claims, records and choices are the real
ones.

As a program (`python -m tests.jobs.stand_in worker ...`) it is a worker in a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard import _stages
from autoshard.cli.app import run
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evidence.candidate import CompiledEvidence, Measured, Status, Verified

SLOWNESS, TEAM = "STAND_IN_S", "STAND_IN_TEAM"
"""Variables of the environment: seconds that an evaluation takes, and how many workers there are.
The first evaluation of each waits for those of the others, so that all take part."""

MEET_S = 60.0
"""How long they wait for each other."""

JOB = """
factory = "job.py:factory"
mesh = "data=4,model=2"
cpu_devices = 8
compiled = {compiled}
measured = {measured}
isolate = false
storage = "{storage}"
study = "mlp"
lease_s = {lease_s}
"""
FACTORY = """
from tests.models import mlp_args, mlp_step

def factory():
    return dict(fn=mlp_step, example_args=mlp_args(), donate_argnums=0)
"""


def seconds_of(key: str, what: str) -> float:
    """What an evaluation finds of a candidate."""
    digest = hashlib.sha256(f"{what} {key}".encode()).digest()
    return 1e-3 * (1 + int.from_bytes(digest[:4], "big") / 2**30)


def evidence_of(key: str) -> CompiledEvidence:
    return CompiledEvidence(
        collectives=(), collective_bytes=0, argument_bytes=1, output_bytes=1, alias_bytes=0,
        temp_bytes=1, peak_bytes=3, full_remat_warnings=0, flops=0.0,
        time_s=seconds_of(key, "compiled"), compile_s=0.0, compute_s=seconds_of(key, "compiled"),
    )  # fmt: skip


def _pause() -> None:
    _meet(int(os.environ.get(TEAM, "0")))
    time.sleep(float(os.environ.get(SLOWNESS, "0")))


def _meet(team: int) -> None:
    here = Path(f"here-{os.getpid()}")
    if team and not here.exists():
        here.touch()
        until_s = time.monotonic() + MEET_S
        while len(list(Path().glob("here-*"))) < team and time.monotonic() < until_s:
            time.sleep(0.02)


def compiled(self: Evaluation, entry: Entry, *, to_run: bool = False) -> None:
    if entry.untried:
        _pause()
        entry.gain(Status.COMPILED, compiled=evidence_of(entry.key))


def partitioned(self: Evaluation, entry: Entry) -> float:
    return seconds_of(entry.key, "partitioned")


def verified(self: Evaluation, entry: Entry) -> None:
    entry.gain(entry.candidate.status, verified=Verified(0.0, 1.0, "unsharded function", "x"))


def measured(self: Evaluation, entries: Sequence[Entry]) -> None:
    _pause()
    for entry in entries:
        second = seconds_of(entry.key, "measured")
        entry.gain(Status.MEASURED, measured=Measured(second, 3, (second,) * 3))


PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (Evaluation, "compile", compiled),
    (Evaluation, "_partition", partitioned),
    (Evaluation, "verify", verified),
    (Evaluation, "measure", measured),
    (_stages, "_advice", lambda session, evaluated: ()),
)


def main() -> None:
    for owner, name, value in PATCHES:
        setattr(owner, name, value)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
