"""How a shared study stands: what is done, what runs where, the best so far, what was rejected and
why, time left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autoshard.evidence.candidate import Candidate
from autoshard.search.study.claims import StudyTrial, claim_of
from autoshard.search.study.shared_evaluation import candidates_of
from autoshard.search.study.task_queue import Tasks
from autoshard.text import seconds_text

COUNTED = ("compile", "full", "quick")
"""Rungs on which one task is one evaluation of a candidate."""


@dataclass(frozen=True, slots=True)
class Running:
    """A task that a worker has."""

    title: str
    owner: str
    for_s: float


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """See the module.

    Attributes:
        evaluated: Candidates compiled or rejected.
        wanted: Candidates chosen for compiling; 0 where that is not decided yet.
        running: Tasks in work.
        best: The best candidate so far, measured if any is.
        rejected: Name and reason.
        per_hour: Evaluations of the last hour's pace; 0 before the second.
        left_s: Seconds until the wanted ones are evaluated at that pace; None where that cannot be
            said.
        deaths: How often a worker was lost.
    """

    evaluated: int
    wanted: int
    running: tuple[Running, ...]
    best: Candidate | None
    rejected: tuple[tuple[str, str], ...]
    per_hour: float
    left_s: float | None
    deaths: int


def status_of(tasks: Tasks, now_s: float | None = None) -> StudyStatus:
    """How a study stands now.

    Args:
        tasks: Of the study.
        now_s: Seconds since the epoch, for how long things run; by default this machine's clock.
    """
    now_s = time.time() if now_s is None else now_s
    claims = tasks.read()
    found: dict[str, Candidate] = {}
    done: list[StudyTrial] = []
    wanted: set[str] = set()
    for task, trial in claims.results.items():
        rung, _, rest = task.partition(" ")
        if rung == "choice" and rest.split()[0] in ("compiled", "next", "smallest"):
            wanted |= set(claims.record(task))
        elif rung in (*COUNTED, "verify", "measure"):
            found |= candidates_of(claims.record(task))
            if rung in COUNTED:
                done.append(trial)
    alive = [t for t in found.values() if not t.rejected and t.compiled is not None]
    measured = [t for t in alive if t.measured is not None]
    pace = _per_hour(done)
    evaluated = {claim.task.partition(" ")[2] for t in done if (claim := claim_of(t)) is not None}
    left = len(wanted - evaluated)
    return StudyStatus(
        evaluated=len(evaluated),
        wanted=len(wanted),
        running=tuple(_running(c, now_s) for c in claims.claims.values()),
        best=min(measured or alive, key=_seconds, default=None),
        rejected=tuple((t.name, t.reason.splitlines()[0]) for t in found.values() if t.rejected),
        per_hour=pace,
        left_s=left / pace * 3600 if pace and wanted else None,
        deaths=sum(claims.deaths.values()),
    )


def _seconds(candidate: Candidate) -> float:
    if candidate.measured is not None:
        return candidate.measured.median_s
    return candidate.compiled.time_s if candidate.compiled is not None else float("inf")


def _running(claim: StudyTrial, now_s: float) -> Running:
    start = claim.datetime_start
    for_s = max(0.0, now_s - start.timestamp()) if isinstance(start, datetime) else 0.0
    made = claim_of(claim)
    return Running("?", "?", for_s) if made is None else Running(made.title, made.owner, for_s)


def _per_hour(done: Sequence[StudyTrial]) -> float:
    ends = sorted(t.datetime_complete.timestamp() for t in done if t.datetime_complete is not None)
    recent = [end for end in ends if ends[-1] - end <= 3600]
    return (
        (len(recent) - 1) / (recent[-1] - recent[0]) * 3600
        if len(recent) > 1 and recent[-1] > recent[0]
        else 0.0
    )


def status_text(status: StudyStatus) -> str:
    """A few lines for people."""
    wanted = status.wanted or "?"
    lines = [f"{status.evaluated} of {wanted} candidates evaluated"]
    if status.per_hour:
        lines[0] += f", {status.per_hour:.3g} an hour"
    if status.left_s is not None:
        lines[0] += f", about {_duration(status.left_s)} left"
    if status.deaths:
        lines[0] += f"; workers lost {status.deaths} times"
    if status.best is not None:
        word = "measured" if status.best.measured is not None else "compiled"
        rules = ", ".join(status.best.rules) or "no rules"
        lines.append(
            f"best so far: {status.best.name}, {seconds_text(_seconds(status.best))} {word} "
            f"({rules})"
        )
    lines += [f"running: {r.title} on {r.owner} for {_duration(r.for_s)}" for r in status.running]
    lines += [f"rejected: {name}, {reason}" for name, reason in status.rejected]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def status_json(status: StudyStatus) -> dict[str, Any]:
    """The same as plain builtins."""
    return {
        "evaluated": status.evaluated,
        "wanted": status.wanted,
        "running": [{"task": r.title, "worker": r.owner, "for_s": r.for_s} for r in status.running],
        "best": None if status.best is None else status.best.to_dict(),
        "rejected": [{"name": name, "reason": reason} for name, reason in status.rejected],
        "per_hour": status.per_hour,
        "left_s": status.left_s,
        "workers_lost": status.deaths,
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
