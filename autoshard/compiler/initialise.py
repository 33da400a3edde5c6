"""Ways into a plan's layout: initialise straight into it, restore a checkpoint straight into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.compiler.bound_plan import BoundPlan, argument_of
from autoshard.errors import ArgumentError
from autoshard.tracing.signature import is_static


def init(plan: BoundPlan, init_fn: Callable[..., Any], *args: Any) -> Any:
    """What `init_fn(*args)` returns, made shard by shard in the plan's layout; no device ever holds
    the whole.

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
    made: dict[str, Any] = {}

    def arrays(*given: Any) -> list[Any]:
        leaves, made["tree"] = jax.tree.flatten(init_fn(*given))
        made["static"] = {i: leaf for i, leaf in enumerate(leaves) if is_static(leaf)}
        return [leaf for i, leaf in enumerate(leaves) if i not in made["static"]]

    with jax.sharding.use_abstract_mesh(plan.mesh.auto.abstract_mesh):
        shapes = jax.eval_shape(arrays, *args)
    whole = _unflatten(made, shapes)
    numbers = _matching(plan, whole)
    shardings = [plan.built.in_shardings[i] for i in numbers]
    leaves = jax.jit(arrays, out_shardings=shardings)(*args)
    return _unflatten(made, leaves)


def _unflatten(made: dict[str, Any], arrays: Sequence[Any]) -> Any:
    rest = iter(arrays)
    count = made["tree"].num_leaves
    leaves = [made["static"][i] if i in made["static"] else next(rest) for i in range(count)]
    return jax.tree.unflatten(made["tree"], leaves)


def _matching(plan: BoundPlan, whole: Any) -> list[int]:
    """Argument leaves of the plan that the leaves of `whole` are: of one argument, or of several in
    a tuple.
    """
    arguments = plan.traced.call.owners
    taken: set[int | str] = set()
    one = _argument_like(plan, whole, taken)
    if one is not None:
        return one
    found: list[int] = []
    for i, part in enumerate(whole if isinstance(whole, tuple | list) else (whole,)):
        numbers = _argument_like(plan, part, taken)
        if numbers is None:
            raise ArgumentError(
                f"init: what init_fn returns "
                f"{f'at position {i} ' if isinstance(whole, tuple | list) else ''}has "
                f"the structure and shapes of no argument of the plan "
                f"{list(dict.fromkeys(arguments))}: "
                f"{_summary(part)}. Return an argument as the plan takes it, or a tuple of several."
            )
        found += numbers
    return found


def _argument_like(plan: BoundPlan, tree: Any, taken: set[int | str]) -> list[int] | None:
    call = plan.traced.call
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_static(leaf)]
    for owner in dict.fromkeys(call.owners):
        numbers = [i for i, o in enumerate(call.owners) if o == owner]
        if owner in taken or len(numbers) != len(leaves):
            continue
        same = all(
            call.avals[i].shape == leaf.shape and call.avals[i].dtype == leaf.dtype
            for i, leaf in zip(numbers, leaves, strict=True)
        )
        if same and _paths(tree) == _paths(argument_of(plan, owner, call.avals)):
            taken.add(owner)
            return numbers
    return None


def _paths(tree: Any) -> list[str]:
    """Leaf paths; statics inside a structure (the functions of an optax optimizer) may be other
    objects.
    """
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not is_static(leaf)
    ]


def _summary(tree: Any) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_static(leaf)]
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3])
    return f"{len(leaves)} arrays ({shown}{', ...' if len(leaves) > 3 else ''})"
