"""Which candidates are partitioned, compiled, verified and measured, and which one wins.

Each step cuts the ranked list of the step before. What a candidate earned is kept in the study, so
an interrupted search continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import NOISE, Evaluation, fastest
from autoshard.evaluate.evaluator import Evaluator
from autoshard.evaluate.failures import all_rejected, infeasible
from autoshard.evaluate.refit import Refit

PARTITIONED_PER_COMPILED = 2
"""Partitioning takes 50 ms where a compile takes 2 s; with twice as many, the ranking by
partitioned bytes (Spearman 0.93 to 0.98 with compiled ones) has something to choose from.
`tests/test_optimize.py` counts them."""

FAR = 2.0
"""Prediction alone prunes a candidate only beyond this multiple of the memory budget: the largest
errors of predicted peaks in the accuracy suite. `tests/test_optimize.py` covers budgets."""

MORE_WORK = 1.5
"""A program for arguments only that has so many times the flops per predicted second of any program
with its layout stated inside did not split the work as its rules say; below, the rest (copies,
norms) may account for it. `tests/whole_models/test_awkward_programs.py` has such a program."""

FIRST = 2 / 3
"""Share of what is compiled that is chosen by partitioned times; the rest is chosen when their
programs are known. Chosen by hand; `tests/whole_models/test_known_winners.py` pins the winners."""

FITTED_AT_LEAST = 3
"""Measured programs from which it is told what others should take: compute and the links of two
mesh axes differ."""

REEVALUATIONS = 2
"""How often those are measured that should be faster by what was measured; 0 fails
`tests/evaluate/test_refit_order.py`."""

ROUNDS_OF_REJECTIONS = 3
"""So many times `Effort.compiled` rejections end a search that nothing survives: chosen by hand;
`tests/compiler/test_isolated.py` has searches in which everything is rejected."""

AS_GOOD = 1.01
"""Compiled times within this ratio count as equal: their compute part is predicted, and no better
than that. `tests/evaluate/test_order.py` pins it."""

SAME = 1 + 1e-9
"""Times within this ratio differ by the order in which floats were added."""


def select(evaluator: Evaluator, effort: Effort) -> Entry:
    """The winner on devices that are here, of the candidates of an evaluation."""
    if not effort.compiled:
        return uncompiled_best(evaluator, effort)
    fitting = _compiled(evaluator, effort)
    able = [entry for entry in fitting if not evaluator.evaluation.too_large(entry)]
    if effort.measured and able and not evaluator.evaluation.late():
        return _measured_winner(evaluator, able, effort)
    while True:
        for entry in fitting:
            evaluator.verify(entry)
            if not entry.rejected:
                return entry
        fitting = _next_best(evaluator, effort.compiled)


def _compiled(evaluator: Evaluator, effort: Effort) -> list[Entry]:
    """Compiles what is worth it; returns what fits, best first by compiled time."""
    evaluation = evaluator.evaluation
    chosen = choose_compiled(evaluator, effort, FIRST)
    evaluator.compile(chosen)
    more = _choose_more(evaluator, effort, chosen)
    evaluator.compile(more)
    chosen += more
    left = sum(entry.untried for entry in chosen)
    if left and evaluation.late():
        done = len(chosen) - left
        evaluation.setting.progress.say(f"out of time after {done} of {len(chosen)} compiles")
    fitting = [entry for entry in chosen if entry.fits]
    if not fitting:
        fitting = _compile_smallest(evaluator, chosen, effort.compiled)
    charge_unsplit_work(evaluation, fitting)
    return by_compiled_time(fitting)


def uncompiled_best(evaluator: Evaluator, effort: Effort) -> Entry:
    """The best by prediction, or by what the partitioner says of the best predicted ones where that
    is asked for.
    """
    evaluation = evaluator.evaluation
    budget_bytes = evaluation.setting.budget_bytes
    inside = [entry for entry in evaluation.entries if entry.layout.inside]
    fitting = [entry for entry in inside if _maybe_fits(entry, budget_bytes, 1)]
    if not fitting:
        raise infeasible(evaluation, compiled=False)
    if not effort.partitioned:
        return fitting[0]
    ranked = _partitioned(evaluation, _shortlist(_distinct(fitting), effort.partitioned))
    if not ranked:
        raise all_rejected(evaluation)
    return ranked[0]


# Which are compiled -------------------------------------------------------------------------------


def choose_compiled(evaluator: Evaluator, effort: Effort, share: float = 1.0) -> list[Entry]:
    """What is worth compiling: what was compiled before, then the best of those that were
    partitioned.

    Args:
        evaluator: Whose candidates.
        effort: How many are compiled.
        share: Of those, how many are chosen now.
    """
    evaluation = evaluator.evaluation

    def choice() -> list[Entry]:
        budget_bytes = evaluation.setting.budget_bytes
        hopeful = [e for e in evaluation.entries if _maybe_fits(e, budget_bytes, FAR)]
        partitioned = effort.partitioned
        if partitioned is None:
            partitioned = PARTITIONED_PER_COMPILED * effort.compiled
        shortlist = _shortlist(_distinct(hopeful), max(partitioned, effort.compiled))
        ranked = _partitioned(evaluation, shortlist, may_compile=effort.compiled > 1)
        tried = [entry for entry in evaluation.entries if not entry.untried]
        fresh = [entry for entry in ranked if entry not in tried]
        places = math.ceil(share * max(0, effort.compiled - len(tried)))
        presets_at_least = math.ceil(share * (effort.compiled // 2))
        return tried + with_presets(fresh, places, presets_at_least, plain_at_least=places // 3)

    return evaluator.choose("compiled", choice)


def _choose_more(evaluator: Evaluator, effort: Effort, chosen: Sequence[Entry]) -> list[Entry]:
    """The rest of what is compiled, in the order that the first ones' programs suggest."""
    evaluation = evaluator.evaluation

    def choice() -> list[Entry]:
        places = max(0, effort.compiled - len(chosen))
        compiled = [entry for entry in chosen if entry.compiled is not None]
        refit = Refit(evaluation)

        def best() -> list[Entry]:
            untried = sorted((e for e in evaluation.entries if e.untried), key=refit.order)
            return [e for e in _distinct([*compiled, *untried]) if e not in compiled]

        first = best()[: PARTITIONED_PER_COMPILED * places]
        evaluation.partition([e for e in first if e.candidate.partitioned is None])
        return best()[:places]

    return evaluator.choose("compiled", choice)


def _partitioned(
    evaluation: Evaluation, shortlist: list[Entry], *, may_compile: bool = False
) -> list[Entry]:
    """Partitions candidates; returns them best first by what came of it, without failures.

    Args:
        evaluation: Whose candidates.
        shortlist: The best by prediction first.
        may_compile: As for `Evaluation.partition`.
    """
    progress = evaluation.setting.progress
    progress.say(f"partitioning {len(shortlist)} candidates")
    times = evaluation.partition(shortlist, may_compile=may_compile)
    done = sum(entry.candidate.partitioned is not None for entry in shortlist)
    progress.say(
        f"{done} of {len(shortlist)} partitioned: {progress.spent('partition')} (lowering them "
        f"{progress.spent('lower')})"
    )
    budget_bytes = evaluation.setting.budget_bytes

    def order(entry: Entry) -> tuple[object, ...]:
        proposal = entry.proposal
        seconds = float(f"{times[entry.key]:.4g}")
        return proposal.excess_bytes(budget_bytes), seconds, *proposal.order(budget_bytes)

    return _distinct(sorted((e for e in shortlist if e.key in times), key=order))


def _next_best(evaluator: Evaluator, count: int) -> list[Entry]:
    """Where everything that was tried is wrong: presets that were not, then others by prediction, a
    few at a time.
    """
    evaluation = evaluator.evaluation

    def choice() -> list[Entry]:
        rejected = sum(entry.rejected for entry in evaluation.entries)
        if rejected >= ROUNDS_OF_REJECTIONS * count:
            return []
        alive = [entry for entry in evaluation.entries if not entry.rejected]
        hopeful = [e for e in alive if _maybe_fits(e, evaluation.setting.budget_bytes, FAR)]
        hopeful.sort(key=lambda entry: not entry.candidate.is_preset)
        return hopeful[:count]

    for entry in evaluator.choose("next", choice):
        evaluator.compile([entry])
        if not entry.rejected:
            return [entry]
    raise all_rejected(evaluation)


def _compile_smallest(evaluator: Evaluator, tried: list[Entry], count: int) -> list[Entry]:
    """Where nothing compiled fits: layouts and presets of the smallest predicted peak, before
    saying that none does.

    Presets too, because their compiled peak is close to the predicted one; odd layouts may need far
    more.
    """
    evaluation = evaluator.evaluation

    def choice() -> list[Entry]:
        rest = [e for e in evaluation.entries if e not in tried and not e.rejected]
        rest.sort(key=lambda entry: (entry.proposal.prediction.peak_bytes, entry.key))
        smallest = rest[: max(count, 4)]
        presets = [entry for entry in rest[len(smallest) :] if entry.candidate.is_preset]
        return smallest + presets[: max(count, 4)]

    for entry in evaluator.choose("smallest", choice):
        evaluator.compile([entry])
        if not entry.rejected:
            return [entry]
    if evaluation.setting.budget_bytes is not None:
        raise infeasible(evaluation, compiled=True)
    raise all_rejected(evaluation)


# Which one wins -----------------------------------------------------------------------------------


def _measured_winner(evaluator: Evaluator, fitting: list[Entry], effort: Effort) -> Entry:
    """Verifies and measures the best few; the fastest correct one, ties within noise by
    prediction.
    """
    left = list(fitting)
    while left:
        chosen = with_presets(left, effort.measured, max(1, effort.measured // 2))
        rejected = _verify(evaluator, chosen)
        if rejected:
            left = _without(left, rejected) or _next_best(evaluator, effort.compiled)
            continue
        evaluator.measure(chosen)
        measured = [entry for entry in chosen if entry.measured]
        if measured:
            return _reevaluated(evaluator, fastest(measured), effort)
        if evaluator.evaluation.late():
            evaluator.evaluation.setting.progress.say("out of time before measuring")
            return chosen[0]
        left = _without(left, chosen) or _next_best(evaluator, effort.compiled)
    raise all_rejected(evaluator.evaluation)


def _verify(evaluator: Evaluator, entries: Sequence[Entry]) -> list[Entry]:
    """Verifies candidates; returns those that are rejected."""
    for entry in entries:
        evaluator.verify(entry)
    return [entry for entry in entries if entry.rejected]


def _without(entries: Sequence[Entry], others: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry not in others]


def _reevaluated(evaluator: Evaluator, winner: Entry, effort: Effort) -> Entry:
    """The winner after those were measured too that should be faster by what was measured so far.

    None is where compiled times rank as the clock does; where the hardware was described wrongly,
    those come that its right numbers favour, compiled now if they were not.
    """
    evaluation = evaluator.evaluation
    for _ in range(REEVALUATIONS):
        if _count_measured(evaluation.entries) < FITTED_AT_LEAST or evaluation.late():
            break

        def choice(winner: Entry = winner) -> list[Entry]:
            return _should_be_faster(evaluation, winner)[: max(1, effort.measured // 2)]

        favoured = evaluator.choose("challengers", choice)
        able = _without(favoured, _verify(evaluator, favoured))
        if not able:
            break
        names = ", ".join(entry.name for entry in able)
        evaluation.setting.progress.say(f"by the clock {names} should be faster")
        contenders = [winner, *able]
        evaluator.measure(contenders)
        winner = fastest([e for e in contenders if e.candidate.measured is not None])
    return winner


def _count_measured(entries: Sequence[Entry]) -> int:
    return sum(entry.candidate.measured is not None for entry in entries)


def _should_be_faster(evaluation: Evaluation, winner: Entry) -> list[Entry]:
    """Those that were not measured, fit, and should be faster by what was measured; best first."""
    refit = Refit(evaluation)
    budget_bytes = evaluation.setting.budget_bytes
    faster = []
    for entry in evaluation.entries:
        if entry.candidate.measured is not None or entry.rejected:
            continue
        if budget_bytes is not None and refit.peak_bytes(entry) > budget_bytes:
            continue
        if NOISE * refit.time_s(entry) < refit.time_s(winner):
            faster.append(entry)
    return sorted(faster, key=refit.order)


def charge_unsplit_work(evaluation: Evaluation, entries: Sequence[Entry]) -> None:
    """Corrects the compute of layouts for arguments only whose programs do more work than their
    rules say; noted.

    Predicted compute takes the work to be split by the rules. Where nothing is stated inside, the
    partitioner decides, and may leave it whole. The compiler's flops are no measure of seconds (it
    counts loop bodies once), but of two programs of one function their ratio tells: it is held
    against that of the layouts that are stated inside. What was corrected before, in evidence of an
    earlier run, stays as it is.
    """
    flops_per_s: dict[str, float] = {}
    for entry in entries:
        if entry.compiled is not None and entry.compiled.compute_from == "predicted":
            compute_s = max(entry.proposal.prediction.compute_s, 1e-30)  # 0 of an empty program
            flops_per_s[entry.key] = entry.compiled.flops / compute_s
    inside = [flops_per_s.get(entry.key, 0.0) for entry in entries if entry.layout.inside]
    usual = max(inside, default=0.0)
    if not usual:
        return
    for entry in entries:
        times = flops_per_s.get(entry.key, 0.0) / usual
        if not entry.layout.inside and times > MORE_WORK:
            _charge(evaluation, entry, times)


def _charge(evaluation: Evaluation, entry: Entry, times: float) -> None:
    """Charges a candidate so many times its predicted compute."""
    assert entry.compiled is not None
    compute_s = times * entry.proposal.prediction.compute_s
    time_s = entry.compiled.time_s + compute_s - entry.compiled.compute_s
    corrected = replace(entry.compiled, compute_s=compute_s, time_s=time_s)
    entry.gain(entry.candidate.status, compiled=corrected)
    note = f"{entry.name}: its compiled program does {times:.1f} times the work that its rules say"
    evaluation.notes.append(note)
    evaluation.setting.progress.say(note)


def by_compiled_time(entries: list[Entry]) -> list[Entry]:
    """Fastest first by compiled time; of those that are as good as equal to the fastest, the fewest
    rules first.

    What is slower than a preset among them, by however little, is not as good.
    """
    presets_s = [SAME * entry.time_s for entry in entries if entry.candidate.is_preset]
    good_s = min([AS_GOOD * min(entry.time_s for entry in entries), *presets_s])

    def order(entry: Entry) -> tuple[object, ...]:
        slower = entry.time_s > good_s
        return slower, 0 if slower else len(entry.layout.rules), entry.order

    return sorted(entries, key=order)


# Short lists --------------------------------------------------------------------------------------


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that differ from an earlier one in nothing that any evidence so far can see."""
    seen: set[object] = set()
    kept = []
    for entry in entries:
        layout, candidate = entry.layout, entry.candidate
        moved = entry.proposal.prediction.collectives
        if candidate.partitioned is not None:
            moved = candidate.partitioned.collectives
        looks = (candidate.constraints, layout.input_specs(), layout.output_specs(), moved)
        if looks not in seen or candidate.is_preset:
            kept.append(entry)
        seen.add(looks)
    return kept


def _shortlist(entries: list[Entry], count: int) -> list[Entry]:
    """The best by prediction, every preset, and the best without conditions."""
    plain = [entry for entry in entries if entry.is_plain][: count // 3]
    others = [e for e in entries[count:] if e.candidate.is_preset or e in plain]
    return entries[:count] + others


def with_presets(
    ranked: list[Entry], count: int, presets_at_least: int, plain_at_least: int = 0
) -> list[Entry]:
    """The best `count` of a ranking, some places (never the first) kept for the best presets and
    plain rule lists.

    Predictions of layouts under conditions err more, so the plain one they grew from competes with
    them.
    """
    presets = [entry for entry in ranked if entry.candidate.is_preset]
    presets = presets[: min(presets_at_least, max(count - 1, 0))]
    plain = [entry for entry in ranked if entry.is_plain]
    plain = plain[: min(plain_at_least, count - len(presets))]
    kept = presets + plain
    kept += [entry for entry in ranked if entry not in kept][: count - len(kept)]
    return [entry for entry in ranked if entry in kept]


def _maybe_fits(entry: Entry, budget_bytes: int | None, factor: float) -> bool:
    """True unless the predicted peak is over so many times the budget."""
    if budget_bytes is None:
        return True
    return entry.proposal.prediction.peak_bytes <= factor * budget_bytes


def best_so_far(evaluation: Evaluation) -> Entry:
    """After an interruption: the best measured, else compiled, else predicted candidate."""
    alive = [entry for entry in evaluation.entries if not entry.rejected]
    measured = [entry for entry in alive if entry.measured]
    if measured:
        return fastest(measured)
    return min(_most_compiled(alive), key=lambda entry: entry.order)


def _most_compiled(entries: list[Entry]) -> list[Entry]:
    """Those that were compiled fully, else those compiled at all, else all."""
    compiled = [entry for entry in entries if entry.compiled is not None]
    fully = [entry for entry in compiled if entry.compiled_at("full")]
    return fully or compiled or entries
