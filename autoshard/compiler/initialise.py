"""Initialises arrays straight into a plan's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.arguments import check_kind
from autoshard.compiler.bound_plan import BoundPlan, argument_of
from autoshard.errors import ArgumentError
from autoshard.tracing.signature import Call


def init(plan: BoundPlan, init_fn: Callable[..., Any], *args: Any) -> Any:
    """What `init_fn(*args)` returns, computed shard by shard in the plan's layout.

    No device ever holds the whole.

    Works for pytrees, optimizer states, Linen `TrainState`s, Equinox modules and Flax NNX modules
    alike.

    Args:
        plan: The plan.
        init_fn: Returns one of the plan's arguments, or a tuple of several (`lambda key: (params,
            opt_state)`).
        args: Its arguments; arrays (a random key, say).

    Returns:
        What `init_fn` returns, each array laid out as the plan takes it.

    Raises:
        ArgumentError: If what it returns has the structure and shapes of no argument of the plan.
    """
    check_kind("plan", plan, BoundPlan, "what optimize or apply returned")
    unchecked: object = init_fn
    if not callable(unchecked):
        check_kind("init_fn", unchecked, (), "a function that returns arguments of the plan")
    structures: list[_Structure] = []

    def arrays(*init_args: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(init_fn(*init_args))
        statics = {i: leaf for i, leaf in enumerate(leaves) if plan.traced.call.is_static(leaf)}
        structures.append(_Structure(treedef, statics))
        return [leaf for i, leaf in enumerate(leaves) if i not in statics]

    # Traced twice: the shapes say which arguments they are, and these have the shardings.
    mesh, shapes = _abstractly(arrays, args, plan.mesh.for_tracing)
    numbers = _matching(plan, structures[-1].filled(shapes))
    shardings = [plan.built.in_shardings[i] for i in numbers]
    explicit = bool(mesh.explicit_axes)  # it says shardings itself, which jax knows under them only
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if explicit else nullcontext():
        values = jax.jit(arrays, out_shardings=shardings)(*args)
    return structures[-1].filled(values)


def _abstractly(
    fn: Callable[..., Any], args: Sequence[Any], meshes: Sequence[Mesh]
) -> tuple[Mesh, Any]:
    """The first mesh under which a function can be traced, and what it returns there.

    Raises:
        Exception: What jax says under the last, where it is none.
    """
    *others, last = meshes
    for mesh in others:
        with suppress(Exception), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return mesh, jax.eval_shape(fn, *args)
    with jax.sharding.use_abstract_mesh(last.abstract_mesh):
        return last, jax.eval_shape(fn, *args)


@dataclass(frozen=True, slots=True)
class _Structure:
    """What a function returned but for its arrays, which alone pass through `jax.jit`.

    Attributes:
        treedef: Of all leaves.
        statics: Leaves that are no arrays, by number.
    """

    treedef: Any
    statics: Mapping[int, Any]

    def filled(self, arrays: Iterable[Any]) -> Any:
        """What the function returned, with these arrays."""
        rest = iter(arrays)
        leaves = []
        for number in range(self.treedef.num_leaves):
            leaves.append(self.statics[number] if number in self.statics else next(rest))
        return jax.tree.unflatten(self.treedef, leaves)


def _matching(plan: BoundPlan, returned: Any) -> list[int]:
    """Argument leaves of the plan that the leaves of `returned` are: of one argument, or of several
    in a tuple.

    Raises:
        ArgumentError: If they are those of no argument.
    """
    taken: set[int | str] = set()
    one = _argument_like(plan, returned, taken)
    if one is not None:
        return one
    numbers: list[int] = []
    call = plan.traced.call
    for i, part in enumerate(returned if isinstance(returned, tuple | list) else (returned,)):
        of_part = _argument_like(plan, part, taken)
        if of_part is None:
            where = f"at position {i} " if isinstance(returned, tuple | list) else ""
            raise ArgumentError(
                f"init: what init_fn returns {where}has the structure and shapes of no argument of "
                f"the plan {list(dict.fromkeys(call.owners))}: {_summary(call, part)}. "
                f"Return an argument as the plan takes it, or a tuple of several."
            )
        numbers += of_part
    return numbers


def _argument_like(plan: BoundPlan, tree: Any, taken: set[int | str]) -> list[int] | None:
    """Leaf numbers of the first argument that is like a tree and not taken yet; it is then."""
    call = plan.traced.call
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not call.is_static(leaf)]
    for owner in dict.fromkeys(call.owners):
        numbers = [i for i, leaf_owner in enumerate(call.owners) if leaf_owner == owner]
        if owner in taken or not _same_arrays([call.avals[i] for i in numbers], leaves):
            continue
        if _paths(call, tree) == _paths(call, argument_of(plan, owner, call.avals)):
            taken.add(owner)
            return numbers
    return None


def _same_arrays(avals: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """True if they have the same shapes and dtypes."""
    if len(avals) != len(leaves):
        return False
    pairs = zip(avals, leaves, strict=True)
    return all(aval.shape == leaf.shape and aval.dtype == leaf.dtype for aval, leaf in pairs)


def _paths(call: Call, tree: Any) -> list[str]:
    """Paths of the arrays. Structures themselves are not compared: the functions in that of an
    optax optimizer are other objects each time.
    """
    paths = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not call.is_static(leaf):
            paths.append(jax.tree_util.keystr(path))
    return paths


def _summary(call: Call, tree: Any) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not call.is_static(leaf)]
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3])
    return f"{len(leaves)} arrays ({shown}{', ...' if len(leaves) > 3 else ''})"
