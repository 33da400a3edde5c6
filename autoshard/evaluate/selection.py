"""Which candidates climb: how many are partitioned, compiled, verified and measured, and which one
wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.evaluate.candidate import Candidate
from autoshard.evaluate.effort import Effort
from autoshard.evaluate.evaluation import FAR, NOISE, Race
from autoshard.evaluate.failures import all_rejected, infeasible
from autoshard.evaluate.refit import Revision
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

CHALLENGES = 2
ROUNDS_OF_REJECTIONS = 3
AS_GOOD = 1.01
"""Compiled times within this ratio count as equal: their compute part is predicted, and no better
than that."""
SAME = 1 + 1e-9
"""Times within this ratio differ by the order in which floats were added."""


def climb(race: Race, proposals: Proposals, effort: Effort) -> Candidate:
    """Climbs the ladder on devices that are here; returns the winner."""
    race.enter(proposals.ranked)
    if not effort.compiled:
        return uncompiled_best(race, proposals, effort)
    chosen = choose_compiled(race, effort, FIRST)
    race.compile(chosen)
    more = _choose_more(race, effort, chosen)
    race.compile(more)
    chosen += more
    if race.late() and (
        left := sum(c.trial.compiled is None and c.trial.status != "rejected" for c in chosen)
    ):
        race.progress.say(f"out of time after {len(chosen) - left} of {len(chosen)} compiles")
    fitting = [c for c in chosen if c.trial.compiled is not None and c.trial.status != "rejected"]
    if not fitting:
        fitting = _compile_smallest(race, chosen, effort.compiled)
    charge_unsplit_work(race, fitting)
    fitting = by_compiled_time(fitting)
    able = [c for c in fitting if not race.too_large(c)]
    if effort.measured and able:
        return _measured_winner(race, able, effort)
    while True:
        for candidate in fitting:
            race.verify(candidate)
            if candidate.trial.status != "rejected":
                return candidate
        fitting = _next_best(race, effort.compiled)


def uncompiled_best(race: Race, proposals: Proposals, effort: Effort) -> Candidate:
    """The best by prediction, or by what the partitioner says of the best predicted ones where that
    is asked for.
    """
    anchored = [c for c in race.candidates if c.trial.constraints == "anchors"]
    fitting = [c for c in anchored if _maybe_fits(c, race.budget_bytes, 1)]
    if not fitting:
        raise infeasible(race, proposals, compiled=False)
    if not effort.partitioned:
        return fitting[0]
    ranked = _partitioned(race, _shortlist(_distinct(fitting), effort.partitioned))
    if not ranked:
        raise all_rejected(race)
    return ranked[0]


def choose_compiled(race: Race, effort: Effort, share: float = 1.0) -> list[Candidate]:
    """What is worth compiling: what was compiled before, then the best of those that were
    partitioned.

    Args:
        race: Whose candidates.
        effort: How many are compiled.
        share: Of those, how many are chosen now.
    """
    return race.shared.choose(
        "compiled", lambda: _choose_compiled(race, effort, share), race.candidates
    )


def _choose_compiled(race: Race, effort: Effort, share: float) -> list[Candidate]:
    hopeful = [c for c in race.candidates if _maybe_fits(c, race.budget_bytes, FAR)]
    partitioned = (
        PARTITIONED_PER_COMPILED * effort.compiled
        if effort.partitioned is None
        else effort.partitioned
    )
    ranked = _partitioned(race, _shortlist(_distinct(hopeful), max(partitioned, effort.compiled)))
    known = [
        c for c in race.candidates if c.trial.compiled is not None or c.trial.status == "rejected"
    ]
    fresh = [c for c in ranked if c not in known]
    places = math.ceil(share * max(0, effort.compiled - len(known)))
    presets_at_least = math.ceil(share * (effort.compiled // 2))
    return known + with_presets(fresh, places, presets_at_least, plain_at_least=places // 3)


def _choose_more(race: Race, effort: Effort, chosen: Sequence[Candidate]) -> list[Candidate]:
    """The rest of what is compiled, in the order that the first ones' programs suggest."""

    def choose() -> list[Candidate]:
        places = max(0, effort.compiled - len(chosen))
        compiled = [c for c in chosen if c.trial.compiled is not None]
        revision = Revision(race)

        def best() -> list[Candidate]:
            untried = [
                c
                for c in race.candidates
                if c.trial.compiled is None and c.trial.status != "rejected"
            ]
            return [
                c
                for c in _distinct([*compiled, *sorted(untried, key=revision.order)])
                if c not in compiled
            ]

        race.partition(
            [c for c in best()[: PARTITIONED_PER_COMPILED * places] if c.trial.partitioned is None]
        )
        return best()[:places]

    return race.shared.choose("compiled", choose, race.candidates)


def _partitioned(race: Race, shortlist: list[Candidate]) -> list[Candidate]:
    """Partitions candidates; returns them best first by what came of it, without those that
    fail.
    """
    race.progress.say(f"partitioning {len(shortlist)} candidates")
    times = race.partition(shortlist)

    def key(candidate: Candidate) -> tuple[object, ...]:
        excess = candidate.proposal.excess_bytes(race.budget_bytes)
        seconds = float(f"{times[candidate.trial.key]:.4g}")
        return excess, seconds, *candidate.proposal.order(race.budget_bytes)

    return _distinct(sorted((c for c in shortlist if c.trial.key in times), key=key))


def _next_best(race: Race, count: int) -> list[Candidate]:
    """Where everything that was tried is wrong: presets that were not, then others by prediction, a
    few at a time.
    """
    rejected = sum(c.trial.status == "rejected" for c in race.candidates)
    rest = [
        c
        for c in race.candidates
        if c.trial.status != "rejected" and _maybe_fits(c, race.budget_bytes, FAR)
    ]
    rest.sort(key=lambda c: not c.is_preset)
    few = rest[:count] if rejected < ROUNDS_OF_REJECTIONS * count else []
    for candidate in race.shared.choose("next", lambda: few, race.candidates):
        race.compile([candidate])
        if candidate.trial.status != "rejected":
            return [candidate]
    raise all_rejected(race)


def _measured_winner(race: Race, fitting: list[Candidate], effort: Effort) -> Candidate:
    """Verifies and measures the best few; the fastest correct one, ties within noise by
    prediction.
    """
    left = list(fitting)
    while left:
        chosen = with_presets(left, effort.measured, presets_at_least=max(1, effort.measured // 2))
        for candidate in chosen:
            race.verify(candidate)
        rejected = [c for c in chosen if c.trial.status == "rejected"]
        if rejected:
            left = [c for c in left if c not in rejected] or _next_best(race, effort.compiled)
            continue
        race.measure(chosen)
        measured = [
            c for c in chosen if c.trial.measured is not None and c.trial.status != "rejected"
        ]
        if measured:
            return _challenged(race, race.fastest(measured), effort)
        left = [c for c in left if c not in chosen]
        if not left:
            left = _next_best(race, effort.compiled)
    raise all_rejected(race)


def _challenged(race: Race, winner: Candidate, effort: Effort) -> Candidate:
    """The winner after those were measured too that should be faster by what the clock has said so
    far.

    None is where compiled times rank as the clock does; where the hardware was described wrongly,
    those come that its right numbers favour, compiled now if they were not.
    """
    for _ in range(CHALLENGES):
        measured = sum(c.trial.measured is not None for c in race.candidates)
        if measured < FITTED_AT_LEAST or race.late():
            break

        def choose(winner: Candidate = winner) -> list[Candidate]:
            revision = Revision(race)
            left = [
                c
                for c in race.candidates
                if c.trial.measured is None and c.trial.status != "rejected"
            ]
            budget = race.budget_bytes
            faster = [
                c for c in left
                if NOISE * revision.time_s(c) < revision.time_s(winner)
                and (budget is None or revision.peak_bytes(c) <= budget)
            ]  # fmt: skip
            return sorted(faster, key=revision.order)[: max(1, effort.measured // 2)]

        challengers = race.shared.choose("challengers", choose, race.candidates)
        for candidate in challengers:
            race.verify(candidate)
        able = [c for c in challengers if c.trial.status != "rejected"]
        if not able:
            break
        race.progress.say(f"by the clock {', '.join(c.trial.name for c in able)} should be faster")
        race.measure([winner, *able])
        winner = race.fastest([c for c in (winner, *able) if c.trial.measured is not None])
    return winner


def charge_unsplit_work(race: Race, candidates: Sequence[Candidate]) -> None:
    """Corrects the compute of layouts for arguments only whose programs do more work than their
    rules say; noted.

    Predicted compute takes the work to be split by the rules. Where nothing is stated inside, the
    partitioner decides, and may leave it whole. The compiler's flops are no measure of seconds (it
    counts loop bodies once), but of two programs of one function their ratio tells: it is held
    against that of the layouts that are stated inside. What was corrected before, in evidence of an
    earlier run, stays as it is.
    """
    flops_per_s: dict[str, float] = {}
    for c in candidates:
        if c.trial.compiled is not None and c.trial.compiled.compute_from == "predicted":
            flops_per_s[c.trial.key] = c.trial.compiled.flops / max(
                c.proposal.prediction.compute_s, 1e-30
            )
    usual = max(
        (flops_per_s.get(c.trial.key, 0.0) for c in candidates if c.layout.inside), default=0.0
    )
    for c in candidates:
        found = c.trial.compiled
        times = flops_per_s.get(c.trial.key, 0.0) / usual if usual and not c.layout.inside else 0.0
        if found is None or times <= MORE_WORK:
            continue
        compute_s = times * c.proposal.prediction.compute_s
        more_s = compute_s - found.compute_s
        c.trial = replace(
            c.trial, compiled=replace(found, compute_s=compute_s, time_s=found.time_s + more_s)
        )
        note = f"{c.trial.name}: its compiled program does {times:.1f} times the work that its rules say"
        race.notes.append(note)
        race.progress.say(note)


def by_compiled_time(candidates: list[Candidate]) -> list[Candidate]:
    """Fastest first by compiled time; of those that are as good as equal to the fastest, the fewest
    rules first.

    What is slower than a preset among them, by however little, is not as good.
    """
    good_s = AS_GOOD * min(c.time_s for c in candidates)
    good_s = min([good_s, *(SAME * c.time_s for c in candidates if c.is_preset)])

    def key(candidate: Candidate) -> tuple[object, ...]:
        slower = candidate.time_s > good_s
        return slower, 0 if slower else len(candidate.layout.rules), candidate.order

    return sorted(candidates, key=key)


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without those that differ from an earlier one in nothing that any evidence so far can see."""
    seen: set[object] = set()
    kept = []
    for candidate in candidates:
        layout, trial = candidate.layout, candidate.trial
        moved = (
            candidate.proposal.prediction.collectives
            if trial.partitioned is None
            else trial.partitioned.collectives
        )
        looks = (trial.constraints, layout.input_specs(), layout.output_specs(), moved)
        if looks not in seen or candidate.is_preset:
            kept.append(candidate)
        seen.add(looks)
    return kept


def _shortlist(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The best by prediction, every preset, and the best without conditions."""
    plain = [c for c in candidates if c.is_plain][: count // 3]
    return candidates[:count] + [c for c in candidates[count:] if c.is_preset or c in plain]


def with_presets(
    ranked: list[Candidate], count: int, presets_at_least: int, plain_at_least: int = 0
) -> list[Candidate]:
    """The best `count` of a ranking, some places (never the first) kept for the best presets and
    plain rule lists.

    Predictions of layouts under conditions err more, so the plain one they grew from competes with
    them.
    """
    presets = [c for c in ranked if c.is_preset][: min(presets_at_least, max(count - 1, 0))]
    plain = [c for c in ranked if c.is_plain][: min(plain_at_least, count - len(presets))]
    kept = presets + plain
    kept += [c for c in ranked if c not in kept][: count - len(kept)]
    return [c for c in ranked if c in kept]


def _maybe_fits(candidate: Candidate, budget_bytes: int | None, factor: float) -> bool:
    return budget_bytes is None or candidate.proposal.prediction.peak_bytes <= factor * budget_bytes


def _compile_smallest(race: Race, tried: list[Candidate], count: int) -> list[Candidate]:
    """Where nothing compiled fits: layouts and presets of the smallest predicted peak, before
    saying that none does.

    Presets too, because their compiled peak is close to the predicted one; odd layouts may need far
    more.
    """
    rest = [c for c in race.candidates if c not in tried and c.trial.status != "rejected"]
    rest.sort(key=lambda c: (c.proposal.prediction.peak_bytes, c.trial.key))
    smallest = rest[: max(count, 4)]
    smallest += [c for c in rest[len(smallest) :] if c.is_preset][: max(count, 4)]
    for candidate in race.shared.choose("smallest", lambda: smallest, race.candidates):
        race.compile([candidate])
        if candidate.trial.status != "rejected":
            return [candidate]
    raise (
        infeasible(race, None, compiled=True)
        if race.budget_bytes is not None
        else all_rejected(race)
    )


def best_so_far(race: Race, proposals: Proposals) -> Candidate:
    """After an interruption: the best measured, else compiled, else predicted candidate."""
    if not race.candidates:
        race.enter(proposals.ranked[:1])
    alive = [c for c in race.candidates if c.trial.status != "rejected"]
    measured = [c for c in alive if c.trial.measured is not None]
    if measured:
        return race.fastest(measured)
    compiled = [c for c in alive if c.trial.compiled is not None]
    fully = [
        c for c in compiled if c.trial.compiled is not None and c.trial.compiled.level == "full"
    ]
    return min(fully or compiled or alive, key=lambda c: c.order)
