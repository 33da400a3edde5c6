"""Rules against drawn shapes and parameters, one strategy a family: cut, run, put together, compare
exactly.

Data are small integers, so that sums in any order agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax import lax
from rule_cases import distinct, integers, primitives
from rule_check import application, disproved

from autoshard.axes.sharding_rules import known_primitives

SIZES = st.sampled_from((1, 2, 3, 4, 6))
EVEN = st.sampled_from((2, 4, 6))
EXAMPLES = 15


def examples(count: int = EXAMPLES) -> Any:
    """Deterministic, without deadlines."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=quiet,
    )


def holds(
    primitive: str, function: Callable[..., Any], *inputs: Any, tolerance: float = 0.0
) -> None:
    """Asserts that the rule of a primitive in a function is what running says."""
    app = application(primitive, function, *inputs)
    wrong, _ = disproved(app, known_primitives()[primitive].rule(app.eqn), tolerance)
    assert not wrong, "\n".join(wrong)


def shapes(ranks: tuple[int, int] = (1, 3)) -> st.SearchStrategy[list[int]]:
    """Shapes of small sizes, 1 among them."""
    return st.lists(SIZES, min_size=ranks[0], max_size=ranks[1])


@examples()
@given(data=st.data())
def test_elementwise(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    shape = data.draw(shapes())
    x, y = integers(rng, *shape), integers(rng, *shape)
    function, primitive = data.draw(
        st.sampled_from(
            (
                (lambda a, b: a + b, "add"),
                (lambda a, b: lax.select_n(a > 0, a, b), "select_n"),
                (lambda a, b: lax.select_n(jnp.asarray(True), a, b), "select_n"),
                (lambda a, b: lax.clamp(np.float32(-1), a, np.float32(2)), "clamp"),
                (lambda a, b: lax.optimization_barrier((a, b.reshape(-1))), "optimization_barrier"),
                (lambda a, b: lax.convert_element_type(a, np.int8), "convert_element_type"),
            )
        )
    )
    holds(primitive, function, x, y)


@examples(40)
@given(data=st.data())
def test_dot_general(data: st.DataObject) -> None:
    """Any number of batch, contracting and free dimensions, anywhere."""
    rng = np.random.default_rng(0)
    batch, contract, left, right = (data.draw(st.lists(SIZES, max_size=2)) for _ in range(4))
    order_left = data.draw(st.permutations(range(len(batch + contract + left))))
    order_right = data.draw(st.permutations(range(len(batch + contract + right))))

    def places(order: list[int], first: int, count: int) -> tuple[int, ...]:
        return tuple(order.index(i) for i in range(first, first + count))

    b, c = len(batch), len(contract)
    numbers = (
        (places(order_left, b, c), places(order_right, b, c)),
        (places(order_left, 0, b), places(order_right, 0, b)),
    )
    x = integers(rng, *((batch + contract + left)[i] for i in order_left))
    y = integers(rng, *((batch + contract + right)[i] for i in order_right))
    holds("dot_general", lambda x, y: lax.dot_general(x, y, numbers), x, y)


@examples()
@given(data=st.data())
def test_ragged_dot(data: st.DataObject) -> None:
    """The ragged dimension is free, contracting, or a batch dimension; groups may be empty or not
    fill it."""
    rng = np.random.default_rng(0)
    b, m, k, n, groups = (data.draw(st.sampled_from((2, 4))) for _ in range(5))
    mode = data.draw(st.sampled_from(("free", "contracting", "batch")))
    length = {"free": m, "contracting": k, "batch": b}[mode]
    sizes = data.draw(st.lists(st.integers(0, length), min_size=groups, max_size=groups))
    fitting = np.diff(np.minimum(np.cumsum(sizes), length), prepend=0).astype(np.int32)
    by_batch = mode != "batch" and data.draw(st.booleans())
    group_sizes = np.stack([fitting] * b) if by_batch else fitting
    dot = (((2,), (2 if mode == "free" else 1,)), ((0,), (1 if mode == "free" else 0,)))
    numbers = lax.RaggedDotDimensionNumbers(
        dot, [{"free": 1, "contracting": 2, "batch": 0}[mode]], [0] if mode == "free" else []
    )
    x = integers(rng, b, m, k)
    y = integers(rng, groups, b, k, n) if mode == "free" else integers(rng, b, k, n)
    holds(
        "ragged_dot_general",
        lambda x, y, s: lax.ragged_dot_general(x, y, s, numbers),
        x,
        y,
        group_sizes,
    )


@examples(40)
@given(data=st.data())
def test_conv(data: st.DataObject) -> None:
    """Layouts, groups, strides, padding and dilations of one and two dimensions of space."""
    rng = np.random.default_rng(0)
    space = data.draw(st.integers(1, 2))
    groups = data.draw(st.sampled_from((1, 1, 2, 4)))
    kind = data.draw(st.sampled_from(("feature", "batch")))
    feature_groups, batch_groups = (groups, 1) if kind == "feature" else (1, groups)
    batch = batch_groups * data.draw(st.sampled_from((1, 2)))
    per_group = data.draw(st.sampled_from((1, 2)))
    out_features = groups * data.draw(st.sampled_from((1, 2)))
    image, kernel = [batch, feature_groups * per_group], [out_features, per_group]
    strides, padding, dilation = [], [], []
    for _ in range(space):
        window = data.draw(st.sampled_from((1, 2, 3)))
        kernel.append(window)
        strides.append(data.draw(st.sampled_from((1, window))))
        padding.append(data.draw(st.sampled_from(((0, 0), (0, 0), (1, 1), (2, 0)))))
        dilation.append(data.draw(st.sampled_from((1, 1, 2))))
        image.append(data.draw(st.sampled_from((6, 8))))
    orders = [data.draw(st.permutations(range(space + 2))) for _ in range(3)]
    numbers = lax.ConvDimensionNumbers(
        *(tuple(order.index(i) for i in range(space + 2)) for order in orders)
    )
    x = integers(rng, *(image[i] for i in orders[0]))
    y = integers(rng, *(kernel[i] for i in orders[1]))

    def conv(x: Any, y: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            y,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=feature_groups,
            batch_group_count=batch_groups,
        )

    holds("conv_general_dilated", conv, x, y)


@examples()
@given(data=st.data())
def test_reduce_window(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    rank = data.draw(st.integers(1, 3))
    shape = [data.draw(st.sampled_from((2, 4, 6))) for _ in range(rank)]
    window = tuple(data.draw(st.sampled_from((1, 1, 2))) for _ in range(rank))
    strides = tuple(data.draw(st.sampled_from((1, w))) for w in window)
    padding = tuple(
        data.draw(st.sampled_from(((0, 0), (0, 0), (1, 1)))) if w > 1 else (0, 0) for w in window
    )
    name = data.draw(
        st.sampled_from(("sum", "max", "select_and_gather_add", "select_and_scatter_add"))
    )
    geometry = {"window_dimensions": window, "window_strides": strides, "padding": padding}
    dilations = {"base_dilation": (1,) * rank, "window_dilation": (1,) * rank}
    x = distinct(rng, *shape)
    table = primitives()
    if name in ("sum", "max"):
        primitive = f"reduce_window_{name}"
        holds(primitive, lambda x: table[primitive].bind(x, **geometry, **dilations), x)
    elif name == "select_and_gather_add":
        holds(
            name,
            lambda t, x: table[name].bind(t, x, select_prim=lax.ge_p, **geometry, **dilations),
            integers(rng, *shape),
            x,
        )
    else:
        sizes = [
            (n + sum(p) - w) // s + 1
            for n, p, w, s in zip(shape, padding, window, strides, strict=True)
        ]
        holds(
            name,
            lambda s, x: table[name].bind(s, x, select_prim=lax.ge_p, **geometry),
            integers(rng, *sizes),
            x,
        )


@examples(40)
@given(data=st.data())
def test_reshape(data: st.DataObject) -> None:
    """Both shapes are groupings of the same list of factors, or unrelated factorings of one
    number."""
    rng = np.random.default_rng(0)
    op_factors = data.draw(st.lists(st.sampled_from((1, 2, 2, 3, 4)), min_size=1, max_size=5))

    def grouped(op_factors: list[int]) -> list[int]:
        shape = [op_factors[0]]
        for op_factor in op_factors[1:]:
            if data.draw(st.booleans()):
                shape.append(op_factor)
            else:
                shape[-1] *= op_factor
        return shape

    shape, new = grouped(op_factors), grouped(list(data.draw(st.permutations(op_factors))))
    new = data.draw(st.sampled_from((new, grouped(op_factors))))
    order = data.draw(st.one_of(st.none(), st.permutations(range(len(shape)))))
    x = distinct(rng, *shape)
    if shape != new or order is not None:
        holds(
            "reshape",
            lambda x: lax.reshape_p.bind(
                x, new_sizes=tuple(new), dimensions=order and tuple(order), sharding=None
            ),
            x,
        )


@examples(60)
@given(data=st.data())
def test_moving_and_cutting(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    shape = data.draw(shapes())
    rank = len(shape)
    x = distinct(rng, *shape)
    dim = data.draw(st.integers(0, rank - 1))
    some = data.draw(st.sets(st.integers(0, rank - 1)))

    def drawn(d: int, values: st.SearchStrategy[Any], default: Any) -> Any:
        """What happens to a dimension: something, if it is one of `some`."""
        return data.draw(values) if d in some else default

    padding = st.sampled_from(((0, 0, 0), (1, 1, 0), (-1, 1, 0), (0, 1, 1)))
    edges = [drawn(d, padding, (0, 0, 0)) for d in range(rank)]
    starts = [drawn(d, st.integers(0, n - 1), 0) for d, n in enumerate(shape)]
    strides = [drawn(d, st.sampled_from((1, 2)), 1) for d in range(rank)]
    widths = [drawn(d, st.integers(1, n), n) for d, n in enumerate(shape)]
    repeats = [1 + (d in some) for d in range(rank)]
    order = data.draw(st.permutations(range(rank)))
    y = distinct(rng, *(n if d != dim else data.draw(SIZES) for d, n in enumerate(shape)))
    update = integers(rng, *widths)
    index = [jnp.asarray(s) for s in starts]
    name, function, inputs = data.draw(
        st.sampled_from(
            (
                ("transpose", lambda x: lax.transpose_p.bind(x, permutation=tuple(order)), (x,)),
                ("rev", lambda x: lax.rev(x, sorted(some)), (x,)),
                ("concatenate", lambda x, y: lax.concatenate((x, y), dim), (x, y)),
                ("split", lambda x: lax.split_p.bind(x, sizes=(1, shape[dim] - 1), axis=dim), (x,)),
                ("pad", lambda x: lax.pad(x, np.float32(7), edges), (x,)),
                (
                    "slice",
                    lambda x: lax.slice_p.bind(
                        x,
                        start_indices=tuple(starts),
                        limit_indices=tuple(shape),
                        strides=tuple(strides),
                    ),
                    (x,),
                ),
                ("dynamic_slice", lambda x: lax.dynamic_slice(x, index, widths), (x,)),
                (
                    "dynamic_update_slice",
                    lambda x, u: lax.dynamic_update_slice(x, u, index),
                    (x, update),
                ),
                ("squeeze", lambda x: lax.squeeze(x[:, None], (1,)), (x,)),
                ("tile", lambda x: lax.tile(x, repeats), (x,)),
                ("stack", lambda x: lax.stack((x, x), dim), (x,)),
                ("unstack", lambda x: lax.unstack(x, dim), (x,)),
            )
        )
    )
    holds(name, function, *inputs)


@examples()
@given(data=st.data())
def test_broadcast_in_dim(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    result = data.draw(shapes((1, 4)))
    kept = sorted(data.draw(st.sets(st.integers(0, len(result) - 1))))
    shape = [data.draw(st.sampled_from((1, result[d]))) for d in kept]
    assume(shape != result)
    holds(
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim_p.bind(
            x, shape=tuple(result), broadcast_dimensions=tuple(kept), sharding=None
        ),
        integers(rng, *shape),
    )


@examples(40)
@given(data=st.data())
def test_reductions(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    shape = data.draw(shapes())
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    dim = axes[0]
    bools = integers(rng, *shape) > 0
    name, function, x = data.draw(
        st.sampled_from(
            (
                ("reduce_sum", lambda x: x.sum(axes), integers(rng, *shape)),
                ("reduce_max", lambda x: x.max(axes), integers(rng, *shape)),
                ("reduce_min", lambda x: x.min(axes), integers(rng, *shape)),
                ("reduce_prod", lambda x: x.prod(axes), integers(rng, *shape, low=1, high=3)),
                ("reduce_and", lambda x: x.all(axes), bools),
                ("reduce_or", lambda x: x.any(axes), bools),
                (
                    "reduce_xor",
                    lambda x: lax.reduce_xor(x, axes),
                    integers(rng, *shape, dtype=np.int32),
                ),
                (
                    "reduce",
                    lambda x: lax.reduce(x, jnp.float32(3), lambda a, b: a + b, axes),
                    integers(rng, *shape),
                ),
                (
                    "reduce",
                    lambda x: lax.reduce(x, jnp.float32(1), lambda a, b: a * b + a, axes),
                    integers(rng, *shape),
                ),
                ("argmax", lambda x: lax.argmax(x, dim, np.int32), distinct(rng, *shape)),
                ("cumsum", lambda x: lax.cumsum(x, dim), integers(rng, *shape)),
                ("cummax", lambda x: lax.cummax(x, dim, reverse=True), integers(rng, *shape)),
                (
                    "sort",
                    lambda x: lax.sort((x, x), dimension=dim, num_keys=1),
                    integers(rng, *shape),
                ),
                ("top_k", lambda x: lax.top_k(x, 1), distinct(rng, *shape)),
            )
        )
    )
    holds(name, function, jnp.asarray(x))


INDEXED = st.sampled_from(("batch", "row", "full", "part", "full at index"))


def _draw_indexing(
    data: st.DataObject,
) -> tuple[list[str], list[int], list[int], list[int], list[int]]:
    """Use, size and window size of each dimension of an operand; batching and further dimensions of
    the indices."""
    uses = data.draw(st.lists(INDEXED, min_size=1, max_size=3))
    if all(use in ("batch", "full") for use in uses):
        uses[-1] = "row"
    sizes = [data.draw(EVEN) for _ in uses]
    widths, batch = [], []
    for use, size in zip(uses, sizes, strict=True):
        if use.startswith("full"):
            width = size
        else:
            width = data.draw(st.integers(1, size - 1)) if use == "part" else 1
        widths.append(width)
        if use == "batch":
            batch.append(size)
    looked_up = data.draw(st.lists(EVEN, max_size=1))
    return uses, sizes, widths, batch, looked_up


def _indices(
    rng: np.random.Generator,
    uses: list[str],
    sizes: list[int],
    batch: list[int],
    inside: bool,
) -> np.ndarray:
    """Index vectors, some out of bounds unless `inside`."""
    columns = []
    for use, size in zip(uses, sizes, strict=True):
        if use in ("row", "part", "full at index"):
            end = 1 if inside and use != "row" else size + (not inside)
            columns.append(rng.integers(0 if inside else -1, end, batch))
    return np.stack(columns, axis=-1).astype(np.int32)


def _dims(uses: list[str], *which: str) -> tuple[int, ...]:
    return tuple(d for d, use in enumerate(uses) if use in which)


MODES = st.sampled_from(("fill", "clip", "promise_in_bounds"))


@examples(30)
@given(data=st.data())
def test_gather(data: st.DataObject) -> None:
    """Each dimension is batching, collapsed and indexed, or a window: whole or partial, indexed or
    not."""
    rng = np.random.default_rng(0)
    uses, sizes, widths, batch, looked_up = _draw_indexing(data)
    mode = data.draw(MODES)
    indices = _indices(rng, uses, sizes, batch + looked_up, inside=mode == "promise_in_bounds")
    window = len(_dims(uses, "full", "part", "full at index"))
    rank = len(batch) + len(looked_up) + window
    offset = tuple(sorted(data.draw(st.permutations(range(rank)))[:window]))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offset,
        collapsed_slice_dims=_dims(uses, "row"),
        start_index_map=_dims(uses, "row", "part", "full at index"),
        operand_batching_dims=_dims(uses, "batch"),
        start_indices_batching_dims=tuple(range(len(batch))),
    )
    holds(
        "gather",
        lambda x, i: lax.gather(x, i, numbers, tuple(widths), mode=mode, fill_value=-9),
        distinct(rng, *sizes),
        indices,
    )


@examples(40)
@given(data=st.data())
def test_scatter(data: st.DataObject) -> None:
    """As gather, for every way of combining; indices repeat."""
    rng = np.random.default_rng(0)
    uses, sizes, widths, batch, looked_up = _draw_indexing(data)
    mode = data.draw(MODES)
    function, primitive = data.draw(
        st.sampled_from(
            (
                (lax.scatter, "scatter"),
                (lax.scatter_add, "scatter-add"),
                (lax.scatter_sub, "scatter-sub"),
                (lax.scatter_mul, "scatter-mul"),
                (lax.scatter_min, "scatter-min"),
                (lax.scatter_max, "scatter-max"),
            )
        )
    )
    indices = _indices(rng, uses, sizes, batch + looked_up, inside=mode == "promise_in_bounds")
    windows = _dims(uses, "full", "part", "full at index")
    rank = len(batch) + len(looked_up) + len(windows)
    places = tuple(sorted(data.draw(st.permutations(range(rank)))[: len(windows)]))
    around = iter(batch + looked_up)
    inner = iter(widths[d] for d in windows)
    updates = integers(
        rng, *(next(inner) if d in places else next(around) for d in range(rank)), low=-2, high=3
    )
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=places,
        inserted_window_dims=_dims(uses, "row"),
        scatter_dims_to_operand_dims=_dims(uses, "row", "part", "full at index"),
        operand_batching_dims=_dims(uses, "batch"),
        scatter_indices_batching_dims=tuple(range(len(batch))),
    )
    holds(
        primitive,
        lambda x, i, u: function(x, i, u, numbers, mode=mode),
        integers(rng, *sizes),
        indices,
        updates,
    )


@examples()
@given(data=st.data())
def test_linear_algebra(data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    batch = data.draw(st.lists(EVEN, max_size=2))
    n, columns = data.draw(EVEN), data.draw(EVEN)
    a = rng.normal(size=(*batch, n, n)).astype(np.float32) + 4 * np.eye(n, dtype=np.float32)
    b = rng.normal(size=(*batch, n, columns)).astype(np.float32)
    name, function, inputs = data.draw(
        st.sampled_from(
            (
                ("lu", lax.linalg.lu, (a,)),
                ("qr", lax.linalg.qr, (a,)),
                (
                    "triangular_solve",
                    lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
                    (a, b),
                ),
                ("cholesky", lambda a: lax.linalg.cholesky(a @ a.mT, symmetrize_input=False), (a,)),
                ("fft", lambda b: lax.fft(b + 0j, lax.FftType.FFT, b.shape[-1:]), (b,)),
            )
        )
    )
    holds(name, function, *(jnp.asarray(x) for x in inputs), tolerance=1e-3)


@examples()
@given(
    shape=shapes((0, 2)),
    words=shapes((0, 2)),
    name=st.sampled_from(("random_bits", "random_split", "random_unwrap")),
)
def test_keys(shape: list[int], words: list[int], name: str) -> None:
    """Keys of any shape: their dimensions pass."""
    seeds = np.arange(int(np.prod(shape))).reshape(shape)
    function: Callable[[Any], Any] = {
        "random_bits": lambda k: jax.random.bits(k, tuple(words)),
        "random_split": lambda k: jax.random.split(k, tuple(words)),
        "random_unwrap": jax.random.key_data,
    }[name]
    for _ in shape:
        function = jax.vmap(function)
    keys = jax.random.key(0)
    make = jax.random.key
    for _ in shape:
        make = jax.vmap(make)
    keys = make(jnp.asarray(seeds)) if shape else keys
    holds(name, function, keys)
