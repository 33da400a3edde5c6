"""`pkg.module:factory`: what the command line searches for, imported from where the user says."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from autoshard.devices.target import MAX_CPU_DEVICES
from autoshard.errors import ArgumentError, FactoryError, ProcessesError
from autoshard.text import first_line

LISTED = 10
"""So many functions of a module are listed in a message. Chosen by hand; no test depends on it."""


def load_factory(where: str) -> Callable[[], Any]:
    """Imports `pkg.module:factory` (from the current directory too) or `path/to/file.py:factory`.

    Raises:
        FactoryError: If the module or the factory does not exist, or importing it fails.
    """
    module_name, _, name = where.rpartition(":")
    if not module_name or not name:
        raise FactoryError(
            f"{where!r} is no factory. Write pkg.module:factory, or path/to/file.py:factory."
        )
    try:
        module = _module(module_name)
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(
            f"{where}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error

    factory: Callable[[], Any] | None = getattr(module, name, None)
    if factory is None or not callable(factory):
        functions = ", ".join(_public_functions(module)[:LISTED]) or "none"
        raise FactoryError(f"{where}: {module_name} has no function {name!r}. It has {functions}.")
    return factory


def _public_functions(module: ModuleType) -> list[str]:
    members = vars(module).items()
    return sorted(name for name, value in members if callable(value) and name[0] != "_")


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(name)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own module lacks is another error, and its caller says so.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise FactoryError(
                f"no module {error.name!r} can be imported from {Path.cwd()} or the environment. "
                f"Run from the directory that holds it, or install it."
            ) from error
        raise


def _module_of_file(name: str) -> ModuleType:
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FactoryError(f"{name}: no such file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def call_factory(where: str) -> dict[str, Any]:
    """The arguments of `optimize` that a factory gives.

    Raises:
        FactoryError: If it fails, or returns neither `(fn, example_args)` nor a mapping with both.
    """
    factory = load_factory(where)
    try:
        returned = factory()
    except Exception as error:
        raise FactoryError(
            f"{where}: the factory failed: {type(error).__name__}: {error}"
        ) from error

    arguments: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        arguments = dict(returned)
    elif isinstance(returned, tuple) and len(returned) == 2:
        arguments = {"fn": returned[0], "example_args": returned[1]}
    if not {"fn", "example_args"} <= set(arguments):
        raise FactoryError(
            f"{where}: the factory returned {type(returned).__name__}; return (fn, example_args), "
            f"or a dict of optimize's arguments with at least these two."
        )
    return arguments


def use_cpu_devices(count: int | None) -> None:
    """Makes this process see `count` CPU devices and nothing else; must come before the first use
    of a device.
    """
    if count is None:
        return
    if not 1 <= count <= MAX_CPU_DEVICES:
        raise ArgumentError(
            f"--cpu-devices {count}: a process has 1 to {MAX_CPU_DEVICES} of them. Name a smaller "
            f"mesh, or plan for hardware that is not here: --target."
        )
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ArgumentError(
            f"--cpu-devices {count}: jax already started its devices ({error})."
        ) from None


def use_processes(how: str | None) -> None:
    """Joins this process with others that make the same call; must come before the first use of a
    device.

    Args:
        how: `auto` where jax can tell from the environment (SLURM, Open MPI, Kubernetes, Cloud
            TPU), or `HOST:PORT,COUNT,NUMBER`: where process 0 listens, how many there are, which
            one this is. None for alone.

    Raises:
        ArgumentError: If it is neither.
        ProcessesError: If the others are not found.
    """
    if how is None:
        return
    arguments = {} if how == "auto" else _process_arguments(how)
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        reason = first_line(str(error))
        raise ProcessesError(
            f"--distributed {how}: {reason}. Start all processes at the same time, and say where "
            f"process 0 listens: HOST:PORT,COUNT,NUMBER."
        ) from None


def _process_arguments(how: str) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize` in `HOST:PORT,COUNT,NUMBER`."""
    address, *numbers = how.split(",")
    if len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
        raise ArgumentError(
            f"--distributed {how}: write auto, or HOST:PORT,COUNT,NUMBER such as node0:1234,4,0."
        )
    count, number = map(int, numbers)
    return {"coordinator_address": address, "num_processes": count, "process_id": number}
