"""Found plans against presets: `python -m tests.benchmarks.zoo --out zoo.json` (some: `--problems llama@8,gpt2@4x2`).

For each problem: every preset with constraints inside and as in/out shardings only (what people do today), and the
found plan, all compiled for CPU devices and priced alike: the compiled collectives on the links of a v5e at the scale
of the models, and predicted compute. Nothing is executed but the verification of the found plan.

Every problem has a memory budget that replication does not fit, by one formula for all (`BUDGETS`):

- `tight`: 1.1 times the smallest compiled peak that a preset given as arguments only reaches: the smallest device, and
  a tenth, for which today's practice works at all. People shard because a step does not fit.
- `half`: half of what replication needs. These models are small beside their activations, so data parallelism fits it
  often, and where weights are small nothing beats data parallelism.

`--out` is kept up to date: what is compiled is not compiled again, and searches that are in it are not repeated
(`--again` repeats the searches; `--cache` names a folder for jax's compilation cache, which saves most of their time).
`--table` writes the table as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.compile import build, compile_built
from autoshard.cost_model.backend import CPU
from autoshard.cost_model.predict import Predictor
from autoshard.hlo import read_collectives
from autoshard.layout import Layout
from autoshard.race import step_s
from autoshard.search.presets import presets
from autoshard.search.shorten import Shortener
from tests.benchmarks.suite import MESHES as SUITE_MESHES
from tests.stages import prepared
from tests.whole_models.model import WholeModel
from tests.whole_models.registry import MODELS as WHOLE_MODELS
from tests.whole_models.search import SCALE_MODEL, mesh_of, winner_of
from tests.whole_models.transformers import llama

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


def grouped_queries() -> WholeModel:
    """The Llama step with two key-value heads: fewer than a mesh axis of 4 or 8 has devices."""
    return llama(kv=2)


MODELS: Mapping[str, Callable[[], WholeModel]] = MappingProxyType(
    {
        **WHOLE_MODELS,
        "grouped_queries": grouped_queries,
        "recurrent": recurrent,
        "multi_query_decoding": multi_query_decoding,
        "gradient_accumulation": gradient_accumulation,
    }
)
MESHES: Mapping[str, Mapping[str, int]] = MappingProxyType({**SUITE_MESHES, "2x4": {"data": 2, "model": 4}})
ON_8 = ("moe_one_hot", "multi_query_decoding", "recurrent", "gradient_accumulation", "grouped_queries")
PROBLEMS = (
    "grouped_queries@2x4",
    *(f"{model}@8" for model in ON_8),
    *(f"{model}@4x2" for model in sorted(MODELS, key=lambda model: model not in ON_8) if model != "grouped_queries"),
)  # fmt: skip
TIGHT = 1.1
ARGUMENTS = " (arguments)"
SAME = 1.01
"""Times within this ratio are a tie."""


def tight(experts: Mapping[str, Any]) -> int:
    """See the module."""
    least = min(e["peak_bytes"] for name, e in experts.items() if name.endswith(ARGUMENTS))
    return min(int(TIGHT * least), experts["replicated"]["peak_bytes"] - 1)


def half(experts: Mapping[str, Any]) -> int:
    """See the module."""
    return int(experts["replicated"]["peak_bytes"]) // 2


BUDGETS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType({"tight": tight, "half": half})


class Bench:
    """One problem, traced."""

    def __init__(self, name: str) -> None:
        model, mesh = name.split("@")
        self._whole, axes = MODELS[model](), MESHES[mesh]
        self._mesh = mesh_of(tuple(axes.values()), tuple(axes))
        self._made = prepared(self._whole.step, self._whole.args, self._mesh, donate_argnums=self._whole.donate)
        self.predictor = Predictor(self._made.problem, SCALE_MODEL, self._made.traced.call.donated, CPU)

    def _seconds(self, layout: Layout, text: str) -> float:
        """Seconds of a step: predicted compute (a layout for arguments only: of its least rules), and its program's
        collectives."""
        shown = layout if layout.inside else Shortener(self.predictor.placements).shorten(layout)
        ops = read_collectives(text, self._made.request.mesh.axes)
        return step_s(self.predictor, self.predictor.predict(shown).compute_s, ops)

    def experts(self) -> dict[str, Any]:
        """Compiled time, bytes and peak of the presets, by name."""
        found: dict[str, Any] = {}
        for preset in presets(self._made.problem, self.predictor.sent_bytes)[0]:
            for inside in (True, False):
                layout = Layout(self._made.problem, preset.rules, inside=inside)
                compiled = compile_built(
                    build(self._made.traced, layout, self._made.request.mesh), self._made.request.mesh
                )
                found[preset.name + ("" if inside else ARGUMENTS)] = {
                    "s": self._seconds(layout, compiled.executable.as_text() or ""),
                    "bytes": compiled.evidence.collective_bytes,
                    "peak_bytes": compiled.evidence.peak_bytes,
                }
        return found

    def search(self, budget_bytes: int) -> dict[str, Any]:
        """What `optimize` finds within a budget; why it finds nothing."""
        began_s = time.perf_counter()
        try:
            plan = autoshard.optimize(
                self._whole.step, self._whole.args, self._mesh, donate_argnums=self._whole.donate,
                hardware=SCALE_MODEL, progress=False, memory_budget_bytes=budget_bytes,
                effort=autoshard.Effort(compiled=10, measured=0),
            )  # fmt: skip
        except autoshard.AutoshardError as error:
            return {"failed": str(error)[:300]}
        search_s = time.perf_counter() - began_s
        compiled = plan.compile()
        return {
            "s": self._seconds(plan.layout, compiled.executable.as_text() or ""),
            "bytes": compiled.evidence.collective_bytes,
            "peak_bytes": compiled.evidence.peak_bytes,
            "rules": [str(rule) for rule in plan.rules], "constraints": winner_of(plan).constraints,
            "verified": plan.verified.ok, "search_s": search_s, "name": winner_of(plan).name,
            "bound": self.predictor.least_s() / self.predictor.predict(plan.layout).time_s,
        }  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A problem as the table shows it; ratios are a preset's compiled seconds over the found plan's."""

    name: str
    budget_bytes: int
    found: Mapping[str, Any]
    best: tuple[str, float] | None
    plain: tuple[str, float] | None

    @classmethod
    def of(cls, name: str, problem: Problem, budget: str) -> Row:
        """Reads what was kept."""
        budget_bytes = BUDGETS[budget](problem["experts"])
        fits = {n: e["s"] for n, e in problem["experts"].items() if e["peak_bytes"] <= budget_bytes}
        plain = {n: s for n, s in fits.items() if n.endswith(ARGUMENTS)}
        best, only = (min(d.items(), key=lambda item: item[1], default=None) for d in (fits, plain))
        return cls(name, budget_bytes, problem[budget], best, only)

    def ratio(self, expert: tuple[str, float] | None) -> float | None:
        """None where no preset fits; 0 where nothing was found though one does."""
        return None if expert is None else expert[1] / self.found["s"] if "s" in self.found else 0.0

    @property
    def cells(self) -> list[str]:
        """For the table."""

        def text(expert: tuple[str, float] | None) -> list[str]:
            ratio = self.ratio(expert)
            return ["none fits", ""] if expert is None else [f"{expert[0]} {expert[1] * 1e6:.0f}", f"{ratio:.2f}"]

        found = f"{self.found['s'] * 1e6:.0f}" if "s" in self.found else "none"
        bound = f"{self.found['bound']:.0%}" if "bound" in self.found else ""
        budget = f"{self.budget_bytes / 2**20:.2f}"
        return [self.name, budget, found, *text(self.best), *text(self.plain), bound]


HEADINGS = (
    "problem",
    "MiB",
    "found, us",
    "best preset that fits, us",
    "ratio",
    "as arguments only, us",
    "ratio",
    "bound",
)


def lines(rows: list[Row]) -> Iterator[str]:
    """The table as Markdown, and what it comes to."""
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *(row.cells for row in rows)):
        yield "| " + " | ".join(cells) + " |"
    yield ""
    for title, ratios in (
        ("best preset that fits / found", {row.name: row.ratio(row.best) for row in rows}),
        ("fastest fitting preset as arguments only / found", {row.name: row.ratio(row.plain) for row in rows}),
    ):
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        mean = math.exp(sum(math.log(max(r, 1e-3)) for r in known.values()) / max(len(known), 1))
        losses = [f"{name} ({ratio:.2f})" for name, ratio in known.items() if ratio < 1 / SAME]
        ties = [name for name, ratio in known.items() if 1 / SAME <= ratio <= SAME]
        yield (
            f"{title}: geometric mean {mean:.2f} of {len(known)}; losses {len(losses)} {', '.join(losses)}; "
            f"ties {len(ties)}: {', '.join(ties)}\n"
        )
    close = sum(row.found.get("bound", 0) >= 1 / 1.25 for row in rows)
    yield f"bound within 25 % of the found plan's predicted time in {close} of {len(rows)}"


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--budget", choices=sorted(BUDGETS), default="tight")
    parser.add_argument("--again", action="store_true", help="search again")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    parser.add_argument("--cache", help="jax's compilation cache")
    parser.add_argument("--table", type=Path, help="write the table here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if options.cache:
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kept: dict[str, Problem] = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = options.problems.split(",")
    for name in wanted:
        problem = kept.setdefault(name, {})
        if "experts" in problem and options.budget in problem and not options.again:
            continue
        bench = Bench(name)
        problem["experts"] = problem.get("experts") or bench.experts()
        problem[options.budget] = bench.search(BUDGETS[options.budget](problem["experts"]))
        options.out.write_text(json.dumps(kept, indent=1))
        row = Row.of(name, problem, options.budget)
        print(*row.cells, f"{problem[options.budget].get('search_s', 0):.0f} s", flush=True)
    text = "\n".join(lines([Row.of(name, kept[name], options.budget) for name in wanted]))
    print(text)
    if options.table:
        options.table.write_text(text + "\n")


if __name__ == "__main__":
    main()
