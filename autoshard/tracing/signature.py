"""What a function is called with: leaves, leaf paths, statics and donation, flattened exactly as
the function's own `jit` would.

The rest of autoshard sees a function of flat array leaves. Everything that is not an array for jax
-- arguments named in `static_argnums`/`static_argnames`, and leaves such as an activation function
inside a module -- is set aside and put back when the function is called.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.errors import ArgumentError, SignatureError, TraceError
from autoshard.jax_internals import jaxprs
from autoshard.tracing.jit_options import CallOptions, from_start, parameters_of

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
"""What is an array for `equinox.is_array`; and what stands for one in example arguments."""


@dataclass(frozen=True, slots=True)
class Call:
    """One flattened call.

    Attributes:
        leaves: The array leaves, in order.
        avals: Shape, dtype and weak type of each.
        memory_kinds: The memory of each where that is not the device's own (`pinned_host`).
        treedef: Structure of `(args, kwargs)` with static arguments removed.
        statics: Static arguments by position or name.
        array_positions: Leaf number in `treedef` of each array leaf.
        static_leaves: Leaves that are no arrays for jax (an activation function inside a module),
            by leaf number.
        paths: Leaf path of each array leaf, unique, starting with the parameter's name.
        owners: Argument of each leaf: its position, or its name for keyword arguments.
        donated: Whether each leaf is donated.
        arrays_only: True where Python numbers are static, of the arguments and of the result.
    """

    leaves: tuple[Any, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    memory_kinds: tuple[str | None, ...]
    treedef: Any
    statics: tuple[tuple[int | str, Any], ...]
    array_positions: tuple[int, ...]
    static_leaves: tuple[tuple[int, Any], ...]
    paths: tuple[str, ...]
    owners: tuple[int | str, ...]
    donated: tuple[bool, ...]
    arrays_only: bool = False

    def is_static(self, leaf: object) -> bool:
        """True for a leaf, of an argument or of the result, that is passed through as it is."""
        return is_static(leaf, self.arrays_only)

    def same_as(self, other: Call) -> bool:
        """True if the other call has the same structure, statics, shapes, dtypes and weak types."""
        return (
            self.treedef == other.treedef
            and self.array_positions == other.array_positions
            and _equal(self.statics, other.statics)
            and _equal(self.static_leaves, other.static_leaves)
            and all(
                a.shape == b.shape and a.dtype == b.dtype and a.weak_type == b.weak_type
                for a, b in zip(self.avals, other.avals, strict=True)
            )
        )

    def typed_avals(self) -> list[Any]:
        """Abstract leaves as jax types them, in their memories."""
        pairs = zip(self.avals, self.memory_kinds, strict=True)
        return [jaxprs.in_memory(aval, kind) for aval, kind in pairs]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with these array leaves and the statics in their places."""
        flat: list[Any] = [None] * self.treedef.num_leaves
        for position, leaf in zip(self.array_positions, leaves, strict=True):
            flat[position] = leaf
        for position, value in self.static_leaves:
            flat[position] = value
        dynamic, kwargs = jax.tree.unflatten(self.treedef, flat)

        args, kwargs = list(dynamic), dict(kwargs)
        positional = [(key, value) for key, value in self.statics if isinstance(key, int)]
        for position, value in sorted(positional, key=lambda static: static[0]):
            args.insert(position, value)  # ascending: those before are in their places already
        kwargs.update((key, value) for key, value in self.statics if isinstance(key, str))
        return tuple(args), kwargs


def _equal(ours: Sequence[tuple[Any, Any]], theirs: Sequence[tuple[Any, Any]]) -> bool:
    """True if two calls have the same statics at the same places."""
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(here == there and _equal_statics(a, b) for (here, a), (there, b) in pairs)


def _equal_statics(a: object, b: object) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)  # 1 == True, and they are traced otherwise
    # statics may define an == that raises (arrays inside); identity is then the only safe answer
    except Exception:
        return False


def is_static(leaf: object, arrays_only: bool = False) -> bool:
    """True for a leaf that is no array for jax.

    Args:
        leaf: The leaf.
        arrays_only: True where Python numbers are none either (`CallOptions.arrays_only`).
    """
    if arrays_only and not isinstance(leaf, _ARRAYS):
        return True
    try:
        jaxprs.abstractify(leaf)
    except TypeError:
        return True
    return False


def _is_static_checked(leaf: object, where: str, arrays_only: bool) -> bool:
    """`is_static`, which refuses leaves that stand for arrays but cannot be passed to a program."""
    try:
        static = is_static(leaf, arrays_only)
    except ValueError as error:  # masked arrays; jax.jit raises the same
        raise ArgumentError(f"{where}: {error}") from None
    if jaxprs.is_ref(leaf):
        raise ArgumentError(
            f"{where} is a mutable array (jax.new_ref), which a plan cannot lay out. Pass "
            f"{where}[...] and return its "
            f"new value instead; refs that the function makes itself are fine."
        )
    return static


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional arguments."""
    names: list[str] = []
    for parameter in parameters_of(fn):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}/{i}" for i in range(count - len(names))]
    return names + [f"arg{i}" for i in range(len(names), count)]


def leaf_paths(prefixed: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[str, ...]:
    """Unique leaf paths: short (`params/layers/wq`), or full (`params['layers']['wq']`) on a clash.

    >>> key = jax.tree_util.DictKey
    >>> leaf_paths([("p", (key("a/b"),)), ("p", (key("a"), key("b"))), ("x", ())])
    ("p['a/b']", "p['a']['b']", 'x')
    """
    keystr = jax.tree_util.keystr
    short = [
        _encodable("/".join(filter(None, (name, keystr(path, simple=True, separator="/")))))
        for name, path in prefixed
    ]
    occurrences = Counter(short)
    return tuple(
        text if occurrences[text] == 1 else _encodable(name + keystr(path))
        for text, (name, path) in zip(short, prefixed, strict=True)
    )


def _encodable(text: str) -> str:
    r"""Text with half surrogates escaped: a key may hold one (of a file's name, say), a table not.

    >>> _encodable("w" + chr(0xDC80))
    'w\\udc80'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def flatten_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
) -> Call:
    """Flattens a call of `fn` as `jax.jit` would.

    Raises:
        SignatureError: If the arguments do not bind to the signature of `fn`.
    """
    _check_binds(fn, args, kwargs)
    static_positions = from_start(options.static_argnums, len(args))
    dynamic_positions = [i for i in range(len(args)) if i not in static_positions]
    dynamic = tuple(args[i] for i in dynamic_positions)
    keywords = {name: kwargs[name] for name in kwargs if name not in options.static_argnames}
    with_paths, treedef = jax.tree_util.tree_flatten_with_path((dynamic, keywords))

    arrays = _ArrayLeaves(_names(fn, len(args)), options.arrays_only)
    for number, (path, leaf) in enumerate(with_paths):
        # path[0] chooses between `dynamic` and `keywords`, path[1] the argument
        owner: int | str = dynamic_positions[path[1].idx] if path[0].idx == 0 else path[1].key
        arrays.add(number, owner, tuple(path[2:]), leaf)
    donated = options.donate_argnums | options.donate_argnames
    return Call(
        leaves=tuple(arrays.leaves),
        avals=tuple(map(jaxprs.abstractify, arrays.leaves)),
        memory_kinds=tuple(map(jaxprs.memory_kind_of, arrays.leaves)),
        treedef=treedef,
        statics=_statics(args, kwargs, static_positions, options.static_argnames),
        array_positions=tuple(arrays.positions),
        static_leaves=tuple(arrays.static),
        paths=leaf_paths(arrays.named_paths),
        owners=tuple(arrays.owners),
        donated=tuple(owner in donated for owner in arrays.owners),
        arrays_only=options.arrays_only,
    )


def _statics(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    positions: Iterable[int],
    names: Iterable[str],
) -> tuple[tuple[int | str, Any], ...]:
    """The static arguments of a call: by position, then by name."""
    statics: list[tuple[int | str, Any]] = []
    statics += [(i, args[i]) for i in sorted(positions) if i < len(args)]
    statics += [(name, kwargs[name]) for name in sorted(names) if name in kwargs]
    return tuple(statics)


def refuse_tracers(what: str, args: Any, kwargs: Any) -> None:
    """Refuses a call inside a function that jax traces: a search compiles and runs.

    Raises:
        TraceError: If an argument holds a tracer.
    """
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.core.Tracer):
            raise TraceError(
                f"{what} was called inside a function that jax traces (jit, grad, vmap, scan): an "
                f"argument is a tracer. Call it outside, with arrays or jax.ShapeDtypeStructs, and "
                f"call the plan, or plan.fn, inside."
            )


class _ArrayLeaves:
    """The leaves of a call that are arrays, and the others beside them.

    Attributes:
        leaves: The array leaves.
        positions: Number of each among all leaves.
        owners: Argument of each.
        named_paths: Name of its argument and path in it of each.
        static: The leaves that are no arrays, by number among all leaves.
    """

    def __init__(self, names: Sequence[str], arrays_only: bool) -> None:
        """Starts with no leaf.

        Args:
            names: Names of the positional arguments.
            arrays_only: True where Python numbers are static.
        """
        self._names, self._arrays_only = names, arrays_only
        self.leaves: list[Any] = []
        self.positions: list[int] = []
        self.owners: list[int | str] = []
        self.named_paths: list[tuple[str, tuple[Any, ...]]] = []
        self.static: list[tuple[int, Any]] = []

    def add(self, number: int, owner: int | str, path: tuple[Any, ...], leaf: Any) -> None:
        """Adds a leaf of an argument; `path` is its path in that argument."""
        name = self._names[owner] if isinstance(owner, int) else owner
        where = f"{name}{jax.tree_util.keystr(path)}"
        if _is_static_checked(leaf, where, self._arrays_only):
            self.static.append((number, leaf))
            return
        self.leaves.append(leaf)
        self.positions.append(number)
        self.owners.append(owner)
        self.named_paths.append((name, path))


def _check_binds(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises unless the arguments bind to the signature, where there is one."""
    if not parameters_of(fn):
        return
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise SignatureError(
            f"{getattr(fn, '__name__', fn)!s} cannot be called with {len(args)} positional "
            f"arguments and keywords {sorted(kwargs)}: {error}."
        ) from None
