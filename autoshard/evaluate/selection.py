"""Which candidates climb: how many are partitioned, compiled, verified and measured, and which one
wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.evaluate.effort import Effort
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import FAR, NOISE, Evaluation
from autoshard.evaluate.failures import all_rejected, infeasible
from autoshard.evaluate.refit import Refit
from autoshard.search.proposer import Proposals

PARTITIONED_PER_COMPILED = 2
MORE_WORK = 1.5
"""A program for arguments only that has so many times the flops per predicted second of any program
with its layout stated inside did not split the work as its rules say; below, the rest (copies,
norms) may account for it."""

FIRST = 2 / 3
"""Share of what is compiled that is chosen by partitioned times; the rest is chosen when their
programs are known."""

FITTED_AT_LEAST = 3
"""Measured programs from which it is told what others should take: compute and the links of two
mesh axes differ."""

REEVALUATIONS = 2
ROUNDS_OF_REJECTIONS = 3
AS_GOOD = 1.01
"""Compiled times within this ratio count as equal: their compute part is predicted, and no better
than that."""
SAME = 1 + 1e-9
"""Times within this ratio differ by the order in which floats were added."""


def select(evaluation: Evaluation, proposals: Proposals, effort: Effort) -> Entry:
    """Climbs the ladder on devices that are here; returns the winner."""
    evaluation.enter(proposals.ranked)
    if not effort.compiled:
        return uncompiled_best(evaluation, proposals, effort)
    chosen = choose_compiled(evaluation, effort, FIRST)
    evaluation.compile(chosen)
    more = _choose_more(evaluation, effort, chosen)
    evaluation.compile(more)
    chosen += more
    if evaluation.late() and (
        left := sum(c.candidate.compiled is None and not c.candidate.rejected for c in chosen)
    ):
        evaluation.progress.say(f"out of time after {len(chosen) - left} of {len(chosen)} compiles")
    fitting = [c for c in chosen if c.candidate.compiled is not None and not c.candidate.rejected]
    if not fitting:
        fitting = _compile_smallest(evaluation, chosen, effort.compiled)
    charge_unsplit_work(evaluation, fitting)
    fitting = by_compiled_time(fitting)
    able = [c for c in fitting if not evaluation.too_large(c)]
    if effort.measured and able:
        return _measured_winner(evaluation, able, effort)
    while True:
        for entry in fitting:
            evaluation.verify(entry)
            if not entry.candidate.rejected:
                return entry
        fitting = _next_best(evaluation, effort.compiled)


def uncompiled_best(evaluation: Evaluation, proposals: Proposals, effort: Effort) -> Entry:
    """The best by prediction, or by what the partitioner says of the best predicted ones where that
    is asked for.
    """
    anchored = [c for c in evaluation.entries if c.candidate.constraints == "anchors"]
    fitting = [c for c in anchored if _maybe_fits(c, evaluation.budget_bytes, 1)]
    if not fitting:
        raise infeasible(evaluation, proposals, compiled=False)
    if not effort.partitioned:
        return fitting[0]
    ranked = _partitioned(evaluation, _shortlist(_distinct(fitting), effort.partitioned))
    if not ranked:
        raise all_rejected(evaluation)
    return ranked[0]


def choose_compiled(evaluation: Evaluation, effort: Effort, share: float = 1.0) -> list[Entry]:
    """What is worth compiling: what was compiled before, then the best of those that were
    partitioned.

    Args:
        evaluation: Whose candidates.
        effort: How many are compiled.
        share: Of those, how many are chosen now.
    """
    return evaluation.shared.choose(
        "compiled", lambda: _choose_compiled(evaluation, effort, share), evaluation.entries
    )


def _choose_compiled(evaluation: Evaluation, effort: Effort, share: float) -> list[Entry]:
    hopeful = [c for c in evaluation.entries if _maybe_fits(c, evaluation.budget_bytes, FAR)]
    partitioned = (
        PARTITIONED_PER_COMPILED * effort.compiled
        if effort.partitioned is None
        else effort.partitioned
    )
    ranked = _partitioned(
        evaluation, _shortlist(_distinct(hopeful), max(partitioned, effort.compiled))
    )
    known = [
        c for c in evaluation.entries if c.candidate.compiled is not None or c.candidate.rejected
    ]
    fresh = [c for c in ranked if c not in known]
    places = math.ceil(share * max(0, effort.compiled - len(known)))
    presets_at_least = math.ceil(share * (effort.compiled // 2))
    return known + with_presets(fresh, places, presets_at_least, plain_at_least=places // 3)


def _choose_more(evaluation: Evaluation, effort: Effort, chosen: Sequence[Entry]) -> list[Entry]:
    """The rest of what is compiled, in the order that the first ones' programs suggest."""

    def choose() -> list[Entry]:
        places = max(0, effort.compiled - len(chosen))
        compiled = [c for c in chosen if c.candidate.compiled is not None]
        refit = Refit(evaluation)

        def best() -> list[Entry]:
            untried = [
                c
                for c in evaluation.entries
                if c.candidate.compiled is None and not c.candidate.rejected
            ]
            return [
                c
                for c in _distinct([*compiled, *sorted(untried, key=refit.order)])
                if c not in compiled
            ]

        evaluation.partition(
            [
                c
                for c in best()[: PARTITIONED_PER_COMPILED * places]
                if c.candidate.partitioned is None
            ]
        )
        return best()[:places]

    return evaluation.shared.choose("compiled", choose, evaluation.entries)


def _partitioned(evaluation: Evaluation, shortlist: list[Entry]) -> list[Entry]:
    """Partitions candidates; returns them best first by what came of it, without those that
    fail.
    """
    evaluation.progress.say(f"partitioning {len(shortlist)} candidates")
    times = evaluation.partition(shortlist)

    def key(entry: Entry) -> tuple[object, ...]:
        excess = entry.proposal.excess_bytes(evaluation.budget_bytes)
        seconds = float(f"{times[entry.candidate.key]:.4g}")
        return excess, seconds, *entry.proposal.order(evaluation.budget_bytes)

    return _distinct(sorted((c for c in shortlist if c.candidate.key in times), key=key))


def _next_best(evaluation: Evaluation, count: int) -> list[Entry]:
    """Where everything that was tried is wrong: presets that were not, then others by prediction, a
    few at a time.
    """
    rejected = sum(c.candidate.rejected for c in evaluation.entries)
    rest = [
        c
        for c in evaluation.entries
        if not c.candidate.rejected and _maybe_fits(c, evaluation.budget_bytes, FAR)
    ]
    rest.sort(key=lambda c: not c.candidate.is_preset)
    few = rest[:count] if rejected < ROUNDS_OF_REJECTIONS * count else []
    for entry in evaluation.shared.choose("next", lambda: few, evaluation.entries):
        evaluation.compile([entry])
        if not entry.candidate.rejected:
            return [entry]
    raise all_rejected(evaluation)


def _measured_winner(evaluation: Evaluation, fitting: list[Entry], effort: Effort) -> Entry:
    """Verifies and measures the best few; the fastest correct one, ties within noise by
    prediction.
    """
    left = list(fitting)
    while left:
        chosen = with_presets(left, effort.measured, presets_at_least=max(1, effort.measured // 2))
        for entry in chosen:
            evaluation.verify(entry)
        rejected = [c for c in chosen if c.candidate.rejected]
        if rejected:
            left = [c for c in left if c not in rejected] or _next_best(evaluation, effort.compiled)
            continue
        evaluation.measure(chosen)
        measured = [
            c for c in chosen if c.candidate.measured is not None and not c.candidate.rejected
        ]
        if measured:
            return _reevaluated(evaluation, evaluation.fastest(measured), effort)
        left = [c for c in left if c not in chosen]
        if not left:
            left = _next_best(evaluation, effort.compiled)
    raise all_rejected(evaluation)


def _reevaluated(evaluation: Evaluation, winner: Entry, effort: Effort) -> Entry:
    """The winner after those were measured too that should be faster by what the clock has said so
    far.

    None is where compiled times rank as the clock does; where the hardware was described wrongly,
    those come that its right numbers favour, compiled now if they were not.
    """
    for _ in range(REEVALUATIONS):
        measured = sum(c.candidate.measured is not None for c in evaluation.entries)
        if measured < FITTED_AT_LEAST or evaluation.late():
            break

        def choose(winner: Entry = winner) -> list[Entry]:
            refit = Refit(evaluation)
            left = [
                c
                for c in evaluation.entries
                if c.candidate.measured is None and not c.candidate.rejected
            ]
            budget = evaluation.budget_bytes
            faster = [
                c for c in left
                if NOISE * refit.time_s(c) < refit.time_s(winner)
                and (budget is None or refit.peak_bytes(c) <= budget)
            ]  # fmt: skip
            return sorted(faster, key=refit.order)[: max(1, effort.measured // 2)]

        reevaluated = evaluation.shared.choose("challengers", choose, evaluation.entries)
        for entry in reevaluated:
            evaluation.verify(entry)
        able = [c for c in reevaluated if not c.candidate.rejected]
        if not able:
            break
        evaluation.progress.say(
            f"by the clock {', '.join(c.candidate.name for c in able)} should be faster"
        )
        evaluation.measure([winner, *able])
        winner = evaluation.fastest(
            [c for c in (winner, *able) if c.candidate.measured is not None]
        )
    return winner


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
    for c in entries:
        if c.candidate.compiled is not None and c.candidate.compiled.compute_from == "predicted":
            flops_per_s[c.candidate.key] = c.candidate.compiled.flops / max(
                c.proposal.prediction.compute_s, 1e-30
            )
    usual = max(
        (flops_per_s.get(c.candidate.key, 0.0) for c in entries if c.layout.inside), default=0.0
    )
    for c in entries:
        found = c.candidate.compiled
        times = (
            flops_per_s.get(c.candidate.key, 0.0) / usual if usual and not c.layout.inside else 0.0
        )
        if found is None or times <= MORE_WORK:
            continue
        compute_s = times * c.proposal.prediction.compute_s
        more_s = compute_s - found.compute_s
        c.candidate = replace(
            c.candidate, compiled=replace(found, compute_s=compute_s, time_s=found.time_s + more_s)
        )
        note = f"{c.candidate.name}: its compiled program does {times:.1f} times the work that its rules say"
        evaluation.notes.append(note)
        evaluation.progress.say(note)


def by_compiled_time(entries: list[Entry]) -> list[Entry]:
    """Fastest first by compiled time; of those that are as good as equal to the fastest, the fewest
    rules first.

    What is slower than a preset among them, by however little, is not as good.
    """
    good_s = AS_GOOD * min(c.time_s for c in entries)
    good_s = min([good_s, *(SAME * c.time_s for c in entries if c.candidate.is_preset)])

    def key(entry: Entry) -> tuple[object, ...]:
        slower = entry.time_s > good_s
        return slower, 0 if slower else len(entry.layout.rules), entry.order

    return sorted(entries, key=key)


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that differ from an earlier one in nothing that any evidence so far can see."""
    seen: set[object] = set()
    kept = []
    for entry in entries:
        layout, candidate = entry.layout, entry.candidate
        moved = (
            entry.proposal.prediction.collectives
            if candidate.partitioned is None
            else candidate.partitioned.collectives
        )
        looks = (candidate.constraints, layout.input_specs(), layout.output_specs(), moved)
        if looks not in seen or entry.candidate.is_preset:
            kept.append(entry)
        seen.add(looks)
    return kept


def _shortlist(entries: list[Entry], count: int) -> list[Entry]:
    """The best by prediction, every preset, and the best without conditions."""
    plain = [c for c in entries if c.is_plain][: count // 3]
    return entries[:count] + [c for c in entries[count:] if c.candidate.is_preset or c in plain]


def with_presets(
    ranked: list[Entry], count: int, presets_at_least: int, plain_at_least: int = 0
) -> list[Entry]:
    """The best `count` of a ranking, some places (never the first) kept for the best presets and
    plain rule lists.

    Predictions of layouts under conditions err more, so the plain one they grew from competes with
    them.
    """
    presets = [c for c in ranked if c.candidate.is_preset][
        : min(presets_at_least, max(count - 1, 0))
    ]
    plain = [c for c in ranked if c.is_plain][: min(plain_at_least, count - len(presets))]
    kept = presets + plain
    kept += [c for c in ranked if c not in kept][: count - len(kept)]
    return [c for c in ranked if c in kept]


def _maybe_fits(entry: Entry, budget_bytes: int | None, factor: float) -> bool:
    return budget_bytes is None or entry.proposal.prediction.peak_bytes <= factor * budget_bytes


def _compile_smallest(evaluation: Evaluation, tried: list[Entry], count: int) -> list[Entry]:
    """Where nothing compiled fits: layouts and presets of the smallest predicted peak, before
    saying that none does.

    Presets too, because their compiled peak is close to the predicted one; odd layouts may need far
    more.
    """
    rest = [c for c in evaluation.entries if c not in tried and not c.candidate.rejected]
    rest.sort(key=lambda c: (c.proposal.prediction.peak_bytes, c.candidate.key))
    smallest = rest[: max(count, 4)]
    smallest += [c for c in rest[len(smallest) :] if c.candidate.is_preset][: max(count, 4)]
    for entry in evaluation.shared.choose("smallest", lambda: smallest, evaluation.entries):
        evaluation.compile([entry])
        if not entry.candidate.rejected:
            return [entry]
    raise (
        infeasible(evaluation, None, compiled=True)
        if evaluation.budget_bytes is not None
        else all_rejected(evaluation)
    )


def best_so_far(evaluation: Evaluation, proposals: Proposals) -> Entry:
    """After an interruption: the best measured, else compiled, else predicted candidate."""
    if not evaluation.entries:
        evaluation.enter(proposals.ranked[:1])
    alive = [c for c in evaluation.entries if not c.candidate.rejected]
    measured = [c for c in alive if c.candidate.measured is not None]
    if measured:
        return evaluation.fastest(measured)
    compiled = [c for c in alive if c.candidate.compiled is not None]
    fully = [
        c
        for c in compiled
        if c.candidate.compiled is not None and c.candidate.compiled.level == "full"
    ]
    return min(fully or compiled or alive, key=lambda c: c.order)
