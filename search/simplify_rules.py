"""Rule lists without the rules that state nothing: what people review should all mean something."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.placements import Placements
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS
from autoshard.tracing.program import Value


class RuleSimplifier:
    """Drops idle rules of layouts of one problem."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements
        self._columns = {inside: self._stated(inside) for inside in (True, False)}

    def _stated(self, inside: bool) -> NDArray[np.int64]:
        """Columns of what the compiled program is told: arguments, outputs and, inside, anchors and
        loop carries.
        """
        place = self._placements
        body = place.problem.program.body
        values: list[Value] = [*body.inputs, *body.outputs]
        works = []
        for eqn in place.problem.program.eqns if inside else ():
            if eqn.primitive in ANCHORS or eqn.primitive in CUT_KERNELS:
                works.append(eqn)
                values += eqn.outputs
            values += [value for carry in eqn.carries for value in carry]
        columns = {place.value_column(v) for v in values} | {place.factor_column(e) for e in works}
        return np.array(sorted(columns), dtype=np.int64)

    def simplify(self, layout: Layout) -> Layout:
        """The same compiled program from as few of its rules: later ones go first, each that states
        nothing.
        """
        rules, wanted = layout.rules, self._says([layout.rules], layout.inside)[0]
        number = len(rules)
        while number:
            fewer = [rules[:i] + rules[i + 1 :] for i in range(number)]
            same = [n for n, said in enumerate(self._says(fewer, layout.inside)) if said == wanted]
            if not same:
                break
            number = same[-1]
            rules = fewer[number]
        return replace(layout, rules=rules)

    def _says(self, batch: list[tuple[AxisRule, ...]], inside: bool) -> list[bytes]:
        index = self._placements.of_rules(batch)
        columns = self._columns[inside]
        rows = [rows.array[index[:, a]][:, columns] for a, rows in enumerate(self._placements.rows)]
        *axes, order = rows
        shared = np.zeros(order.shape, dtype=bool)
        for a, mine in enumerate(axes):
            for other in axes[:a]:
                shared |= (mine == other) & (mine >= 0)
        said = np.stack([*axes, np.where(shared, order, 0)], axis=1)
        return [one.tobytes() for one in said]
