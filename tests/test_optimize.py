"""The main job, end to end: what a person gets from `optimize` and `apply`."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Effort
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step

QUICK = Effort(compiled=3, measured=0)


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


@pytest.fixture(scope="module")
def plan(mesh: Mesh) -> autoshard.Plan:
    return autoshard.optimize(
        decoder_step,
        decoder_args(),
        mesh,
        donate_argnums=(0, 1),
        effort=Effort(compiled=6, measured=3),
        progress=False,
    )


def test_the_plan_is_verified_and_measured_and_says_so(plan: autoshard.Plan) -> None:
    assert plan.verified
    assert "unsharded" in str(plan.verified)
    winner = next(t for t in plan.candidates if t.status == "winner")
    assert winner.measured is not None
    assert winner.measured.rounds >= 7
    assert winner.compiled is not None
    assert winner.verified is not None
    assert winner.verified.max_abs_err <= winner.verified.tolerance
    text = str(plan)
    assert "verified: yes" in text
    assert "emb" in text


def test_every_preset_is_a_candidate_or_skipped_with_a_reason(plan: autoshard.Plan) -> None:
    named = {t.preset for t in plan.candidates if t.is_preset}
    skipped = {s.name: s.reason for s in plan.skipped}
    assert named | set(skipped) == {
        "replicated",
        "dp",
        "zero1",
        "fsdp",
        "tp",
        "fsdp+tp",
        "tp+sequence",
    }
    assert all(skipped.values())
    assert {t.constraints for t in plan.candidates if t.name.startswith("fsdp")} == {
        "anchors",
        "arguments",
    }


def test_a_layout_is_never_a_candidate_twice(plan: autoshard.Plan) -> None:
    keys = [t.key for t in plan.candidates]
    assert len(keys) == len(set(keys))


def test_the_best_preset_is_measured_and_the_winner_is_no_slower(plan: autoshard.Plan) -> None:
    from autoshard.evaluate.measure import ratio_interval

    winner = next(t for t in plan.candidates if t.status == "winner")
    presets = [t for t in plan.candidates if t.measured is not None and t.is_preset]
    assert presets
    for preset in presets:
        if preset is not winner:
            interval = ratio_interval(winner.measured.seconds, preset.measured.seconds)
            assert interval.ratio <= 1.05 or interval.low <= 1.0


def test_the_plan_is_a_fixed_point_drop_in(plan: autoshard.Plan) -> None:
    params, moment, tokens = decoder_args()
    reference = jax.jit(decoder_step)
    ours = (plan.place(0, params), plan.place("moment", moment))
    theirs = (params, moment)
    for _ in range(3):
        *ours, loss = plan(*ours, tokens)
        *theirs, expected = reference(*theirs, tokens)
        close(loss, expected)
    close(ours, theirs)
    specs = jax.tree.map(lambda a: a.sharding, ours[0])
    assert specs == plan.in_shardings[0] == plan.out_shardings[0]


def test_the_plan_never_compiles_again_what_the_search_compiled(plan: autoshard.Plan) -> None:
    params, moment, tokens = decoder_args()
    placed = plan.place(0, params), plan.place(1, moment), plan.place(2, tokens)
    compiles: list[str] = []

    def listen(event: str, seconds: float, **context: Any) -> None:
        if "backend_compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        plan(*placed)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiles


def test_donation_holds(plan: autoshard.Plan) -> None:
    params, moment, tokens = decoder_args()
    placed = plan.place(0, params)
    plan(placed, plan.place(1, moment), tokens)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    winner = next(t for t in plan.candidates if t.status == "winner")
    assert winner.compiled.alias_bytes >= 0.9 * winner.compiled.output_bytes


def test_the_persons_arrays_survive_the_search(mesh: Mesh) -> None:
    params, x, y = jax.tree.map(jnp.asarray, mlp_args())
    before = jax.tree.map(np.asarray, params)
    autoshard.optimize(
        mlp_step, (params, x, y), mesh, donate_argnums=0, effort=Effort(2, 2), progress=False
    )
    close(params, before, 0.0)


def test_fn_has_the_constraints_and_is_differentiable_and_vmappable(mesh: Mesh) -> None:
    params, moment, tokens = decoder_args()
    plan = autoshard.apply(decoder_step, decoder_args(), mesh, "fsdp+tp")
    assert plan.constraints
    assert all(
        c.source.startswith("models.py:") for c in plan.constraints if c.primitive == "dot_general"
    )
    # Jitted: operation by operation each one of them is compiled for eight devices.
    grads = jax.jit(jax.grad(lambda p: plan.fn(p, moment, tokens)[2]))(params)
    expected = jax.jit(jax.grad(lambda p: decoder_step(p, moment, tokens)[2]))(params)
    close(grads, expected, 1e-4)
    vmapped = jax.jit(jax.vmap(plan.fn, in_axes=(None, None, 0)))
    batched = vmapped(params, moment, np.stack([tokens, tokens]))
    close(batched[2], np.full(2, decoder_step(params, moment, tokens)[2]), 1e-4)


def test_shardings_are_what_jit_takes(plan: autoshard.Plan) -> None:
    params, moment, tokens = decoder_args()
    step = jax.jit(decoder_step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    close(step(params, moment, tokens)[2], decoder_step(params, moment, tokens)[2], 1e-4)


def test_lower_gives_the_same_program(plan: autoshard.Plan) -> None:
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), decoder_args())
    assert "sharding" in plan.lower(*abstract).as_text()


def test_another_batch_size_gives_the_right_numbers_without_a_search(
    plan: autoshard.Plan, caplog: pytest.LogCaptureFixture
) -> None:
    params, moment, tokens = decoder_args()
    with caplog.at_level("INFO", logger="autoshard"):
        _, _, loss = plan(plan.place(0, params), plan.place(1, moment), tokens[:6])
        _, _, again = plan(plan.place(0, params), plan.place(1, moment), tokens[:6])
    close(loss, decoder_step(params, moment, tokens[:6])[2])
    close(again, loss, 0.0)
    assert sum("new signature" in record.message for record in caplog.records) == 1


def test_abstract_arguments_need_no_array(mesh: Mesh) -> None:
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), decoder_args())
    found = autoshard.optimize(
        decoder_step, args, mesh, donate_argnums=(0, 1), effort=Effort(2, 2), progress=False
    )
    assert found.verified
    params, moment, tokens = decoder_args()
    close(found(params, moment, tokens)[2], decoder_step(params, moment, tokens)[2])


def test_no_effort_returns_the_best_predicted_plan_and_says_it_is_not_verified(mesh: Mesh) -> None:
    found = autoshard.optimize(
        mlp_step, mlp_args(), mesh, effort=Effort(compiled=0, measured=0), progress=False
    )
    assert not found.verified
    assert "compiled=0" in found.verified.reason
    assert all(t.compiled is None for t in found.candidates)


def test_a_mesh_string_and_a_jitted_function_are_fine() -> None:
    step = jax.jit(mlp_step, donate_argnums=0)
    found = autoshard.optimize(step, mlp_args(), "data=8", effort=QUICK, progress=False)
    assert found.carry  # the donation of the jitted function was read
    close(found(*mlp_args()), mlp_step(*mlp_args()))


def test_explicit_axes_give_the_same_rules_and_explicit_arrays(mesh: Mesh) -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    arguments = {"donate_argnums": (0, 1), "effort": QUICK, "progress": False}
    auto_plan = autoshard.optimize(decoder_step, decoder_args(), mesh, **arguments)
    plan = autoshard.optimize(decoder_step, decoder_args(), explicit, **arguments)
    assert plan.rules == auto_plan.rules
    params, moment, tokens = decoder_args()
    expected = decoder_step(params, moment, tokens)

    def run() -> Any:
        out = plan(plan.place(0, params), plan.place(1, moment), tokens)
        close(out, expected)
        assert jax.typeof(out[0]["w1"]).sharding.mesh.axis_types == (AxisType.Explicit,) * 2
        added = (
            out[0]["w1"] + plan.place(0, params)["w1"]
        )  # mixes with Explicit arrays of the same mesh
        close(added, expected[0]["w1"] + params["w1"])
        return out

    run()
    with jax.set_mesh(explicit):
        run()
        inside = autoshard.optimize(decoder_step, decoder_args(), explicit, **arguments)
    assert inside.rules == plan.rules


# A memory budget ----------------------------------------------------------------------------------


def test_a_budget_just_under_data_parallelism_changes_the_answer(mesh: Mesh) -> None:
    dp = autoshard.apply(mlp_step, mlp_args(batch=64), mesh, "dp", donate_argnums=0)
    budget = dp.compile().evidence.peak_bytes - 1
    found = autoshard.optimize(
        mlp_step,
        mlp_args(batch=64),
        mesh,
        donate_argnums=0,
        memory_budget_bytes=budget,
        effort=QUICK,
        progress=False,
    )
    winner = next(t for t in found.candidates if t.status == "winner")
    assert winner.compiled.peak_bytes <= budget
    assert any(spec != P() for path, spec in found.specs.items() if path.startswith("params"))


def test_below_anything_possible_says_so_with_numbers_after_compiling(mesh: Mesh) -> None:
    with pytest.raises(autoshard.NoFeasiblePlanError) as error:
        autoshard.optimize(
            mlp_step, mlp_args(), mesh, memory_budget_bytes="1KiB", effort=QUICK, progress=False
        )  # fmt: skip
    assert re.search(
        r"budget of 1\.00 KiB .* smallest predicted\s+peak is .* smallest compiled peak",
        str(error.value),
    )
    assert "memory_budget_bytes" in str(error.value)


# Layouts that are known ---------------------------------------------------------------------------


def test_apply_a_preset_rules_a_plan_and_a_table_without_a_search(
    mesh: Mesh, tmp_path: Any
) -> None:
    expected = mlp_step(*mlp_args())
    fsdp = autoshard.apply(mlp_step, mlp_args(), mesh, "fsdp", donate_argnums=0)
    assert not fsdp.candidates
    fsdp.table.save(tmp_path / "fsdp.json")
    loaded = autoshard.SpecTable.load(tmp_path / "fsdp.json")
    for layout in (fsdp, fsdp.rules, [str(r) for r in fsdp.rules], loaded, tmp_path / "fsdp.json"):
        again = autoshard.apply(mlp_step, mlp_args(), mesh, layout, donate_argnums=0)
        assert again.specs == fsdp.specs
        assert again.compile().evidence.collectives == fsdp.compile().evidence.collectives
        close(again(*mlp_args()), expected)


def test_fsdp_inside_moves_a_third_and_holds_half_of_fsdp_on_arguments_only(mesh: Mesh) -> None:
    args = decoder_args(batch=32, length=32, layers=4, d=128, ff=256)  # tokens per device = d_model
    inside, outside = (
        autoshard.apply(decoder_step, args, mesh, "fsdp", donate_argnums=(0, 1), constraints=c)
        .compile()
        .evidence
        for c in ("anchors", "arguments")
    )
    assert inside.collective_bytes * 3 <= outside.collective_bytes
    assert inside.temp_bytes * 2 <= outside.temp_bytes


@pytest.mark.parametrize("layout", ["tp", "fsdp+tp"])
def test_few_key_value_heads_are_not_pinned_replicated(layout: str) -> None:
    batch, length, d, heads, kv, k = 8, 64, 128, 8, 2, 16

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q = jnp.einsum("bsd,dhk->bshk", x, p["q"]).reshape(batch, length, kv, heads // kv, k)
        keys, values = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in ("k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bsgrk,btgk->bgrst", q, keys), -1)
        mixed = jnp.einsum("bgrst,btgk->bsgrk", weights, values).reshape(batch, length, heads, k)
        return jnp.einsum("bshk,hkd->bsd", mixed, p["o"])

    f32 = jnp.float32
    shapes = {"q": (d, heads, k), "k": (d, kv, k), "v": (d, kv, k), "o": (heads, k, d)}
    params = {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((batch, length, d), f32)
    step = jax.grad(lambda p, x: attention(p, x).sum())
    inside, outside = (
        autoshard.apply(step, (params, x), "data=2,model=4", layout, constraints=c)
        .compile()
        .evidence
        for c in ("anchors", "arguments")
    )
    assert inside.flops <= outside.flops


def test_pins_hold_and_feed_an_eval_step(plan: autoshard.Plan, mesh: Mesh) -> None:
    from tests.models import decoder_loss

    params, _, tokens = decoder_args()
    eval_plan = autoshard.optimize(
        decoder_loss, (params, tokens), mesh, pins=plan, effort=QUICK, progress=False
    )
    for path, spec in eval_plan.specs.items():
        assert spec == plan.specs[path]
    pinned = autoshard.optimize(
        mlp_step,
        mlp_args(),
        mesh,
        pins={re.compile(r"w\d$"): P("model")},
        effort=QUICK,
        progress=False,
    )
    assert pinned.specs["params/w1"] == pinned.specs["params/w2"] == P("model")


def test_the_same_seed_gives_the_same_plan(mesh: Mesh) -> None:
    tables = [
        autoshard.optimize(
            mlp_step, mlp_args(), mesh, donate_argnums=0, effort=QUICK, progress=False
        ).table
        for _ in range(2)
    ]
    assert tables[0].rules == tables[1].rules
    assert tables[0].inputs == tables[1].inputs


# Bad input ----------------------------------------------------------------------------------------


def broken(x: jax.Array) -> jax.Array:
    return x[x > 0].sum()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a pin that does not divide": (
        {"pins": {"x": P(None, "data")}, "example_args": mlp_args(d=30)},
        autoshard.SpecError,
        r"x is float32\[16, 30\].*dimension 1 \(size 30\).*'data' \(size 4\).*\n.*32",
    ),
    "a pin for a path that does not exist": (
        {"pins": {"params/w3": P()}},
        autoshard.PathError,
        r"params/w3.*Nearest: params/w",
    ),
    "a pin on an unknown mesh axis": (
        {"pins": {"x": P("date")}},
        autoshard.SpecError,
        r"'date'.*Use data",
    ),
    "a mesh string with the wrong device count": (
        {"mesh": "data=3"},
        autoshard.MeshError,
        "3 devices.*has 8",
    ),
    "a mesh string that is none": ({"mesh": "data:4"}, autoshard.MeshError, "data=4,model=2"),
    "a function that cannot be traced": (
        {"fn": broken, "example_args": (np.ones(8, np.float32),)},
        autoshard.TraceError,
        r"jax\.jit\(broken\)",
    ),
    "the wrong number of arguments": (
        {"example_args": mlp_args()[:2]},
        autoshard.SignatureError,
        "missing",
    ),
    "a budget that is no size": ({"memory_budget_bytes": "lots"}, autoshard.ArgumentError, "16GiB"),
    "an effort that is none": ({"effort": {}}, autoshard.ArgumentError, r"Effort\(compiled=4"),
    "no effort for several mesh shapes": (
        {"effort": 5, "mesh": "8"},
        autoshard.ArgumentError,
        r"Effort\(compiled=4",
    ),
    "a carry that does not exist": ({"carry": {0: 7}}, autoshard.ArgumentError, "outputs"),
    "a mesh axis that compilers abort on": (
        {"mesh": Mesh(np.array(jax.devices()), ("données",))},
        autoshard.MeshError,
        "ASCII",
    ),
    "unknown hardware": ({"hardware": "tpu_v99"}, autoshard.HardwareError, "tpu_v5e"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_clear_error(what: str) -> None:
    changed, kind, words = BAD[what]
    arguments = {
        "fn": mlp_step,
        "example_args": mlp_args(),
        "mesh": "data=4,model=2",
        "progress": False,
    } | changed
    with pytest.raises(kind, match=re.compile(words, re.DOTALL)):
        autoshard.optimize(**arguments)


def test_a_table_of_other_mesh_axes_or_another_function_is_refused(
    plan: autoshard.Plan, mesh: Mesh
) -> None:
    table = plan.table
    with pytest.raises(autoshard.TableError, match=r"'data': 4.*'x': 2.*without 'data'"):
        autoshard.apply(decoder_step, decoder_args(), "x=2,model=4", table)
    with pytest.raises(autoshard.TableError, match=r"decoder_step.*mlp_step.*gone"):
        autoshard.apply(mlp_step, mlp_args(), mesh, table)


def test_unknown_layouts_name_the_known_ones(mesh: Mesh) -> None:
    with pytest.raises(autoshard.RuleError, match=r"fspd.*fsdp"):
        autoshard.apply(mlp_step, mlp_args(), mesh, "fspd")
    with pytest.raises(autoshard.RuleError, match=r"optimizer state"):
        autoshard.apply(mlp_step, mlp_args(), mesh, "zero1")
    with pytest.raises(autoshard.RuleError, match=r"Nearest.*w1"):
        autoshard.apply(mlp_step, mlp_args(), mesh, ["w9.1->model"])


def test_odd_names_survive_the_table(tmp_path: Any) -> None:
    def fn(p: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ p["my w (a)->b@"]) @ p["down"]

    args = (
        {"my w (a)->b@": np.ones((16, 32), np.float32), "down": np.ones((32, 16), np.float32)},
        np.ones((8, 16)),
    )
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("my data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    plan = autoshard.apply(fn, args, mesh, "fsdp+tp")
    plan.table.save(tmp_path / "odd.json")
    assert autoshard.apply(fn, args, mesh, tmp_path / "odd.json").specs == plan.specs


def test_a_plan_says_which_leaf_no_longer_fits(mesh: Mesh) -> None:
    plan = autoshard.apply(mlp_step, mlp_args(batch=16), mesh, "tp", pins={"x": P("data")})
    with pytest.raises(autoshard.SignatureError, match=r"x is float32\[6, 32\].*'data' \(size 4\)"):
        plan(*mlp_args(batch=6))
