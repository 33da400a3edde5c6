"""Opaque kernels: what of a `pallas_call` can be cut, and that in shards it computes the same on
eight devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.axes.kernels import GridFactor, grid_factors
from tests.stages import mesh_of, traced

Factors = list[tuple[int, int, dict[int, int], dict[int, int]]]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def call(
    kernel: Callable[..., None],
    grid: Any,
    blocks: list[pl.BlockSpec],
    out: Any,
    shape: tuple[int, ...],
    **options: Any,
) -> Any:
    result = jax.ShapeDtypeStruct(shape, np.float32)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=blocks,
        out_specs=out,
        out_shape=result,
        interpret=True,
        **options,
    )


def factors_of(fn: Any, *args: Any) -> Factors:
    """(grid axis, most shards, dimension by operand, dimension by result) of the only kernel."""
    (eqn,) = (e for e in traced(fn, *args).program.eqns if e.primitive == "pallas_call")
    return [plain(factor) for factor in grid_factors(eqn)]


def plain(factor: GridFactor) -> tuple[int, int, dict[int, int], dict[int, int]]:
    return factor.grid_axis, factor.max_shards, dict(factor.operands), dict(factor.results)


def double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def row(*blocks: Any) -> Callable[[Callable[..., Any]], pl.BlockSpec]:
    return lambda index_map: pl.BlockSpec(blocks, index_map)


X = floats(8, 16)
TILE = row(2, 8)


def one(
    index_map: Any, out_map: Any, kernel: Any = double, grid: Any = (4, 2), **options: Any
) -> Any:
    return call(kernel, grid, [TILE(index_map)], TILE(out_map), (8, 16), **options)


def test_both_axes_of_a_grid_of_tiles_can_be_cut() -> None:
    assert factors_of(one(lambda i, j: (i, j), lambda i, j: (i, j)), X) == [
        (0, 4, {0: 0}, {0: 0}),
        (1, 2, {0: 1}, {0: 1}),
    ]


def test_what_is_transposed_moves_along_another_dimension() -> None:
    def flip(x: Any, out: Any) -> None:
        out[...] = x[...].T

    fn = call(flip, (4, 2), [TILE(lambda i, j: (i, j))], row(8, 2)(lambda i, j: (j, i)), (16, 8))
    assert factors_of(fn, X) == [(0, 4, {0: 0}, {0: 1}), (1, 2, {0: 1}, {0: 0})]


def test_an_operand_that_all_steps_share_stays_whole() -> None:
    def product(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    blocks = [row(2, 16)(lambda i: (i, 0)), row(16, 16)(lambda i: (0, 0))]
    fn = call(product, (4,), blocks, row(2, 16)(lambda i: (i, 0)), (8, 16))
    assert factors_of(fn, X, floats(16, 16)) == [(0, 4, {0: 0}, {0: 0})]


def test_a_sum_over_an_axis_is_no_shard_of_the_result() -> None:
    def accumulate(x: Any, out: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    fn = call(accumulate, (4, 2), [TILE(lambda i, j: (i, j))], TILE(lambda i, j: (i, 0)), (8, 8))
    assert factors_of(fn, X) == [(0, 4, {0: 0}, {0: 0})]


def test_an_axis_whose_position_the_kernel_asks_for_is_whole() -> None:
    def shifted(x: Any, out: Any) -> None:
        out[...] = x[...] + pl.program_id(0).astype(np.float32)

    fn = one(lambda i, j: (i, j), lambda i, j: (i, j), shifted)
    assert factors_of(fn, X) == [(1, 2, {0: 1}, {0: 1})]
    stacked = jax.vmap(fn)
    assert factors_of(stacked, floats(3, 8, 16)) == [(0, 3, {0: 0}, {0: 0}), (2, 2, {0: 2}, {0: 2})]


@pytest.mark.parametrize(
    ("index_map", "expected"),
    [
        (lambda i, j: (3 - i, j), [(1, 2, {0: 1}, {0: 1})]),
        (lambda i, j: ((i + 1) % 4, j), [(1, 2, {0: 1}, {0: 1})]),
        (
            lambda i, j: (i * i % 4, j),
            [(0, 2, {}, {0: 0}), (1, 2, {0: 1}, {0: 1})],
        ),  # blocks 0 and 1 in both halves
        (lambda i, j: (i, (i + j) % 2), [(0, 2, {0: 0}, {0: 0})]),
    ],
    ids=["reversed", "rolled", "squared", "skewed"],
)
def test_blocks_that_do_not_move_evenly_are_not_cut(index_map: Any, expected: Factors) -> None:
    fn = one(index_map, lambda i, j: (i, j))
    assert factors_of(fn, X) == expected
    mesh = mesh_of(a=2, b=2)
    axes = autoshard.apply(fn, (X,), mesh, []).layout.problem.logical_axes.axes
    everything = [(axis.name, mesh_axis) for axis in axes for mesh_axis in "ab"]
    plan = autoshard.apply(fn, (X,), mesh, everything)
    np.testing.assert_allclose(plan(X), jax.jit(fn)(X))


def test_swapped_halves_can_be_cut_within_a_half() -> None:
    fn = one(lambda i, j: (i // 2 * 2 + (1 - i % 2), j), lambda i, j: (i, j))
    assert factors_of(fn, X)[0] == (0, 2, {0: 0}, {0: 0})


def test_blocks_that_do_not_divide_are_whole() -> None:
    fn = call(double, (3,), [row(4)(lambda i: (i,))], row(4)(lambda i: (i,)), (10,))
    assert factors_of(fn, floats(10)) == []


@pytest.mark.parametrize(("semantics", "axes"), [(None, []), (("parallel", "arbitrary"), [0])])
def test_scratch_memory_may_carry_unless_the_axis_is_declared_parallel(
    semantics: Any, axes: list[int]
) -> None:
    def kernel(x: Any, out: Any, scratch: Any) -> None:
        scratch[...] = x[...]
        out[...] = scratch[...]

    fn = one(
        lambda i, j: (i, j),
        lambda i, j: (i, j),
        kernel,
        scratch_shapes=[pltpu.VMEM((2, 8), np.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )
    assert [axis for axis, *_ in factors_of(fn, X)] == axes


def test_prefetched_data_may_choose_blocks_along_other_axes_only() -> None:
    def kernel(order: Any, x: Any, out: Any) -> None:
        out[...] = x[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4, 2),
        in_specs=[TILE(lambda i, j, order: (i, order[j]))],
        out_specs=TILE(lambda i, j, order: (i, j)),
    )
    fn = pl.pallas_call(
        kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((8, 16), np.float32), interpret=True
    )
    order = np.array([1, 0], np.int32)
    assert factors_of(fn, order, X) == [(0, 4, {1: 0}, {0: 0})]
    same(fn, (order, X), ["1.0->a"])


def test_an_operand_that_becomes_the_result_must_move_alike() -> None:
    aliased = {"input_output_aliases": {0: 0}}
    assert factors_of(one(lambda i, j: (i, j), lambda i, j: (i, j), **aliased), X) != []
    fn = one(lambda i, j: (0, 0), lambda i, j: (i, j), **aliased)
    assert factors_of(fn, X) == []


# In shards, on eight devices ----------------------------------------------------------------------


def same(
    fn: Any, args: tuple[Any, ...], rules: list[str], mesh: Mesh | None = None
) -> autoshard.Plan:
    """Applies a layout in which the kernel is cut, and compares with the plain function."""
    plan = autoshard.apply(fn, args, mesh_of(a=4, b=2) if mesh is None else mesh, rules)
    assert any("shard_map" in c.place and c.spec != P() for c in plan.constraints)
    np.testing.assert_allclose(plan(*args), jax.jit(fn)(*args), rtol=1e-5, atol=1e-5)
    return plan


BATCH, HEADS, KV_HEADS, TIME, SIZE = 4, 4, 2, 16, 8


def attend(q: Any, k: Any, v: Any, out: Any) -> None:
    scores = q[...] @ k[...].T
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out[...] = (weights / weights.sum(-1, keepdims=True)) @ v[...]


def grouped(q: Any, k: Any, v: Any) -> Any:
    """Attention with fewer heads of keys than of queries, the queries in two blocks."""
    tile, keys = row(None, None, TIME // 2, SIZE), row(None, None, TIME, SIZE)
    blocks = [tile(lambda b, h, t: (b, h, t, 0)), *[keys(lambda b, h, t: (b, h // 2, 0, 0))] * 2]
    return call(attend, (BATCH, HEADS, 2), blocks, tile(lambda b, h, t: (b, h, t, 0)), q.shape)(
        q, k, v
    )


def flattened(q: Any, k: Any, v: Any) -> Any:
    """The same with batch and heads in one axis of the grid."""
    tile = row(None, None, TIME, SIZE)
    blocks = [
        tile(lambda i: (i // HEADS, i % HEADS, 0, 0)),
        *[tile(lambda i: (i // HEADS, i % HEADS // 2, 0, 0))] * 2,
    ]
    return call(
        attend, (BATCH * HEADS,), blocks, tile(lambda i: (i // HEADS, i % HEADS, 0, 0)), q.shape
    )(q, k, v)


QKV = (
    floats(BATCH, HEADS, TIME, SIZE),
    *(floats(BATCH, KV_HEADS, TIME, SIZE, seed=i) for i in (1, 2)),
)


def test_attention_is_cut_by_batch_and_by_heads_of_both_sizes() -> None:
    batch, heads, times = factors_of(grouped, *QKV)
    assert batch == (0, 4, {0: 0, 1: 0, 2: 0}, {0: 0})
    assert heads == (1, 2, {0: 1, 1: 1, 2: 1}, {0: 1})
    assert times == (2, 2, {0: 2}, {0: 2})
    plan = same(grouped, QKV, ["q.0->a", "q.1->b"])
    assert plan.compile().evidence.collectives == ()


def test_batch_and_heads_in_one_axis_are_cut_by_batch() -> None:
    assert factors_of(flattened, *QKV) == [(0, 4, {0: 0, 1: 0, 2: 0}, {0: 0})]
    plan = same(flattened, QKV, ["q.0->a"])
    assert plan.compile().evidence.collectives == ()


def test_more_devices_than_heads_leave_heads_whole() -> None:
    plan = autoshard.apply(grouped, QKV, mesh_of(a=8), ["q.1->a"])
    np.testing.assert_allclose(plan(*QKV), jax.jit(grouped)(*QKV), rtol=1e-5, atol=1e-5)


def test_on_an_explicit_mesh() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    same(
        grouped,
        QKV,
        ["q.0->a", "q.1->b"],
        Mesh(devices, ("a", "b"), axis_types=(AxisType.Explicit,) * 2),
    )


@jax.custom_vjp
def squash(x: Any, w: Any) -> Any:
    return forward(x, w)[0]


def forward(x: Any, w: Any) -> Any:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...] @ w[...])

    blocks = [row(4, 16)(lambda i, j: (i, 0)), row(16, 8)(lambda i, j: (0, j))]
    out = call(
        kernel, (x.shape[0] // 4, 2), blocks, row(4, 8)(lambda i, j: (i, j)), (x.shape[0], 16)
    )(x, w)
    return out, (x, w, out)


def backward(saved: Any, grad: Any) -> Any:
    def kernel(out: Any, grad: Any, result: Any) -> None:
        result[...] = grad[...] * (1 - out[...] ** 2)

    x, w, out = saved
    tile = row(4, 8)(lambda i, j: (i, j))
    inner = call(kernel, (x.shape[0] // 4, 2), [tile, tile], tile, out.shape)(out, grad)
    return inner @ w.T, x.T @ inner


squash.defvjp(forward, backward)


def train_step(w: Any, x: Any, y: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((squash(x, w) - y) ** 2))(w)
    return w - 0.1 * grad, loss


def test_a_train_step_through_kernels_is_searched_verified_and_cut() -> None:
    args = floats(16, 16), floats(64, 16), floats(64, 16, seed=1)
    plan = autoshard.optimize(
        train_step,
        args,
        mesh_of(a=4, b=2),
        hardware="tpu_v5e",
        progress=False,
        donate_argnums=0,
        memory_budget_bytes=9000,
        effort=autoshard.Effort(compiled=3, measured=0),
    )
    assert plan.verified
    in_shards = {c.primitive for c in plan.constraints if "shard_map" in c.place}
    assert in_shards == {"pallas_call"}
    notes = "\n".join(plan.notes)
    assert notes.count("runs by pieces, in a shard_map over") == 2
    assert "WARNING" not in notes


def test_the_gradient_of_the_plans_own_function_keeps_the_custom_rule() -> None:
    args = floats(16, 16), floats(64, 16)
    plan = autoshard.apply(
        lambda w, x: squash(x, w).sum(), args, mesh_of(a=4, b=2), ["x.0->a", "w.1->b"]
    )
    assert any("shard_map" in c.place for c in plan.constraints)
    want = jax.jit(jax.grad(lambda w, x: squash(x, w).sum()))(*args)
    np.testing.assert_allclose(jax.jit(jax.grad(plan.fn))(*args), want, rtol=1e-5, atol=1e-5)


def test_a_foreign_function_is_cut_where_running_it_shows_that_it_can_be() -> None:
    jax.scipy.linalg.lu_factor(np.eye(2, dtype=np.float32))  # makes LAPACK ready
    shapes = tuple(
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((8, 4, 4), np.float32), ((8, 4), np.int32), ((8,), np.int32))
    )

    def fn(x: Any) -> Any:
        return jax.ffi.ffi_call("lapack_sgetrf_ffi", shapes)(x)[0]

    plan = same(fn, (floats(8, 4, 4),), ["x.0->a", "x.0->b"])
    assert plan.compile().evidence.collectives == ()
    assert any("running it on small arrays shows" in note for note in plan.notes)


# cuDNN attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_fused_attention_is_split_by_batch_and_heads(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(np.float32).sum()

    q = jax.ShapeDtypeStruct((8, 256, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((8, 256, kv_heads, 64), jnp.bfloat16)
    plan = autoshard.apply(
        jax.grad(loss, (0, 1, 2)), (q, k, k), mesh_of(a=4, b=2), ["q.0->a", "q.2->b"]
    )
    stated = [c for c in plan.constraints if "attention" in c.primitive]
    assert {c.primitive.removesuffix("_wrapper")[-3:] for c in stated} == {"fwd", "bwd"}
    by_rank = {len(c.shape): set() for c in stated}
    for constraint in stated:
        by_rank[len(constraint.shape)].add(constraint.spec)
    assert by_rank[4] == {P("a", None, "b")}
    assert by_rank[3] == {P("a", "b")}
    assert "WARNING" not in "".join(plan.notes)


def initialised(x: Any, o: Any) -> None:
    """Writes zeros in a branch first, as kernels that add up do."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        o[...] = jnp.zeros_like(o)

    o[...] += x[...]


def filled_or_copied(x: Any, o: Any) -> None:
    """Branches that make arrays of their own, inside a loop."""

    def body(i: Any, c: jax.Array) -> jax.Array:
        full = jnp.full(x.shape, 2.0, jnp.float32)
        return jax.lax.cond(i == 0, lambda: c + jax.lax.expand_dims(full[:, 0], (1,)), lambda: c)

    o[...] = jax.lax.fori_loop(0, 2, body, x[...])


def nested(x: Any, o: Any) -> None:
    first = pl.program_id(1) == 0

    @pl.when(first)
    def _() -> None:
        o[...] = jnp.zeros_like(o)

        @pl.when(first)
        def _() -> None:
            rows = jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)
            o[...] = x[...] + jnp.where(rows > 3, 1.0, jnp.ones(x.shape, jnp.float32))


def tiled(kernel: Any) -> Callable[[jax.Array], jax.Array]:
    """A kernel over rows in tiles of 8, in a grid whose second axis has one step."""
    block = pl.BlockSpec((8, 128), lambda i, j: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        grid=(8, 1),
        in_specs=[block],
        out_specs=block,
        interpret=True,
    )


@pytest.mark.parametrize("kernel", [initialised, filled_or_copied, nested])
def test_a_kernel_that_makes_arrays_in_a_branch_runs_by_pieces(kernel: Any) -> None:
    fn, x = tiled(kernel), floats(64, 128)
    plan = autoshard.apply(lambda x: fn(x) * 2, (x,), mesh_of(a=4, b=2), ("x.0->a",))
    np.testing.assert_allclose(plan(x), jax.jit(lambda x: fn(x) * 2)(x), rtol=1e-6)
    assert plan.specs["x"] == P("a")
    (note,) = [note for note in plan.notes if "pallas_call" in note]
    assert "runs by pieces, in a shard_map over a: its grid" in note


def test_notes_on_a_kernel_are_about_this_layout() -> None:
    fn, x = tiled(initialised), floats(64, 128)
    plan = autoshard.apply(fn, (x,), mesh_of(a=4, b=2), ())
    (note,) = [note for note in plan.notes if "pallas_call" in note]
    assert "runs whole on every device" in note
    assert "shard_map" not in note
