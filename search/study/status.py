"""The status of a shared study: what is done, what runs where, the best so far, what was rejected
and why, time left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from autoshard.evidence.candidate import Candidate
from autoshard.search.study.claims import Claims, StudyTrial, claim_of
from autoshard.search.study.shared_study import ANSWER, candidates_of
from autoshard.search.study.task_id import COMPILATIONS, EVALUATIONS
from autoshard.search.study.task_queue import TaskQueue
from autoshard.text import first_line, seconds_text

COMPILED_PURPOSES = ("compiled", "challengers")
"""Purposes for which candidates are chosen that are all compiled."""

PACE_WINDOW_S = 3600.0
"""The pace is that of the last hour: long enough for compilations of minutes, and what joins or
leaves is seen soon. Chosen by hand; no test depends on it."""


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
        wanted: Candidates chosen for compiling, those evaluated among them; 0 where that is not
            decided yet.
        running: Tasks in hand.
        best: The answer of the search that ended last; before one has, the best candidate so far,
            measured if any is.
        finished: True once a search has ended.
        rejected: Name and reason.
        per_hour: Evaluations of the last hour's pace; 0 before the second.
        left_s: Seconds until the wanted ones are evaluated at that pace; None where that cannot be
            said, or none is left.
        deaths: How often a worker was lost.
    """

    evaluated: int
    wanted: int
    running: tuple[Running, ...]
    best: Candidate | None
    finished: bool
    rejected: tuple[tuple[str, str], ...]
    per_hour: float
    left_s: float | None
    deaths: int


def status_of(queue: TaskQueue, now_s: float | None = None) -> StudyStatus:
    """The status of a study now.

    Args:
        queue: Of the study.
        now_s: Seconds since the epoch, for how long things run; by default this machine's clock.
    """
    now_s = time.time() if now_s is None else now_s
    claims = queue.read()
    candidates = _candidates(claims)
    wanted = _wanted(claims)
    compilations = [task_id for task_id in claims.results if task_id.kind in COMPILATIONS]
    evaluated = {task_id.key for task_id in compilations}
    answer = _answer(queue.note(ANSWER))
    per_hour = _per_hour([claims.results[task_id] for task_id in compilations])
    left = len(wanted - evaluated)
    return StudyStatus(
        evaluated=len(evaluated),
        wanted=len(wanted | evaluated) if wanted else 0,
        running=tuple(_running(trial, now_s) for trial in claims.live.values()),
        best=answer or _best(candidates),
        finished=answer is not None,
        rejected=_rejected(candidates),
        per_hour=per_hour,
        left_s=left / per_hour * 3600 if per_hour and left else None,
        deaths=claims.deaths.total(),
    )


def _wanted(claims: Claims) -> set[str]:
    """Keys of the candidates that were chosen to be compiled. Of those chosen for a case, one after
    the other until one is good, only what was evaluated counts.
    """
    keys: set[str] = set()
    for task_id in claims.results:
        if task_id.purpose in COMPILED_PURPOSES:
            keys.update(claims.record(task_id))
    return keys


def _answer(noted: Any) -> Candidate | None:
    """The answer that a search noted; None where there is none that can be read."""
    try:
        return msgspec.convert(noted, Candidate)
    except msgspec.ValidationError:
        return None


def _candidates(claims: Claims) -> dict[str, Candidate]:
    """What is recorded of each candidate, by key: the last record of it."""
    candidates: dict[str, Candidate] = {}
    for task_id in claims.results:
        if task_id.kind in EVALUATIONS:
            candidates.update(candidates_of(claims.record(task_id)))
    return candidates


def _rejected(candidates: Mapping[str, Candidate]) -> tuple[tuple[str, str], ...]:
    rejected = [candidate for candidate in candidates.values() if candidate.rejected]
    return tuple((candidate.name, first_line(candidate.reason)) for candidate in rejected)


def _best(candidates: Mapping[str, Candidate]) -> Candidate | None:
    compiled = [c for c in candidates.values() if not c.rejected and c.compiled is not None]
    measured = [c for c in compiled if c.measured is not None]
    return min(measured or compiled, key=_seconds, default=None)


def _seconds(candidate: Candidate) -> float:
    if candidate.measured is not None:
        return candidate.measured.median_s
    return candidate.compiled.time_s if candidate.compiled is not None else float("inf")


def _running(trial: StudyTrial, now_s: float) -> Running:
    start = trial.datetime_start
    for_s = max(0.0, now_s - start.timestamp()) if isinstance(start, datetime) else 0.0
    claim = claim_of(trial)
    return Running("?", "?", for_s) if claim is None else Running(claim.title, claim.owner, for_s)


def _per_hour(done: Sequence[StudyTrial]) -> float:
    """Evaluations an hour, by those of the last hour; 0 where there is no pace yet."""
    ends = sorted(t.datetime_complete.timestamp() for t in done if t.datetime_complete is not None)
    recent = [end for end in ends if ends[-1] - end <= PACE_WINDOW_S]
    if len(recent) < 2 or recent[-1] == recent[0]:
        return 0.0
    return (len(recent) - 1) / (recent[-1] - recent[0]) * 3600


def status_text(status: StudyStatus) -> str:
    """A few lines for people."""
    lines = [_progress_line(status)]
    if status.best is not None:
        lines.append(_best_line(status.best))
    lines += [f"running: {r.title} on {r.owner} for {_duration(r.for_s)}" for r in status.running]
    lines += [f"rejected: {name}, {reason}" for name, reason in status.rejected]
    return "\n".join(map(_printable, lines))


def _progress_line(status: StudyStatus) -> str:
    line = f"{status.evaluated} of {status.wanted or '?'} candidates evaluated"
    if status.per_hour:
        line += f", {status.per_hour:.3g} an hour"
    if status.left_s is not None:
        line += f", about {_duration(status.left_s)} left"
    elif status.finished:
        line += ", finished"
    if status.deaths:
        line += f"; workers lost {status.deaths} times"
    return line


def _best_line(best: Candidate) -> str:
    evidence = "measured" if best.measured is not None else "compiled"
    rules = ", ".join(best.rules) or "no rules"
    return f"best so far: {best.name}, {seconds_text(_seconds(best))} {evidence} ({rules})"


def _printable(line: str) -> str:
    """A line without what a terminal would act on: anybody may have written the study."""
    return "".join(c if c.isprintable() else "?" for c in line)


def status_json(status: StudyStatus) -> dict[str, Any]:
    """The same as plain builtins."""
    return {
        "evaluated": status.evaluated,
        "wanted": status.wanted,
        "running": [{"task": r.title, "worker": r.owner, "for_s": r.for_s} for r in status.running],
        "best": None if status.best is None else status.best.to_dict(),
        "finished": status.finished,
        "rejected": [{"name": name, "reason": reason} for name, reason in status.rejected],
        "per_hour": status.per_hour,
        "left_s": status.left_s,
        "workers_lost": status.deaths,
    }


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest_s} s"
    return f"{rest_s} s"
