"""What a function is called with: leaves, leaf paths, statics and donation, flattened exactly as
`jax.jit` would.

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

from autoshard.errors import ArgumentError, SignatureError
from autoshard.jax_internals import jaxprs


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The `jit` arguments of a function: each argument by position where the signature tells it."""

    static_argnums: frozenset[int]
    static_argnames: frozenset[str]
    donate_argnums: frozenset[int]
    donate_argnames: frozenset[str]


@dataclass(frozen=True, slots=True)
class Call:
    """One flattened call.

    Attributes:
        leaves: The array leaves, in order.
        avals: Shape, dtype and weak type of each.
        treedef: Structure of `(args, kwargs)` with static arguments removed.
        statics: Static arguments by position or name.
        array_positions: Leaf number in `treedef` of each array leaf.
        static_leaves: Leaves that are no arrays for jax (an activation function inside a module),
            by leaf number.
        paths: Leaf path of each array leaf, unique, starting with the parameter's name.
        owners: Argument of each leaf: its position, or its name for keyword arguments.
        donated: Whether each leaf is donated.
    """

    leaves: tuple[Any, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any
    statics: tuple[tuple[int | str, Any], ...]
    array_positions: tuple[int, ...]
    static_leaves: tuple[tuple[int, Any], ...]
    paths: tuple[str, ...]
    owners: tuple[int | str, ...]
    donated: tuple[bool, ...]

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


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    # statics may define an == that raises (arrays inside); identity is then the only safe answer
    except Exception:
        return a is b


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of `fn`, empty where it has no readable signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):
        return []


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


def _from_start(positions: Iterable[int], count: int) -> set[int]:
    """Positions among so many, those counted from the end (negative) counted from the start."""
    return {position % count if position < 0 else position for position in positions}


def options_for(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> CallOptions:
    """Normalises the jit arguments: names and positions imply each other where the signature tells.

    As in `jax.jit`. A function that is jitted already brings its own where none are passed here.

    Raises:
        ArgumentError: If the function has no such argument.
    """
    own = jaxprs.jit_options(fn)
    # Both or none: a position that is passed must not be joined with a name of its own.
    if static_argnums is None and static_argnames is None:
        static_argnums, static_argnames = own.get("static_argnums"), own.get("static_argnames")
    if donate_argnums is None and donate_argnames is None:
        donate_argnums, donate_argnames = own.get("donate_argnums"), own.get("donate_argnames")
    parameters = _Parameters(fn)
    static = parameters.resolve("static", _as_tuple(static_argnums), _as_tuple(static_argnames))
    donate = parameters.resolve("donate", _as_tuple(donate_argnums), _as_tuple(donate_argnames))
    return CallOptions(*static, *donate)


class _Parameters:
    """The parameters of a function, as far as its signature tells them."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._function_name = getattr(fn, "__name__", str(fn))
        self._parameters = parameters_of(fn)
        self._positional = [
            p.name
            for p in self._parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._by_name = {
            p.name for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }

    def _has(self, kind: Any) -> bool:
        return any(parameter.kind is kind for parameter in self._parameters)

    def resolve(
        self, what: str, numbers: Iterable[int], names: Iterable[str]
    ) -> tuple[frozenset[int], frozenset[str]]:
        """Arguments by position and by name; each in both ways where it can be passed in both.

        Args:
            what: `static` or `donate`.
            numbers: Positions, negative ones from the end.
            names: Names.
        """
        if not self._parameters:  # a builtin without a signature: nothing implies anything
            return frozenset(numbers), frozenset(names)
        self._check(what, numbers, names)
        count = len(self._positional)
        positions = _from_start(numbers, count)
        names = set(names)
        for position in positions:
            if position < count and self._positional[position] in self._by_name:
                names.add(self._positional[position])
        positions |= {self._positional.index(name) for name in names if name in self._positional}
        return frozenset(positions), frozenset(names)

    def _check(self, what: str, numbers: Iterable[int], names: Iterable[str]) -> None:
        """Raises unless there are such parameters."""
        unknown = sorted(set(names) - self._by_name)
        if unknown and not self._has(inspect.Parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"{what}_argnames names {unknown}, but {self._function_name} takes "
                f"{sorted(self._by_name)}."
            )
        if self._has(inspect.Parameter.VAR_POSITIONAL):
            return
        count = len(self._positional)
        for number in set(numbers):
            if not -count <= number < count:
                raise ArgumentError(
                    f"{what}_argnums has {number}, but {self._function_name} has {count} "
                    f"positional parameters {self._positional}."
                )


def is_static(leaf: object) -> bool:
    """True for a leaf that is no array for jax."""
    try:
        jaxprs.abstractify(leaf)
    except TypeError:
        return True
    return False


def _is_static_checked(leaf: object, where: str) -> bool:
    """`is_static`, which refuses leaves that stand for arrays but cannot be passed to a program."""
    try:
        static = is_static(leaf)
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
    static_positions = _from_start(options.static_argnums, len(args))
    dynamic_positions = [i for i in range(len(args)) if i not in static_positions]
    dynamic = tuple(args[i] for i in dynamic_positions)
    keywords = {name: kwargs[name] for name in kwargs if name not in options.static_argnames}
    with_paths, treedef = jax.tree_util.tree_flatten_with_path((dynamic, keywords))

    arrays = _ArrayLeaves(_names(fn, len(args)))
    for number, (path, leaf) in enumerate(with_paths):
        # path[0] chooses between `dynamic` and `keywords`, path[1] the argument
        owner: int | str = dynamic_positions[path[1].idx] if path[0].idx == 0 else path[1].key
        arrays.add(number, owner, tuple(path[2:]), leaf)
    donated = options.donate_argnums | options.donate_argnames
    return Call(
        leaves=tuple(arrays.leaves),
        avals=tuple(map(jaxprs.abstractify, arrays.leaves)),
        treedef=treedef,
        statics=_statics(args, kwargs, static_positions, options.static_argnames),
        array_positions=tuple(arrays.positions),
        static_leaves=tuple(arrays.static),
        paths=leaf_paths(arrays.named_paths),
        owners=tuple(arrays.owners),
        donated=tuple(owner in donated for owner in arrays.owners),
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


class _ArrayLeaves:
    """The leaves of a call that are arrays, and the others beside them.

    Attributes:
        leaves: The array leaves.
        positions: Number of each among all leaves.
        owners: Argument of each.
        named_paths: Name of its argument and path in it of each.
        static: The leaves that are no arrays, by number among all leaves.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Starts with no leaf.

        Args:
            names: Names of the positional arguments.
        """
        self._names = names
        self.leaves: list[Any] = []
        self.positions: list[int] = []
        self.owners: list[int | str] = []
        self.named_paths: list[tuple[str, tuple[Any, ...]]] = []
        self.static: list[tuple[int, Any]] = []

    def add(self, number: int, owner: int | str, path: tuple[Any, ...], leaf: Any) -> None:
        """Adds a leaf of an argument; `path` is its path in that argument."""
        name = self._names[owner] if isinstance(owner, int) else owner
        if _is_static_checked(leaf, f"{name}{jax.tree_util.keystr(path)}"):
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
