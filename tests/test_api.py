"""The public face: what `autoshard` exports, and that nothing a caller needs is missing."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import autoshard

ROOT = Path(__file__).parents[1]
PUBLIC = {name: getattr(autoshard, name) for name in autoshard.__all__ if name != "__version__"}


def test_dir_shows_the_api_and_nothing_else() -> None:
    import autoshard.cost_model.predict  # a submodule that was imported is no part of it

    assert dir(autoshard) == sorted(autoshard.__all__)
    assert all(getattr(autoshard, name) is not None for name in dir(autoshard))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = autoshard.optimise


def test_type_checkers_see_what_is_loaded_lazily() -> None:
    tree = ast.parse((ROOT / "autoshard" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    stated = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.name == alias.asname
            stated[alias.name] = node.module
    assert stated == autoshard._HOMES


def test_the_version_is_that_of_the_distribution() -> None:
    assert autoshard.__version__ == version("autoshard")


def test_no_public_function_has_the_name_of_a_module_beside_it() -> None:
    modules = {p.stem for p in (ROOT / "autoshard").iterdir()}
    assert not modules & set(PUBLIC)


def autoshard_classes(hint: Any) -> Iterator[type]:
    """Classes of this package that a type names."""
    if isinstance(hint, type):
        if hint.__module__.startswith("autoshard"):
            yield hint
        return
    for part in typing.get_args(hint):
        yield from autoshard_classes(part)


def functions_of(member: Any) -> Iterator[Callable[..., Any]]:
    """A function, or the public methods and properties of a class."""
    if inspect.isfunction(member):
        yield member
    elif inspect.isclass(member) and not issubclass(member, BaseException):
        for name, attribute in inspect.getmembers(member):
            if name.startswith("_") and name != "__call__":
                continue
            if isinstance(attribute, property) and attribute.fget is not None:
                yield attribute.fget
            elif inspect.isfunction(attribute) or inspect.ismethod(attribute):
                yield attribute


def named_by(name: str) -> Iterator[tuple[str, str]]:
    """(place, class) of each class that the signature or the docstring of a public name names."""
    for function in functions_of(PUBLIC[name]):
        place = f"{name}: {function.__qualname__}"
        for hint in typing.get_type_hints(inspect.unwrap(function)).values():
            for cls in autoshard_classes(hint):
                yield place, cls.__name__
        for error in re.findall(r"^ {4,}(\w+Error):", inspect.getdoc(function) or "", re.M):
            yield place, error


@pytest.mark.parametrize("name", PUBLIC)
def test_every_class_that_a_public_signature_names_is_exported(name: str) -> None:
    builtin = {"TypeError", "ValueError", "OSError", "KeyError"}
    missing = {
        f"{place} names {cls}" for place, cls in named_by(name) if cls not in {*PUBLIC, *builtin}
    }
    assert not missing


def test_importing_loads_no_library_that_is_not_needed() -> None:
    code = "import jax, sys; before = set(sys.modules); import autoshard; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"optuna", "networkx", "scipy", "rich", "typer", "jinja2"}
    assert not heavy & {module.partition(".")[0] for module in done.stdout.split()}


THREADS = """
import threading, autoshard
failed = []
start = threading.Barrier(len(autoshard.__all__))
def load(name):
    start.wait()
    try:
        getattr(autoshard, name)
    except Exception as error:
        failed.append(f"{name}: {error}")
threads = [threading.Thread(target=load, args=[name]) for name in autoshard.__all__]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed)
"""


def test_names_may_be_used_first_by_many_threads() -> None:
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
