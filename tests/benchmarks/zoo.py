"""Found plans against presets: `python -m tests.benchmarks.zoo --models gpt2,llama --meshes 4x2 --out zoo.json`.

Each problem has a memory budget of half of what replication needs. For each: every preset that fits, with constraints
inside and as in/out shardings only (what people do today), and the found plan, all compiled for CPU devices and priced
alike: the compiled collectives on the links of a v5e at the scale of the models, and predicted compute. `--out` is kept
up to date, and problems that are in it already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard.compile import build, compile_built
from autoshard.cost_model.backend import CPU
from autoshard.cost_model.predict import Predictor
from autoshard.evidence import CollectiveOp
from autoshard.layout import Layout
from autoshard.search.presets import presets
from tests.benchmarks.suite import MESHES
from tests.stages import prepared
from tests.whole_models.model import WholeModel
from tests.whole_models.registry import MODELS as WHOLE_MODELS
from tests.whole_models.search import SCALE_MODEL, mesh_of, winner_of

Problem = dict[str, Any]


def recurrent() -> WholeModel:
    """Backpropagation through 32 steps of a recurrent net with a square weight."""
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(256, 256)).astype(np.float32) / 16,
        "u": rng.normal(size=(64, 256)).astype(np.float32) / 8,
    }

    def step(params: Any, xs: Any) -> Any:
        def loss(p: Any) -> Any:
            def cell(h: Any, x: Any) -> Any:
                return jnp.tanh(h @ p["w"] + x @ p["u"]), None

            return jnp.mean(jax.lax.scan(cell, jnp.zeros((xs.shape[1], 256)), xs)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return WholeModel(step, (params, rng.normal(size=(32, 64, 64)).astype(np.float32)), 0)


def multi_query_decoding() -> WholeModel:
    """One token of attention with one key-value head: the cache has no heads to split, only the batch."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32) / 16

    params = {"q": weight(256, 16, 32), "kv": weight(256, 64), "o": weight(16, 32, 256)}

    def step(params: Any, cache: Any, x: Any) -> Any:
        new = (x @ params["kv"]).reshape(x.shape[0], 1, 2, 32)
        cache = jnp.concatenate([cache[:, 1:], new], 1)
        q = jnp.einsum("bd,dhk->bhk", x, params["q"])
        weights = jax.nn.softmax(jnp.einsum("bhk,btk->bht", q, cache[:, :, 0]) / 6)
        mixed = jnp.einsum("bht,btk->bhk", weights, cache[:, :, 1])
        return cache, x + jnp.einsum("bhk,hkd->bd", mixed, params["o"])

    return WholeModel(step, (params, weight(64, 512, 2, 32), weight(64, 256)), 1)


def gradient_accumulation() -> WholeModel:
    """Four micro-batches, `(B) -> (4, b)` and a scan."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) / 16 for name, shape in
              {"up": (256, 1024), "down": (1024, 256)}.items()}  # fmt: skip

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(p: Any, x: Any, y: Any) -> Any:
            return jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2)

        def micro(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

        batches = (x.reshape(4, -1, 256), y.reshape(4, -1, 256))
        grads = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), batches)[0]
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    data = rng.normal(size=(256, 256)).astype(np.float32)
    return WholeModel(step, (params, data, data), 0)


MODELS: Mapping[str, Callable[[], WholeModel]] = MappingProxyType(
    {
        **WHOLE_MODELS,
        "recurrent": recurrent,
        "multi_query_decoding": multi_query_decoding,
        "gradient_accumulation": gradient_accumulation,
    }
)


def run(model: str, mesh: str) -> Problem:
    """One problem; see the module."""
    whole, axes = MODELS[model](), MESHES[mesh]
    over = mesh_of(tuple(axes.values()), tuple(axes))
    made = prepared(whole.step, whole.args, over, donate_argnums=whole.donate)
    predictor = Predictor(made.problem, SCALE_MODEL, made.traced.call.donated, CPU)

    def priced(layout: Layout) -> dict[str, Any]:
        compute_s = predictor.predict(layout).compute_s

        def time_of(ops: tuple[CollectiveOp, ...]) -> float:
            comm_s = sum(o.trips * predictor.collective_s(o.kind, o.axes, o.full_bytes, o.group_size) for o in ops)
            return compute_s + comm_s - SCALE_MODEL.overlap * min(compute_s, comm_s)

        mesh_info = made.request.mesh
        found = compile_built(build(made.traced, layout, mesh_info), mesh_info, time_of=time_of).evidence
        return {"s": found.time_s, "bytes": found.collective_bytes, "peak_bytes": found.peak_bytes}

    whole_peak = priced(Layout(made.problem, ()))["peak_bytes"]
    budget = whole_peak // 2
    experts = {}
    for preset in presets(made.problem, predictor.sent_bytes)[0]:
        for inside in (True, False):
            name = preset.name if inside else f"{preset.name} (arguments)"
            experts[name] = priced(Layout(made.problem, preset.rules, inside=inside))
    began_s = time.perf_counter()
    try:
        plan = autoshard.optimize(
            whole.step, whole.args, over, donate_argnums=whole.donate, hardware=SCALE_MODEL, progress=False,
            memory_budget_bytes=budget, effort=autoshard.Effort(compiled=10, measured=0),
        )  # fmt: skip
    except autoshard.AutoshardError as error:
        return {"model": model, "mesh": mesh, "budget_bytes": budget, "experts": experts, "failed": str(error)[:300]}
    trial = winner_of(plan)
    assert trial.compiled is not None
    found = {"s": trial.compiled.time_s, "bytes": trial.compiled.collective_bytes,
             "peak_bytes": trial.compiled.peak_bytes}  # fmt: skip
    return {
        "model": model, "mesh": mesh, "budget_bytes": budget, "experts": experts, "found": found,
        "rules": [str(rule) for rule in plan.rules], "constraints": trial.constraints, "verified": plan.verified.ok,
        "search_s": time.perf_counter() - began_s, "jax": jax.__version__, "bound_s": predictor.least_s(),
        "predicted_s": predictor.predict(plan.layout).time_s,
    }  # fmt: skip


def fitting(problem: Problem, *, arguments_only: bool) -> tuple[str, float] | None:
    """The fastest preset that fits the budget, by compiled time."""
    fits = {
        name: p["s"]
        for name, p in problem["experts"].items()
        if p["peak_bytes"] <= problem["budget_bytes"] and (name.endswith("(arguments)") or not arguments_only)
    }
    return min(fits.items(), key=lambda item: item[1], default=None)


def show(problems: list[Problem]) -> None:
    """Prints the table, and what it comes to."""
    table = Table("problem", "found", "best preset that fits", "ratio", "as arguments only", "ratio", "search", "bound")
    ratios, plain_ratios, bounds = [], [], []
    for problem in problems:
        name = f"{problem['model']} {problem['mesh']}"
        best, plain = fitting(problem, arguments_only=False), fitting(problem, arguments_only=True)
        if "failed" in problem:
            table.add_row(name, "none: " + problem["failed"][:40], str(best), "", str(plain), "", "", "")
            continue
        found_s = problem["found"]["s"]
        cells = [name, f"{found_s * 1e6:.1f} us"]
        for one, into in ((best, ratios), (plain, plain_ratios)):
            if one is None:
                cells += ["none fits", ""]
                continue
            into.append(one[1] / found_s)
            cells += [f"{one[0]} {one[1] * 1e6:.1f} us", f"{into[-1]:.2f}"]
        bounds.append(problem["bound_s"] / problem["predicted_s"])
        table.add_row(*cells, f"{problem['search_s']:.0f} s", f"{bounds[-1]:.0%}")
    Console(width=150).print(table)
    for name, found in (("best preset", ratios), ("best preset as arguments only", plain_ratios)):
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            losses, ties = sum(r < 0.99 for r in found), sum(0.99 <= r <= 1.01 for r in found)
            print(f"{name} / found: geometric mean {mean:.2f} of {len(found)}; losses {losses}, ties {ties}")
    if bounds:
        close = sum(b >= 1 / 1.25 for b in bounds)
        print(f"bound within 25 % of the found plan's predicted time in {close} of {len(bounds)}")


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    problems: list[Problem] = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(p["model"], p["mesh"]) for p in problems}
    for mesh in options.meshes.split(","):
        for model in options.models.split(","):
            if (model, mesh) not in done:
                problems.append(run(model, mesh))
                options.out.write_text(json.dumps(problems, indent=1))
                print(f"{model} {mesh} done", flush=True)
    show(problems)


if __name__ == "__main__":
    main()
