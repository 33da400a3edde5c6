"""How the search grows with depth: `python -m tests.benchmarks.depth --layers 12,32,96 --out
depth.json`.

Llama-3-8B, layers written out, AdamW, on 16x16: seconds of every stage after tracing, and
candidates a second when 20,000 layouts are predicted at once, memory included. Medians of
`--repeats` runs in one process (the garbage of earlier ones slows later ones), on a machine that
does nothing else. Machines differ much in how fast they run Python, so all of it is also given as a
multiple of what jax itself takes to trace the step.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from autoshard.axes.argument_groups import find_groups
from autoshard.axes.axis_classes import axis_classes
from autoshard.axes.logical_axes import find_logical_axes
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.problem import Problem
from autoshard.search.proposer import propose
from autoshard.search.space import make_space
from autoshard.tracing.carry import matching_state
from autoshard.tracing.jit_options import options_for
from autoshard.tracing.signature import flatten_call
from autoshard.tracing.trace import trace
from tests.benchmarks.llama import Sizes, train_step

MESH = {"data": 16, "model": 16}
PREDICTED = 20_000


@dataclass
class Stages:
    """Seconds of each stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    last_s: float = field(default_factory=time.perf_counter)

    def done(self, stage: str) -> None:
        """Ends a stage."""
        now_s = time.perf_counter()
        self.seconds[stage] = now_s - self.last_s
        self.last_s = now_s


def run(layers: int, seed: int = 0) -> dict[str, Any]:
    """One run; see the module."""
    step, args = train_step(Sizes(layers=layers))
    stages = Stages()
    call = flatten_call(step, args, {}, options_for(step, donate_argnums=(0, 1)))
    traced = trace(step, call)
    stages.done("trace")
    carry = matching_state(traced, donated_only=True)
    axes = axis_classes(traced.program, carry)
    stages.done("axis classes")
    logical_axes = find_logical_axes(axes)
    groups = find_groups(axes, carry)
    problem = Problem(logical_axes, groups, MESH)
    stages.done("logical axes, groups")
    predictor = Predictor(problem, hardware_for("tpu_v5e"), call.donated)
    stages.done("tables")
    proposals = propose(problem, predictor, seed=seed)
    stages.done("search")
    index = random_layouts(problem, predictor, seed)
    predictor.predict_many(index)  # rows that are new are computed
    rates = []
    for _ in range(3):
        began_s = time.perf_counter()
        predictor.predict_many(index)
        rates.append(len(index) / (time.perf_counter() - began_s))
    best = proposals.ranked[0]
    return {
        "layers": layers,
        "equations": len(traced.program.eqns),
        "axes": axes.count,
        "logical axes": len(logical_axes.axes),
        "seconds": stages.seconds,
        "predictions_per_s": statistics.median(rates),
        "evaluations": proposals.evaluations,
        "rules": [str(rule) for rule in best.layout.rules],
        "predicted_s": best.prediction.time_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "jax": jax.__version__,
    }


def random_layouts(problem: Problem, predictor: Predictor, seed: int) -> Any:
    """Rows of layouts made of two random rule lists out of 300 for each mesh axis."""
    rng = random.Random(seed)
    space = make_space(problem)
    lists = []
    for axis in space.able:
        chosen = [rng.sample(space.able[axis], rng.randint(0, 4)) for _ in range(300)]
        lists.append(
            [
                tuple(AxisRule(logical_axis, axis) for logical_axis in logical_axes)
                for logical_axes in chosen
            ]
        )
    pairs = [(*rng.choice(lists[0]), *rng.choice(lists[1])) for _ in range(PREDICTED)]
    index: Any = predictor.placements.of_rules(pairs)
    assert index.dtype == np.int32
    return index


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="12,32,96")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = Table(
        "layers", "equations", "trace", "axes", "logical axes", "tables", "search", "after tracing"
    )
    table.add_column("/ trace")
    table.add_column("predictions/s")
    found = []
    for layers in map(int, options.layers.split(",")):
        runs = [run(layers) for _ in range(options.repeats)]
        median = {s: statistics.median(r["seconds"][s] for r in runs) for s in runs[0]["seconds"]}
        total_s = sum(s for stage, s in median.items() if stage != "trace")
        rate = statistics.median(r["predictions_per_s"] for r in runs)
        found.append(
            {**runs[0], "seconds": median, "predictions_per_s": rate, "after_tracing_s": total_s}
        )
        cells = [f"{s:.2f}" for s in (*median.values(), total_s, total_s / median["trace"])]
        table.add_row(str(layers), str(runs[0]["equations"]), *cells, f"{rate:,.0f}")
    Console(width=120).print(table)
    print(
        f"peak {found[-1]['peak_rss_bytes'] / 2**20:.0f} MiB; best at the last: "
        f"{found[-1]['rules']}"
    )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
