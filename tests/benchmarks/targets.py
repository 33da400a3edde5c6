"""A Llama-shaped step on hardware that is not here: the search's plan against presets compiled the
same way.

    python -m tests.benchmarks.targets tpu:v5e:4x4 data=4,model=4
    python -m tests.benchmarks.targets gpu:h100:4x8 data=4,model=8 --compiled 6 --full 3
    python -m tests.benchmarks.targets tpu:v5e:4x4 data=4,model=4 --presets
    python -m tests.benchmarks.targets tpu:v5e:4x4 data=4,model=4 --random 20

The first two search, then compile FSDP, tensor parallelism and their mixture at the full level and
print all of them; `--presets` compiles each preset twice, as arguments only and with the layout
stated inside too; `--random` compiles so many random distinct layouts of those that are predicted
to fit. What was compiled before comes from the cache. How far predictions are from what was
compiled stands at the end (layouts stated inside: the model predicts no others)."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import autoshard
from autoshard.compiler.cache import CompileCache, Refusal, default_folder
from autoshard.compiler.compile import Reading
from autoshard.compiler.pool import CompilePool, Job, Outcome
from autoshard.cost_model.hardware.hardware import resolve_hardware
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evaluate.target_compiles import priced
from autoshard.evidence.candidate import CompiledEvidence, Predicted
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.mesh import resolve_mesh
from autoshard.text import bytes_text, seconds_text
from examples.llama_target import factory
from tests.benchmarks.suite import ATTEMPTS, random_layouts

RIVALS = ("fsdp", "tp", "fsdp+tp")
PRESETS = ("dp", "zero1", "fsdp", "tp", "fsdp+tp", "tp+sequence")


@dataclass(frozen=True)
class Row:
    name: str
    stated: str
    evidence: CompiledEvidence | None
    reason: str = ""
    predicted: Predicted | None = None

    def text(self) -> str:
        found, predicted = self.evidence, self.predicted
        if found is None or predicted is None:
            return f"{self.name:24} {self.stated:10} {self.reason}"
        return (
            f"{self.name:24} {self.stated:10} {found.level:6} peak "
            f"{bytes_text(found.peak_bytes):>10} (predicted "
            f"{bytes_text(predicted.peak_bytes):>10})  moved "
            f"{bytes_text(found.collective_bytes):>10} (predicted "
            f"{bytes_text(predicted.collective_bytes):>10})  compute "
            f"{seconds_text(found.compute_s):>8} "
            f"({found.compute_from})  step {seconds_text(found.time_s):>8}  compiled in "
            f"{found.compile_s:.0f} s"
        )


Given = str | tuple[AxisRule, ...]
"""A layout: a preset's name or rules."""


def compile_layouts(
    name: str, axes: str, layouts: Mapping[str, Given], stated: tuple[str, ...]
) -> list[Row]:
    """Compiles layouts at the full level."""
    mesh = resolve_mesh(autoshard.target(name, axes))
    arguments = factory(mesh.user.size)
    rows: list[Row] = []
    jobs: list[tuple[str, str, Job, Prediction, Predictor]] = []
    for label, given in layouts.items():
        for constraints in stated:
            try:
                plan = autoshard.apply(
                    mesh=mesh.user, layout=given, constraints=constraints, **arguments
                )
            except autoshard.RuleError as error:
                rows.append(Row(label, constraints, None, str(error).splitlines()[0]))
                continue
            donated = plan.traced.call.donated
            predictor = Predictor(
                plan.layout.problem,
                resolve_hardware(None, mesh.device_kind, mesh.far_axes),
                donated,
            )
            jobs.append(
                (label, constraints, Job(plan.built, {}), predictor.predict(plan.layout), predictor)
            )

    def take(number: int, outcome: Outcome) -> None:
        label, constraints, _, predicted, predictor = jobs[number]
        if isinstance(outcome, Reading):
            evidence = priced(outcome, mesh, predictor, predicted.compute_s, "full")
            said = Predicted(predicted.time_s, predicted.peak_bytes, predicted.collective_bytes)
            rows.append(Row(label, constraints, evidence, "", said))
        elif isinstance(outcome, Refusal):
            needs, has = bytes_text(outcome.needed_bytes), bytes_text(outcome.available_bytes)
            rows.append(Row(label, constraints, None, f"refused: needs {needs}, there are {has}"))
        else:
            rows.append(Row(label, constraints, None, outcome.reason))
        print(rows[-1].text(), flush=True)

    with CompilePool(mesh, timeout_s=3600.0, cache=CompileCache(default_folder())) as pool:
        pool.compile([job for _, _, job, _, _ in jobs], take)
    return rows


def random_fitting(name: str, axes: str, count: int) -> dict[str, Given]:
    """Random layouts that are predicted to fit."""
    mesh = resolve_mesh(autoshard.target(name, axes))
    hardware = resolve_hardware(None, mesh.device_kind, mesh.far_axes)
    plan = autoshard.apply(mesh=mesh.user, layout="dp", **factory(mesh.user.size))
    predictor = Predictor(plan.layout.problem, hardware, plan.traced.call.donated)
    found: dict[str, Given] = {}
    for layout in random_layouts(plan.layout.problem, f"{name} {axes}", ATTEMPTS * count, set()):
        if len(found) == count:
            break
        if predictor.predict(layout).peak_bytes <= hardware.memory_bytes:
            found[f"random-{len(found)}"] = layout.rules
    return found


def accuracy(rows: Sequence[Row]) -> str:
    """How far predictions are from what was compiled, of the layouts that are stated inside."""
    pairs = [
        (r.predicted, r.evidence)
        for r in rows
        if r.predicted and r.evidence and r.stated == "anchors"
    ]
    if not pairs:
        return "nothing compiled"

    def errors(predicted: Sequence[float], compiled: Sequence[float]) -> str:
        found = np.abs(np.array(predicted) / compiled - 1)
        return (
            f"median error {np.median(found):.1%}, 95th percentile {np.quantile(found, 0.95):.0%}"
        )

    peaks = [p.peak_bytes for p, _ in pairs], [e.peak_bytes for _, e in pairs]
    moved = [p.collective_bytes for p, _ in pairs], [e.collective_bytes for _, e in pairs]
    times = [p.time_s for p, _ in pairs], [e.time_s for _, e in pairs]
    return (
        f"{len(pairs)} layouts: memory {errors(*peaks)}; bytes {errors(*moved)}, rank "
        f"{spearmanr(*moved)[0]:.2f}; "
        f"step {errors(*times)}, rank {spearmanr(*times)[0]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("mesh")
    parser.add_argument("--presets", action="store_true", help="each preset twice; no search")
    parser.add_argument("--random", type=int, default=0, help="so many random layouts; no search")
    parser.add_argument("--compiled", type=int, default=8)
    parser.add_argument("--full", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    if options.presets:
        rows = compile_layouts(
            options.target, options.mesh, {name: name for name in PRESETS}, ("arguments", "anchors")
        )
    elif options.random:
        rows = compile_layouts(
            options.target,
            options.mesh,
            random_fitting(options.target, options.mesh, options.random),
            ("anchors",),
        )
    else:
        mesh = autoshard.target(options.target, options.mesh)
        effort = autoshard.Effort(compiled=options.compiled, full=options.full)
        plan = autoshard.optimize(
            mesh=mesh,
            effort=effort,
            compile_timeout_s=3600.0,
            **factory(math.prod(mesh.shape.values())),
        )
        print(plan)
        print(f"the search took {time.monotonic() - started:.0f} s", flush=True)
        winner = next(candidate for candidate in plan.candidates if candidate.status == "winner")
        rows = [
            Row(
                f"autoshard: {winner.name}",
                winner.constraints,
                winner.compiled,
                "",
                winner.predicted,
            )
        ]
        rows += compile_layouts(
            options.target, options.mesh, {name: name for name in RIVALS}, ("anchors", "arguments")
        )
    print(f"\n{options.target} {options.mesh}, {time.monotonic() - started:.0f} s in all")
    for row in sorted(rows, key=lambda row: row.evidence.time_s if row.evidence else math.inf):
        print(row.text())
    print(accuracy(rows))
    if options.json:
        records = [
            {
                "name": r.name, "stated": r.stated, "reason": r.reason,
                "predicted": r.predicted and asdict(r.predicted),
                "evidence": r.evidence and asdict(r.evidence),
            }
            for r in rows
        ]  # fmt: skip
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
