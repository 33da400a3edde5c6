"""Rule lists without the rules that state nothing: what people review should all mean something."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.placements import Placements
from autoshard.layout.signature_table import shared_dims
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS


class RuleSimplifier:
    """Drops idle rules of layouts of one problem."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements
        self._stated_columns = {inside: self._find_stated(inside) for inside in (True, False)}

    def _find_stated(self, inside: bool) -> NDArray[np.int64]:
        """[stated columns] columns of what a layout states to the compiler.

        Arguments and outputs; inside the function anchors and loop carries too.
        """
        placements = self._placements
        program = placements.problem.program
        values = [*program.body.inputs, *program.body.outputs]
        columns = set()
        for eqn in program.eqns if inside else ():
            if eqn.primitive in ANCHORS or eqn.primitive in CUT_KERNELS:
                columns.add(placements.factor_column(eqn))
                values += eqn.outputs
            for carried in eqn.carries:
                values += carried
        columns.update(map(placements.value_column, values))
        return np.array(sorted(columns), dtype=np.int64)

    def simplify(self, layout: Layout) -> Layout:
        """The same compiled program from as few of its rules.

        Later rules go first, each that states nothing.
        """
        rules = layout.rules
        (wanted,) = self._stated_shardings([rules], layout.inside)
        end = len(rules)
        while end:
            # Rules from `end` on were needed with the one just dropped, which states nothing.
            fewer = [rules[:i] + rules[i + 1 :] for i in range(end)]
            shardings = self._stated_shardings(fewer, layout.inside)
            idle = [i for i, stated in enumerate(shardings) if stated == wanted]
            if not idle:
                break
            end = idle[-1]
            rules = fewer[end]
        return replace(layout, rules=rules)

    def _stated_shardings(self, batch: list[tuple[AxisRule, ...]], inside: bool) -> list[bytes]:
        """What each rule list states to the compiler, equal where the compiled program is."""
        index = self._placements.of_rules(batch)
        columns = self._stated_columns[inside]
        # For each mesh axis, then for the orders, [rule lists, stated columns].
        *axes, order = (
            rows.array[index[:, a]][:, columns] for a, rows in enumerate(self._placements.rows)
        )
        # The order of the mesh axes counts only where two share a dimension.
        order = np.where(shared_dims(axes, order.shape), order, 0)
        # [rule lists, mesh axes + 1, stated columns].
        shardings = np.stack([*axes, order], axis=1)
        return [sharding.tobytes() for sharding in shardings]
