"""Found plans against presets: `python -m tests.benchmarks.zoo --out zoo.json` (some: `--problems
mixtral@h100:4x8`).

Models at the sizes at which people train and serve them, on 8 to 64 GPUs, arguments abstract;
nothing is executed. For each: every preset with constraints inside and as in/out shardings only
(what people do today), and the found plan, all compiled for CPU devices and priced alike: the
compiled collectives on the links of the hardware, and predicted compute. A preset of which the
model says that it needs more than `HOPELESS` times the memory is not compiled. Where
google-parallax is installed (`pip install google-parallax`), it is asked too.

The memory budget of every problem is the memory of its device. No problem fits there replicated;
that is asserted by prediction. On 16 devices or more the first mesh axis goes over the network, the
second over NVLink.

`--out` is kept up to date: what is compiled is not compiled again, and searches that are in it are
not repeated (`--again` repeats the searches; `--cache` names a folder for jax's compilation cache,
which saves most of their time). `--table` writes the table as Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Machine code is not looked at; collectives and memory stay the same without the time that LLVM
# takes.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
from jax.sharding import NamedSharding

import autoshard
from autoshard.compiler.compile import build, compile_built, evidence_of, figures_of, read_program
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.evaluate.evaluation import program_s
from autoshard.layout.layout import Layout
from autoshard.search.presets import presets
from autoshard.search.simplify_rules import RuleSimplifier
from tests.benchmarks.zoo_models import MODELS
from tests.stages import mesh_of, prepared
from tests.whole_models.search import winner_of

Problem = dict[str, Any]


PROBLEMS = (
    "recurrent@h100:8",
    "recurrent@h100:4x2",
    "multi_query_decoding@h100:8",
    "multi_query_decoding@h100:4x2",
    "recommender@h100:8",
    "recommender@h100:4x2",
    "llama_8b@h100:8",
    "llama_8b@h100:4x2",
    "llama_8b@a100:2x8",
    "grouped_queries@h100:2x4",
    "gradient_accumulation@h100:4x2",
    "mixtral@h100:4x8",
    "mixtral@h100:8x4",
    "llama_70b@h100:8x8",
    "residual_mlp@h100:4x2",
)
HOPELESS = 1.5
ARGUMENTS = " (arguments)"
SAME = 1.01
"""Times within this ratio are a tie."""

NETWORK_FROM = 16
"""Devices; fewer are in one NVLink domain."""

AXES = {1: ("data",), 2: ("data", "model")}


class DeviceRunner:
    """One problem, traced."""

    def __init__(self, name: str) -> None:
        model, _, place = name.partition("@")
        part, _, shape = place.partition(":")
        sizes = tuple(map(int, shape.split("x")))
        far = AXES[len(sizes)][:1] if math.prod(sizes) >= NETWORK_FROM else ()
        self.hardware = hardware_for(part).with_far_axes(far)
        self._whole = MODELS[model]()
        self._mesh = mesh_of(**dict(zip(AXES[len(sizes)], sizes, strict=True)))
        self._made = prepared(
            self._whole.step, self._whole.args, self._mesh, donate_argnums=self._whole.donate
        )
        self.predictor = Predictor(
            self._made.problem, self.hardware, self._made.traced.call.donated, CPU
        )
        assert (
            self.predictor.predict(Layout(self._made.problem, ())).peak_bytes
            > self.hardware.memory_bytes
        )

    def _seconds(self, layout: Layout, text: str) -> float:
        """Seconds of a step: predicted compute (a layout for arguments only: of its least rules),
        and its program's collectives."""
        shown = (
            layout if layout.inside else RuleSimplifier(self.predictor.placements).simplify(layout)
        )
        ops = read_collectives(text, self._made.request.mesh.axes)
        return program_s(self.predictor, self.predictor.predict(shown).compute_s, ops)

    def experts(self) -> dict[str, Any]:
        """Compiled time, bytes and peak of the presets, by name."""
        found: dict[str, Any] = {}
        mesh = self._made.request.mesh
        for preset in presets(self._made.problem)[0]:
            for inside in (True, False):
                layout = Layout(self._made.problem, preset.rules, inside=inside)
                name = preset.name + ("" if inside else ARGUMENTS)
                peak_bytes = self.predictor.predict(layout).peak_bytes
                if peak_bytes > HOPELESS * self.hardware.memory_bytes:
                    found[name] = {"predicted_peak_bytes": peak_bytes}
                    continue
                compiled = compile_built(build(self._made.traced, layout, mesh), mesh)
                found[name] = {
                    "s": self._seconds(layout, compiled.executable.as_text() or ""),
                    "bytes": compiled.evidence.collective_bytes,
                    "peak_bytes": compiled.evidence.peak_bytes,
                }
        return found

    def search(self) -> dict[str, Any]:
        """What `optimize` finds within the device's memory; why it finds nothing."""
        began_s = time.perf_counter()
        try:
            plan = autoshard.optimize(
                self._whole.step,
                self._whole.args,
                self._mesh,
                donate_argnums=self._whole.donate,
                hardware=self.hardware,
                progress=False,
                memory_budget_bytes=self.hardware.memory_bytes,
                effort=autoshard.Effort(compiled=10, measured=0),
            )
        except autoshard.AutoshardError as error:
            return {"failed": str(error)[:300]}
        search_s = time.perf_counter() - began_s
        compiled = plan.compile()
        return {
            "s": self._seconds(plan.layout, compiled.executable.as_text() or ""),
            "bytes": compiled.evidence.collective_bytes,
            "peak_bytes": compiled.evidence.peak_bytes,
            "flops": compiled.evidence.flops,
            "compute_s": self.predictor.predict(plan.layout).compute_s,
            "rules": [str(rule) for rule in plan.rules],
            "constraints": winner_of(plan).constraints,
            "search_s": search_s,
            "name": winner_of(plan).name,
            "bound": self.predictor.least_s() / self.predictor.predict(plan.layout).time_s,
        }

    def parallax(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What google-parallax says, compiled and priced in the same way; why it says nothing.

        Compute is that of the found plan, times how many more flops the compiler counts (there is
        no loop to miscount).
        """
        try:
            from parallax.sharding.auto_shard import get_shardings
        except ImportError:
            return {"refused": "not installed: pip install google-parallax"}
        params, *rest = self._whole.args
        try:
            with jax.set_mesh(self._mesh):
                inputs, outputs = get_shardings(self._whole.step, params, *rest)
        except Exception as error:
            return {
                "refused": f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"
            }
        given, made = (
            jax.tree.map(partial(NamedSharding, self._mesh), specs) for specs in (inputs, outputs)
        )
        step = jax.jit(
            self._whole.step,
            in_shardings=given,
            out_shardings=made,
            donate_argnums=self._whole.donate,
        )
        executable = step.lower(*self._whole.args).compile()
        reading = read_program(
            executable.as_text() or "", figures_of(executable, 0.0), "", self._made.request.mesh
        )
        compute_s = found["compute_s"] * reading.figures.flops / found["flops"]
        evidence = evidence_of(reading, self._made.request.mesh, None)
        return {
            "s": program_s(self.predictor, compute_s, reading.ops),
            "peak_bytes": evidence.peak_bytes,
        }


@dataclass(frozen=True)
class Row:
    """A problem as the table shows it; ratios are a preset's compiled seconds over the found
    plan's."""

    name: str
    found: Mapping[str, Any]
    best: tuple[str, float] | None
    plain: tuple[str, float] | None

    @classmethod
    def of(cls, name: str, problem: Problem) -> Row:
        """Reads what was kept."""
        budget_bytes = problem["budget_bytes"]
        fits = {
            n: e["s"]
            for n, e in problem["experts"].items()
            if e.get("peak_bytes", math.inf) <= budget_bytes
        }
        plain = {n: s for n, s in fits.items() if n.endswith(ARGUMENTS)}
        best, only = (min(d.items(), key=lambda item: item[1], default=None) for d in (fits, plain))
        return cls(name, problem["found"], best, only)

    def ratio(self, expert: tuple[str, float] | None) -> float | None:
        """None where no preset fits; 0 where nothing was found though one does."""
        return None if expert is None else expert[1] / self.found["s"] if "s" in self.found else 0.0

    @property
    def cells(self) -> list[str]:
        """For the table."""

        def text(expert: tuple[str, float] | None) -> list[str]:
            ratio = self.ratio(expert)
            return (
                ["none fits", ""]
                if expert is None
                else [f"{expert[0]} {expert[1] * 1e3:.4g}", f"{ratio:.2f}"]
            )

        found = f"{self.found['s'] * 1e3:.4g}" if "s" in self.found else "none"
        bound = f"{self.found['bound']:.0%}" if "bound" in self.found else ""
        peak = f"{self.found['peak_bytes'] / 2**30:.1f}" if "s" in self.found else ""
        return [self.name, found, peak, *text(self.best), *text(self.plain), bound]


HEADINGS = (
    "problem",
    "found, ms",
    "peak, GiB",
    "best preset that fits, ms",
    "ratio",
    "as arguments only, ms",
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
        (
            "fastest fitting preset as arguments only / found",
            {row.name: row.ratio(row.plain) for row in rows},
        ),
    ):
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        mean = math.exp(sum(math.log(max(r, 1e-3)) for r in known.values()) / max(len(known), 1))
        losses = [f"{name} ({ratio:.2f})" for name, ratio in known.items() if ratio < 1 / SAME]
        mappings = [name for name, ratio in known.items() if 1 / SAME <= ratio <= SAME]
        yield (
            f"{title}: geometric mean {mean:.2f} of {len(known)}; losses {len(losses)} "
            f"{', '.join(losses)}; "
            f"ties {len(mappings)}: {', '.join(mappings)}\n"
        )
    close = sum(row.found.get("bound", 0) >= 1 / 1.25 for row in rows)
    yield f"bound within 25 % of the found plan's predicted time in {close} of {len(rows)}"


def peer_lines(kept: Mapping[str, Problem], names: list[str]) -> Iterator[str]:
    """What google-parallax makes of the problems."""
    refused: dict[str, list[str]] = {}
    for name in names:
        said, found = kept[name].get("parallax", {"refused": "not asked"}), kept[name]["found"]
        if "refused" in said:
            refused.setdefault(said["refused"], []).append(name)
        elif "s" in found:
            fits = (
                "" if said["peak_bytes"] <= kept[name]["budget_bytes"] else ", which does not fit,"
            )
            yield (
                f"google-parallax on {name}: {said['s'] * 1e3:.4g} ms{fits} with "
                f"{said['peak_bytes'] / 2**30:.1f} GiB "
                f"a device; google-parallax / found {said['s'] / found['s']:.2f}"
            )
    for reason, those in refused.items():
        yield f"google-parallax refuses ({reason}): {', '.join(those)}"


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--again", action="store_true", help="search again")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    parser.add_argument("--cache", help="jax's compilation cache")
    parser.add_argument("--table", type=Path, help="write the table here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 64)
    if options.cache:
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kept: dict[str, Problem] = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = options.problems.split(",")
    for name in wanted:
        problem = kept.setdefault(name, {})
        if "found" in problem and not options.again:
            continue
        runner = DeviceRunner(name)
        problem["budget_bytes"] = runner.hardware.memory_bytes
        problem["experts"] = problem.get("experts") or runner.experts()
        options.out.write_text(json.dumps(kept, indent=1))
        problem["found"] = runner.search()
        problem["parallax"] = runner.parallax(problem["found"])
        options.out.write_text(json.dumps(kept, indent=1))
        print(
            *Row.of(name, problem).cells, f"{problem['found'].get('search_s', 0):.0f} s", flush=True
        )
    text = "\n".join(
        [*lines([Row.of(name, kept[name]) for name in wanted]), "", *peer_lines(kept, wanted)]
    )
    print(text)
    if options.table:
        options.table.write_text(text + "\n")


if __name__ == "__main__":
    main()
