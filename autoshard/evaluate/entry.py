"""An entry of an evaluation: a proposed layout, and the candidate that gains evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoshard.compiler.compile import Built
from autoshard.evidence.candidate import Candidate, CompiledEvidence, Predicted, Status
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER
from autoshard.layout.layout import Layout
from autoshard.search.proposer import Proposal


@dataclass(eq=False)
class Entry:
    """A proposal under evaluation.

    A candidate is frozen: evidence is added by putting one that has it in the place of the other.

    Attributes:
        proposal: The layout and its prediction; for arguments only that is the prediction of the
            same layout stated inside, which is good for ranking and is no number of this candidate.
        candidate: What is known of it by now.
        built: The jitted function of the layout, once it was lowered.
    """

    proposal: Proposal
    candidate: Candidate
    built: Built | None = None

    @classmethod
    def of(cls, proposal: Proposal) -> Entry:
        """The entry of a proposal of which nothing but its prediction is known."""
        layout, prediction = proposal.layout, proposal.prediction
        predicted: Predicted | None = None
        if layout.inside:  # what else the partitioner would decide is not in the prediction
            predicted = Predicted(
                prediction.time_s, prediction.peak_bytes, prediction.collective_bytes
            )
        candidate = Candidate(
            name=proposal.name if layout.inside else f"{proposal.name} (arguments)",
            origin=proposal.origin,
            rules=tuple(map(str, layout.rules)),
            constraints="anchors" if layout.inside else "arguments",
            key=proposal.key,
            predicted=predicted,
            preset=proposal.preset,
        )
        return cls(proposal, candidate)

    def gain(self, status: Status, **evidence: object) -> None:
        """Adds evidence.

        Args:
            status: How far the candidate came by it.
            evidence: Fields of `Candidate`.
        """
        gained: dict[str, Any] = {"status": status, **evidence}
        self.candidate = replace(self.candidate, **gained)

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.proposal.layout

    @property
    def name(self) -> str:
        """Readable name of the candidate."""
        return self.candidate.name

    @property
    def key(self) -> str:
        """Digest of the effective layout."""
        return self.candidate.key

    @property
    def compiled(self) -> CompiledEvidence | None:
        """What the compiled program says; None where there is none."""
        return self.candidate.compiled

    @property
    def rejected(self) -> bool:
        """True for a candidate that is out of the search."""
        return self.candidate.rejected

    @property
    def fits(self) -> bool:
        """True for a candidate that was compiled and not rejected."""
        return self.compiled is not None and not self.rejected

    @property
    def untried(self) -> bool:
        """True for a candidate that was neither compiled nor rejected."""
        return self.compiled is None and not self.rejected

    @property
    def measured(self) -> bool:
        """True for a candidate that was measured and not rejected."""
        return self.candidate.measured is not None and not self.rejected

    def compiled_at(self, level: str) -> bool:
        """True if there is evidence of a program compiled at this level."""
        return self.compiled is not None and self.compiled.level == level

    @property
    def time_s(self) -> float:
        """Compiled seconds of a step, predicted where it is not compiled."""
        return self.proposal.prediction.time_s if self.compiled is None else self.compiled.time_s

    @property
    def peak_bytes(self) -> int:
        """Compiled peak of a device, predicted where it is not compiled."""
        if self.compiled is None:
            return self.proposal.prediction.peak_bytes
        return self.compiled.peak_bytes

    @property
    def order(self) -> tuple[float, float, bool, int, str]:
        """Order of candidates: time to three digits, peak to two.

        Then stated inside before arguments only, fewer rules, key.
        """
        rounded = float(f"{self.time_s:.3g}"), float(f"{self.peak_bytes:.2g}")
        return (*rounded, not self.layout.inside, len(self.layout.rules), self.key)

    @property
    def is_plain(self) -> bool:
        """True for a searched layout without rules under a condition."""
        scopes = {rule.where for rule in self.layout.rules}
        return not self.candidate.is_preset and scopes <= {EVERYWHERE, OPTIMIZER}
