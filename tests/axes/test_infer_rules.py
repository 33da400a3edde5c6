"""Primitives that nobody has a rule for: what is linked, and that nothing stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import mlir
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import Mesh

from autoshard import Effort, optimize
from autoshard.axes import infer_rules
from autoshard.axes.axis_classes import axis_classes
from autoshard.axes.infer_rules import RuleFinder
from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.tracing.jit_options import options_for
from autoshard.tracing.program import Program
from autoshard.tracing.signature import flatten_call
from autoshard.tracing.trace import trace

PASS, REDUCED, PERMUTED, WHOLE = (
    FactorKind.PASS_THROUGH,
    FactorKind.REDUCTION,
    FactorKind.PERMUTATION,
    FactorKind.NEED_REPLICATION,
)


def primitive(
    name: str,
    shape_of: Callable[..., Any],
    *,
    as_jax: Callable[..., Any] | None = None,
    effect: Any = None,
) -> Callable[..., Any]:
    """A user's own primitive: its abstract evaluation, and its lowering as a jax function (None: it
    has none)."""
    own = Primitive(name)
    if effect is None:
        own.def_abstract_eval(shape_of)
    else:
        own.def_effectful_abstract_eval(
            lambda *avals, **params: (shape_of(*avals, **params), {effect})
        )
    if as_jax is not None:
        mlir.register_lowering(own, mlir.lower_fun(as_jax, multiple_results=False))
    return own.bind


def like(x: Any, *_: Any, **__: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype)


def shaped(*shape: int) -> Callable[..., Any]:
    return lambda x, *_, **__: jax.core.ShapedArray(shape, x.dtype)


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering through an operation for which the compiler states no rule: a loop of one trip."""

    def looped(*args: Any, **params: Any) -> Any:
        trip_count = jnp.int32(args[0].size > 0)
        start = jnp.zeros_like(function(*args, **params))
        return lax.fori_loop(0, trip_count, lambda _, x: function(*args, **params), start)

    return looped


def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    return trace(fn, flatten_call(fn, args, {}, options_for(fn))).program


def rule(
    fn: Callable[..., Any], *shapes: Sequence[int], dtype: Any = np.float32
) -> tuple[ShardingRule, str]:
    """The rule of the one unknown equation of a function, and the note on it."""
    finder = RuleFinder()
    program = program_of(fn, *(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape in shapes))
    (inferred,) = [finder.rule_for(eqn) for eqn in program.eqns]
    (note,) = finder.notes
    return inferred, note


def linked(inferred: ShardingRule) -> dict[str, str]:
    """Factors that are not NEED_REPLICATION, `operand.dim ...>result.dim ...`.

    For example {"0.0 1.0>0.0": "pass_through"}.
    """

    def places(factor: int, arrays: Sequence[Sequence[int]]) -> str:
        return " ".join(
            f"{i}.{dim}"
            for i, factors in enumerate(arrays)
            for dim, other in enumerate(factors)
            if other == factor
        )

    links = {}
    for factor, kind in enumerate(inferred.kinds):
        if kind is not WHOLE:
            dims = f"{places(factor, inferred.operands)}>{places(factor, inferred.results)}"
            links[dims] = kind.value
    return links


def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> Any:
        raise AssertionError("run")

    monkeypatch.setattr(infer_rules, "discovered_rule", run)


# Stated by the compiler ---------------------------------------------------------------------------

ELEMENTWISE = primitive("test_elementwise", like, as_jax=lambda x, y: jnp.tanh(x) * y)
MATMUL = primitive(
    "test_matmul",
    lambda x, y: jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype),
    as_jax=lambda x, y: lax.dot(x, y).astype(x.dtype) * 2,
)
SOFTMAX = primitive("test_softmax", like, as_jax=jax.nn.softmax)
WHERE = primitive("test_where", like, as_jax=lambda x, y: jnp.where(x > 0, x, y))
ROWS = primitive(
    "test_rows", lambda x: jax.core.ShapedArray(x.shape[:1], x.dtype), as_jax=lambda x: x.max(1)
)
FLAT = primitive("test_flat", shaped(128), as_jax=lambda x: x.reshape(128))
SORTED = primitive("test_sorted", like, as_jax=lambda x: lax.sort(x, dimension=1))
CUMULATED = primitive("test_cumulated", like, as_jax=lambda x: lax.cumsum(x, 0))
TABLE = primitive(
    "test_table", like, as_jax=lambda x: x + jnp.asarray(np.arange(16.0, dtype=np.float32))
)
GRAM = primitive("test_gram", shaped(8, 8), as_jax=lambda x: x @ x.T)


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (
            ELEMENTWISE,
            [(8, 16), (8, 16)],
            {"0.0 1.0>0.0": "pass_through", "0.1 1.1>0.1": "pass_through"},
        ),
        (
            MATMUL,
            [(8, 16), (16, 4)],
            {"0.0>0.0": "pass_through", "0.1 1.0>": "reduction", "1.1>0.1": "pass_through"},
        ),
        (SOFTMAX, [(8, 16)], {"0.0>0.0": "pass_through", "0.1>0.1": "pass_through"}),
        (WHERE, [(8, 16), (8, 16)], {"0.0 1.0>0.0": "pass_through", "0.1 1.1>0.1": "pass_through"}),
        (ROWS, [(8, 16)], {"0.0>0.0": "pass_through", "0.1>": "reduction"}),
        (FLAT, [(8, 16)], {"0.0>0.0": "pass_through"}),
        (SORTED, [(8, 16)], {"0.0>0.0": "pass_through"}),
        (CUMULATED, [(8, 16)], {"0.0>0.0": "permutation", "0.1>0.1": "pass_through"}),
        (TABLE, [(8, 16)], {"0.0>0.0": "pass_through", "0.1>0.1": "pass_through"}),
        (GRAM, [(8, 16)], {"0.0>0.0": "pass_through", "0.1>": "reduction"}),
        (
            lambda x: ELEMENTWISE(x, 2.0),
            [(8, 16)],
            {"0.0>0.0": "pass_through", "0.1>0.1": "pass_through"},
        ),
    ],
)
def test_stated_by_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
    fn: Callable[..., Any],
    shapes: list[Any],
    expected: dict[str, str],
) -> None:
    no_run(monkeypatch)
    inferred, note = rule(fn, *shapes)
    assert linked(inferred) == expected
    assert note.endswith("as the compiler states for its lowering")


def test_how_a_reduction_combines() -> None:
    assert rule(ROWS, (8, 16))[0].combine == "max"
    assert rule(MATMUL, (8, 16), (16, 4))[0].combine == "add"


def test_a_stated_rule_is_not_run_and_large_shapes_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_run(monkeypatch)
    inferred, _ = rule(MATMUL, (2**14, 2**15), (2**15, 2**16))
    assert linked(inferred) == {
        "0.0>0.0": "pass_through",
        "0.1 1.0>": "reduction",
        "1.1>0.1": "pass_through",
    }


# Discovered by running it -------------------------------------------------------------------------

D_ELEMENTWISE = primitive("test_run_elementwise", like, as_jax=hidden(lambda x, y: jnp.tanh(x) * y))
D_MATMUL = primitive(
    "test_run_matmul",
    lambda x, y: jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype),
    as_jax=hidden(lambda x, y: x @ y),
)
D_SORTED = primitive("test_run_sorted", like, as_jax=hidden(lambda x: lax.sort(x, dimension=1)))
D_TOTAL = primitive("test_run_total", shaped(), as_jax=hidden(jnp.sum))
D_ZEROS = primitive("test_run_zeros", like, as_jax=hidden(lambda x: x * 0))
D_BIAS = primitive("test_run_bias", like, as_jax=hidden(lambda x, b: x + b))
D_ODD = primitive("test_run_odd", like, as_jax=hidden(lambda x: x + 1))


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (
            D_ELEMENTWISE,
            [(8, 16), (8, 16)],
            {"0.0 1.0>0.0": "pass_through", "0.1 1.1>0.1": "pass_through"},
        ),
        (
            D_ELEMENTWISE,
            [(2**14, 2**15)] * 2,
            {"0.0 1.0>0.0": "pass_through", "0.1 1.1>0.1": "pass_through"},
        ),
        (
            D_MATMUL,
            [(8, 16), (16, 4)],
            {"0.0>0.0": "pass_through", "0.1 1.0>": "reduction", "1.1>0.1": "pass_through"},
        ),
        (
            D_MATMUL,
            [(16, 16), (16, 16)],
            {"0.0>0.0": "pass_through", "0.1 1.0>": "reduction", "1.1>0.1": "pass_through"},
        ),
        (D_SORTED, [(8, 16)], {"0.0>0.0": "pass_through"}),
        (D_TOTAL, [(8, 16)], {"0.0>": "reduction", "0.1>": "reduction"}),
        (D_ZEROS, [(8, 16)], {}),
        (D_BIAS, [(8, 16), (16,)], {"0.0>0.0": "pass_through", "0.1 1.0>0.1": "pass_through"}),
        (D_ODD, [(7, 1, 9)], {"0.0>0.0": "pass_through", "0.2>0.2": "pass_through"}),
    ],
)
def test_discovered_by_running(
    fn: Callable[..., Any], shapes: list[Any], expected: dict[str, str]
) -> None:
    inferred, note = rule(fn, *shapes)
    assert linked(inferred) == expected
    assert note.endswith("as running it on small arrays shows")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int32, np.complex64, np.float16])
def test_dtypes(dtype: Any) -> None:
    inferred, _ = rule(D_MATMUL, (8, 16), (16, 4), dtype=dtype)
    assert linked(inferred) == {
        "0.0>0.0": "pass_through",
        "0.1 1.0>": "reduction",
        "1.1>0.1": "pass_through",
    }


def test_a_product_of_sizes_keeps_its_proportions() -> None:
    """Sizes 2048, 512 and 4 cannot become three unrelated small ones here; divided by the same they
    can."""
    split = primitive(
        "test_run_split",
        lambda x, w: jax.core.ShapedArray((x.shape[0] // w.shape[0], w.shape[0]), x.dtype),
        as_jax=hidden(lambda x, w: x.reshape(-1, w.shape[0]) * w),
    )
    assert linked(rule(split, (2048,), (512,))[0]) == {"0.0>0.0": "pass_through"}


def test_what_a_branch_captures_is_not_overlooked() -> None:
    """The compiler's branches read arrays that are not among their operands."""
    branch = primitive(
        "test_run_branch",
        like,
        as_jax=lambda x: x + lax.cond(x[0, 0] > 0, lambda: lax.cumsum(x, 1), lambda: x),
    )
    inferred, note = rule(branch, (8, 16))
    assert note.endswith("as running it on small arrays shows")
    assert linked(inferred) == {"0.0>0.0": "pass_through"}


# Not run ------------------------------------------------------------------------------------------


class Effect(jax._src.effects.Effect):
    """Of a primitive that writes somewhere."""


@pytest.fixture
def lowerable_effect() -> Iterator[Effect]:
    from jax._src import effects

    effects.lowerable_effects.add_type(Effect)
    yield Effect()
    effects.lowerable_effects._effect_types.discard(Effect)


def test_what_has_a_side_effect_is_not_run(
    monkeypatch: pytest.MonkeyPatch, lowerable_effect: Effect
) -> None:
    no_run(monkeypatch)
    writes = primitive("test_writes", like, as_jax=hidden(lambda x: x + 1), effect=lowerable_effect)
    inferred, note = rule(writes, (8, 16))
    assert linked(inferred) == {}
    assert "it has a side effect" in note


def test_what_calls_python_is_not_run() -> None:
    calls: list[int] = []

    def callback(x: Any) -> Any:
        calls.append(1)
        return x

    python = primitive("test_python", like, as_jax=lambda x: jax.pure_callback(callback, x, x))
    inferred, note = rule(python, (8, 16))
    assert (linked(inferred), calls) == ({}, [])
    assert "it calls back into Python" in note


def test_what_cannot_be_lowered_links_nothing() -> None:
    inferred, note = rule(primitive("test_no_lowering", like), (8, 16))
    assert linked(inferred) == {}
    assert (
        "nothing is linked (NotImplementedError: MLIR translation rule for primitive "
        "'test_no_lowering'" in note
    )


def test_what_fails_whenever_it_runs_links_nothing() -> None:
    foreign = Primitive("test_foreign")
    foreign.def_abstract_eval(like)
    mlir.register_lowering(foreign, jax.ffi.ffi_lowering("test_no_such_target"))
    inferred, note = rule(foreign.bind, (8, 16))
    assert linked(inferred) == {}
    assert "nothing is linked (JaxRuntimeError" in note


def test_a_large_sample_is_not_run() -> None:
    """It only runs at its own size, which is large."""

    def strict(x: Any) -> Any:
        assert x.shape == (2**10, 2**10)
        return like(x)

    inferred, note = rule(
        primitive("test_strict", strict, as_jax=hidden(lambda x: x + 1)), (2**10, 2**10)
    )
    assert linked(inferred) == {}
    assert note.startswith("test_strict has no sharding rule of its own: nothing is linked")


def test_scalars() -> None:
    _, note = rule(ELEMENTWISE, (), ())
    assert note.endswith("it has no dimension to link")


def test_custom_partitioning_follows_its_function() -> None:
    @custom_partitioning
    def doubled(x: Any) -> Any:
        return x * 2

    doubled.def_partition(partition=lambda *_: None, sharding_rule="i j -> i j")
    assert linked(rule(doubled, (8, 16))[0]) == {
        "0.0>0.0": "pass_through",
        "0.1>0.1": "pass_through",
    }


# Foreign functions --------------------------------------------------------------------------------


def ffi(name: str, result: Any, **attributes: Any) -> Callable[..., Any]:
    return lambda *operands: jax.ffi.ffi_call(name, result)(*operands, **attributes)


def test_a_foreign_function_that_does_not_exist_links_nothing() -> None:
    inferred, note = rule(ffi("test_absent", jax.ShapeDtypeStruct((8, 16), np.float32)), (8, 16))
    assert linked(inferred) == {}
    assert "nothing is linked (JaxRuntimeError" in note


def test_a_foreign_function_with_a_size_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    no_run(monkeypatch)
    inferred, note = rule(
        ffi("test_sized", jax.ShapeDtypeStruct((8,), np.float32), n=np.int32(8)), (8,)
    )
    assert linked(inferred) == {}
    assert "foreign code with an integer parameter" in note


def test_a_foreign_function_that_runs() -> None:
    """An LU factorisation, batched, called as a user would call it."""
    jax.scipy.linalg.lu_factor(np.eye(2, dtype=np.float32))  # makes LAPACK ready
    shapes = (
        jax.ShapeDtypeStruct((6, 4, 4), np.float32),
        jax.ShapeDtypeStruct((6, 4), np.int32),
        jax.ShapeDtypeStruct((6,), np.int32),
    )
    inferred, note = rule(jax.ffi.ffi_call("lapack_sgetrf_ffi", shapes), (6, 4, 4))
    assert note.endswith("as running it on small arrays shows")
    assert linked(inferred) == {"0.0>0.0 1.0 2.0": "pass_through"}


# Cached, and in the program -----------------------------------------------------------------------


def test_equal_equations_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    infer = infer_rules._infer

    def counting(eqn: Any) -> Any:
        looked.append(eqn.primitive)
        return infer(eqn)

    monkeypatch.setattr(infer_rules, "_infer", counting)

    def fn(x: Any, y: Any) -> Any:
        return ELEMENTWISE(ELEMENTWISE(x, x), x), ELEMENTWISE(y, y), MATMUL(x, y)

    finder = RuleFinder()
    program = program_of(fn, np.ones((8, 16), np.float32), np.ones((16, 4), np.float32))
    for eqn in program.eqns:
        finder.rule_for(eqn)
    assert looked == ["test_elementwise", "test_elementwise", "test_matmul"]
    assert len(finder.notes) == 2


def test_axes_go_through() -> None:
    """Batch and features are the same axis classes before and after a user's own primitives."""

    def fn(w: Any, x: Any) -> Any:
        hidden_ = D_ELEMENTWISE(jnp.tanh(x @ w), jnp.cos(x @ w))
        return MATMUL(hidden_, w.T)

    program = program_of(fn, np.ones((16, 32), np.float32), np.ones((8, 16), np.float32))
    axes = axis_classes(program, (), RuleFinder().rule_for)
    _, batch = program.body.inputs
    (out,) = program.body.outputs
    assert axes.of_value[out.index] == axes.of_value[batch.index]
    assert axes.count == 3
    plain = axis_classes(program)
    assert plain.of_value[out.index][0] != plain.of_value[batch.index][0]
    assert plain.count > 3


def test_a_search_with_a_users_own_primitive(mesh_4x2: Mesh) -> None:
    def step(w: Any, x: Any) -> Any:
        return D_ELEMENTWISE(x @ w, x @ w).sum()

    args = (np.ones((16, 32), np.float32), np.ones((8, 16), np.float32))
    plan = optimize(step, args, mesh_4x2, effort=Effort(2, 0), progress=False)
    assert plan.verified.ok
    assert any(
        "test_run_elementwise has no sharding rule of its own" in note for note in plan.notes
    )


def test_inside_an_explicit_mesh() -> None:
    program = program_of(D_SORTED, np.ones((8, 16), np.float32))
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):
        assert linked(RuleFinder().rule_for(program.eqns[0])) == {"0.0>0.0": "pass_through"}
