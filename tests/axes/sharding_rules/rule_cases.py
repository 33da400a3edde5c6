"""At least one application of each primitive that has a rule: sizes even where a cut is to be
tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax.windowed_reductions import _select_and_scatter as select_and_scatter
from jax.ad_checkpoint import checkpoint_name
from rule_check import application
from run_shards import Application

Make = Callable[[np.random.Generator], Application]


@dataclass(frozen=True)
class Case:
    """A primitive, how to apply it to random data, and how exactly pieces must agree."""

    primitive: str
    make: Make
    tolerance: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        """Test id."""
        return self.primitive + (f"[{self.note}]" if self.note else "")


def primitives() -> Mapping[str, Any]:
    """jax primitives that have a lowering, by name."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    return {primitive.name: primitive for table in tables for primitive in table}


def integers(
    rng: np.random.Generator, *shape: int, dtype: Any = np.float32, low: int = -4, high: int = 5
) -> np.ndarray:
    """Small integers, exact in float32 sums."""
    return rng.integers(low, high, shape).astype(dtype)


def distinct(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Distinct integers in random order: no ties."""
    return rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


_FLOAT_1 = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square
    round rsqrt sign sin sinh sqrt square stop_gradient tan tanh
"""
_FLOAT_2 = """
    add atan2 div eq ge gt igamma igammac igamma_grad_a le lt max min mul ne nextafter polygamma pow
    rem sub zeta
"""
_INT_1 = "clz population_count not"
_INT_2 = "and mulhi or shift_left shift_right_arithmetic shift_right_logical xor"
_ROUNDED = 1e-5


def of(
    primitive: str,
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    note: str = "",
    tolerance: float = 0.0,
    data: Callable[..., np.ndarray] = integers,
    **limits: Any,
) -> Case:
    """The case of a function applied to random arrays of these shapes."""

    def make(rng: np.random.Generator) -> Application:
        return application(primitive, function, *(data(rng, *shape, **limits) for shape in shapes))

    return Case(primitive, make, tolerance, note)


def _public(name: str) -> Callable[..., Any] | None:
    """The function of jax.lax that applies a primitive, if this jax has it."""
    return getattr(lax, name, None) or getattr(lax, f"bitwise_{name}", None)


def elementwise() -> list[Case]:
    """Element by element."""
    shape = (4, 6)
    one_device = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec()
    )
    cases = []
    for names, arity, dtype in (
        (_FLOAT_1, 1, np.float32),
        (_FLOAT_2, 2, np.float32),
        (_INT_1, 1, np.int32),
        (_INT_2, 2, np.int32),
    ):
        for name in names.split():
            function = _public(name)
            if function is not None:
                low = 1 if arity == 2 else -4
                cases.append(
                    of(name, function, *[(4,)] * arity, dtype=dtype, low=low, tolerance=_ROUNDED)
                )
    for name in ("add_any", "eq_to", "le_to", "lt_to"):
        cases.append(of(name, primitives()[name].bind, shape, shape))
    if hasattr(lax, "polynomial"):
        cases.append(of("polynomial", primitives()["polynomial"].bind, shape, shape, shape))
    return [
        *cases,
        of("clamp", lambda x: lax.clamp(-1.0, x, 2.0), shape),
        of("clamp", lax.clamp, shape, shape, shape, note="arrays"),
        of("complex", lax.complex, shape, shape),
        of("conj", lax.conj, shape, dtype=np.complex64),
        of("real", lax.real, shape, dtype=np.complex64),
        of("imag", lax.imag, shape, dtype=np.complex64),
        of("convert_element_type", lambda x: lax.convert_element_type(x, np.int32), shape),
        of("copy", lambda x: jnp.array(x, copy=True), shape),
        of("integer_pow", lambda x: lax.integer_pow(x, 3), shape),
        of("reduce_precision", lambda x: lax.reduce_precision(x, 5, 3), shape),
        of(
            "regularized_incomplete_beta",
            jax.scipy.special.betainc,
            (4,),
            (4,),
            (4,),
            low=1,
            tolerance=_ROUNDED,
        ),
        of("select_n", lambda p, a, b: lax.select_n(p > 0, a, b), (), shape, shape, note="scalar"),
        of("select_n", lambda p, a, b: lax.select_n(p > 0, a, b), shape, shape, shape),
        of("optimization_barrier", lambda a, b: lax.optimization_barrier((a, b)), shape, (6, 4)),
        of("sharding_constraint", lambda x: lax.with_sharding_constraint(x, one_device), shape),
        of("device_put", jax.device_put, shape),
        of("name", lambda x: checkpoint_name(x, "x"), shape),
    ]


def contraction() -> list[Case]:
    """Products."""
    ragged = (((2,), (2,)), ((0,), (0,)))
    sizes = np.array([1, 2, 0, 1], np.int32)

    def ragged_dot(numbers: lax.RaggedDotDimensionNumbers) -> Callable[..., Any]:
        return lambda a, b: lax.ragged_dot_general(a, b, jnp.asarray(sizes), numbers)

    return [
        of(
            "dot_general",
            lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
            (2, 4, 6),
            (2, 6, 8),
        ),
        of(
            "ragged_dot_general",
            lambda a, b: lax.ragged_dot(a, b, jnp.asarray(sizes)),
            (4, 6),
            (4, 6, 2),
        ),
        of(
            "ragged_dot_general",
            ragged_dot(lax.RaggedDotDimensionNumbers(ragged, [2], [])),
            (2, 6, 4),
            (2, 6, 4),
            note="contracting",
        ),
        of(
            "ragged_dot_general",
            ragged_dot(lax.RaggedDotDimensionNumbers(ragged, [0], [])),
            (4, 2, 6),
            (4, 4, 6),
            note="batch",
        ),
        of(
            "scaled_dot",
            lambda a, b, s, t: lax.scaled_dot(
                a.astype(jnp.float8_e4m3fn),
                b.astype(jnp.float8_e4m3fn),
                lhs_scale=s.astype(jnp.float8_e8m0fnu),
                rhs_scale=t.astype(jnp.float8_e8m0fnu),
                preferred_element_type=np.float32,
            ),
            (2, 4, 128),
            (2, 128, 6),
            (2, 4, 4),
            (2, 4, 6),
            low=1,
            high=3,
        ),
        of(
            "symmetric_product",
            lambda a, c: lax.linalg.symmetric_product(
                a, c, alpha=1.0, beta=2.0, symmetrize_output=False
            ),
            (2, 4, 6),
            (2, 4, 4),
        ),
    ]


def windows() -> list[Case]:
    """Sliding windows."""
    window = {"window_dimensions": (1, 3), "window_strides": (1, 1), "padding": ((0, 0), (1, 1))}
    tiled = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    dilations = {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    table = primitives()
    scatter_add, gather_add = table["select_and_scatter_add"], table["select_and_gather_add"]
    cases = []
    for note, geometry, source in (("", window, (4, 8)), ("tiled", tiled, (4, 4))):
        cases += [
            of(
                name,
                lambda x, n=name, g=geometry: table[n].bind(x, **g, **dilations),
                (4, 8),
                note=note,
            )
            for name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
        ]
        cases += [
            of(
                "reduce_window",
                lambda x, g=geometry: lax.reduce_window(
                    x, np.float32(1), lambda a, b: a + b + 1, **g
                ),
                (4, 8),
                note=note,
            ),
            of(
                "select_and_scatter_add",
                lambda s, x, g=geometry: scatter_add.bind(s, x, select_prim=lax.ge_p, **g),
                source,
                (4, 8),
                note=note,
            ),
            of(
                "select_and_gather_add",
                lambda t, x, g=geometry: gather_add.bind(
                    t, x, select_prim=lax.ge_p, **g, **dilations
                ),
                (4, 8),
                (4, 8),
                note=note,
            ),
        ]

    def scatter_products(x: Any, s: Any) -> Any:
        geometry = window["window_dimensions"], window["window_strides"], window["padding"]
        return select_and_scatter(x, lax.ge, *geometry, s, np.float32(1), lambda a, b: a + b + 1)

    return [*cases, of("select_and_scatter", scatter_products, (4, 8), (4, 8))]


def convolutions() -> list[Case]:
    """With a halo, without one, over all space, and in groups."""

    def conv(**params: Any) -> Callable[..., Any]:
        return lambda x, k: lax.conv_general_dilated(x, k, **params)

    return [
        of("conv_general_dilated", conv(window_strides=(1,), padding="SAME"), (2, 4, 8), (6, 4, 3)),
        of(
            "conv_general_dilated",
            conv(window_strides=(2,), padding="VALID"),
            (2, 4, 8),
            (6, 4, 2),
            note="patches",
        ),
        of(
            "conv_general_dilated",
            conv(window_strides=(1,), padding="VALID"),
            (2, 4, 8),
            (6, 4, 8),
            note="all space",
        ),
        of(
            "conv_general_dilated",
            conv(window_strides=(1,), padding="SAME", feature_group_count=2),
            (2, 4, 8),
            (6, 2, 3),
            note="feature groups",
        ),
        of(
            "conv_general_dilated",
            conv(window_strides=(1,), padding="SAME", batch_group_count=2),
            (4, 4, 8),
            (6, 4, 3),
            note="batch groups",
        ),
    ]


def moving() -> list[Case]:
    """Moving, joining and padding dimensions."""
    shape = (4, 6)
    dims = {"dtype": np.float32}
    return [
        of("transpose", lambda x: x.transpose(1, 2, 0), (2, 4, 6), **dims),
        of("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (6, 2, 4, 8), (2, 3)), (4, 1)),
        of("squeeze", lambda x: lax.squeeze(x, (1,)), (4, 1, 6)),
        of("rev", lambda x: lax.rev(x, (1,)), shape, data=distinct),
        of("concatenate", lambda a, b: lax.concatenate((a, b), 1), shape, (4, 8), data=distinct),
        of("concatenate", lambda a: lax.concatenate_p.bind(a, dimension=1), shape, note="one"),
        of("split", lambda x: lax.split(x, (2, 4), 1), shape, data=distinct),
        of(
            "pad", lambda x: lax.pad(x, np.float32(7), ((0, 0, 0), (1, 1, 0))), shape, data=distinct
        ),
        of(
            "pad",
            lambda x: lax.pad(x, np.float32(7), ((0, 0, 1), (-1, 1, 0))),
            shape,
            note="inside",
            data=distinct,
        ),
    ]


def cutting() -> list[Case]:
    """Cutting, repeating and reshaping dimensions."""
    shape = (4, 6)
    start = jnp.asarray
    return [
        of("slice", lambda x: lax.slice(x, (0, 2), (4, 4)), shape, data=distinct),
        of(
            "slice",
            lambda x: lax.slice(x, (0, 1), (4, 6), (1, 2)),
            shape,
            note="every other",
            data=distinct,
        ),
        of(
            "slice",
            lambda x: lax.slice(x, (0, 1), (4, 8), (1, 2)),
            (4, 10),
            note="strided",
            data=distinct,
        ),
        of(
            "dynamic_slice",
            lambda x: lax.dynamic_slice(x, (start(9), start(3)), (4, 2)),
            shape,
            data=distinct,
        ),
        of(
            "dynamic_update_slice",
            lambda x, u: lax.dynamic_update_slice(x, u, (start(9), start(3))),
            shape,
            (4, 2),
            data=distinct,
        ),
        of("tile", lambda x: lax.tile(x, (1, 3)), shape, data=distinct),
        of("stack", lambda a, b: lax.stack((a, b), 1), shape, shape),
        of("unstack", lambda x: lax.unstack(x, 1), (4, 2, 6)),
        of("reshape", lambda x: lax.reshape(x, (4, 2, 6, 5)), (8, 30), data=distinct),
        of(
            "reshape",
            lambda x: lax.reshape(x, (4, 3)),
            (6, 2),
            note="nothing in common",
            data=distinct,
        ),
        of(
            "reshape",
            lambda x: lax.reshape(x, (6, 8), (1, 0)),
            (8, 6),
            note="transposed",
            data=distinct,
        ),
    ]


def reductions() -> list[Case]:
    """Reductions, scans, sorting."""
    shape = (4, 6)
    table = primitives()
    cases = [
        of(name, lambda x, n=name: table[n].bind(x, axes=(1,), **_sharding(n)), shape)
        for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
    ]
    cases += [
        of(name, lambda x, f=function: f(x, (1,)), shape, dtype=np.int32)
        for name, function in (
            ("reduce_and", lax.reduce_and),
            ("reduce_or", lax.reduce_or),
            ("reduce_xor", lax.reduce_xor),
        )
    ]
    cases += [
        of(
            name,
            lambda x, n=name: getattr(lax, n)(x, axis=1),
            shape,
            tolerance=1e-5 * (name == "cumlogsumexp"),
        )
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    ]
    return [
        *cases,
        of("argmax", lambda x: lax.argmax(x, 1, np.int32), shape, data=distinct),
        of("argmin", lambda x: lax.argmin(x, 1, np.int32), shape, data=distinct),
        of(
            "reduce",
            lambda x, i: lax.reduce(x, i, lambda a, b: a * b + a, (1,)),
            shape,
            (),
            note="any",
        ),
        of(
            "reduce", lambda x, i: lax.reduce(x, i, lambda a, b: b + a, (1,)), shape, (), note="add"
        ),
        of(
            "reduce",
            lambda x, y, i, j: lax.reduce(
                (x, y), (i, j), lambda a, b: (lax.max(a[0], b[0]), lax.max(a[1], b[1])), (0,)
            ),
            shape,
            shape,
            (),
            (),
            note="two",
        ),
        of(
            "sort",
            lambda a, b: lax.sort((a, b), dimension=1, num_keys=1),
            shape,
            shape,
            data=distinct,
        ),
        of("top_k", lambda x: lax.top_k(x, 2), shape, data=distinct),
        of("approx_top_k", lambda x: lax.approx_max_k(x, 2), shape, data=distinct),
    ]


def _sharding(name: str) -> dict[str, None]:
    """`out_sharding=None` for the reductions of this jax that have the parameter."""
    jaxpr = jax.make_jaxpr(lambda x: getattr(lax, name)(x, (0,)))(np.zeros(2, np.float32))
    return {key: None for key in jaxpr.jaxpr.eqns[0].params if key == "out_sharding"}


def indexing() -> list[Case]:
    """Gather and scatter."""

    def look_up(rng: np.random.Generator) -> Application:
        return application(
            "gather",
            lambda t, i: t.at[i].get(mode="fill", fill_value=-9),
            distinct(rng, 8, 6),
            rng.integers(-12, 12, (4,)),
        )

    def windowed(rng: np.random.Generator) -> Application:
        take = jax.vmap(lambda t, i: lax.dynamic_slice(t, (i,), (2,)))
        return application("gather", take, distinct(rng, 8, 8), rng.permutation(8))

    cases = [Case("gather", look_up, note="rows"), Case("gather", windowed, note="windows")]
    for name in ("set", "add", "multiply", "min", "max", "subtract"):
        primitive = {"set": "scatter", "multiply": "scatter-mul", "subtract": "scatter-sub"}.get(
            name, f"scatter-{name}"
        )

        def rows(
            rng: np.random.Generator, name: str = name, primitive: str = primitive
        ) -> Application:
            index = rng.integers(0, 8, (4,))
            index[0] = index[2]
            return application(
                primitive,
                lambda t, i, u: getattr(t.at[i], name)(u),
                integers(rng, 8, 6),
                index,
                distinct(rng, 4, 6) - 11,
            )

        cases.append(Case(primitive, rows, note="rows"))
    return cases


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers; matrices of size 4 are positive definite."""
    a = rng.normal(size=shape).astype(np.float32)
    if shape[-2:] == (4, 4):
        return a @ np.swapaxes(a, -1, -2) + 4 * np.eye(4, dtype=np.float32)
    return a


def on(
    primitive: str, function: Callable[..., Any], *shapes: tuple[int, ...], note: str = ""
) -> Case:
    """The case of a function of linear algebra."""
    return of(primitive, function, *shapes, data=_normal, tolerance=1e-4, note=note)


def factorisations() -> list[Case]:
    """Matrices into factors."""
    algebra = lax.linalg
    square, tall = (2, 4, 4), (2, 6, 4)
    return [
        on("cholesky", lambda a: algebra.cholesky(a, symmetrize_input=False), square),
        on("cholesky_update", algebra.cholesky_update, (4, 4), (4,)),
        on("eigh", lambda a: algebra.eigh(a, symmetrize_input=False), square),
        on("eig", algebra.eig, square),
        on("lu", algebra.lu, square),
        on("qr", lambda a: algebra.qr(a, full_matrices=False), tall),
        on("geqrf", primitives()["geqrf"].bind, tall),
        on("householder_product", algebra.householder_product, tall, (2, 4)),
        on("ormqr", lambda a, t, c: algebra.ormqr(a, t, c, left=True), tall, (2, 4), (2, 6, 8)),
        on(
            "ormqr",
            lambda a, t, c: algebra.ormqr(a, t, c, left=False),
            tall,
            (2, 4),
            (2, 8, 6),
            note="right",
        ),
        on("svd", lambda a: algebra.svd(a, full_matrices=False), tall),
        on("svd", lambda a: algebra.svd(a, compute_uv=False), tall, note="values"),
        on("schur", algebra.schur, square),
        on("hessenberg", algebra.hessenberg, square),
        on("tridiagonal", algebra.tridiagonal, square),
    ]


def solvers() -> list[Case]:
    """Solvers and Fourier transforms."""
    algebra = lax.linalg
    square = (2, 4, 4)
    return [
        on("tridiagonal_solve", algebra.tridiagonal_solve, (2, 6), (2, 6), (2, 6), (2, 6, 4)),
        on(
            "triangular_solve",
            lambda a, b: algebra.triangular_solve(a, b, left_side=True),
            square,
            (2, 4, 6),
        ),
        on("triangular_solve", algebra.triangular_solve, square, (2, 6, 4), note="right"),
        on("fft", lambda x: lax.fft(x + 0j, lax.FftType.FFT, (8,)), (4, 6, 8)),
        on("fft", lambda x: lax.fft(x, lax.FftType.RFFT, (6, 8)), (4, 6, 8), note="real"),
        on("fft", lambda x: lax.fft(x + 0j, lax.FftType.IRFFT, (8,)), (4, 6, 5), note="back"),
        of(
            "lu_pivots_to_permutation",
            lambda p: algebra.lu_pivots_to_permutation(jnp.asarray(p), 6),
            (2, 4),
            dtype=np.int32,
            low=4,
            high=6,
        ),
    ]


def random_numbers() -> list[Case]:
    """Keys, and arrays made from nothing."""
    words = {"dtype": np.uint32, "low": 0, "high": 99}

    def keyed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seeds: function(jax.vmap(jax.random.key)(seeds))

    table = primitives()
    return [
        of("iota", lambda: lax.broadcasted_iota(np.int32, (4, 6), 1)),
        of("empty", lambda: lax.empty((4, 6), np.float32))
        if hasattr(lax, "empty")
        else of("iota", lambda: jnp.arange(4)),
        of("random_seed", jax.vmap(jax.random.key), (4,), **words),
        of("random_clone", keyed(jax.random.clone), (4,), **words),
        of(
            "random_fold_in",
            keyed(lambda k: jax.vmap(jax.random.fold_in)(k, jnp.arange(4))),
            (4,),
            **words,
        ),
        of("random_unwrap", keyed(jax.random.key_data), (4,), **words),
        of("random_wrap", jax.random.wrap_key_data, (4, 2), **words),
        of("random_bits", keyed(jax.vmap(lambda k: jax.random.bits(k, (3,)))), (4,), **words),
        of("random_split", keyed(jax.vmap(lambda k: jax.random.split(k, 3))), (4,), **words),
        of(
            "random_gamma",
            keyed(jax.vmap(lambda k: jax.random.gamma(k, 2.0, (3,)))),
            (4,),
            tolerance=_ROUNDED,
            **words,
        ),
        *(
            of(name, table[name].bind, *[(4,)] * arity, **words)
            for name, arity in (
                ("threefry2x32", 4),
                ("threefry4x32", 8),
                ("philox2x32", 3),
                ("philox4x32", 6),
            )
        ),
        of("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int32), (4, 6)),
        of(
            "bitcast_convert_type",
            lambda x: lax.bitcast_convert_type(x, np.uint8),
            (4, 6),
            note="wider",
        ),
        of(
            "bitcast_convert_type",
            lambda x: lax.bitcast_convert_type(x, np.float32),
            (4, 6, 4),
            note="narrower",
            dtype=np.uint8,
            low=0,
        ),
    ]


CASES: tuple[Case, ...] = tuple(
    case
    for family in (
        elementwise,
        contraction,
        windows,
        convolutions,
        moving,
        cutting,
        reductions,
        indexing,
        factorisations,
        solvers,
        random_numbers,
    )
    for case in family()
)
