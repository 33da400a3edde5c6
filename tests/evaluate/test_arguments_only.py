"""Layouts stated at arguments only: what moves inside is the partitioner's decision, so the model has
no number for them; what was partitioned or compiled has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import autoshard
from autoshard import Effort, SpecTable, optimize
from autoshard.report.html import report_html
from autoshard.report.plan_text import candidates_table
from tests.models import mlp_args, mlp_step


def convolutions(params: Any, images: Any) -> Any:
    """Two convolutions with a norm between and a train step: what a ResNet is made of."""

    def loss(params: Any) -> Any:
        x = images
        for kernel in params:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
        return jnp.mean(x**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def recurrence(weight: Any, xs: Any) -> Any:
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ weight + x), None), xs[0], xs)[0]


def normal(*shape: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


PROGRAMS = {
    "mlp": (mlp_step, mlp_args()),
    "convolutions": (
        convolutions,
        ([normal(3, 3, 8, 16), normal(3, 3, 16, 8)], normal(8, 8, 8, 8)),
    ),
    "recurrence": (recurrence, (normal(32, 32), normal(4, 8, 32))),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def plan(request: pytest.FixtureRequest, mesh_4x2: Mesh) -> autoshard.Plan:
    fn, args = PROGRAMS[request.param]
    return optimize(fn, args, mesh_4x2, effort=Effort(4, 0), progress=False)


def test_only_what_is_stated_inside_is_predicted(plan: autoshard.Plan) -> None:
    assert {c.constraints for c in plan.candidates} == {"anchors", "arguments"}
    for candidate in plan.candidates:
        assert (candidate.predicted is None) == (candidate.constraints == "arguments")
    for record in plan.records():
        assert (record["predicted"] is None) == (record["constraints"] == "arguments")


def test_they_are_still_partitioned_and_compiled(plan: autoshard.Plan) -> None:
    """The ranking knows them by what is predicted of the same layout stated inside."""
    some = [c for c in plan.candidates if c.constraints == "arguments" and c.partitioned]
    assert some
    assert (
        any(c.compiled for c in plan.candidates if c.constraints == "arguments")
        or not plan.layout.inside
    )


def test_the_table_says_so(plan: autoshard.Plan) -> None:
    table = candidates_table(plan.candidates)
    for row in table.rows:
        name, stated, _, time, peak, sent, *_ = row
        shown = {time, peak, sent}
        assert (shown == {"none"}) == (stated == "arguments"), name


def test_files_and_pages_say_so(plan: autoshard.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.table.save(path)
    for candidate in json.loads(path.read_text())["evidence"]["candidates"]:
        stated = candidate["constraints"]
        assert (candidate.get("predicted") is None) == (stated == "arguments")
    page = report_html(SpecTable.load(path))
    assert "Layouts stated at arguments only are not predicted" in page


def test_a_plan_at_arguments_only_is_not_predicted(plan: autoshard.Plan) -> None:
    inside = replace(plan, layout=replace(plan.layout, inside=True))
    outside = replace(plan, layout=replace(plan.layout, inside=False), precompiled=None)
    assert "\npredicted: step" in str(inside)
    assert "\npredicted: step" not in str(outside)
    explanation = str(outside.explain())
    assert "communication, compiled" in explanation
    assert "efficiency" not in explanation
    assert "speed-up" not in explanation
    path = next(iter(plan.specs))
    assert "as if stated inside the function too" in str(outside.explain(path))
    assert "as if stated" not in str(inside.explain(path))
    assert "as if stated inside" in str(outside.what_if({path: PartitionSpec()}))
