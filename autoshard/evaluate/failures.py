"""What is said where no candidate is left."""

from __future__ import annotations

from autoshard.errors import NoFeasiblePlanError, SearchFailedError
from autoshard.evaluate.evaluation import Evaluation
from autoshard.layout.spec import shard_count
from autoshard.search.proposer import Proposals
from autoshard.text import bytes_text


def infeasible(
    evaluation: Evaluation, proposals: Proposals | None, *, compiled: bool
) -> NoFeasiblePlanError:
    """The error of a search in which nothing fits the budget, with the smallest and what is largest
    in it.
    """
    budget = bytes_text(evaluation.budget_bytes or 0)
    smallest = min(evaluation.entries, key=lambda c: c.proposal.prediction.peak_bytes)
    prediction = smallest.proposal.prediction
    part, held = max(prediction.argument_bytes.items(), key=lambda item: item[1])
    program = evaluation.prepared.traced.program
    problem = evaluation.prepared.problem
    leaf_bytes = {
        path: value.bytes // shard_count(smallest.layout.fit(value).spec, problem.mesh_axes)
        for path, value, group in zip(
            program.input_paths, program.body.inputs, problem.groups.of_input, strict=True
        )
        if group.value == part
    }
    leaf = max(leaf_bytes, key=lambda path: leaf_bytes[path], default="")
    peaks = [
        c.candidate.compiled.peak_bytes
        for c in evaluation.entries
        if c.candidate.compiled is not None
    ]
    text = (
        f"all {len(evaluation.entries)} candidates need more than the budget of {budget} per device; "
        f"the smallest "
        f"predicted peak is {bytes_text(prediction.peak_bytes)} ({smallest.candidate.name}; of it "
        f"{part} {bytes_text(held)}"
        + (f", most in {leaf}, {bytes_text(leaf_bytes[leaf])})" if leaf else ")")
    )
    if compiled and peaks:
        text += f", the smallest compiled peak of {len(peaks)} is {bytes_text(min(peaks))}"
    elif evaluation.refusals:
        needs = bytes_text(min(evaluation.refusals))
        text += f", the compiler refuses all {len(evaluation.refusals)} programs that it was given, the smallest needs {needs}"
    else:
        text += " (predicted only: nothing was compiled)"
    donated = evaluation.prepared.traced.call.donated
    advice = ["Raise memory_budget_bytes", "add devices"]
    if not all(donated):
        advice.append("donate arguments that the step replaces (donate_argnums)")
    return NoFeasiblePlanError(f"{text}.\n{', '.join(advice)}, or shrink the batch.")


def all_rejected(evaluation: Evaluation) -> SearchFailedError:
    """The error of a search in which everything that was tried was rejected, with the reasons."""
    reasons = [
        f"{c.candidate.name}: {c.candidate.reason}"
        for c in evaluation.entries
        if c.candidate.rejected
    ]
    listed = "\n  ".join(reasons[:12])
    return SearchFailedError(
        f"all {len(reasons)} candidates that were tried were rejected:\n  {listed}"
    )
