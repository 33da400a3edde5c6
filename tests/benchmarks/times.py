"""Predicted against measured seconds on the devices here, calibrated in the same run:

    python -m tests.benchmarks.times --models transformer --meshes 4x2 --layouts 10 --out times.json

Layouts run interleaved, twice over; the rank correlation of the two repetitions says how much noise
there is. Where that is much, a rank can be had for the compiled evidence: predicted compute, the
compiled program's own collectives. The last line says for how many models and meshes the best is
among the three that are predicted best, and for how many one of them is within 5 % of it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from scipy.stats import spearmanr

from autoshard.cost_model.hardware.calibrate import calibrate
from autoshard.cost_model.hardware.hardware import Hardware, cpu
from autoshard.cost_model.hardware.step_components import summary_s
from autoshard.evaluate.measure import measure
from autoshard.evaluate.verification.inputs import inputs_for
from tests.benchmarks.evidence_store import gather
from tests.benchmarks.suite import Setting, setting

BEST = 3
CLOSE = 1.05


def times_of(made: Setting, hardware: Hardware, layouts: int) -> dict[str, Any]:
    """What was predicted and measured of a model's layouts, and how well the two agree."""
    prepared = made.made
    cases = {case.name: case.layout for case in made.cases(cpu, layouts)}
    compiled = {name: gather(prepared, layout)[1] for name, layout in cases.items()}
    compiled = {name: program for name, program in compiled.items() if program is not None}
    inputs = inputs_for(prepared.traced.call, prepared.traced.program)
    runs = [measure(compiled, inputs, prepared.carry) for _ in range(2)]
    names = list(compiled)
    evidence = {name: compiled[name].evidence.collectives for name in names}
    first, second = ([run[name].median_s for name in names] for run in runs)
    measured = np.minimum(first, second)

    def against(one: Hardware) -> dict[str, Any]:
        predictor = made.predictor(one)
        predictions = [predictor.predict(cases[name]) for name in names]
        predicted = [found.time_s for found in predictions]
        by_evidence = [
            found.compute_s
            + sum(
                summary_s(predictor.hardware, predictor.problem.mesh_axes, c)
                for c in evidence[name]
            )
            for name, found in zip(names, predictions, strict=True)
        ]  # the collectives of XLA:CPU block
        best = min(measured[i] for i in np.argsort(predicted)[:BEST])
        return {
            "predicted_s": predicted,
            "compiled_s": by_evidence,
            "rank": float(spearmanr(predicted, measured)[0]),
            "rank_with_compiled": float(spearmanr(predicted, by_evidence)[0]),
            "compiled_with_measured": float(spearmanr(by_evidence, measured)[0]),
            "median_log_error": float(np.median(np.abs(np.log(np.array(predicted) / measured)))),
            "best_of_predicted_3": float(best / min(measured)),
        }

    return {
        "model": made.model,
        "mesh": made.mesh,
        "names": names,
        "measured_s": measured.tolist(),
        "rank_of_two_repetitions": float(spearmanr(first, second)[0]),
        "calibrated": against(hardware),
        "preset": against(cpu),
    }


def main() -> None:
    """Runs; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="transformer,gpt2,llama")
    parser.add_argument("--meshes", default="4x2")
    parser.add_argument("--layouts", type=int, default=10)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found = []
    for mesh in chosen.meshes.split(","):
        hardware = None
        for model in chosen.models.split(","):
            made = setting(model, mesh)
            hardware = (
                hardware or calibrate(made.made.request.mesh.auto, dtypes=("float32",)).hardware
            )
            one = times_of(made, hardware, chosen.layouts)
            found.append(one)
            fit, preset, noise = one["calibrated"], one["preset"], one["rank_of_two_repetitions"]
            print(
                f"{model} {mesh}: {len(one['names'])} layouts, rank {fit['rank']:.2f} (preset "
                f"{preset['rank']:.2f}, "
                f"two repetitions {noise:.2f}, with compiled evidence "
                f"{fit['rank_with_compiled']:.2f}, that with "
                f"the clock {fit['compiled_with_measured']:.2f}), median |log error| "
                f"{fit['median_log_error']:.2f} "
                f"(preset {preset['median_log_error']:.2f}), best of predicted {BEST}: "
                f"{fit['best_of_predicted_3']:.2f} of the best",
                flush=True,
            )
    ratios = [one["calibrated"]["best_of_predicted_3"] for one in found]
    good, best = sum(ratio <= CLOSE for ratio in ratios), sum(ratio == 1.0 for ratio in ratios)
    rank = np.median([one["calibrated"]["rank"] for one in found])
    print(
        f"median rank {rank:.2f}; the best is among the predicted {BEST} in {best} of "
        f"{len(found)}, one within "
        f"{CLOSE - 1:.0%} of it in {good}"
    )
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
