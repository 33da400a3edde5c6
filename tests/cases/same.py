"""What every case says: a searched plan gives what the plain jitted function gives.

To see what each case gets where latency does not count, or in half the memory that replication
needs (where that is enough), one line a search:

    CASES_FREE_COLLECTIVES=1 CASES_LAYOUTS=layouts.txt python -m pytest tests/cases -n0
    CASES_HALF_BUDGET=1 CASES_LAYOUTS=layouts.txt python -m pytest tests/cases -n0
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import autoshard
from autoshard.cost_model.hardware.hardware import Hardware, hardware_for

EFFORT = autoshard.Effort(compiled=3, measured=0)
STATICS = ("static_argnums", "static_argnames")
HAS_DYNAMIC_UPDATE_BUG = jax.__version_info__ < (0, 11)
"""jax 0.10.2 on CPU gets a traced update followed by a fixed one wrong where the updated dimension
is sharded."""


def mesh_of(*, explicit: Sequence[str] = (), **axes: int) -> Mesh:
    """A mesh over the first CPU devices, `mesh_of(data=4, model=2)`; the axes named in `explicit`
    are Explicit."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    types = tuple(AxisType.Explicit if name in explicit else AxisType.Auto for name in axes)
    return Mesh(devices, tuple(axes), axis_types=types)


def floats(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Normally distributed numbers, the same for the same shape and seed."""
    rng = np.random.default_rng([seed, *shape])
    return (scale * rng.standard_normal(shape)).astype(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Integers in [0, high)."""
    return np.random.default_rng([seed, *shape]).integers(0, high, shape).astype(np.int32)


def free_collectives(name: str = "tpu_v5e") -> Hardware:
    """Hardware whose collectives cost bytes alone: at the sizes of a test, latency would make
    replication win."""
    hardware = hardware_for(name)
    return replace(hardware, link=replace(hardware.link, alpha_s=0.0))


def host(leaf: Any) -> np.ndarray:
    """A leaf on the host, keys as their data."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(got: Any, want: Any, lowest: Any = None) -> None:
    """Equal structure, shapes, dtypes; integers exactly, floats within what the lowest precision
    allows.

    Args:
        got: What the plan returned.
        want: What the plain function returned.
        lowest: The lowest float dtype on the way, where the outputs do not show it.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        where = jax.tree_util.keystr(path)
        if not hasattr(b, "dtype"):
            assert a is b or a == b, where
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False), where
        a, b = host(a), host(b)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        eps = float(jnp.finfo(lowest or b.dtype).eps)
        wide = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        scale = max(1.0, float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0)))
        np.testing.assert_allclose(
            a, b, rtol=0, atol=(4 if eps > 1e-4 else 32) * eps * scale, err_msg=where
        )


def plain(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any = None, **options: Any) -> Any:
    """What the unsharded jitted function returns."""
    statics = {name: options[name] for name in STATICS if name in options}
    return jax.jit(fn, **statics)(*args, **(kwargs or {}))


def search(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, **options: Any
) -> autoshard.Plan:
    """A search that compiles few candidates and measures none."""
    if "CASES_FREE_COLLECTIVES" in os.environ:
        options.setdefault("hardware", free_collectives())
    if "CASES_HALF_BUDGET" in os.environ and "memory_budget_bytes" not in options:
        known = {k: v for k, v in options.items() if k not in ("hardware", "isolate", "seed")}
        half = max(1, replicated_bytes(fn, args, mesh, **known) // 2)
        with contextlib.suppress(autoshard.NoFeasiblePlanError):
            return search(fn, args, mesh, memory_budget_bytes=half, **options)
    plan = autoshard.optimize(fn, tuple(args), mesh, effort=EFFORT, progress=False, **options)
    if "CASES_LAYOUTS" in os.environ:
        note_layout(plan)
    return plan


def note_layout(plan: autoshard.Plan) -> None:
    """Writes down what a search found: test, mesh, rules, split leaves."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes.items())
    rules = " ".join(str(rule) for rule in plan.rules) or "replicated"
    split = f"{len(split_leaves(plan))} of {len(plan.specs)} leaves split"
    with open(os.environ["CASES_LAYOUTS"], "a", encoding="utf-8") as file:
        file.write(f"{test} | {mesh} | {rules} | {split} | verified: {plan.verified.ok}\n")


def search_and_compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    *,
    kwargs: Any = None,
    lowest: Any = None,
    reference: Callable[..., Any] | None = None,
    look_at: Callable[[Any], Any] = lambda out: out,
    **options: Any,
) -> autoshard.Plan:
    """Searches, runs the plan on the same arguments, compares, and returns the plan.

    Args:
        fn: The function.
        args: Its positional arguments.
        mesh: The mesh.
        kwargs: Its keyword arguments.
        lowest: See `assert_same`.
        reference: What to compare with where plain `jax.jit(fn)` cannot take the arguments.
        look_at: The part of the outputs that is to be the same.
        options: Of `autoshard.optimize`.
    """
    want = reference(*args, **(kwargs or {})) if reference else plain(fn, args, kwargs, **options)
    plan = search(fn, args, mesh, example_kwargs=kwargs, **options)
    assert plan.verified, plan.verified
    assert_same(look_at(plan(*args, **(kwargs or {}))), look_at(want), lowest)
    return plan


def search_and_reject(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, **options: Any
) -> tuple[autoshard.Plan | None, str]:
    """Searches where candidates may be rejected: the plan, compared, or None where all are; and the
    reasons."""
    try:
        plan = search(fn, args, mesh, **options)
    except autoshard.SearchFailedError as error:
        return None, str(error)
    assert plan.verified, plan.verified
    assert_same(plan(*args), plain(fn, args))
    return plan, "; ".join(
        candidate.reason for candidate in plan.candidates if candidate.status == "rejected"
    )


def pin_and_compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    pins: dict[str, PartitionSpec],
    **options: Any,
) -> autoshard.Plan:
    """Applies a layout that is nothing but pins, runs it and compares; the pinned leaves must be
    laid out so."""
    lowest = options.pop("lowest", None)
    plan = autoshard.apply(fn, tuple(args), mesh, [], pins=pins, **options)
    assert {path: plan.specs[path] for path in pins} == pins
    assert_same(plan(*args), plain(fn, args, **options), lowest)
    return plan


def replicated_bytes(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, **options: Any
) -> int:
    """Compiled peak memory per device with everything replicated."""
    return (
        autoshard.apply(fn, tuple(args), mesh, "replicated", **options)
        .compile()
        .evidence.peak_bytes
    )


def split_leaves(plan: autoshard.Plan) -> set[str]:
    """Leaf paths that the plan splits."""
    return {path for path, spec in plan.specs.items() if spec != PartitionSpec()}


def winner(plan: autoshard.Plan) -> autoshard.Candidate:
    """The winning candidate."""
    return next(candidate for candidate in plan.candidates if candidate.status == "winner")
