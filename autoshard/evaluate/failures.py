"""What is said where no candidate is left."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.errors import NoFeasiblePlanError, SearchFailedError
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import Evaluation
from autoshard.layout.spec import shard_count
from autoshard.text import bytes_text

MOST_REASONS = 12
"""Rejections that are listed; a screen has room for no more."""


def infeasible(evaluation: Evaluation, *, compiled: bool) -> NoFeasiblePlanError:
    """The error of a search in which nothing fits the budget, with the smallest and what is largest
    in it.

    Args:
        evaluation: The candidates.
        compiled: Whether any was to be compiled.
    """
    setting = evaluation.setting
    smallest = min(evaluation.entries, key=lambda entry: entry.proposal.prediction.peak_bytes)
    needs = bytes_text(smallest.proposal.prediction.peak_bytes)
    text = (
        f"all {len(evaluation.entries)} candidates need more than the budget of "
        f"{bytes_text(setting.budget_bytes or 0)} per device; the smallest predicted peak is "
        f"{needs} ({smallest.name}; of it {_largest_part(evaluation, smallest)})"
    )
    peaks = [e.compiled.peak_bytes for e in evaluation.entries if e.compiled is not None]
    refusals = evaluation.refusals
    if compiled and peaks:
        text += f", the smallest compiled peak of {len(peaks)} is {bytes_text(min(peaks))}"
    elif refusals:
        text += (
            f", the compiler refuses all {len(refusals)} programs that it was given, the smallest "
            f"needs {bytes_text(min(refusals))}"
        )
    else:
        text += " (predicted only: nothing was compiled)"
    remedies = ["Raise memory_budget_bytes", "add devices"]
    if not all(setting.prepared.traced.call.donated):
        remedies.append("donate arguments that the step replaces (donate_argnums)")
    return NoFeasiblePlanError(f"{text}.\n{', '.join(remedies)}, or shrink the batch.")


def _largest_part(evaluation: Evaluation, entry: Entry) -> str:
    """The group of arguments that takes most memory, and the largest leaf in it."""
    part, part_bytes = max(
        entry.proposal.prediction.argument_bytes.items(), key=lambda item: item[1]
    )
    leaves = dict(_leaf_bytes(evaluation, entry, part))
    if not leaves:
        return f"{part} {bytes_text(part_bytes)}"
    leaf = max(leaves, key=lambda path: leaves[path])
    return f"{part} {bytes_text(part_bytes)}, most in {leaf}, {bytes_text(leaves[leaf])}"


def _leaf_bytes(evaluation: Evaluation, entry: Entry, part: str) -> Iterator[tuple[str, int]]:
    """Path and bytes on a device of each argument leaf of a group."""
    problem = evaluation.setting.prepared.problem
    program = problem.program
    for path, value, group in zip(
        program.input_paths, program.body.inputs, problem.groups.of_input, strict=True
    ):
        if group.value == part:
            shards = shard_count(entry.layout.fit(value).spec, problem.mesh_axes)
            yield path, value.bytes // shards


def all_rejected(evaluation: Evaluation) -> SearchFailedError:
    """The error of a search in which everything that was tried was rejected, with the reasons."""
    rejected = [entry for entry in evaluation.entries if entry.rejected]
    reasons = [f"{entry.name}: {entry.candidate.reason}" for entry in rejected]
    listed = "\n  ".join(reasons[:MOST_REASONS])
    return SearchFailedError(
        f"all {len(reasons)} candidates that were tried were rejected:\n  {listed}"
    )
