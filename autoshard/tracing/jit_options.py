"""What `jax.jit` is told of the arguments of a function: which are static, which donated.

It is passed to us as it is to `jax.jit`, or a function that is jitted already says it: `jax.jit`,
`nnx.jit` and `equinox.filter_jit` each have a rule. A method, a `functools.partial` or a decorated
function hands on the rule of the function inside, whose arguments are at other positions. Neither
Flax nor Equinox is imported here.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.jax_internals import jaxprs


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The `jit` arguments of a function: each argument by position where the signature tells it.

    Attributes:
        static_argnums: Positions of static arguments.
        static_argnames: Their names.
        donate_argnums: Positions of donated arguments.
        donate_argnames: Their names.
        arrays_only: True where all leaves but arrays are static, Python numbers included: the rule
            of `equinox.filter_jit`. `jax.jit` makes arrays of numbers.
    """

    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    donate_argnums: frozenset[int] = frozenset()
    donate_argnames: frozenset[str] = frozenset()
    arrays_only: bool = False


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

    >>> import functools, jax
    >>> power = jax.jit(lambda x, n: x**n, static_argnames="n")
    >>> sorted(options_for(functools.partial(power, 2.0)).static_argnums)
    [0]
    """
    own = _own_options(fn)
    parameters = _Parameters(fn)
    # Both or none: a position that is passed must not be joined with a name of its own.
    if static_argnums is None and static_argnames is None:
        static = own.static_argnums, own.static_argnames
    else:
        static = parameters.resolve("static", _as_tuple(static_argnums), _as_tuple(static_argnames))
    if donate_argnums is None and donate_argnames is None:
        donate = own.donate_argnums, own.donate_argnames
    else:
        donate = parameters.resolve("donate", _as_tuple(donate_argnums), _as_tuple(donate_argnames))
    return CallOptions(*static, *donate, own.arrays_only)


# The rule of a wrapper ----------------------------------------------------------------------------


def _own_options(fn: Any) -> CallOptions:
    """The rule of the outermost jit around a function, for the arguments of the function as it is
    called; the default where there is none.
    """
    bound = 0
    while (own := _stated(fn)) is None:
        inside = _inside(fn)
        if inside is None:
            return CallOptions()
        fn, count = inside
        bound += count
    return CallOptions(
        static_argnums=frozenset(n - bound for n in own.static_argnums if n >= bound),
        static_argnames=own.static_argnames,
        donate_argnums=frozenset(n - bound for n in own.donate_argnums if n >= bound),
        donate_argnames=own.donate_argnames,
        arrays_only=own.arrays_only,
    )


def _inside(fn: Any) -> tuple[Any, int] | None:
    """What a callable calls, and how many positional arguments it passes before those it is given;
    None for a function that is no wrapper.
    """
    if isinstance(fn, types.MethodType):
        return fn.__func__, 1
    # functools.partial, and those of jax and Equinox, which are pytrees
    if hasattr(fn, "func") and hasattr(fn, "args") and hasattr(fn, "keywords"):
        return fn.func, len(fn.args)
    if hasattr(fn, "__wrapped__"):  # by functools.wraps: its signature is that of what it wraps
        return fn.__wrapped__, 0
    # An object of a class written in Python: its __call__ may be jitted.
    call: Any = type(fn).__call__
    if isinstance(call, types.FunctionType) or _stated(call) is not None:
        return call, 1
    return None


def _stated(fn: Any) -> CallOptions | None:
    """The rule that a callable states itself, for its own positions and names."""
    if isinstance(fn, types.MethodType):  # it answers as its function, whose positions are others
        return None
    if type(fn).__name__ == "_JitWrapper" and type(fn).__module__.startswith("equinox."):
        return _of_filter_jit(fn)
    jitted = getattr(fn, "jitted_fn", fn)  # nnx.jit keeps the jitted function inside
    if not jaxprs.is_jitted(jitted):
        return None
    own = jaxprs.jit_options(jitted)
    parameters = _Parameters(fn)
    return CallOptions(
        *parameters.resolve("static", *_numbers_and_names(own, "static")),
        *parameters.resolve("donate", *_numbers_and_names(own, "donate")),
    )


def _numbers_and_names(own: dict[str, Any], what: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return _as_tuple(own.get(f"{what}_argnums")), _as_tuple(own.get(f"{what}_argnames"))


def _of_filter_jit(fn: Any) -> CallOptions:
    """All arrays are traced and all else is static; the first argument and the others are donated
    or not.
    """
    positional, names = _Parameters(fn).names()
    donated = [n for n in range(len(positional)) if (fn.donate_rest if n else fn.donate_first)]
    donated_names = {positional[n] for n in donated}
    if fn.donate_rest:
        donated_names |= names - set(positional)
    return CallOptions(
        donate_argnums=frozenset(donated),
        donate_argnames=frozenset(donated_names & names),
        arrays_only=True,
    )


# Positions and names ------------------------------------------------------------------------------


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


def from_start(positions: Iterable[int], count: int) -> set[int]:
    """Positions among so many, those counted from the end (negative) counted from the start."""
    return {position % count if position < 0 else position for position in positions}


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

    def names(self) -> tuple[list[str], set[str]]:
        """Those that can be passed by position, in order, and those that can be passed by name."""
        return self._positional, self._by_name

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
        positions = from_start(numbers, count)
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
