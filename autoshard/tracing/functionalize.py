"""Steps in the manner of `nnx.jit`: modules and optimizers go in, are changed in place, and only
the rest is returned.

`functionalize` makes a pure function of such a step: it returns what was changed before what the step
returns. A plan calls that, and writes the changes back into the caller's objects. Flax is not
imported here: without it there are no modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.errors import ArgumentError


class FunctionalizedStep:
    """A step on modules as a pure function: returns `(*changed modules, *outputs)`.

    Attributes:
        step: The step as it was written.
        changed: Positions of the arguments that it changes.
    """

    def __init__(self, step: Callable[..., Any], changed: tuple[int, ...], many: bool) -> None:
        self.step, self.changed, self._many = step, changed, many
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The changed modules, then what the step returns."""
        if len(args) <= max(self.changed):
            raise ArgumentError(
                f"pass argument {max(self.changed)} by position: the plan changes it in place."
            )
        out = self.step(*args, **kwargs)
        return (*(args[i] for i in self.changed), *(out if self._many else (out,)))

    def write_back(self, args: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Writes what a call of the plan changed into the caller's modules; what the step itself
        returns.
        """
        from flax import nnx

        count = len(self.changed)
        for position, new in zip(self.changed, outputs[:count], strict=True):
            nnx.update(args[position], nnx.state(new))
        rest = tuple(outputs[count:])
        return rest if self._many else rest[0]

    @property
    def carry(self) -> dict[int | str, int | str]:
        """What is changed feeds the next call."""
        return {position: number for number, position in enumerate(self.changed)}


def functionalize(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
) -> Callable[..., Any]:
    """`fn` itself, or an `FunctionalizedStep` if it changes Flax NNX modules among its positional arguments.

    Args:
        fn: The step.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        mesh: The mesh with Auto axes, under which it is traced.

    Raises:
        ArgumentError: If it adds variables to a module or takes some away, so that the next call
            would have others.
    """
    modules = [i for i, arg in enumerate(args) if _is_module(arg)]
    if not modules or isinstance(fn, FunctionalizedStep):
        return fn
    changed: list[int] = []
    many: list[bool] = []
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    arrays = [
        i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]

    def watched(*traced: Any) -> None:
        flat = list(leaves)
        for i, value in zip(arrays, traced, strict=True):
            flat[i] = value
        own_args, own_kwargs = jax.tree.unflatten(treedef, flat)
        before = {i: jax.tree.flatten(own_args[i]) for i in modules}
        many.append(isinstance(fn(*own_args, **own_kwargs), tuple))
        for i in modules:
            old, old_tree = before[i]
            new = jax.tree.leaves(own_args[i])
            tree: Any = jax.tree.structure(own_args[i])
            if tree != old_tree:
                raise ArgumentError(
                    f"{getattr(fn, '__name__', fn)} changes the structure of argument {i} (a "
                    f"{type(args[i]).__name__}): variables come or go. Make them before, for "
                    f"instance with one call."
                )
            if any(a is not b for a, b in zip(old, new, strict=True)):
                changed.append(i)

    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.eval_shape(watched, *(leaves[i] for i in arrays))
    except ArgumentError:
        raise
    except Exception:  # what cannot be traced is said by `trace`, which comes next
        return fn
    return FunctionalizedStep(fn, tuple(changed), many[0]) if changed else fn


def _is_module(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)
