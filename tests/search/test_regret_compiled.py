"""The plan that `optimize` finds, against every distinct layout of the space, all of them compiled.

Compiled time is as everywhere: alpha-beta seconds of the compiled collectives, and predicted
compute. Each layout is compiled with its constraints inside and for arguments only, which the
search also tries. Layouts under conditions (`refinements`) are beyond the space: a found plan may
use them, and then be better than all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest

import autoshard
from autoshard.compiler.compile import build, compile_built
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.predict import Predictor
from autoshard.evaluate.evaluation import step_s
from autoshard.evidence.collectives import CollectiveOp
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.search.space import every_list, make_space, rules_of
from tests.benchmarks.evidence_store import key_of
from tests.search.test_regret import CASES, MESHES, V5E, of_case
from tests.stages import QUICKLY, mesh_of

pytestmark = pytest.mark.slow

PROBLEMS = (
    *((case, "8") for case in ("forward", "attention", "embedding", "experts", "recurrent", "mlp")),
    ("gradient", "4x2"),
)
MOST = 200

REGRET = 1.05


def every_layout(made: Prepared) -> list[Layout]:
    """Every distinct effective layout of the space, once."""
    space = make_space(made.problem)
    by_axis = [every_list(space, axis, 10_000) or [] for axis in space.able]
    found: dict[str, Layout] = {}
    for lists in product(*by_axis):
        for order in permutations(lists):
            layout = Layout(made.problem, rules_of(order))
            found.setdefault(layout.key(), layout)
    return list(found.values())


class Priced:
    """Compiles layouts of a problem and says what a step takes."""

    def __init__(self, made: Prepared) -> None:
        self._made = made
        self._predictor = Predictor(made.problem, V5E, made.traced.call.donated, CPU)
        self._shortener = RuleSimplifier(self._predictor.placements)

    def every(self, layouts: list[Layout]) -> Iterator[float]:
        """Seconds of each program that differs from those before it."""
        seen = set()
        for layout in layouts:
            for inside in (True, False):
                form = Layout(self._made.problem, layout.rules, inside=inside)
                if (key := (key_of(self._made, form), inside)) not in seen:
                    seen.add(key)
                    mesh = self._made.request.mesh
                    compiled = compile_built(
                        build(self._made.traced, form, mesh), mesh, compiler_options=QUICKLY
                    )
                    yield self.seconds(form, compiled.executable)

    def seconds(self, layout: Layout, executable: Any) -> float:
        """Predicted compute, and the collectives of the program."""
        shown = layout if layout.inside else self._shortener.simplify(layout)
        ops: tuple[CollectiveOp, ...] = read_collectives(
            executable.as_text() or "", self._made.request.mesh.axes
        )
        return step_s(self._predictor, self._predictor.predict(shown).compute_s, ops)


@pytest.mark.parametrize(("case", "mesh"), PROBLEMS)
def test_the_found_plan_is_as_good_as_the_best_that_compiles(case: str, mesh: str) -> None:
    made, chosen = of_case(case, mesh), CASES[case]
    layouts, priced = every_layout(made), Priced(made)
    assert 10 < len(layouts) <= MOST
    best_s = min(priced.every(layouts))
    plan = autoshard.optimize(
        chosen.fn,
        chosen.args,
        mesh_of(**MESHES[mesh]),
        donate_argnums=chosen.donate,
        hardware=V5E,
        progress=False,
        effort=autoshard.Effort(compiled=12, measured=0),
        compiler_options=QUICKLY,
    )
    assert plan.verified.ok
    found_s = priced.seconds(plan.layout, plan.compile().executable)
    print(
        f"{case} {mesh}: {len(layouts)} layouts, found {found_s:.4g} s, best {best_s:.4g} s: "
        f"{found_s / best_s:.3f}"
    )
    assert found_s <= REGRET * best_s
