"""An evaluator around the local one that shares the work: each evaluation is a task of a study,
done once by any of its workers.

What is done is done by the local evaluation; what another worker did is read from the study. Who
compiled or measured a candidate does not matter.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence

from autoshard.errors import StudyError
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evaluate.evaluator import LocalEvaluator, all_measured, any_fits, measurable
from autoshard.evaluate.target_compiles import Level
from autoshard.evidence.candidate import Candidate
from autoshard.search.study.shared_study import SharedStudy, candidates_of
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.search.study.task_queue import Capability, Result, Task


class SharedEvaluator:
    """Evaluates the candidates of an evaluation with other workers."""

    def __init__(self, local: LocalEvaluator, study: SharedStudy) -> None:
        """Shares what the local evaluator does in a study."""
        self._local, self._study = local, study

    @property
    def evaluation(self) -> Evaluation:
        """The candidates."""
        return self._local.evaluation

    def compile(self, entries: Sequence[Entry]) -> None:
        """See `Evaluator`."""
        untried = [entry for entry in entries if entry.untried]
        self.evaluation.expect(untried)
        self._each(
            TaskKind.COMPILE,
            untried,
            self.evaluation.compile,
            capability="compile",
            stop=lambda: self.evaluation.late() and any_fits(self.evaluation),
        )

    def compile_on_target(self, entries: Sequence[Entry], level: Level) -> None:
        """See `Evaluator`."""
        self._each(
            TaskKind(level),
            entries,
            lambda entry: self._local.compile_on_target([entry], level),
            capability="compile",
            stop=self.evaluation.late,
        )

    def verify(self, entry: Entry) -> None:
        """See `Evaluator`."""
        self.compile([entry])
        if not self.evaluation.wants_verifying(entry):
            return
        failures = self._each(
            TaskKind.VERIFY, [entry], self.evaluation.verify, capability="measure"
        )
        for failure in failures:
            self.evaluation.reference_failure = failure

    def measure(self, entries: Sequence[Entry]) -> None:
        """See `Evaluator`; together, on one worker."""
        self.compile(entries)
        able = measurable(self.evaluation, entries)
        if not able or self.evaluation.late() or (all_measured(able) and not self._study.again):
            return

        def run() -> Result:
            self.evaluation.measure(able)
            medians = [e.candidate.measured.median_s for e in able if e.candidate.measured]
            return Result(_record(able), min(medians, default=None))

        def give_up(reason: str) -> Result:
            return Result(_rejected_record(able, reason))

        keys = " ".join(sorted(entry.key for entry in able))
        parts = [hashlib.sha256(keys.encode()).hexdigest()[:16]]
        if self._study.again:
            parts.append(uuid.uuid4().hex)
        task_id = TaskId(TaskKind.MEASURE, tuple(parts))
        names = ", ".join(entry.name for entry in able)
        task = Task(run, give_up, "measure", f"measure {names}")
        records = self._study.queue.run({task_id: task})
        for entry in able:
            _adopt(entry, candidates_of(records[task_id]))

    def choose(self, purpose: str, choice: Callable[[], Sequence[Entry]]) -> list[Entry]:
        """See `Evaluator`; the choice of the first worker holds for all with the same settings.

        Raises:
            StudyError: If it chose candidates that are not here.
        """
        keys = self._study.choose(purpose, lambda: [entry.key for entry in choice()])
        by_key = {entry.key: entry for entry in self.evaluation.entries}
        missing = [key for key in keys if key not in by_key]
        if missing:
            raise StudyError(
                f"the study chose candidates that this process does not have ({missing[0]}, ...); "
                f"were its proposals made by another version? Choose another --study name."
            )
        return [by_key[key] for key in keys]

    def _each(
        self,
        kind: TaskKind,
        entries: Sequence[Entry],
        evaluate: Callable[[Entry], None],
        *,
        capability: Capability,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Evaluates candidates one by one, here or on another worker.

        Args:
            kind: Of the tasks.
            entries: The most urgent first.
            evaluate: Does it here.
            capability: What a worker must be able to do.
            stop: True once no more is to be started.

        Returns:
            Why the workers who did it could not compare outputs, where that was so.
        """
        tasks = {}
        for entry in entries:
            task_id = TaskId(kind, (entry.key,))
            tasks[task_id] = self._task(kind, entry, evaluate, capability)
        records = self._study.queue.run(tasks, stop)
        for entry in entries:
            task_id = TaskId(kind, (entry.key,))
            if task_id in records:
                candidates = candidates_of(records[task_id])
                if entry.key not in candidates:
                    raise StudyError(
                        f"the study is damaged: its record of {str(task_id)!r} is about "
                        f"{', '.join(candidates) or 'nothing'}. Choose another --study name."
                    )
                _adopt(entry, candidates)
        notes = [record.get("note") for record in records.values()]
        return [str(note) for note in notes if note]

    def _task(
        self,
        kind: TaskKind,
        entry: Entry,
        evaluate: Callable[[Entry], None],
        capability: Capability,
    ) -> Task:
        """The evaluation of one candidate as a task."""

        def run() -> Result:
            evaluate(entry)
            note = self.evaluation.reference_failure if kind is TaskKind.VERIFY else ""
            seconds = None
            if entry.compiled is not None and not entry.rejected:
                seconds = entry.compiled.time_s
            return Result(_record([entry], note), seconds)

        def give_up(reason: str) -> Result:
            return Result(_rejected_record([entry], reason))

        return Task(run, give_up, capability, f"{kind} {entry.name}", single_candidate=True)


def _record(entries: Sequence[Entry], note: str = "") -> dict[str, object]:
    """What is recorded of candidates, as plain builtins."""
    return {"candidates": [entry.candidate.to_dict() for entry in entries], "note": note}


def _rejected_record(entries: Sequence[Entry], reason: str) -> dict[str, object]:
    """What is recorded where workers keep dying on candidates."""
    rejected = [entry.candidate.reject(reason).to_dict() for entry in entries]
    return {"candidates": rejected, "note": ""}


def _adopt(entry: Entry, candidates: dict[str, Candidate]) -> None:
    """Takes over what the study has of a candidate."""
    if entry.key in candidates:
        entry.candidate = candidates[entry.key].named_as(entry.candidate)
