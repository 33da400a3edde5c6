"""Compiled and partitioned evidence of programs whose collectives follow from a formula."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.evidence.collectives import Collective, collective_bytes, summarise
from autoshard.shardy.partition import Partitioned, partition
from tests.compiler.train_steps import lower

DATA, MODEL = ("data",), ("model",)
BOTH = ("data", "model")


def compiled(lowered: Any, mesh: Mesh) -> tuple[Collective, ...]:
    return summarise(read_collectives(lowered.compile().as_text(), dict(mesh.shape)))


def partitioned(lowered: Any, mesh: Mesh) -> tuple[Collective, ...]:
    result = partition(lowered, dict(mesh.shape))
    assert isinstance(result, Partitioned)
    assert result.collectives == summarise(result.ops)
    assert result.collective_bytes == collective_bytes(result.ops)
    return result.collectives


EVIDENCE = pytest.mark.parametrize("evidence", [compiled, partitioned])
Evidence = Callable[[Any, Mesh], tuple[Collective, ...]]


@EVIDENCE
def test_contraction_over_a_sharded_dimension(mesh: Mesh, evidence: Evidence) -> None:
    lowered = lower(
        mesh, lambda x, w: x @ w, ((8, 16), P(None, "data")), ((16, 32), P("data")), out=P()
    )
    assert evidence(lowered, mesh) == (
        Collective("all_reduce", DATA, 1, 2 * 3 * (8 * 32 * 4) // 4),
    )


@EVIDENCE
def test_gather_of_an_argument(mesh: Mesh, evidence: Evidence) -> None:
    lowered = lower(mesh, lambda x: jnp.sin(x) * 2, ((64, 32), P(("data", "model"))), out=P())
    assert evidence(lowered, mesh) == (Collective("all_gather", BOTH, 1, 7 * (64 * 32 * 4) // 8),)


@EVIDENCE
def test_partly_gathered(mesh: Mesh, evidence: Evidence) -> None:
    """B is what one device holds afterwards: a quarter of the value."""
    lowered = lower(mesh, jnp.sin, ((64, 32), P("data", "model")), out=P("data"))
    assert evidence(lowered, mesh) == (Collective("all_gather", MODEL, 1, (64 * 32 * 4 // 4) // 2),)


@EVIDENCE
def test_move_to_another_dimension(mesh: Mesh, evidence: Evidence) -> None:
    lowered = lower(mesh, jnp.sin, ((64, 32), P("data")), out=P(None, "data"))
    assert evidence(lowered, mesh) == (
        Collective("all_to_all", DATA, 1, 3 * (64 * 32 * 4 // 4) // 4),
    )


@EVIDENCE
def test_order_of_axes(mesh: Mesh, evidence: Evidence) -> None:
    lowered = lower(mesh, jnp.sin, ((64, 32), P(("data", "model"))), out=P(("model", "data")))
    assert evidence(lowered, mesh) == (Collective("collective_permute", BOTH, 1, 64 * 32 * 4 // 8),)


def _sum_step(mesh: Mesh, h: Any, x: Any, w: Any) -> Any:
    """h + x @ w with the contracted dimension split; h is replicated and the product depends on
    it."""
    return h + jax.lax.with_sharding_constraint((x * h[0, 0]) @ w, NamedSharding(mesh, P()))


_SUM_ARGS = (((4, 16), P()), ((4, 32), P(None, "model")), ((32, 16), P("model")))
_SUM_BYTES = 2 * (4 * 16 * 4) // 2


@EVIDENCE
def test_scan_counts_every_iteration(mesh: Mesh, evidence: Evidence) -> None:
    def fn(h: Any, x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (_sum_step(mesh, h, x, w), None), h, None, length=5)[0]

    lowered = lower(mesh, fn, *_SUM_ARGS, out=P())
    assert evidence(lowered, mesh) == (Collective("all_reduce", MODEL, 5, 5 * _SUM_BYTES),)


@EVIDENCE
@pytest.mark.parametrize("start", [0, 3])
def test_loops_nested_and_from_any_start(mesh: Mesh, evidence: Evidence, start: int) -> None:
    def fn(h: Any, x: Any, w: Any) -> Any:
        def inner(_: int, h: Any) -> Any:
            return _sum_step(mesh, h, x, w)

        return jax.lax.fori_loop(start, 9, lambda i, h: jax.lax.fori_loop(0, 2, inner, h), h)

    lowered = lower(mesh, fn, *_SUM_ARGS, out=P())
    trip_count = (9 - start) * 2
    assert evidence(lowered, mesh) == (
        Collective("all_reduce", MODEL, trip_count, trip_count * _SUM_BYTES),
    )


def test_loop_whose_end_depends_on_data(mesh: Mesh) -> None:
    def fn(h: Any, x: Any, w: Any) -> Any:
        return jax.lax.while_loop(lambda h: h[0, 0] < 5.0, lambda h: _sum_step(mesh, h, x, w), h)

    lowered = lower(mesh, fn, *_SUM_ARGS, out=P())
    by_text = read_collectives(lowered.compile().as_text(), dict(mesh.shape))
    by_shardy = partition(lowered, dict(mesh.shape))
    assert isinstance(by_shardy, Partitioned)
    for ops in (by_text, by_shardy.ops):
        assert [(op.kind, op.trip_count, op.trip_count_known) for op in ops] == [
            ("all_reduce", 1, False)
        ]


@EVIDENCE
def test_the_costlier_branch_counts(mesh: Mesh, evidence: Evidence) -> None:
    def fn(x: Any, w: Any) -> Any:
        def cheap(x: Any) -> Any:
            return jnp.zeros((8, 32)) + jnp.sum(x)

        return jax.lax.cond(w[0, 0] > 0, lambda x: x @ w, cheap, x)

    lowered = lower(mesh, fn, ((8, 16), P(None, "model")), ((16, 32), P("model")), out=P())
    found = {c.kind: c.bytes for c in evidence(lowered, mesh)}
    assert found["all_reduce"] >= 2 * (8 * 32 * 4) // 2


@EVIDENCE
def test_a_move_of_the_same_value_counts_once(mesh: Mesh, evidence: Evidence) -> None:
    def fn(x: Any, y: Any) -> Any:
        full = NamedSharding(mesh, P())
        again = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, full))
        return again(x) @ y + again(x) @ (y + 1)

    lowered = lower(mesh, fn, ((64, 64), P("data")), ((64, 64), P()), out=P())
    gathers = [c for c in evidence(lowered, mesh) if c.kind == "all_gather"]
    assert gathers == [Collective("all_gather", DATA, 1, 3 * (64 * 64 * 4) // 4)]


_X = 16 * 16 * 4  # bytes of x on one device


@EVIDENCE
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jax.lax.psum(x, "model"), Collective("all_reduce", MODEL, 1, _X)),
        (lambda x: jax.lax.psum(x, BOTH), Collective("all_reduce", BOTH, 1, 2 * 7 * _X // 8)),
        (lambda x: jax.lax.all_gather(x, "data"), Collective("all_gather", DATA, 1, 3 * _X)),
        (
            lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
            Collective("reduce_scatter", DATA, 1, 3 * _X // 4),
        ),
        (
            lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True),
            Collective("all_to_all", DATA, 1, 3 * _X // 4),
        ),
        (
            lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
            Collective("collective_permute", DATA, 1, _X),
        ),
    ],
    ids=["psum", "psum_both", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_collectives_written_by_hand(
    mesh: Mesh, evidence: Evidence, fn: Callable[[Any], Any], expected: Collective
) -> None:
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data", "model"), check_vma=False
    )
    lowered = lower(mesh, mapped(fn, out_specs=P()), ((64, 32), P("data", "model")))
    assert evidence(lowered, mesh) == (expected,)


@EVIDENCE
@pytest.mark.parametrize(
    ("dtype", "size", "cpu_size"),
    [
        (
            "bfloat16",
            2,
            4,
        ),  # the CPU compiler has no 16-bit and 8-bit float collectives: it widens them
        ("float8_e4m3fn", 1, 2),
        ("int8", 1, 1),
        ("bool", 1, 1),
        ("complex64", 8, 8),
    ],
)
def test_bytes_of_dtypes(
    mesh: Mesh, evidence: Evidence, dtype: str, size: int, cpu_size: int
) -> None:
    x = jax.ShapeDtypeStruct((64, 32), jnp.dtype(dtype), sharding=NamedSharding(mesh, P("data")))
    lowered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P())).lower(x)
    itemsize = cpu_size if evidence is compiled else size
    assert evidence(lowered, mesh) == (
        Collective("all_gather", DATA, 1, 3 * (64 * 32 * itemsize) // 4),
    )


def test_no_collective_in_a_replicated_program(mesh: Mesh) -> None:
    lowered = lower(mesh, jnp.sin, ((8, 8), P()), out=P())
    assert compiled(lowered, mesh) == partitioned(lowered, mesh) == ()
