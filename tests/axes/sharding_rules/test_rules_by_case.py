"""Each primitive with a rule, run whole and in shards; and what its rule does not allow, tried
too."""

from __future__ import annotations

import numpy as np
import pytest
from rule_cases import CASES, Case, primitives
from rule_check import disproved, missing

from autoshard.axes.sharding_rules import Coverage, FactorKind, known_primitives

_NEEDS_A_MESH = "the identity, with a mesh or layout that a test without devices does not have"
_POSITION = "its numbers depend on the position of an element in the whole array"

NOT_RUN = {
    "dot_product_attention_bwd_wrapper": "runs on a GPU only",
    "dot_product_attention_fwd_wrapper": "runs on a GPU only",
    "empty2": "has no defined contents",
    "from_edtype": "takes types of extensions only",
    "geqp3": "has no lowering for the host",
    "iota_2x32_shape": _POSITION,
    "layout_constraint": _NEEDS_A_MESH,
    "multiple_of": "occurs inside kernels only",
    "pvary": _NEEDS_A_MESH,
    "reciprocal": "occurs inside kernels only",
    "reduced_vary_cast": _NEEDS_A_MESH,
    "reduced_vary_cast_p": _NEEDS_A_MESH,
    "relayout": _NEEDS_A_MESH,
    "reshard": _NEEDS_A_MESH,
    "rng_bit_generator": _POSITION,
    "rng_uniform": _POSITION,
    "scaled_matmul": "has no lowering for the host",
    "scaled_matmul_wrapper": "has no lowering for the host",
    "to_edtype": "takes types of extensions only",
    "vary_unreduced_cast": _NEEDS_A_MESH,
    "vary_unreduced_cast_p": _NEEDS_A_MESH,
    "with_memory_space_constraint": _NEEDS_A_MESH,
    "xla_metadata_value": "the identity, with a note for the compiler",
}
"""Rules that no case runs, and why."""

LEFT_WHOLE = {
    "reshape[nothing in common]": (
        "(6, 2) -> (4, 3): shards of 6 and of 4 agree for common divisors only; to join such sizes "
        "would put unlike dimensions into one axis class"
    ),
}
"""Cases with a cut that works, and that the rule leaves out on purpose."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_holds_when_run(case: Case) -> None:
    app = case.make(np.random.default_rng(0))
    rule = known_primitives()[case.primitive].rule(app.eqn)
    wrong, _ = disproved(app, rule, case.tolerance)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_link_is_missing(case: Case) -> None:
    app = case.make(np.random.default_rng(0))
    rule = known_primitives()[case.primitive].rule(app.eqn)
    if set(rule.kinds) <= {FactorKind.PASS_THROUGH, FactorKind.REDUCTION}:
        return
    others = [case.make(np.random.default_rng(seed)) for seed in (1, 2)]
    links = missing([app, *others], rule, case.tolerance)
    assert bool(links) == (str(case) in LEFT_WHOLE), links


def test_every_rule_is_run_or_excused() -> None:
    ruled = {name for name, entry in known_primitives().items() if entry.coverage is Coverage.RULE}
    lowered = set(primitives())
    assert (ruled & lowered) - {case.primitive for case in CASES} - set(NOT_RUN) == set()
