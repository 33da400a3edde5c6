"""`check` and `diff`: what changed since the table was written, each by its own message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.table.check import Finding, check, mesh_of
from autoshard.table.diff import diff_text
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable

ROOT = Path(__file__).parents[2]
MESH = "data=4,model=2"


def job(
    layers: int = 4,
    d: int = 16,
    hidden: int = 32,
    name: str = "up",
    dtype: Any = jnp.float32,
    optimizer: Any = None,
    squares: bool = True,
) -> dict[str, Any]:
    """Arguments of `apply` and `check`: an unrolled MLP with an optimizer of optax."""
    transform = optax.adam(1e-3) if optimizer is None else optimizer

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params["layers"]:
            x = x + jax.nn.gelu(x @ layer[name]) @ layer["down"]
        return jnp.mean(jnp.square(x) if squares else jnp.abs(x)).astype(jnp.float32)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    layer = {
        name: jax.ShapeDtypeStruct((d, hidden), dtype),
        "down": jax.ShapeDtypeStruct((hidden, d), dtype),
    }
    params = {"layers": [dict(layer) for _ in range(layers)]}
    state = jax.eval_shape(transform.init, params)
    return {
        "fn": step,
        "example_args": (params, state, jax.ShapeDtypeStruct((32, d), dtype)),
        "donate_argnums": (0, 1),
    }


def factory() -> dict[str, Any]:
    return job()


def wider() -> dict[str, Any]:
    return job(hidden=48)


@pytest.fixture(scope="module")
def table() -> SpecTable:
    return autoshard.apply(mesh=MESH, layout="fsdp+tp", **job()).table


def of_kind(findings: tuple[Finding, ...], kind: str) -> Finding:
    (finding,) = (f for f in findings if f.kind == kind)
    return finding


def test_nothing_changed(table: SpecTable, tmp_path: Path) -> None:
    assert check(table, **job()) == ()
    assert check(table, mesh=MESH, **job()) == ()
    table.save(tmp_path / "x.json")
    assert check(tmp_path / "x.json", **job(), seed=3, memory_budget_bytes="1GiB") == ()


CHANGES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "a renamed parameter": (
        {"name": "gate"},
        "renamed",
        True,
        r"layers/0/up is gone, .*layers/0/gate has its shape",
    ),
    "a layer more": (
        {"layers": 5},
        "added",
        True,
        r"layers/4/down, .* without a spec .*a layer more",
    ),
    "a layer less": ({"layers": 3}, "removed", True, r"layers/3/down, .* are gone \(a layer less"),
    "another width": (
        {"hidden": 64},
        "size",
        True,
        r"params/layers/\*/up is \[16, 32\] in the table, \[16, 64\] here; P\(.*\) still divides "
        r"it",
    ),
    "a width that does not divide": (
        {"hidden": 33},
        "size",
        True,
        r"\(size 33\) over mesh axis 'model' \(size 2\), which does not",
    ),
    "another dtype": (
        {"dtype": jnp.bfloat16},
        "dtype",
        True,
        r"layers/\*/up is float32 in the table, bfloat16 here",
    ),
    "another optimizer": (
        {"optimizer": optax.sgd(1e-3, momentum=0.9)},
        "optimizer",
        True,
        r"state changed: .*mu.* gone, .*trace",
    ),
    "no optimizer state": (
        {"optimizer": optax.sgd(1e-3)},
        "optimizer",
        True,
        r"optimizer's state changed: .* gone",
    ),
    "an optimizer with the same state": (
        {"optimizer": optax.adamw(1e-3)},
        "program",
        False,
        r"mul \d+ -> \d+",
    ),
    "another loss": (
        {"squares": False},
        "program",
        False,
        r"step computes something else .*abs 0 -> 1",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_caught_by_its_own_message(table: SpecTable, what: str) -> None:
    changed, kind, fatal, words = CHANGES[what]
    findings = check(table, **job(**changed))
    finding = of_kind(findings, kind)
    assert finding.fatal is fatal
    assert re.search(words, finding.text), finding.text
    assert {f.kind for f in findings} <= {kind, "program"}


def test_another_mesh(table: SpecTable) -> None:
    finding = of_kind(check(table, mesh="data=2,model=4", **job()), "mesh")
    assert finding.fatal
    assert "{'data': 4, 'model': 2}, this mesh is {'data': 2, 'model': 4}" in finding.text
    assert of_kind(check(table, mesh="x=8", **job()), "mesh").fatal
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    (warning,) = check(table, mesh=explicit, **job())
    assert (warning.kind, warning.fatal) == ("axis types", False)


def evidence(table: SpecTable, **changes: Any) -> SpecTable:
    return msgspec.structs.replace(
        table, evidence=msgspec.structs.replace(table.evidence, **changes)
    )


def test_another_jax_is_a_warning(table: SpecTable) -> None:
    (finding,) = check(evidence(table, versions={"jax": "0.1"}, fingerprint="other"), **job())
    assert not finding.fatal
    assert f"written with jax 0.1, this is {jax.__version__}" in finding.text


def test_an_edited_file(table: SpecTable) -> None:
    text = table.dumps()
    line = next(x for x in text.splitlines() if '"params/layers/*/up"' in x)
    by_hand = line.replace(line[line.index('"spec"') : line.index('"shape"')], '"spec": [], ')
    edited = SpecTable.loads(text.replace(line, by_hand))
    (finding,) = check(edited, **job())
    assert finding.kind == "edited"
    assert finding.fatal
    plan = autoshard.apply(mesh=MESH, layout=edited, **job())
    assert plan.specs["params/layers/1/up"] == P()
    assert any("stale" in note and "edited" in note for note in plan.notes)
    assert "stale" in str(plan.verified)
    assert check(plan.table, **job()) == ()


def test_rules_of_logical_axes_that_are_not_here(table: SpecTable) -> None:
    renamed = msgspec.structs.replace(table, rules=["nothing.0->data"])
    finding = of_kind(check(renamed, **job()), "rules")
    assert "names logical axis 'nothing.0'" in finding.text


# Loading under another mesh or a model of another size --------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("data=2,model=4", {}),
        (MESH, {"layers": 6}),
        (MESH, {"hidden": 64}),
        ("data=2,model=2", {"layers": 6, "d": 32}),
    ],
)
def test_specs_of_another_mesh_or_size_come_from_the_rules(
    table: SpecTable, mesh: str, changes: dict[str, Any]
) -> None:
    arguments = job(**changes)
    target = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    on = target if mesh == "data=2,model=2" else mesh
    plan = autoshard.apply(mesh=on, layout=table, **arguments)
    assert plan.specs == autoshard.apply(mesh=on, layout=[*table.rules], **arguments).specs
    assert any(note.startswith("the table's numbers are stale") for note in plan.notes)
    assert "stale" in str(plan.verified)
    assert not plan.table.evidence.candidates
    assert check(plan.table, mesh=on, **arguments) == ()


def test_what_was_fixed_stays_fixed_where_it_divides() -> None:
    pins = {"params/layers/1/up": P(("data", "model"))}
    table = autoshard.apply(mesh=MESH, layout="fsdp+tp", pins=pins, **job()).table
    plan = autoshard.apply(mesh="data=2,model=4", layout=table, **job())
    assert plan.specs["params/layers/1/up"] == P(("data", "model"))
    plan = autoshard.apply(mesh="data=2,model=4", layout=table, **job(d=20))
    assert plan.specs["params/layers/1/up"] != P(("data", "model"))


def test_a_logical_axis_is_found_by_its_leaves_when_its_name_changed(table: SpecTable) -> None:
    def strange(name: str | None) -> str | None:
        return None if name is None else f"old_{name}"

    inputs = {
        path: msgspec.structs.replace(leaf, logical_axes=[strange(r) for r in leaf.logical_axes])
        for path, leaf in table.inputs.items()
    }
    old = msgspec.structs.replace(
        table, rules=[f"old_{rule}" for rule in table.rules], inputs=inputs
    )
    plan = autoshard.apply(mesh=MESH, layout=old, **job())
    assert {p: spec_text(leaf.spec) for p, leaf in plan.table.inputs.items()} == {
        p: spec_text(leaf.spec) for p, leaf in table.inputs.items()
    }
    assert [str(rule) for rule in plan.rules] == table.rules


def test_the_mesh_of_a_table(table: SpecTable) -> None:
    explicit = msgspec.structs.replace(
        table, mesh=msgspec.structs.replace(table.mesh, types=["explicit", "auto"])
    )
    assert mesh_of(explicit).axis_types == (AxisType.Explicit, AxisType.Auto)
    many = msgspec.structs.replace(
        table, mesh=msgspec.structs.replace(table.mesh, axes={"data": 400, "model": 2})
    )
    with pytest.raises(autoshard.MeshError, match="--cpu-devices 800"):
        mesh_of(many)


# diff ---------------------------------------------------------------------------------------------


def test_diff_says_what_differs(table: SpecTable) -> None:
    assert diff_text(table, table) == ""
    other = autoshard.apply(mesh="data=2,model=4", layout="fsdp", **job(layers=5, hidden=64)).table
    text = diff_text(table, other)
    assert "mesh: {'data': 4, 'model': 2} -> {'data': 2, 'model': 4}" in text
    assert "+ params/layers/4/up" not in text
    assert "params/layers/4/up: + float32[16, 64]" in text
    assert (
        "params/layers/*/up (* is 0-3): float32[16, 32] P('data', 'model') -> float32[16, 64]"
        in text
    )
    assert "different programs" in text
    assert len(text.splitlines()) < 60


# The command line ---------------------------------------------------------------------------------


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=False,
    )


def test_exit_codes_of_the_command(table: SpecTable, tmp_path: Path) -> None:
    table.save(tmp_path / "x.json")
    evidence(table, fingerprint="other").save(tmp_path / "old.json")
    text = table.dumps()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])

    def of(*arguments: str, code: int) -> str:
        done = run(tmp_path, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert "fits" in of("check", "x.json", "tests.table.test_check:factory", code=0)
    assert "error: size: " in of("check", "x.json", "tests.table.test_check:wider", code=1)
    assert '"kind": "mesh"' in of(
        "check", "x.json", "tests.table.test_check:factory", "--mesh", "x=2", "--json", code=1
    )
    assert "warning: program: " in of(
        "check", "old.json", "tests.table.test_check:factory", "--strict", code=1
    )
    assert "cut short" in of("check", "cut.json", "tests.table.test_check:factory", code=2)
    assert "verified" not in of("diff", "x.json", "old.json", code=0)
