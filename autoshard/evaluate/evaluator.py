"""Where candidates are evaluated: here, one after the other, or by any worker of a study.

`selection` asks an evaluator, and does not know whether it is the local one or that of
`shared_evaluator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evaluate.target_compiles import Level, compile_on_target


class Evaluator(Protocol):
    """Brings candidates of an evaluation further."""

    @property
    def evaluation(self) -> Evaluation:
        """The candidates."""

    def compile(self, entries: Sequence[Entry]) -> None:
        """Compiles those of which there is no evidence yet."""

    def compile_on_target(self, entries: Sequence[Entry], level: Level) -> None:
        """Compiles for a target that is not here."""

    def verify(self, entry: Entry) -> None:
        """Compares a candidate's outputs, compiling it first."""

    def measure(self, entries: Sequence[Entry]) -> None:
        """Measures candidates against each other, compiling them first."""

    def choose(self, purpose: str, choice: Callable[[], Sequence[Entry]]) -> list[Entry]:
        """The candidates chosen for a purpose.

        Args:
            purpose: What for; a second choice for it is another choice.
            choice: Chooses.
        """


class LocalEvaluator:
    """Evaluates everything in this process."""

    def __init__(self, evaluation: Evaluation) -> None:
        """Evaluates the candidates of an evaluation."""
        self.evaluation = evaluation

    def compile(self, entries: Sequence[Entry]) -> None:
        """See `Evaluator`; nothing new is started after the deadline, once one was compiled."""
        untried = [entry for entry in entries if entry.untried]
        self.evaluation.expect(untried)
        for entry in untried:
            if self.evaluation.late() and any_fits(self.evaluation):
                return
            self.evaluation.compile(entry)

    def compile_on_target(self, entries: Sequence[Entry], level: Level) -> None:
        """See `Evaluator`; several at a time."""
        compile_on_target(self.evaluation, entries, level)

    def verify(self, entry: Entry) -> None:
        """See `Evaluator`."""
        self.compile([entry])
        if self.evaluation.wants_verifying(entry):
            self.evaluation.verify(entry)

    def measure(self, entries: Sequence[Entry]) -> None:
        """See `Evaluator`; those that were measured already are not measured again."""
        self.compile(entries)
        able = measurable(self.evaluation, entries)
        if not all_measured(able) and not self.evaluation.late():
            self.evaluation.measure(able)

    def choose(self, purpose: str, choice: Callable[[], Sequence[Entry]]) -> list[Entry]:
        """See `Evaluator`."""
        return list(choice())


def any_fits(evaluation: Evaluation) -> bool:
    """True if there is a candidate that was compiled and not rejected."""
    return any(entry.fits for entry in evaluation.entries)


def measurable(evaluation: Evaluation, entries: Sequence[Entry]) -> list[Entry]:
    """Those that can be run here."""
    return [e for e in entries if not e.rejected and not evaluation.too_large(e)]


def all_measured(entries: Sequence[Entry]) -> bool:
    """True if there is nothing left to measure."""
    return all(entry.candidate.measured is not None for entry in entries)
