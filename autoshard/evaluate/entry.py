"""A candidate of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.compiler.compile import Built
from autoshard.evidence.candidate import Candidate
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER
from autoshard.layout.layout import Layout
from autoshard.search.proposer import Proposal


@dataclass(eq=False)
class Entry:
    """A layout in the race."""

    layout: Layout
    proposal: Proposal
    candidate: Candidate
    built: Built | None = None

    @property
    def order(self) -> tuple[float, float, bool, int, str]:
        """Order of candidates: compiled time to three digits (predicted where there is none),
        compiled peak to two.

        Then stated inside before arguments only, fewer rules, key.
        """
        found = self.candidate.compiled
        peak_bytes = self.proposal.prediction.peak_bytes if found is None else found.peak_bytes
        rounded = float(f"{self.time_s:.3g}"), float(f"{peak_bytes:.2g}")
        return (*rounded, not self.layout.inside, len(self.layout.rules), self.candidate.key)

    @property
    def time_s(self) -> float:
        """Compiled seconds of a step, predicted where it is not compiled."""
        found = self.candidate.compiled
        return self.proposal.prediction.time_s if found is None else found.time_s

    @property
    def is_plain(self) -> bool:
        """True for a searched layout without rules under a condition."""
        scopes = {rule.where for rule in self.layout.rules}
        return not self.candidate.is_preset and scopes <= {EVERYWHERE, OPTIMIZER}
