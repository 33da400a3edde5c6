"""Optuna's samplers alone, where the best is known: `python -m tests.benchmarks.samplers`.

No presets, no descent. For each problem of `tests/search/test_regret.py` on one mesh and each seed:
how much longer than the best of every rule list the best of the first 40 and of 200 points takes
that a sampler asks for, and in how many it is the best itself. The Gaussian process sampler needs
torch, and is left out where there is none.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from statistics import mean, median
from types import MappingProxyType
from typing import Any

import jax
import optuna

from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.predict import Predictor
from autoshard.search.space import Space, make_space, rules_of
from tests.search.test_regret import CASES, HARDWARE, of_case, proposals

AFTER = 40, 200
SAMPLERS: Mapping[str, Callable[[int], Any]] = MappingProxyType(
    {
        "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
        "TPE, one by one": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=False),
        "TPE, multivariate": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True),
        "TPE, grouped": lambda seed: optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True
        ),
        "NSGA-II": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=20),
        "GP": lambda seed: optuna.samplers.GPSampler(seed=seed, deterministic_objective=True),
    }
)


def bests(space: Space, predictor: Predictor, sampler: Any) -> list[float]:
    """The best predicted seconds after so many points (`AFTER`)."""
    study = optuna.create_study(sampler=sampler)
    found: list[float] = []
    for _ in range(max(AFTER)):
        trial = study.ask()
        point = {
            name: trial.suggest_categorical(name, list(values))
            for name, values in space.parameters().items()
        }
        index = predictor.placements.of_rules([rules_of(space.decode(point))])
        found.append(float(predictor.predict_many(index).time_s[0]))
        study.tell(trial, found[-1])
    return [min(found[:count]) for count in AFTER]


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", choices=sorted(HARDWARE), default="4x2")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    hardware = HARDWARE[options.mesh]
    problems = []
    for case in CASES:
        made = of_case(case, options.mesh)
        best_s = proposals(made, hardware, enumerate_at_most=1_000_000).ranked[0].prediction.time_s
        predictor = Predictor(
            made.problem, hardware, made.traced.call.donated, backend_for(hardware.name)
        )
        problems.append((make_space(made.problem), predictor, best_s))
    print(
        f"{len(problems)} problems on {options.mesh}, {options.seeds} seeds; best found / best of "
        f"all"
    )
    for name, make in SAMPLERS.items():
        began_s = time.process_time()
        try:
            runs = [
                [found_s / best_s for found_s in bests(space, predictor, make(seed))]
                for space, predictor, best_s in problems
                for seed in range(options.seeds)
            ]
        except ImportError as error:
            print(f"{name:18} left out: {error.name} is not installed")
            continue
        asked_s = (time.process_time() - began_s) / len(runs) / max(AFTER)
        for count, regrets in zip(AFTER, zip(*runs, strict=True), strict=True):
            hits = sum(r <= 1 + 1e-6 for r in regrets)
            text = (
                f"median {median(regrets):.3f}, mean {mean(regrets):.3f}, worst {max(regrets):.2f}"
            )
            print(
                f"{name:18} after {count:3}: {text}, the best itself in {hits} of {len(regrets)}",
                flush=True,
            )
        print(f"{name:18} {asked_s * 1e3:.1f} ms of CPU a point")


if __name__ == "__main__":
    main()
