"""Tells which claims are stale: those whose heartbeat has not changed for their lease."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from optuna.trial import FrozenTrial

from autoshard.search.study.claims import claim_of
from autoshard.search.study.heartbeat import HEARTBEAT

LEASE_S = 60.0
"""Seconds without a heartbeat after which a claim is stale, where a job says nothing else. Chosen
by hand: long against the hiccups of a storage, short against the hours of a job. Tests set their
own."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A heartbeat, and when it was first seen by the clock of this process."""

    heartbeat: object
    at_s: float


@dataclass(eq=False)
class LeaseWatch:
    """When each claim's heartbeat last changed, by the clock of this process alone."""

    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked_s: float = 0.0

    def stale(self, claims: Iterable[FrozenTrial], now_s: float) -> list[FrozenTrial]:
        """The claims whose heartbeat has not changed for their lease, with this process looking on.

        Heartbeats are only compared with earlier ones, never with a clock: those of two hosts may
        differ. While the storage was away none could be written, so time in which nobody looked
        does not count.

        Args:
            claims: That hold a task.
            now_s: By a clock that never goes back.
        """
        blind_s = now_s - self._looked_s
        self._looked_s = now_s
        stale = []
        for trial in claims:
            claim = claim_of(trial)
            lease_s = LEASE_S if claim is None else claim.lease_s
            heartbeat = trial.user_attrs.get(HEARTBEAT)
            last = self._seen.get(trial._trial_id)
            if last is None or last.heartbeat != heartbeat or blind_s > lease_s:
                self._seen[trial._trial_id] = _Seen(heartbeat, now_s)
            elif now_s - last.at_s > lease_s:
                stale.append(trial)
        return stale
