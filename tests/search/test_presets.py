"""Presets over discovered axes: what experts would write, or the reason why not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.evidence.candidate import Skipped
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from autoshard.layout.spec import Spec
from autoshard.search.presets import ORDER, Preset, find_parts, presets
from tests.models import decoder_args, decoder_loss, decoder_step, mlp_args, mlp_step
from tests.stages import array, mesh_of, prepared

MESH = {"data": 4, "model": 2}


def presets_of(made: Prepared) -> tuple[dict[str, Preset], dict[str, Skipped]]:
    named, skipped = presets(made.problem)
    return {p.name: p for p in named}, {s.name: s for s in skipped}


def specs_of(made: Prepared, preset: Preset) -> dict[str, Spec]:
    return dict(
        zip(
            made.traced.program.input_paths,
            Layout(made.problem, preset.rules).input_specs(),
            strict=True,
        )
    )


@pytest.fixture(scope="module")
def mlp() -> Prepared:
    return prepared(mlp_step, mlp_args(batch=64, d=32, h=128), mesh_of(**MESH), donate_argnums=0)


@pytest.fixture(scope="module")
def decoder() -> Prepared:
    return prepared(decoder_step, decoder_args(), mesh_of(**MESH), donate_argnums=(0, 1))


@pytest.fixture(scope="module")
def decoder_presets(decoder: Prepared) -> dict[str, dict[str, Spec]]:
    return {name: specs_of(decoder, preset) for name, preset in presets_of(decoder)[0].items()}


def test_every_preset_is_made_or_skipped_with_a_reason(mlp: Prepared, decoder: Prepared) -> None:
    for made in (mlp, decoder):
        named, skipped = presets_of(made)
        assert set(named) | set(skipped) == set(ORDER)
        assert not set(named) & set(skipped)
        assert all(s.reason for s in skipped.values())


# An MLP


def test_data_parallelism_of_an_mlp_splits_the_data_over_all_axes(mlp: Prepared) -> None:
    specs = specs_of(mlp, presets_of(mlp)[0]["dp"])
    assert specs["x"] == specs["y"] == (("data", "model"), ())
    assert not any(any(spec) for path, spec in specs.items() if path.startswith("params"))


def test_tensor_parallelism_of_an_mlp_splits_columns_then_rows(mlp: Prepared) -> None:
    specs = specs_of(mlp, presets_of(mlp)[0]["tp"])
    assert specs["params/w1"] == ((), ("model",))
    assert specs["params/b1"] == (("model",),)
    assert specs["params/w2"] == (("model",), ())
    assert specs["x"] == (("data",), ())


def test_fully_sharded_covers_every_parameter_of_an_mlp(mlp: Prepared) -> None:
    specs = specs_of(mlp, presets_of(mlp)[0]["fsdp"])
    for path in ("params/w1", "params/b1", "params/w2"):
        assert sorted(a for axes in specs[path] for a in axes) == ["data", "model"], path


def test_without_optimizer_state_there_is_no_zero1(mlp: Prepared) -> None:
    assert presets_of(mlp)[1]["zero1"].reason == "no argument is optimizer state"


# A transformer


def test_parts_of_a_transformer(decoder: Prepared) -> None:
    parts = find_parts(decoder.problem)
    names = {
        path: [
            decoder.problem.logical_axes.axes[r].name if r >= 0 else ""
            for r in decoder.problem.logical_axes.of_value[v.index]
        ]
        for path, v in zip(
            decoder.traced.program.input_paths, decoder.traced.program.body.inputs, strict=True
        )
    }
    assert parts.batch == names["tokens"][0]
    assert parts.residual[0] == names["params/emb"][1], "the axis that all weights share"
    heads, mlp, vocabulary = names["params/wq"][2], names["params/w1"][2], names["params/emb"][0]
    assert set(parts.inner) == {heads, mlp, vocabulary}
    assert parts.sequence == names["tokens"][1]


def test_megatron_pairs_column_and_row_splits(decoder_presets: dict[str, dict[str, Spec]]) -> None:
    specs = decoder_presets["tp"]
    for name in ("wq", "wk", "wv"):
        assert specs[f"params/{name}"] == ((), (), ("model",), ()), "heads, never the head size"
    assert specs["params/wo"] == ((), ("model",), (), ())
    assert specs["params/w1"] == ((), (), ("model",))
    assert specs["params/w2"] == ((), ("model",), ())
    assert specs["params/emb"] == (("model",), ())
    assert specs["params/scale"] == ((), (), ())
    assert specs["tokens"] == (("data",), ())


def test_the_optimizer_state_is_laid_out_as_its_parameters_but_for_zero1(
    decoder_presets: dict[str, dict[str, Spec]],
) -> None:
    for preset, specs in decoder_presets.items():
        for path, spec in specs.items():
            if path.startswith("params/"):
                moment = specs[path.replace("params/", "moment/")]
                if preset == "zero1":
                    assert not any(spec)
                    assert any(moment), path
                else:
                    assert moment == spec, (preset, path)


def test_fully_sharded_splits_every_weight_over_all_devices(
    decoder_presets: dict[str, dict[str, Spec]],
) -> None:
    for path, spec in decoder_presets["fsdp"].items():
        if path.startswith("params/"):
            assert sorted(a for axes in spec for a in axes) == ["data", "model"], path


def test_both_together(decoder_presets: dict[str, dict[str, Spec]]) -> None:
    specs = decoder_presets["fsdp+tp"]
    assert specs["params/w1"] == ((), ("data",), ("model",))
    assert specs["params/wo"] == ((), ("model",), (), ("data",))
    assert specs["params/emb"] == (("model",), ("data",))


def test_tensor_and_sequence_parallelism_share_the_mesh_axis(decoder: Prepared) -> None:
    named = presets_of(decoder)[0]
    tp, sequence = named["tp"].rules, named["tp+sequence"].rules
    assert sequence[:-1] == tp
    assert (sequence[-1].logical_axis, sequence[-1].mesh_axis) == (
        find_parts(decoder.problem).sequence,
        "model",
    )


def test_a_scanned_axis_is_in_no_preset(decoder: Prepared) -> None:
    scanned = {r.name for r in decoder.problem.logical_axes.axes if r.scanned}
    assert scanned
    assert not scanned & {
        rule.logical_axis for p in presets_of(decoder)[0].values() for rule in p.rules
    }


def test_a_forward_pass_has_presets_too() -> None:
    made = prepared(decoder_loss, (decoder_args()[0], decoder_args()[2]), mesh_of(**MESH))
    named, skipped = presets_of(made)
    assert set(skipped) == {"zero1"}
    assert specs_of(made, named["tp"])["params/w1"] == ((), (), ("model",))


# Where presets make no sense


@pytest.mark.parametrize(
    ("fn", "args", "mesh", "reasons"),
    [
        (
            jnp.sin,
            (array(7, 5),),
            MESH,
            {"dp": "no batch", "fsdp": "no parameter", "tp": "no weight has"},
        ),
        (
            mlp_step,
            mlp_args(),
            {"data": 1},
            dict.fromkeys(("dp", "fsdp", "tp", "fsdp+tp"), "no mesh axis has more"),
        ),
        (mlp_step, mlp_args(), {"data": 8}, {"fsdp+tp": "it needs two mesh axes"}),
        (lambda n: n + 1, (np.int32(3),), MESH, {"dp": "no batch", "fsdp": "no parameter"}),
    ],
)
def test_the_reasons(fn: Any, args: Any, mesh: dict[str, int], reasons: dict[str, str]) -> None:
    named, skipped = presets_of(prepared(fn, args, mesh_of(**mesh)))
    assert "replicated" in named
    for name, words in reasons.items():
        assert words in skipped[name].reason, name


def test_one_mesh_axis_serves_every_purpose() -> None:
    made = prepared(mlp_step, mlp_args(), mesh_of(devices=8), donate_argnums=0)
    named, _ = presets_of(made)
    assert specs_of(made, named["dp"])["x"] == (("devices",), ())
    assert specs_of(made, named["tp"])["params/w1"] == ((), ("devices",))
    assert specs_of(made, named["tp"])["x"] == ((), ())


def test_names_do_not_matter() -> None:
    def anonymous(p0: Any, p1: jax.Array, p2: jax.Array) -> Any:
        (new, _) = mlp_step({"w1": p0["a"], "b1": p0["c"], "w2": p0["b"]}, p1, p2)
        return {"a": new["w1"], "b": new["w2"], "c": new["b1"]}

    params, x, y = mlp_args(batch=64, d=32, h=128)
    args = ({"a": params["w1"], "b": params["w2"], "c": params["b1"]}, x, y)
    made = prepared(anonymous, args, mesh_of(**MESH))
    specs = specs_of(made, presets_of(made)[0]["tp"])
    assert (specs["p0/a"], specs["p0/b"], specs["p0/c"]) == (
        ((), ("model",)),
        (("model",), ()),
        (("model",),),
    )
