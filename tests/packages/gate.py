"""Searches a program as its users would, and compiles what an expert would have written beside it.

The memory budget is half of what replication needs, so that replication is no answer. The rivals
are the layout by hand and every preset, as constraints inside and as shardings of arguments alone;
all are compiled in the same run, and priced alike: the collectives that the compiled program has,
on the links of the hardware, and predicted compute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

import autoshard
from autoshard.compiler.compile import build, compile_built, evidence_of, figures_of, read_program
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evaluate.evaluation import program_s
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import JitOptions, Prepared, make_request, prepare
from autoshard.search.presets import presets
from autoshard.search.simplify_rules import RuleSimplifier
from autoshard.tracing.rewrite import as_function
from tests.packages.program import Program, spec_of
from tests.whole_models.search import SCALE_MODEL, winner_of

EFFORT = autoshard.Effort(compiled=3, measured=0)
BY_HAND = "by hand"
SAME = 1.01
"""Times within this ratio are a tie, as in the zoo's benchmark."""

HOPELESS = 1.5
"""Presets that are predicted to need so many times the budget, or to take so many times as long as
the found plan, are not compiled."""


@dataclass(frozen=True)
class Priced:
    """A compiled layout.

    Attributes:
        time_s: Of a step.
        sent_bytes: By one device and step.
        peak_bytes: Of one device.
    """

    time_s: float
    sent_bytes: int
    peak_bytes: int


class Gate:
    """One program: traced once for its rivals, and searched in one call of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = Mesh(
            np.array(jax.devices()).reshape(4, 2), program.axes, axis_types=(AxisType.Auto,) * 2
        )
        self.seconds: dict[str, float] = {}
        began_s = time.perf_counter()
        self.prepared: Prepared = prepare(
            *make_request(
                program.step,
                program.args,
                self.mesh,
                jit=JitOptions(donate_argnums=program.donate or None),
            )
        )
        self.seconds["tracing, for the rivals"] = time.perf_counter() - began_s
        problem, call = self.prepared.problem, self.prepared.traced.call
        self.predictor = Predictor(problem, SCALE_MODEL, call.donated, CPU)

    def searched(self) -> dict[str, Any]:
        """The row of the table: what is found, what the rivals are, where the seconds went."""
        replicated = self._preset(Layout(self.prepared.problem, ()))
        budget_bytes = replicated.peak_bytes // 2
        plan = autoshard.optimize(  # the one call
            self.program.step,
            self.program.args,
            self.mesh,
            donate_argnums=self.program.donate or None,
            memory_budget_bytes=budget_bytes,
            hardware=SCALE_MODEL,
            effort=EFFORT,
            progress=False,
        )
        assert plan.timings is not None
        self.seconds["search"] = plan.timings.total_s
        for stage, seconds in plan.timings.seconds.items():
            self.seconds[f"of it {stage}"] = seconds
        began_s = time.perf_counter()
        found, s_per_flop = self._found(plan)
        rivals = self.rivals(budget_bytes, self._predicted(plan.layout).time_s, s_per_flop)
        self.seconds["compiling the rivals"] = time.perf_counter() - began_s
        row = self._row(found, budget_bytes, replicated.peak_bytes, rivals)
        return row | {
            "verified": str(plan.verified),
            "found": winner_of(plan).name,
            "rules": [str(rule) for rule in plan.rules],
            "constraints": winner_of(plan).constraints,
        }

    def preset(self, name: str) -> dict[str, Any]:
        """The row of a preset, applied without a search."""
        replicated = self._preset(Layout(self.prepared.problem, ()))
        began_s = time.perf_counter()
        plan = autoshard.apply(
            self.program.step,
            self.program.args,
            self.mesh,
            name,
            donate_argnums=self.program.donate or None,
        )
        plan.compile()
        self.seconds["applying"] = time.perf_counter() - began_s
        found, s_per_flop = self._found(plan)
        budget_bytes = replicated.peak_bytes // 2
        rivals = {BY_HAND: self._by_hand(s_per_flop)}
        row = self._row(found, budget_bytes, replicated.peak_bytes, rivals)
        return row | {"found": name, "rules": [str(rule) for rule in plan.rules]}

    def _row(
        self,
        found: Priced,
        budget_bytes: int,
        replicated_peak_bytes: int,
        rivals: dict[str, Priced],
    ) -> dict[str, Any]:
        return {
            "distribution": f"{self.program.distribution} {version(self.program.distribution)}",
            "equations": len(self.prepared.traced.program.eqns),
            "replicated_peak_bytes": replicated_peak_bytes,
            "budget_bytes": budget_bytes,
            "time_ms": 1e3 * found.time_s,
            "sent_bytes": found.sent_bytes,
            "peak_bytes": found.peak_bytes,
            "rivals": {
                name: {"time_ms": 1e3 * rival.time_s, "peak_bytes": rival.peak_bytes}
                for name, rival in rivals.items()
            },
            "seconds": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
        }

    def _found(self, plan: autoshard.Plan) -> tuple[Priced, float]:
        """The found plan, and its predicted compute for each flop that the compiler counts."""
        compiled = plan.compile()
        evidence = compiled.evidence
        compute_s = self._compute_s(plan.layout)
        time_s = self._time_s(compute_s, compiled.executable.as_text() or "")
        priced = Priced(time_s, evidence.collective_bytes, evidence.peak_bytes)
        return priced, compute_s / evidence.flops

    def rivals(self, budget_bytes: int, found_s: float, s_per_flop: float) -> dict[str, Priced]:
        """By name, the rivals, whether they fit or not.

        Args:
            budget_bytes: Memory of a device.
            found_s: What the found plan is predicted to take.
            s_per_flop: Its predicted compute for each flop that the compiler counts.
        """
        priced = {}
        for preset in presets(self.prepared.problem)[0]:
            for inside in (True, False):
                layout = Layout(self.prepared.problem, preset.rules, inside=inside)
                predicted = self._predicted(layout)
                if predicted.peak_bytes > HOPELESS * budget_bytes:
                    continue
                if predicted.time_s > HOPELESS * found_s:
                    continue
                name = preset.name + ("" if inside else " (arguments)")
                priced[name] = self._preset(layout)
        if self.program.rival:
            priced[BY_HAND] = self._by_hand(s_per_flop)
        return priced

    def _preset(self, layout: Layout) -> Priced:
        compiled = compile_built(
            build(self.prepared.traced, layout, self.prepared.request.mesh),
            self.prepared.request.mesh,
        )
        time_s = self._time_s(self._compute_s(layout), compiled.executable.as_text() or "")
        evidence = compiled.evidence
        return Priced(time_s, evidence.collective_bytes, evidence.peak_bytes)

    def _by_hand(self, s_per_flop: float) -> Priced:
        """The layout by hand, as shardings of arguments and of what is replaced: nothing of ours is
        in its program.

        Its compute is that of the found plan, times how many more flops the compiler counts.
        """
        traced = self.prepared.traced
        shapes = [aval.shape for aval in traced.call.avals]
        shardings = [
            NamedSharding(self.mesh, spec_of(self.program.rival, path, shape))
            for path, shape in zip(traced.program.input_paths, shapes, strict=True)
        ]
        outputs: list[Any] = [None] * len(traced.program.body.outputs)
        for leaf, output in self.prepared.carry:
            outputs[output] = shardings[leaf]
        donated = tuple(i for i, is_donated in enumerate(traced.call.donated) if is_donated)
        step = jax.jit(
            as_function(traced.program.origin, traced.program.name),
            in_shardings=shardings,
            out_shardings=outputs,
            donate_argnums=donated,
        )
        executable = step.lower(*traced.call.avals).compile()
        text = executable.as_text() or ""
        reading = read_program(text, figures_of(executable, 0.0), "", self.prepared.request.mesh)
        evidence = evidence_of(reading, self.prepared.request.mesh, None)
        time_s = self._time_s(s_per_flop * evidence.flops, text)
        return Priced(time_s, evidence.collective_bytes, evidence.peak_bytes)

    def _compute_s(self, layout: Layout) -> float:
        return self._predicted(layout).compute_s

    def _predicted(self, layout: Layout) -> Prediction:
        """The prediction; of a layout for arguments only, that of its least rules."""
        layout = Layout(self.prepared.problem, layout.rules, layout.inside)
        if not layout.inside:
            layout = RuleSimplifier(self.predictor.placements).simplify(layout)
        return self.predictor.predict(layout)

    def _time_s(self, compute_s: float, text: str) -> float:
        ops = read_collectives(text, self.prepared.request.mesh.axes)
        return program_s(self.predictor, compute_s, ops)


def best_rival(row: dict[str, Any]) -> tuple[str, float] | None:
    """Name and milliseconds of the fastest rival that fits the budget; None where none fits."""
    fitting = {
        name: rival["time_ms"]
        for name, rival in row["rivals"].items()
        if rival["peak_bytes"] <= row["budget_bytes"]
    }
    return min(fitting.items(), key=lambda item: item[1]) if fitting else None
