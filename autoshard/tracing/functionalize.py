"""Steps in the manner of `nnx.jit`: modules and optimizers go in, are changed in place, and only
the rest is returned.

`functionalize` makes a pure function of such a step: it returns what was changed before what the
step returns. A plan calls that, and writes the changes back into the caller's objects. Flax is not
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
from autoshard.jax_internals import explicit_axes, jaxprs


class FunctionalizedStep:
    """A step on modules as a pure function: returns `(*changed modules, *outputs)`.

    Attributes:
        step: The step as it was written.
        changed: Positions of the arguments that it changes.
    """

    def __init__(
        self, step: Callable[..., Any], changed: tuple[int, ...], returns_tuple: bool
    ) -> None:
        self.step, self.changed, self._returns_tuple = step, changed, returns_tuple
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The changed modules, then what the step returns."""
        if len(args) <= max(self.changed):
            raise ArgumentError(
                f"pass argument {max(self.changed)} by position: the plan changes it in place."
            )
        result = self.step(*args, **kwargs)
        outputs = result if self._returns_tuple else (result,)
        return (*(args[i] for i in self.changed), *outputs)

    def write_back(self, args: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Writes what a call of the plan changed into the caller's modules.

        Args:
            args: The positional arguments of the call.
            outputs: What the call of this pure function returned.

        Returns:
            What the step itself returns.
        """
        from flax import nnx

        count = len(self.changed)
        for position, new in zip(self.changed, outputs[:count], strict=True):
            nnx.update(args[position], nnx.state(new))
        rest = tuple(outputs[count:])
        return rest if self._returns_tuple else rest[0]

    @property
    def carry(self) -> dict[int | str, int | str]:
        """What is changed feeds the next call."""
        return {position: number for number, position in enumerate(self.changed)}


def functionalize(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], meshes: Sequence[Mesh]
) -> Callable[..., Any]:
    """`fn` itself, or a `FunctionalizedStep` if it changes Flax NNX modules in place.

    Args:
        fn: The step.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        meshes: Under which it may be traced: the first that it can be counts.

    Raises:
        ArgumentError: If it adds variables to a module or takes some away, so that the next call
            would have others.
    """
    modules = [i for i, arg in enumerate(args) if _is_module(arg)]
    if not modules or isinstance(fn, FunctionalizedStep):
        return fn
    for mesh in meshes:
        watch = _Watch(fn, modules)
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                _call_abstractly(watch.call, args, kwargs, mesh)
        except ArgumentError:
            raise
        except Exception:  # what cannot be traced is reported by `trace`, which comes next
            continue
        if watch.changed:
            return FunctionalizedStep(fn, tuple(watch.changed), watch.returns_tuple)
        return fn
    return fn


def _call_abstractly(
    fn: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
) -> None:
    """Calls `fn(args, kwargs)` with tracers of this mesh in the place of arrays; other leaves
    stay.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    numbers = [
        i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]
    originals = [leaves[i] for i in numbers]
    avals = list(map(jaxprs.abstractify, originals))
    if mesh.explicit_axes:
        avals = explicit_axes.avals_on(mesh, originals, avals)
    arrays = dict(zip(numbers, avals, strict=True))

    def call(traced: Mapping[int, Any]) -> None:
        own_leaves = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
        fn(*jax.tree.unflatten(treedef, own_leaves))

    jax.eval_shape(call, arrays)


class _Watch:
    """Calls a step on modules of its own, and notes which of them it changes.

    Attributes:
        changed: Positions of the changed modules, once called.
        returns_tuple: Whether the step returns a tuple, once called.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[int]) -> None:
        self._fn, self._modules = fn, modules
        self.changed: list[int] = []
        self.returns_tuple = False

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Calls the step.

        Raises:
            ArgumentError: If it changes the structure of a module.
        """
        before: list[tuple[list[Any], Any]]
        before = [jax.tree.flatten(args[i]) for i in self._modules]
        self.returns_tuple = isinstance(self._fn(*args, **kwargs), tuple)
        for i, (old_leaves, old_tree) in zip(self._modules, before, strict=True):
            new_leaves = jax.tree.leaves(args[i])
            new_tree: Any = jax.tree.structure(args[i])
            if new_tree != old_tree:
                raise ArgumentError(
                    f"{getattr(self._fn, '__name__', self._fn)} changes the structure of argument "
                    f"{i} (a {type(args[i]).__name__}): variables come or go. Make them before, "
                    f"for instance with one call."
                )
            # By identity: an update in place puts another array into the variable.
            if any(new is not old for new, old in zip(new_leaves, old_leaves, strict=True)):
                self.changed.append(i)


def _is_module(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)
