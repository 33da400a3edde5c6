"""An argument of another kind is refused by name, in one line of the package's own errors, before
anything is tried."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import AutoshardError, AxisRule, Effort, Hardware, Only, SpecTable, apply, optimize
from autoshard.cli import app, tables

MESH = "data=4,model=2"


def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"])


def args() -> tuple[Any, ...]:
    return {"w": jax.ShapeDtypeStruct((16, 16), "float32")}, jax.ShapeDtypeStruct(
        (8, 16), "float32"
    )


def search(**options: Any) -> autoshard.Plan:
    return optimize(step, args(), MESH, **{"effort": Effort(0, 0), "progress": False, **options})


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return apply(step, args(), MESH, "fsdp")


OF_CALLS: dict[str, list[Any]] = {
    "donate_argnums": ["x", 1.5, [1.5], {}, True, [None], object()],
    "static_argnums": ["x", 1.5, [1.5], {0: 0}, [True], b"x"],
    "donate_argnames": [1.5, [5], {}, object()],
    "static_argnames": [5, [None], {"x": 1}],
    "carry": [True, 5, "x", "auto", [(0, 0, 0)], (0,), {0: [1]}, {None: 0}, [0], {1.5: 0}],
    "example_kwargs": [5, "x", [1], ()],
    "compiler_options": [5, "x", [1], {1: 2}],
    "pins": [5, "x", [1], {3: P()}, {"params/w": None}, {"params/w": P(3)}, {"params/w": Only(3)}, {"params/w": P(("data", 3))}],
    "target": [5, b"cpu:8", {}],
    "user_constraints": [5, None],
    "samples_per_step": ["x", -1, float("nan")],
}  # fmt: skip
OF_SEARCHES: dict[str, list[Any]] = {
    "hardware": [5, {}, b"cpu", [1], 1.5],
    "effort": [5, {}, "x"],
    "sharing": [5, {}, "x"],
    "seed": [-1, "x", 1.5, None, True, 2**32],
    "variants": [5, [step], "x", {}, {"a": 5}, {"a": (step,)}],
    "storage": [5, b"x", {}],
    "study": [5, b"x"],
    "cache_dir": [5, {}],
    "compile_timeout_s": ["x", None, True],
    "compile_memory_bytes": ["x", 1.5],
    "memory_budget_bytes": [[1], 1.5, "many"],
    "isolate": ["x", None, 1],
    "progress": ["x", None],
}


def one_line(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(AutoshardError) as failure:
        call()
    text = str(failure.value)
    assert len(text) < 900
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OF_CALLS.items() for v in vs])
def test_arguments_of_apply(name: str, value: Any) -> None:
    one_line(lambda: apply(step, args(), MESH, "fsdp", **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in (OF_SEARCHES | OF_CALLS).items() for v in vs]
)
def test_arguments_of_another_kind_are_refused_by_name(name: str, value: Any) -> None:
    if name == "variants":
        one_line(
            lambda: optimize(None, args(), MESH, effort=Effort(0, 0), variants=value), "variant"
        )
    else:
        one_line(lambda: search(**{name: value}))


@pytest.mark.parametrize("layout", [None, 5, step, object(), {"a": "b"}, [None], [5], [("a",)]])
def test_layouts(layout: Any) -> None:
    one_line(lambda: apply(step, args(), MESH, layout))


@pytest.mark.parametrize("value", ["x", 1.5, True, float("nan"), -1])
@pytest.mark.parametrize("name", ["compiled", "measured", "full", "partitioned"])
def test_efforts(name: str, value: Any) -> None:
    one_line(lambda: Effort(**{name: value}), name)
    one_line(lambda: Effort(seconds="x"), "seconds")


@pytest.mark.parametrize(
    "pins", [None, 5, "foo", [1], {3: P()}, {"params/w": None}, {"params/w": 3}, {"params/w": P(3)}, "sharding"]
)  # fmt: skip
def test_what_if(pins: Any, plan: autoshard.Plan) -> None:
    given = {"params/w": NamedSharding(plan.mesh.user, P())} if pins == "sharding" else pins
    one_line(lambda: plan.what_if(given), "pins")


@pytest.mark.parametrize("text", [None, 5, b"a->b", "", "->", "a->", "->b"])
def test_rules_as_text(text: Any) -> None:
    one_line(lambda: AxisRule.parse(text))


@pytest.mark.parametrize(
    "parts", [(None, "b"), ("a", 5), ("", "b"), ("a", ""), ("a", "b", "middle")]
)
def test_rules(parts: Any) -> None:
    one_line(lambda: AxisRule(*parts))


@pytest.mark.parametrize("mesh", [None, 5, [], {"a": "x"}, {5: 8}, {"a": 8.0}, {"a": True}])
def test_meshes_of_targets(mesh: Any) -> None:
    one_line(lambda: autoshard.target("cpu:8", mesh), "mesh")


@pytest.mark.parametrize("path", [None, 5, b"x", [1], {}])
def test_paths(path: Any, plan: autoshard.Plan) -> None:
    for call in (SpecTable.load, plan.table.save, Hardware.load, SpecTable.loads):
        one_line(lambda call=call: call(path))
    one_line(lambda: autoshard.check(path, step, args()))
    if not isinstance(path, bytes):
        one_line(lambda: Hardware.from_json(path))


def test_numbers_of_numpy_are_numbers() -> None:
    two = np.int64(0), np.int32(1)
    found = apply(lambda p, x: (p, x), args(), MESH, [], donate_argnums=two, carry=[two[:1] * 2])
    assert len(found.carry) == 1
    assert search(seed=np.int64(3), static_argnums=np.array([], int)).verified.reason


def test_init(plan: autoshard.Plan) -> None:
    one_line(lambda: autoshard.init(plan, 5), "init_fn=5 is a int")
    one_line(lambda: autoshard.init(None, step), "plan=None")


def test_a_step_that_returns_nothing_in_a_tuple() -> None:
    for returned in ((None,), None, (None, None), {"a": None}):
        found = apply(lambda p, x, r=returned: r, args(), MESH, "replicated", donate_argnums=0)
        assert found.carry == ()
    kept = apply(lambda p, x: (None, p), args(), MESH, "replicated", donate_argnums=0)
    assert len(kept.carry) == 1


def test_a_search_on_tracers_is_refused_before_anything_is_tried() -> None:
    tried = []

    def inside(params: Any, x: jax.Array) -> Any:
        def counted(*given: Any) -> jax.Array:
            tried.append(given)
            return step(*given)

        return optimize(counted, (params, x), MESH, progress=False)

    arrays = {"w": jnp.ones((16, 16))}, jnp.ones((8, 16))
    for transform in (jax.jit, jax.grad, lambda f: jax.vmap(f, in_axes=(None, 0))):
        with pytest.raises(autoshard.TraceError, match=r"is a tracer\. Call it outside"):
            transform(inside)(*arrays)
    assert not tried


def test_a_plan_is_copied_and_says_how_to_be_saved(plan: autoshard.Plan, tmp_path: Path) -> None:
    assert copy.deepcopy({"plan": plan})["plan"] is copy.copy(plan) is plan
    with pytest.raises(AutoshardError, match=r"Save its table, plan\.table\.save\(path\)"):
        pickle.dumps(plan)
    plan.table.save(tmp_path / "step.json")
    assert apply(step, args(), MESH, tmp_path / "step.json").specs == plan.specs


def test_the_check_of_a_table_with_odd_names_acts_on_no_terminal(
    plan: autoshard.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    leaf = plan.table.inputs["x"]
    odd = {**plan.table.inputs, "w\x1b]0;title\x07": leaf, "v\u202e\n": leaf}
    table = tmp_path / "step.json"
    msgspec.structs.replace(plan.table, inputs=odd).save(table)
    monkeypatch.setattr(tables, "call_factory", lambda _: {"fn": step, "example_args": args()})
    assert app.run(["check", str(table), "job.py:f"]) == 1
    said = capfd.readouterr().out
    assert "\\x1b]0;title\\x07" in said
    assert all(line.isprintable() for line in said.splitlines())
