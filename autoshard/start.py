"""Ways into a plan's layout: initialise straight into it, restore a checkpoint straight into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from autoshard.errors import ArgumentError
from autoshard.signature import is_static

if TYPE_CHECKING:
    from autoshard.plan import Plan


def init(plan: Plan, init_fn: Callable[..., Any], *args: Any) -> Any:
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


def _matching(plan: Plan, whole: Any) -> list[int]:
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


def _argument_like(plan: Plan, tree: Any, taken: set[int | str]) -> list[int] | None:
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
        if same and _paths(tree) == _paths(argument(plan, owner, call.avals)):
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


def argument(plan: Plan, owner: int | str, leaves: Sequence[Any]) -> Any:
    """One argument of the plan's function, built of leaves of all of them."""
    args, kwargs = plan.traced.call.rebuild(leaves)
    return args[owner] if isinstance(owner, int) else kwargs[owner]


def abstract(plan: Plan, name: int | str) -> Any:
    """An argument as `jax.ShapeDtypeStruct`s with shardings: what orbax restores into."""
    owner, _ = owned(plan, name, "abstract")
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(plan.traced.call.avals, plan.built.in_shardings, strict=True)
    ]
    return argument(plan, owner, structs)


def owned(plan: Plan, name: int | str, what: str) -> tuple[int | str, list[int]]:
    """(owner, leaf numbers) of an argument given by position or name.

    Raises:
        ArgumentError: If the function has no such argument; `what` was asked for.
    """
    paths, owners = plan.traced.program.input_paths, plan.traced.call.owners
    owner: int | str = name
    if isinstance(name, str) and name not in owners:
        named = {
            path.split("/")[0].split("[")[0].split(".")[0]: o
            for path, o in zip(paths, owners, strict=True)
        }
        owner = named.get(name, name)
    numbers = [i for i, o in enumerate(owners) if o == owner]
    if not numbers:
        raise ArgumentError(
            f"{what}({name!r}, ...): the function's arguments are {sorted(set(map(str, owners)))}."
        )
    return owner, numbers


def _summary(tree: Any) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_static(leaf)]
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3])
    return f"{len(leaves)} arrays ({shown}{', ...' if len(leaves) > 3 else ''})"
