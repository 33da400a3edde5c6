"""Our rules against those that the compiler states for the same operations; every difference has a
reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest
from rule_cases import CASES, Case
from run_shards import Application, run

from autoshard.axes.sharding_rules import FactorKind, ShardingRule, known_primitives
from autoshard.axes.stated_rules import stated_rule
from autoshard.shardy.op_rules import lowered_ops
from autoshard.tracing.program import Value

_EXACT_WINDOWS = (
    "windows that tile the dimension need no halo; the compiler's rule does not look at strides"
)
_NO_HALO_OF_ALL = "every element needs all before it; the compiler gathers them as one large halo"
_PAIRS = (
    "partial results are combined, but by none of add, max, min, mul, and, or, xor: by the "
    "user's function"
)
_COLUMNS = (
    "columns of the right-hand side are solved one by one; jax states the batch dimensions of"
    " its own calls only"
)
_PARTS = (
    "operand and result do share a part of the dimension, for which a reshard pays; the "
    "compiler states nothing"
)
_SOURCE = "the compiler maps one of the two operands of the window only"

EXPLAINED: Mapping[str, str] = {
    **dict.fromkeys(
        (f"reduce_window{kind}[tiled]" for kind in ("", "_sum", "_max", "_min")), _EXACT_WINDOWS
    ),
    "conv_general_dilated[patches]": _EXACT_WINDOWS,
    "select_and_gather_add[tiled]": _EXACT_WINDOWS,
    "select_and_scatter_add[tiled]": _EXACT_WINDOWS,
    "slice[every other]": _EXACT_WINDOWS,
    "select_and_scatter": _SOURCE,
    "select_and_scatter_add": _SOURCE,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _NO_HALO_OF_ALL),
    "reduce[any]": _PAIRS,
    **dict.fromkeys(
        (
            "ormqr",
            "ormqr[right]",
            "tridiagonal_solve",
            "triangular_solve",
            "triangular_solve[right]",
        ),
        _COLUMNS,
    ),
    **dict.fromkeys(("concatenate", "dynamic_slice", "stack"), _PARTS),
    "tile": (
        "copies of a split dimension are a reshard; it is lowered as a new dimension that is "
        "merged afterwards"
    ),
    "reshape[nothing in common]": (
        "shards agree for common divisors only: unlike dimensions would become one axis"
    ),
    "scatter-sub[rows]": (
        "subtracted updates add up; the compiler does not see that in the function it is given"
    ),
    "symmetric_product": (
        "its rows and columns are one dimension: a split of both is no cut of the result"
    ),
    "ragged_dot_general": (
        "groups add up; the compiler sees a mask over all groups, computed from their running sizes"
    ),
    "ragged_dot_general[contracting]": (
        "every device can compute its own groups; the compiler sees a mask again"
    ),
}
"""By case, why the two rules differ."""

EXPLAINED_BEFORE_0_12: Mapping[str, str] = {
    "pad[inside]": (
        "one end is cut off and the other padded, so that all elements move; it looks at the "
        "size only"
    ),
}

EXPLAINED_SINCE_0_12: Mapping[str, str] = {
    **dict.fromkeys(
        (f"conv_general_dilated{note}" for note in ("", "[feature groups]", "[batch groups]")),
        "a window is small: it is never worth splitting",
    ),
    "dynamic_update_slice": (
        "operand and result are one array: only the update has to be brought to its place"
    ),
    "unstack": _PARTS,
}

Factor = tuple[str, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


def factors(rule: ShardingRule, app: Application) -> set[Factor]:
    """The factors that can be split: kind, and the dimensions (of size > 1) of operands and
    results."""
    split = set()
    for factor, kind in enumerate(rule.kinds):
        operands = places(app.eqn.inputs, rule.operands, factor)
        results = places(app.eqn.outputs, rule.results, factor)
        if kind is not FactorKind.NEED_REPLICATION and (operands or results):
            split.add((kind.value, operands, results))
    return split


def places(
    values: Sequence[Value], factors_of: Sequence[tuple[int, ...]], factor: int
) -> tuple[tuple[int, int], ...]:
    """(position, dimension) of each dimension of size > 1 that runs over a factor."""
    return tuple(
        (i, dim)
        for i, value in enumerate(values)
        for dim, size in enumerate(value.shape)
        if factors_of[i][dim] == factor and size > 1
    )


def theirs(app: Application) -> ShardingRule | None:
    """What the compiler states for the lowering of an equation by itself."""
    lowered = jax.jit(
        lambda *operands: run(app.primitive, operands, app.eqn.params), keep_unused=True
    ).lower(*app.operands)
    return stated_rule(app.eqn, lowered_ops(lowered))


def reasons() -> Mapping[str, str]:
    recent = jax.__version_info__ >= (0, 12)
    return {**EXPLAINED, **(EXPLAINED_SINCE_0_12 if recent else EXPLAINED_BEFORE_0_12)}


SEEN: Counter[str] = Counter()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_is_the_compilers_or_differs_for_a_reason(case: Case) -> None:
    app = case.make(np.random.default_rng(0))
    stated = theirs(app)
    if stated is None:
        SEEN["not stated"] += 1
        assert str(case) not in reasons()
        return
    ours = factors(known_primitives()[case.primitive].rule(app.eqn), app)
    SEEN["compared"] += 1
    assert (ours != factors(stated, app)) == (str(case) in reasons()), (
        f"ours {ours}\ntheirs {factors(stated, app)}"
    )


def test_most_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are lowered to loops, or to mathematics for which the compiler states nothing."""
    if sum(SEEN.values()) == len(CASES):
        assert SEEN["compared"] > 150
    with capsys.disabled():
        print(f"\njax {jax.__version__}: {dict(SEEN)}, {len(reasons())} of them differ")
