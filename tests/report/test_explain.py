"""Explanations: compiled bytes by source line and operand, what a leaf's other specs cost, why
presets lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.errors import PathError
from autoshard.evidence.collectives import collective_bytes
from autoshard.plan import Plan
from autoshard.report.explain import pareto_candidates
from examples import transformer
from tests import models


@pytest.fixture(scope="module")
def demo(mesh_4x2: Mesh) -> Plan:
    config = transformer.Config(
        layers=2, d_model=64, heads=4, d_ff=128, length=32, batch=16, vocabulary=64
    )
    params = transformer.init_params(jax.random.key(0), config)
    tokens = np.zeros((config.batch, config.length + 1), np.int32)
    args: tuple[Any, ...] = (params, transformer.OPTIMIZER.init(params), tokens)
    return autoshard.apply(transformer.train_step, args, mesh_4x2, "fsdp+tp", donate_argnums=(0, 1))


def test_bytes_are_attributed_by_operand(demo: Plan) -> None:
    explanation = demo.explain()
    print(explanation)
    assert explanation.attributed >= 0.95
    assert sum(m.bytes for m in explanation.moved) == pytest.approx(
        demo.compile().evidence.collective_bytes, rel=1e-3
    )
    source = Path(transformer.__file__).read_text().splitlines()
    weights = [
        m
        for m in explanation.moved
        if m.source.startswith("transformer.py") and m.kind == "all_reduce"
    ]
    lines = {source[int(m.source.split(":")[1]) - 1].strip() for m in weights}
    for name in (
        "wq",
        "wk",
        "wv",
        "wo",
        "w_up",
    ):  # their gradients are summed in combined collectives
        assert any(f'weights["{name}"]' in line for line in lines), name
    by_line = {
        m.source: m for m in explanation.moved if m.kind == "all_reduce" and m.axes == ("model",)
    }
    assert any("->model" in rule for m in by_line.values() for rule in m.rules)


def test_splitting_by_operand_keeps_the_bytes(demo: Plan) -> None:
    text = demo.compile().executable.as_text() or ""
    whole = read_collectives(text, demo.mesh.axes)
    split = read_collectives(text, demo.mesh.axes, by_operand=True)
    assert len(split) > len(whole)
    assert collective_bytes(split) == pytest.approx(collective_bytes(whole), rel=1e-3)


def test_memory_adds_up(demo: Plan) -> None:
    stored = demo.explain().stored_bytes
    assert stored["optimizer"] == pytest.approx(2 * stored["parameters"], rel=0.01)
    assert stored["gradients"] == pytest.approx(stored["parameters"], rel=0.05)
    assert sum(count for name, count in stored.items() if name != "peak") == pytest.approx(
        stored["peak"], rel=0.02
    )


def test_a_leaf_shows_its_runners_up(demo: Plan) -> None:
    explanation = demo.explain("params/layers/wq")
    print(explanation)
    assert explanation.chosen.spec == demo.specs["params/layers/wq"]
    assert {r.split("->")[1] for r in explanation.rules} == {"data", "model"}
    others = [other.spec for other in explanation.others]
    assert P() in others
    assert explanation.chosen.spec not in others
    replicated = next(other for other in explanation.others if other.spec == P())
    assert replicated.prediction.peak_bytes > explanation.chosen.prediction.peak_bytes


def test_what_if_predicts_and_compiles(mesh_4x2: Mesh) -> None:
    plan = autoshard.apply(models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", donate_argnums=0)
    changed = plan.what_if({"params/w1": P()})
    print(changed)
    assert changed.after.peak_bytes > changed.before.peak_bytes
    compiled = changed.compile()
    assert compiled.evidence.argument_bytes > plan.compile().evidence.argument_bytes
    same = plan.what_if({"params/w1": plan.specs["params/w1"]})
    assert same.after.time_s == pytest.approx(
        same.before.time_s, rel=1e-12
    )  # summed in another order
    assert same.after.collectives == same.before.collectives
    assert same.after.peak_bytes == same.before.peak_bytes


def test_a_leaf_that_is_none_is_named(demo: Plan) -> None:
    with pytest.raises(PathError, match="no such argument leaf"):
        demo.explain("params/nothing")
    with pytest.raises(PathError, match="no argument leaf"):
        demo.what_if({"params/nothing": P()})


def test_every_preset_that_lost_has_its_reason(mesh_4x2: Mesh) -> None:
    budget = autoshard.Effort(compiled=4, measured=0)
    args = models.mlp_args(batch=64, d=64, h=256)
    plan = autoshard.optimize(
        models.mlp_step,
        args,
        mesh_4x2,
        donate_argnums=0,
        effort=budget,
        memory_budget_bytes=150_000,
        progress=False,
    )
    reasons = dict(plan.explain().reasons)
    print(plan.explain())
    losers = {t.name for t in plan.candidates if t.is_preset and t.status != "winner"}
    assert set(reasons) == losers
    assert all(reasons.values())
    rejected = [t.name for t in plan.candidates if t.status == "rejected" and "budget" in t.reason]
    assert all("the budget is" in reasons[name] for name in rejected if name in reasons)


def test_the_command_explains_a_table(
    mesh_4x2: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autoshard.cli.app import app

    plan = autoshard.apply(models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", donate_argnums=0)
    plan.table.save(tmp_path / "t.json")
    module = tmp_path / "factory.py"
    module.write_text(
        "from tests import models\n\ndef factory():\n"
        "    return {'fn': models.mlp_step, 'example_args': models.mlp_args(), 'donate_argnums': "
        "0, 'seed': 1}\n"
    )
    for extra, shown in (
        (["--minimal"], "models.py:"),
        (["--leaf", "params/w1"], "the plan"),
        ([], "throughput"),
    ):
        app(
            ["explain", str(tmp_path / "t.json"), f"{module}:factory", *extra],
            standalone_mode=False,
        )
        assert shown in capsys.readouterr().out


def test_time_against_memory_is_shown(mesh_4x2: Mesh) -> None:
    plan = autoshard.optimize(
        models.mlp_step,
        models.mlp_args(batch=64, d=64, h=256),
        mesh_4x2,
        hardware="tpu_v5e",
        progress=False,
        effort=autoshard.Effort(compiled=0, measured=0),
    )
    anchored = [
        t.predicted
        for t in plan.candidates
        if t.predicted is not None and t.constraints == "anchors"
    ]
    shown = [t.predicted for t in pareto_candidates(plan.candidates) if t.predicted is not None]
    assert len(shown) > 1
    assert [p.time_s for p in shown] == sorted({p.time_s for p in shown})
    assert [p.peak_bytes for p in shown] == sorted({p.peak_bytes for p in shown}, reverse=True)
    for one in anchored:
        assert any(p.time_s <= one.time_s and p.peak_bytes <= one.peak_bytes for p in shown)
    explanation = plan.explain(hardware="tpu_v5e")
    assert explanation.pareto == pareto_candidates(plan.candidates)
    assert "time against memory" in str(explanation)
