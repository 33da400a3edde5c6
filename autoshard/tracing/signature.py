"""What a function is called with: leaves, leaf paths, statics and donation, flattened exactly as
`jax.jit` would.

The rest of autoshard sees a function of flat array leaves. Everything that is not an array for jax
-- arguments named in `static_argnums`/`static_argnames`, and leaves such as an activation function
inside a module -- is kept aside and put back when the function is called.
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
    """The `jit` arguments of a function, normalised: every argument by position where the signature
    tells it.
    """

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
        args = list(dynamic)
        for key, value in sorted(
            (item for item in self.statics if isinstance(item[0], int)), key=lambda i: int(i[0])
        ):
            args.insert(int(key), value)
        kwargs = dict(kwargs) | {
            str(key): value for key, value in self.statics if isinstance(key, str)
        }
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


def options_for(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> CallOptions:
    """Normalises the jit arguments: names and positions imply each other where the signature tells,
    as in `jax.jit`.

    A function that is jitted already brings its own where none are given here.
    """
    own = jaxprs.jit_options(fn)
    if static_argnums is None and static_argnames is None:
        static_argnums, static_argnames = own.get("static_argnums"), own.get("static_argnames")
    if donate_argnums is None and donate_argnames is None:
        donate_argnums, donate_argnames = own.get("donate_argnums"), own.get("donate_argnames")
    parameters = parameters_of(fn)
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    has_var_kw = any(p.kind is p.VAR_KEYWORD for p in parameters)
    has_var_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    called = getattr(fn, "__name__", str(fn))

    def both(nums: Any, names: Any, what: str) -> tuple[frozenset[int], frozenset[str]]:
        numbers, strings = set(_as_tuple(nums)), set(_as_tuple(names))
        if parameters:
            unknown = strings - named
            if unknown and not has_var_kw:
                raise ArgumentError(
                    f"{what}_argnames names {sorted(unknown)}, but {called} takes {sorted(named)}."
                )
            bad = [
                n
                for n in numbers
                if not has_var_positional and not -len(positional) <= n < len(positional)
            ]
            if bad:
                raise ArgumentError(
                    f"{what}_argnums has {bad[0]}, but {called} has {len(positional)} positional "
                    f"parameters "
                    f"{positional}."
                )
            numbers = {n % len(positional) if n < 0 else n for n in numbers}
            strings |= {
                positional[n] for n in numbers if n < len(positional) and positional[n] in named
            }
            numbers |= {positional.index(s) for s in strings if s in positional}
        return frozenset(numbers), frozenset(strings)

    static = both(static_argnums, static_argnames, "static")
    donate = both(donate_argnums, donate_argnames, "donate")
    return CallOptions(*static, *donate)


def is_static(leaf: object) -> bool:
    """True for a leaf that is no array for jax."""
    try:
        jaxprs.abstractify(leaf)
    except TypeError:
        return True
    return False


def _refused(leaf: object, where: str) -> bool:
    """`is_static`, with an error for leaves that stand for arrays but cannot be given to a compiled
    program.
    """
    try:
        static = is_static(leaf)
    except ValueError as error:  # masked arrays; jax.jit says the same
        raise ArgumentError(f"{where}: {error}") from None
    if jaxprs.is_ref(leaf):
        raise ArgumentError(
            f"{where} is a mutable array (jax.new_ref), which a plan cannot lay out. Pass "
            f"{where}[...] and return its "
            f"new value instead; refs that the function makes itself are fine."
        )
    return static


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    for parameter in parameters_of(fn):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}/{i}" for i in range(count - len(names))]
    return names + [f"arg{i}" for i in range(len(names), count)]


def leaf_paths(prefixed: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[str, ...]:
    """Unique leaf paths: the short form (`params/layers/wq`), or the full one
    (`params['layers']['wq']`) on a clash.

    >>> key = jax.tree_util.DictKey
    >>> leaf_paths([("p", (key("a/b"),)), ("p", (key("a"), key("b"))), ("x", ())])
    ("p['a/b']", "p['a']['b']", 'x')
    """
    keystr = jax.tree_util.keystr
    short = [
        "/".join(filter(None, (name, keystr(path, simple=True, separator="/"))))
        for name, path in prefixed
    ]
    seen = Counter(short)
    return tuple(
        text if seen[text] == 1 else name + keystr(path)
        for text, (name, path) in zip(short, prefixed, strict=True)
    )


def flatten_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
) -> Call:
    """Flattens a call of `fn` as `jax.jit` would.

    Raises:
        SignatureError: If the arguments do not bind to the signature of `fn`.
    """
    if parameters_of(fn):
        try:
            inspect.signature(fn).bind(*args, **kwargs)
        except TypeError as error:
            raise SignatureError(
                f"{getattr(fn, '__name__', fn)!s} cannot be called with {len(args)} positional "
                f"arguments and keywords "
                f"{sorted(kwargs)}: {error}."
            ) from None
    static_positions = {n % len(args) if n < 0 else n for n in options.static_argnums}
    statics: list[tuple[int | str, Any]] = [
        (i, args[i]) for i in sorted(static_positions) if i < len(args)
    ]
    statics += [(name, kwargs[name]) for name in sorted(options.static_argnames) if name in kwargs]
    positions = [i for i in range(len(args)) if i not in static_positions]
    dynamic = tuple(args[i] for i in positions)
    keywords = {
        name: value for name, value in kwargs.items() if name not in options.static_argnames
    }
    with_paths, treedef = jax.tree_util.tree_flatten_with_path((dynamic, keywords))
    names = _names(fn, len(args))
    leaves: list[Any] = []
    static_leaves: list[tuple[int, Any]] = []
    array_positions: list[int] = []
    owners: list[int | str] = []
    prefixed: list[tuple[str, tuple[Any, ...]]] = []
    for number, (path, leaf) in enumerate(with_paths):
        owner: int | str = positions[path[1].idx] if path[0].idx == 0 else path[1].key
        name = names[owner] if isinstance(owner, int) else owner
        if _refused(leaf, f"{name}{jax.tree_util.keystr(path[2:])}"):
            static_leaves.append((number, leaf))
            continue
        prefixed.append((name, tuple(path[2:])))
        leaves.append(leaf)
        owners.append(owner)
        array_positions.append(number)
    return Call(
        leaves=tuple(leaves),
        avals=tuple(jaxprs.abstractify(leaf) for leaf in leaves),
        treedef=treedef,
        statics=tuple(statics),
        array_positions=tuple(array_positions),
        static_leaves=tuple(static_leaves),
        paths=leaf_paths(prefixed),
        owners=tuple(owners),
        donated=tuple(
            o in (options.donate_argnames if isinstance(o, str) else options.donate_argnums)
            for o in owners
        ),
    )
