"""Every primitive that jax can lower has an entry."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import jax
import pytest

from autoshard.axes.sharding_rules import Coverage, FactorKind, known_primitives, rule_of
from autoshard.tracing.program import Eqn, Value

NAMES = """
import jax.experimental.pallas, jax.export, jax.extend.core.primitives, jax.nn, jax.numpy, jax.scipy
from jax._src.interpreters import mlir
tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
names = {primitive.name for table in tables for primitive in table}
public = vars(jax.extend.core.primitives).values()
print(*sorted(names | {p.name for p in public if isinstance(p, jax.extend.core.Primitive)}))
"""


def lowered_primitives() -> set[str]:
    """Names of all primitives with a lowering on any platform, and of those that jax makes public.

    Asked of a fresh interpreter: other tests and libraries register primitives of their own.
    """
    listing = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, check=True
    )
    return set(listing.stdout.split())


def test_every_lowered_primitive_has_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    registered, names = known_primitives(), lowered_primitives()
    assert len(names) > 200
    assert names - set(registered) == set()
    counts = Counter(registered[name].coverage.value for name in names)
    with capsys.disabled():
        print(f"\njax {jax.__version__}: {len(names)} primitives, {dict(sorted(counts.items()))}")


def test_whoever_links_nothing_says_why() -> None:
    for name, entry in known_primitives().items():
        assert (entry.reason == "") == (entry.coverage is Coverage.RULE), name


def _eqn(primitive: str) -> Eqn:
    values = [Value(i, (2, 3), "float32", 4) for i in range(3)]
    return Eqn(0, primitive, {}, tuple(values[:2]), (values[2],))


@pytest.mark.parametrize("primitive", ["a_users_own", "scan", "pallas_call"])
def test_unknown_structural_and_opaque_primitives_link_nothing(primitive: str) -> None:
    rule = rule_of(_eqn(primitive))
    assert rule.kinds == (FactorKind.NEED_REPLICATION,) * 6
    assert rule.operands + rule.results == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize("primitive", sorted(known_primitives()))
def test_strange_parameters_never_raise(primitive: str) -> None:
    """Every dimension has a factor even where the parameters are not there at all."""
    rule = rule_of(_eqn(primitive))
    assert [len(factors) for factors in rule.operands + rule.results] == [2, 2, 2]
    assert {factor for factors in rule.operands + rule.results for factor in factors} <= set(
        range(len(rule.kinds))
    )
