"""What the accuracy of the predictor is measured on: models, meshes, and random distinct layouts
beside the presets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.predict import Predictor
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.layout.problem import Problem
from autoshard.search.presets import presets
from examples.transformer import factory
from tests.stages import prepared
from tests.whole_models.model import WholeModel
from tests.whole_models.registry import MODELS as WHOLE_MODELS


def transformer() -> WholeModel:
    """The train step of examples/transformer.py."""
    made = factory()
    return WholeModel(made["fn"], made["example_args"], made["donate_argnums"])


MODELS: Mapping[str, Callable[[], WholeModel]] = MappingProxyType(
    {"transformer": transformer, **WHOLE_MODELS}
)
MESHES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"8": {"data": 8}, "4x2": {"data": 4, "model": 2}, "2x2x2": {"data": 2, "fsdp": 2, "model": 2}}
)
LONGEST = 6
"""Rules of a random layout at most."""
ATTEMPTS = 60
"""Random rule lists per wanted layout: many coincide, and some models have few distinct layouts."""


@dataclass(frozen=True)
class Case:
    """One layout of one model on one mesh."""

    name: str
    layout: Layout
    preset: bool


@dataclass(frozen=True)
class Setting:
    """A model on a mesh."""

    model: str
    mesh: str
    made: Prepared

    def predictor(self, hardware: Hardware) -> Predictor:
        """The predictor as `optimize` makes it for CPU devices."""
        return Predictor(self.made.problem, hardware, self.made.traced.call.donated, CPU)

    def cases(self, hardware: Hardware, layouts: int, seed: int = 0) -> Iterator[Case]:
        """The presets, then up to `layouts` random layouts, all distinct."""
        problem = self.made.problem
        seen: set[str] = set()
        found, _ = presets(problem)
        for preset in found:
            layout = Layout(problem, preset.rules)
            if layout.key() not in seen:
                seen.add(layout.key())
                yield Case(preset.name, layout, preset=True)
        drawn = random_layouts(
            problem, f"{self.model} {self.mesh} {seed}", ATTEMPTS * layouts, seen
        )
        for number, layout in enumerate(itertools.islice(drawn, layouts)):
            yield Case(f"random-{number}", layout, preset=False)


def random_layouts(problem: Problem, seed: str, attempts: int, seen: set[str]) -> Iterator[Layout]:
    """Layouts of random rules, distinct, and not among those whose keys were seen (to which theirs
    are added)."""
    names = sorted(r.name for r in problem.logical_axes.axes if not r.scanned)
    pairs = [AxisRule(name, axis) for name in names for axis in problem.mesh_axes]
    rng = random.Random(seed)
    for _ in range(attempts):
        layout = Layout(problem, tuple(rng.sample(pairs, min(len(pairs), rng.randint(2, LONGEST)))))
        if layout.key() not in seen:
            seen.add(layout.key())
            yield layout


def setting(model: str, mesh: str) -> Setting:
    """Traces a model for a mesh over the first CPU devices."""
    whole, axes = MODELS[model](), MESHES[mesh]
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    over = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return Setting(model, mesh, prepared(whole.step, whole.args, over, donate_argnums=whole.donate))
