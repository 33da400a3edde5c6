"""Shardy's passes run on lowered programs: against the compiled program, and what they say besides
bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.evidence.collectives import CollectiveOp, collective_bytes, summarise
from autoshard.shardy.op_rules import op_sharding_rule
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition
from tests.compiler.train_steps import BATCH, D_FF, D_MODEL, LAYERS, lower, mlp_step


def both(lowered: Any, mesh: Mesh) -> tuple[Partitioned, tuple[CollectiveOp, ...]]:
    axes = dict(mesh.shape)
    result = partition(lowered, axes)
    assert isinstance(result, Partitioned)
    return result, read_collectives(lowered.compile().as_text(), axes)


def totals(ops: tuple[CollectiveOp, ...]) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes by kind and axes; counts differ, since XLA merges collectives."""
    return Counter({(c.kind, c.axes): c.bytes for c in summarise(ops)})


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_equals_the_compiled_program(mesh: Mesh, layout: str, scan: bool) -> None:
    result, compiled = both(mlp_step(mesh, layout, scan), mesh)
    assert totals(result.ops) == totals(compiled)
    assert result.collective_bytes == collective_bytes(compiled)


def test_data_parallel_bytes(mesh: Mesh) -> None:
    """All gradients once over all devices, and the scalar loss."""
    result, _ = both(mlp_step(mesh, "dp"), mesh)
    gradients = 2 * LAYERS * D_MODEL * D_FF * 4
    assert result.collective_bytes == 2 * 7 * gradients // 8 + 2 * 7 * 4 // 8


def test_tensor_parallel_bytes(mesh: Mesh) -> None:
    """One all_reduce of the activations per block and direction."""
    result, _ = both(mlp_step(mesh, "tp"), mesh)
    (collective,) = result.collectives
    assert (collective.kind, collective.axes) == ("all_reduce", ("model",))
    # the input of the first block needs no gradient, but a scan computes it in every iteration
    assert collective.count == 2 * LAYERS
    assert collective.bytes == 2 * LAYERS * BATCH * D_MODEL * 4


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_fsdp_differs_in_two_known_ways(mesh: Mesh, scan: bool) -> None:
    """Gathers are equal; the CPU compiler writes a reduce_scatter as an all_reduce, twice its
    bytes.

    In a scan Shardy also splits the saved activations along another dimension than the activations
    themselves; XLA does not. That is an all_to_all in either direction per layer here, a quarter of
    the whole.
    """
    result, compiled = both(mlp_step(mesh, "fsdp", scan), mesh)
    ours, theirs = totals(result.ops), totals(compiled)
    data = ("data",)
    assert ours["all_gather", data] == theirs["all_gather", data]
    assert 2 * ours["reduce_scatter", data] + ours["all_reduce", data] == theirs["all_reduce", data]
    assert 0.6 <= result.collective_bytes / collective_bytes(compiled) <= 1.1


def test_shardings_of_arguments_and_results(mesh: Mesh) -> None:
    result, _ = both(
        lower(mesh, lambda x, w: (x @ w, x.T), ((8, 16), P("data")), ((16, 32), P(None, "model"))),
        mesh,
    )
    assert result.arg_shardings == ((("data",), ()), ((), ("model",)))
    assert result.result_shardings == ((("data",), ("model",)), ((), ("data",)))


def test_split_axis_counts_its_part_only(mesh: Mesh) -> None:
    """(8) over data=4 becomes (2, 4): the major factor takes half of the axis, the other half the
    minor one."""
    lowered = lower(
        mesh, lambda x: jnp.sin(x.reshape(2, 4, 16)), ((8, 16), P("data")), out=P(None, None, None)
    )
    result, compiled = both(lowered, mesh)
    assert result.collective_bytes == collective_bytes(compiled) == 3 * 8 * 16 * 4 // 4
    lowered = lower(
        mesh, lambda x: jnp.sin(jnp.sum(x.reshape(2, 4, 16), 0)), ((8, 16), P("data")), out=P()
    )
    result, compiled = both(lowered, mesh)
    assert [(op.kind, op.axes, op.group_size, op.sent_bytes) for op in result.ops] == [
        ("all_reduce", ("data",), 2, 2 * 16 * 4),  # one device holds 2 of the 4 rows
        ("all_gather", ("data",), 2, 4 * 16 * 4 // 2),
    ]
    assert totals(result.ops) == totals(compiled)


def test_places_and_names(mesh: Mesh) -> None:
    lowered = lower(
        mesh, lambda x, w: x @ w, ((8, 16), P(None, "data")), ((16, 32), P("data")), out=P()
    )
    result, (compiled,) = both(lowered, mesh)
    (op,) = result.ops
    assert op.source == compiled.source
    assert op.source.startswith("test_partition.py:")
    assert "dot_general" in op.op_name


@pytest.mark.parametrize("mesh_shape", [(16, 16), (64, 32)])
def test_meshes_larger_than_the_devices_here(mesh_shape: tuple[int, int]) -> None:
    abstract = AbstractMesh(mesh_shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def array(*spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (4096, 4096), jnp.bfloat16, sharding=NamedSharding(abstract, P(*spec))
        )

    out = NamedSharding(abstract, P("data"))
    traced = jax.jit(lambda x, w: x @ w, out_shardings=out).trace(
        array("data", "model"), array("model")
    )
    result = partition(traced.lower(lowering_platforms=("tpu",)), dict(abstract.shape))
    assert isinstance(result, Partitioned)
    (op,) = result.ops
    n = mesh_shape[1]
    assert (op.kind, op.axes, op.group_size) == ("all_reduce", ("model",), n)
    assert op.sent_bytes == 2 * (n - 1) * (4096 // mesh_shape[0] * 4096 * 2) // n


def test_the_lowered_program_is_left_as_it_is(mesh: Mesh) -> None:
    lowered = mlp_step(mesh, "fsdp")
    before = lowered.as_text(debug_info=True)
    first = partition(lowered, dict(mesh.shape))
    assert lowered.as_text(debug_info=True) == before
    assert partition(lowered, dict(mesh.shape)) == first


def test_a_failure_is_a_value_and_prints_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lowered = mlp_step(mesh, "dp")
    unknown_axis = partition(lowered, {"data": 4})
    assert isinstance(unknown_axis, PartitionFailure)
    assert "model" in unknown_axis.reason
    monkeypatch.setattr("autoshard.shardy.partition._PIPELINE", "builtin.module(no-such-pass)")
    failed = partition(lowered, dict(mesh.shape))
    assert isinstance(failed, PartitionFailure)
    assert failed.reason.startswith("Shardy's passes: ")
    assert "no-such-pass" in failed.reason
    # two import passes in the wrong order: the first one runs, the second one breaks an invariant
    # that MLIR checks
    broken = "sdy-import-func-calls,sdy-import-pipeline,sdy-user-priority-propagate"
    monkeypatch.setattr("autoshard.shardy.partition._PIPELINE", f"builtin.module({broken})")
    failed = partition(mlp_step(mesh, "fsdp"), dict(mesh.shape))
    assert isinstance(failed, PartitionFailure)
    assert "sdy.data_flow_edge" in failed.reason
    assert capfd.readouterr() == ("", "")


def test_rules_of_operations(mesh: Mesh) -> None:
    lowered = lower(
        mesh,
        lambda x, w: jnp.sort(x @ w.reshape(16, 32), axis=0),
        ((8, 16), P()),
        ((4, 4, 32), P()),
    )
    rules = {rule.op: rule for rule in op_sharding_rule(lowered)}
    assert op_sharding_rule(lowered.as_text()) == op_sharding_rule(lowered)
    dot = rules["stablehlo.dot_general"]
    assert dot.operands == ((("i",), ("k",)), (("k",), ("j",)))
    assert dot.results == ((("i",), ("j",)),)
    assert (dot.sizes, dot.kinds) == ({"i": 8, "j": 32, "k": 16}, {"reduction": ("k",)})
    reshape = rules["stablehlo.reshape"]
    assert reshape.results == ((("i", "j"), ("k",)),)
    assert rules["stablehlo.sort"].kinds == {"need_replication": ("i",)}
