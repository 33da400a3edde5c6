"""What is taken from jax's inside is listed, and a jax that lacks some of it is refused by name."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from autoshard.errors import JaxVersionError
from autoshard.jax_internals import needed_names
from autoshard.jax_internals.needed_names import NEEDED, TESTED, missing_names, require_names

ROOT = Path(__file__).parents[2]
INSIDE = ("jax._src", "jax.extend", "jaxlib", "jax.interpreters")


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def names_taken(path: Path) -> dict[str, set[str]]:
    """By module of jax's inside, the names that a file takes from it."""
    tree = ast.parse(path.read_text())
    taken: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith(INSIDE):
            continue
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if not is_module(whole):
                taken[str(node.module)].add(alias.name)
                continue
            for used in ast.walk(tree):
                if isinstance(used, ast.Attribute) and ast.unparse(used.value) == alias.name:
                    taken[whole].add(used.attr)
    return taken


def test_every_name_that_is_taken_is_listed_and_no_other() -> None:
    taken: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "autoshard" / "jax_internals").glob("*.py"):
        for module, names in names_taken(path).items():
            taken[module] |= names
    assert {module: set(names) for module, names in NEEDED.items()} == taken
    assert not list(missing_names())


def test_each_missing_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    partial_eval = importlib.import_module("jax._src.interpreters.partial_eval")
    monkeypatch.delattr(partial_eval, "lower_jaxpr2")
    gone = {**NEEDED, "jax._src.no_such_module": ("name",)}
    monkeypatch.setattr(needed_names, "NEEDED", gone)
    words = (
        r"does not have jax\._src\.interpreters\.partial_eval\.lower_jaxpr2, "
        r"jax\._src\.no_such_module, which"
    )
    with pytest.raises(JaxVersionError, match=words):
        require_names()


NEWER = """
import jax
jax.__version__ = "0.99.0"
from jax._src import source_info_util
del source_info_util.user_frames
import autoshard
try:
    autoshard.optimize
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_newer_jax_without_a_name_is_refused_before_anything_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEWER], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith(
        "JaxVersionError jax 0.99.0 does not have jax._src.source_info_util.user_frames, which"
    )


def test_the_tested_releases_are_those_that_are_installed() -> None:
    pinned = re.findall(r"^jax==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tuple(pinned) == TESTED
