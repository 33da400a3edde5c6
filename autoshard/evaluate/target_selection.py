"""Which candidates are compiled for a target, first quickly, then fully, and which one wins.

Each step cuts the ranked list; nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluator import Evaluator
from autoshard.evaluate.failures import all_rejected, infeasible
from autoshard.evaluate.selection import (
    by_compiled_time,
    choose_compiled,
    uncompiled_best,
    with_presets,
)
from autoshard.evaluate.target_compiles import has_quick_level


def select_on_target(evaluator: Evaluator, effort: Effort) -> Entry:
    """The winner on hardware that is not here, of the candidates of an evaluation."""
    if not effort.compiled:
        return uncompiled_best(evaluator, effort)
    evaluation = evaluator.evaluation
    chosen = _unlike(choose_compiled(evaluator, effort))
    if has_quick_level(evaluation):
        evaluator.compile_on_target([entry for entry in chosen if entry.compiled is None], "quick")

    waiting = _waiting(evaluation.entries, chosen)
    left = waiting
    while left:
        batch = with_presets(left, effort.full, presets_at_least=max(1, effort.full // 2))
        _compile_fully(evaluator, batch)
        left = [entry for entry in left if entry not in batch]
        fitting = _fitting(waiting)
        if fitting:
            return by_compiled_time(fitting)[0]
        if evaluation.late():
            break
    return _smallest(evaluator, effort)


def _waiting(entries: Sequence[Entry], chosen: Sequence[Entry]) -> list[Entry]:
    """Those that may be compiled fully: chosen now, or compiled by an earlier run; best first."""
    alive = [entry for entry in entries if not entry.rejected]
    waiting = [entry for entry in alive if entry in chosen or entry.compiled is not None]
    return sorted(waiting, key=lambda entry: entry.order)


def _compile_fully(evaluator: Evaluator, entries: Sequence[Entry]) -> None:
    """Compiles at the full level what was not."""
    evaluator.compile_on_target([e for e in entries if not e.compiled_at("full")], "full")


def _fitting(entries: Sequence[Entry]) -> list[Entry]:
    """Those that fit by their program of the full level."""
    return [entry for entry in entries if entry.fits and entry.compiled_at("full")]


def _smallest(evaluator: Evaluator, effort: Effort) -> Entry:
    """Where nothing that was chosen fits: those of the smallest predicted peak, before saying that
    none does.
    """
    evaluation = evaluator.evaluation
    untried = [entry for entry in evaluation.entries if entry.untried]
    untried.sort(key=lambda entry: (entry.proposal.prediction.peak_bytes, entry.key))
    presets = [entry for entry in untried[effort.full :] if entry.candidate.is_preset]
    smallest = untried[: effort.full] + presets[: effort.full]
    _compile_fully(evaluator, smallest)
    fitting = _fitting(smallest)
    if fitting:
        return by_compiled_time(fitting)[0]
    if evaluation.refusals or any(entry.compiled is not None for entry in evaluation.entries):
        raise infeasible(evaluation, compiled=True)
    raise all_rejected(evaluation)


def _unlike(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that move the same data as an earlier one: compiling takes a minute, and they
    are as good.
    """
    seen: set[object] = set()
    kept = []
    for entry in entries:
        candidate = entry.candidate
        moved: object = candidate.key
        if candidate.partitioned is not None:
            moved = candidate.partitioned.collectives
        rounded_peak = f"{entry.proposal.prediction.peak_bytes:.2g}"
        looks = candidate.constraints, moved, rounded_peak
        if looks not in seen or candidate.is_preset:
            kept.append(entry)
        seen.add(looks)
    return kept
