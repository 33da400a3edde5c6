"""Checks of what users pass, in one place: an argument of another kind is refused by name before
anything is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Any

from autoshard.errors import ArgumentError, AutoshardError
from autoshard.text import shown

MAX_SEED = 2**32 - 1
"""Of NumPy's RandomState, which Optuna's samplers have. Without it
test_arguments_of_another_kind_are_refused_by_name fails."""


def check_kind(
    name: str,
    value: Any,
    kinds: type | tuple[type, ...],
    use: str,
    error: type[AutoshardError] = ArgumentError,
) -> None:
    """Refuses a value of another type; a bool is no number, unless it is asked for.

    Args:
        name: What the user calls it.
        value: What they passed.
        kinds: What it may be.
        use: What to pass instead, as the end of a sentence.
        error: Raised.

    >>> check_kind("seed", 3, int, "an int such as 0")
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if int in kinds:
        kinds += (Integral,)  # NumPy's, too
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, kinds):
        raise error(f"{name}={shown(repr(value))} is a {type(value).__name__}; use {use}.")


_OPTIONAL: Mapping[str, tuple[tuple[type, ...], str]] = {
    "target": ((str,), "a name such as 'tpu:v5e:4x4'"),
    "variants": ((Mapping,), "a mapping of names to functions, such as {'remat': f, 'plain': g}"),
    "example_kwargs": ((Mapping,), "a mapping of names to values"),
    "carry": ((Mapping, Sequence), "pairs (argument, output), such as {0: 0}"),
    "compiler_options": ((Mapping,), "a mapping of XLA's options to values"),
    "cache_dir": ((str, PathLike), "the path of a folder, 'auto' or None"),
    "storage": ((str, PathLike), "a journal's path or a URL such as 'postgresql://user@host/db'"),
    "study": ((str,), "a name"),
}
"""Arguments that may be None: what else they may be, and how to say it."""

_NEVER_NONE: Mapping[str, tuple[tuple[type, ...], str]] = {
    "compile_timeout_s": ((int, float), "a number of seconds above 0"),
    "isolate": ((bool,), "True or False"),
    "progress": ((bool,), "True or False"),
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of `optimize` and `apply` that are of another kind than documented.

    Args:
        arguments: By name; others than known here are passed over.

    Raises:
        ArgumentError: Naming the argument, and what to use.
    """
    for name, (kinds, use) in _OPTIONAL.items():
        if arguments.get(name) is not None:
            check_kind(name, arguments[name], kinds, use)
    for name, (kinds, use) in _NEVER_NONE.items():
        if name in arguments:
            check_kind(name, arguments[name], kinds, use)
    for name in arguments.get("compiler_options") or ():
        check_kind("a name in compiler_options", name, str, "XLA's name of an option")
    for what in ("static", "donate"):
        _check_listed(f"{what}_argnums", arguments.get(f"{what}_argnums"), int, "1 or (0, 1)")
        _check_listed(f"{what}_argnames", arguments.get(f"{what}_argnames"), str, "'x' or ('x',)")
    check_seed(arguments.get("seed", 0))


def check_seed(seed: Any) -> None:
    """Refuses what no sampler takes as a seed."""
    use = f"an int from 0 to {MAX_SEED}"
    check_kind("seed", seed, int, use)
    if not 0 <= seed <= MAX_SEED:
        raise ArgumentError(f"seed={seed}; use {use}.")


def _check_listed(name: str, value: Any, kind: type, example: str) -> None:
    """Refuses what is neither of a kind nor several of it."""
    wanted = Integral if kind is int else kind
    if value is None or (isinstance(value, wanted) and not isinstance(value, bool)):
        return
    use = f"{kind.__name__} or several of it, such as {example}"
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        check_kind(name, value, (), use)
    for item in value:
        if not isinstance(item, wanted) or isinstance(item, bool):
            raise ArgumentError(f"{name}={shown(repr(value))}: {item!r} is none; use {use}.")
