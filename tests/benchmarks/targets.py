"""A Llama-shaped step on hardware that is not here: the search's plan against presets compiled the same way.

    python -m tests.benchmarks.targets tpu:v5e:4x4 data=4,model=4
    python -m tests.benchmarks.targets gpu:h100:4x8 data=4,model=8 --compiled 6 --full 3
    python -m tests.benchmarks.targets tpu:v5e:4x4 data=4,model=4 --presets

The first two search, then compile FSDP, tensor parallelism and their mixture at the full level and print all of them;
`--presets` compiles each preset twice, as arguments only and with the layout stated inside too. What was compiled
before comes from the cache. How far predicted peaks are from the compiled ones stands at the end (layouts stated
inside: the model predicts no others).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import autoshard
from autoshard.compile import Reading
from autoshard.compile_cache import CompileCache, Refusal, default_folder
from autoshard.compile_pool import CompilePool, Job, Outcome
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.meshes import resolve_mesh
from autoshard.optimize import resolve_hardware
from autoshard.report import bytes_text, seconds_text
from autoshard.target_ladder import priced
from autoshard.trial import CompiledEvidence
from examples.llama_target import factory

RIVALS = ("fsdp", "tp", "fsdp+tp")
PRESETS = ("dp", "zero1", "fsdp", "tp", "fsdp+tp", "tp+sequence")


@dataclass(frozen=True)
class Row:
    name: str
    stated: str
    evidence: CompiledEvidence | None
    reason: str = ""
    predicted_peak_bytes: int = 0

    def text(self) -> str:
        found = self.evidence
        if found is None:
            return f"{self.name:24} {self.stated:10} {self.reason}"
        return (
            f"{self.name:24} {self.stated:10} {found.level:6} peak {bytes_text(found.peak_bytes):>10} (predicted "
            f"{bytes_text(self.predicted_peak_bytes):>10})  moved "
            f"{bytes_text(found.collective_bytes):>10}  compute {seconds_text(found.compute_s):>8} "
            f"({found.compute_from})  step {seconds_text(found.time_s):>8}  compiled in {found.compile_s:.0f} s"
        )


def compile_presets(name: str, axes: str, presets: tuple[str, ...], stated: tuple[str, ...]) -> list[Row]:
    """Compiles presets at the full level."""
    mesh = resolve_mesh(autoshard.target(name, axes))
    arguments = factory(mesh.user.size)
    rows: list[Row] = []
    jobs: list[tuple[str, str, Job, Prediction, Predictor]] = []
    for preset in presets:
        for constraints in stated:
            try:
                plan = autoshard.apply(mesh=mesh.user, layout=preset, constraints=constraints, **arguments)
            except autoshard.RuleError as error:
                rows.append(Row(preset, constraints, None, str(error).splitlines()[0]))
                continue
            donated = plan.traced.call.donated
            predictor = Predictor(plan.layout.problem, resolve_hardware(None, mesh), donated)
            jobs.append((preset, constraints, Job(plan.built, {}), predictor.predict(plan.layout), predictor))

    def take(number: int, outcome: Outcome) -> None:
        preset, constraints, _, predicted, predictor = jobs[number]
        if isinstance(outcome, Reading):
            evidence = priced(outcome, mesh, predictor, predicted.compute_s, "full")
            rows.append(Row(preset, constraints, evidence, "", predicted.peak_bytes))
        elif isinstance(outcome, Refusal):
            needs, has = bytes_text(outcome.needed_bytes), bytes_text(outcome.available_bytes)
            rows.append(Row(preset, constraints, None, f"refused: needs {needs}, there are {has}"))
        else:
            rows.append(Row(preset, constraints, None, outcome.reason))
        print(rows[-1].text(), flush=True)

    with CompilePool(mesh, timeout_s=3600.0, cache=CompileCache(default_folder())) as pool:
        pool.compile([job for _, _, job, _, _ in jobs], take)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("mesh")
    parser.add_argument("--presets", action="store_true", help="each preset twice; no search")
    parser.add_argument("--compiled", type=int, default=8)
    parser.add_argument("--full", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    if options.presets:
        rows = compile_presets(options.target, options.mesh, PRESETS, ("arguments", "anchors"))
    else:
        mesh = autoshard.target(options.target, options.mesh)
        effort = autoshard.Effort(compiled=options.compiled, full=options.full)
        plan = autoshard.optimize(
            mesh=mesh, effort=effort, compile_timeout_s=3600.0, **factory(math.prod(mesh.shape.values()))
        )
        print(plan)
        print(f"the search took {time.monotonic() - started:.0f} s", flush=True)
        winner = next(trial for trial in plan.trials if trial.status == "winner")
        peak_bytes = 0 if winner.predicted is None else winner.predicted.peak_bytes
        rows = [Row(f"autoshard: {winner.name}", winner.constraints, winner.compiled, "", peak_bytes)]
        rows += compile_presets(options.target, options.mesh, RIVALS, ("anchors", "arguments"))
    print(f"\n{options.target} {options.mesh}, {time.monotonic() - started:.0f} s in all")
    for row in sorted(rows, key=lambda row: row.evidence.time_s if row.evidence else math.inf):
        print(row.text())
    inside = [(r.predicted_peak_bytes, r.evidence.peak_bytes) for r in rows if r.evidence and r.stated == "anchors"]
    errors = sorted(abs(predicted / compiled - 1) for predicted, compiled in inside)
    if errors:
        print(f"memory, {len(errors)} layouts: median error {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")
    if options.json:
        records = [
            {
                "name": r.name, "stated": r.stated, "reason": r.reason,
                "predicted_peak_bytes": r.predicted_peak_bytes, "evidence": r.evidence and asdict(r.evidence),
            }
            for r in rows
        ]  # fmt: skip
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
