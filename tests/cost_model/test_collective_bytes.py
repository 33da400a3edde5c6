"""Predicted collective bytes against compiled ones of saved layouts: presets and random ones,
spatially split too.

The compiled side was read from the CPU programs of `tests.benchmarks.accuracy --models
gpt2,resnet,unet --meshes 4x2`; nothing is compiled here. Layouts are saved by their rules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.cost_model.hardware.hardware import cpu
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from tests.benchmarks.accuracy import bytes_error, kinds, rank
from tests.benchmarks.evidence_store import by_kind
from tests.benchmarks.suite import setting

SAVED = json.loads((Path(__file__).parents[1] / "golden" / "collective_bytes.json").read_text())


@pytest.fixture(scope="module", params=sorted({row["model"] for row in SAVED["rows"]}))
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    model = setting(request.param, SAVED["mesh"])
    predictor, names = (
        model.predictor(cpu),
        {logical_axis.name for logical_axis in model.made.problem.logical_axes.axes},
    )
    compared = []
    for row in SAVED["rows"]:
        rules = tuple(map(AxisRule.parse, row["rules"]))
        if row["model"] == request.param and names >= {rule.logical_axis for rule in rules}:
            predicted = predictor.predict(Layout(model.made.problem, rules))
            compared.append(
                {
                    **row,
                    "preset": "random" not in row["name"],
                    "predicted": by_kind(predicted.collectives),
                }
            )
    if len(compared) < 20:
        pytest.skip("this jax names the logical axes otherwise")
    return compared


def test_bytes(rows: list[dict[str, Any]]) -> None:
    errors = [bytes_error(row) for row in rows if not row["preset"]]
    assert np.median(errors) <= 0.005
    assert np.quantile(errors, 0.95) <= 0.12


def test_presets(rows: list[dict[str, Any]]) -> None:
    assert max(bytes_error(row) for row in rows if row["preset"]) <= 0.035


def test_ranks(rows: list[dict[str, Any]]) -> None:
    assert rank([row for row in rows if not row["preset"]]) >= 0.98


def test_kinds(rows: list[dict[str, Any]]) -> None:
    assert np.mean([kinds(row, "predicted") == kinds(row, "compiled") for row in rows]) >= 0.95
