"""Each folder says what it imports, and that is true; `lint-imports` says that none goes upward."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    path.name: path
    for path in [*(ROOT / "autoshard").iterdir(), ROOT / "cost_model", ROOT / "search"]
    if (path / "__init__.py").exists()
}
UNDER_EVERYTHING = {"arguments", "errors", "text", "version"}


def _docstring(folder: str) -> str:
    source = (FOLDERS[folder] / "__init__.py").read_text()
    return ast.get_docstring(ast.parse(source)) or ""


def _stated_imports(folder: str) -> set[str]:
    match = re.search(r"^Imports: ([^.]+)\.$", _docstring(folder), re.MULTILINE)
    assert match is not None, f"{folder}/__init__.py ends without a line 'Imports: ...'"
    return set(re.split(r",\s+", match[1])) - {"nothing of autoshard"} - UNDER_EVERYTHING


def _imports(folder: str) -> set[str]:
    """What the files of a folder import of autoshard, wherever in them, without `folder` itself."""
    names: set[str] = set()
    for path in FOLDERS[folder].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                package, _, rest = node.module.partition(".")
                if package == "autoshard" and rest:
                    names.add(rest.split(".")[0])
    return names - {folder} - UNDER_EVERYTHING


def test_all_folders_of_the_package_are_here() -> None:
    assert len(FOLDERS) == 15


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_says_what_it_imports(folder: str) -> None:
    assert _stated_imports(folder) == _imports(folder)


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_is_described_in_a_few_lines(folder: str) -> None:
    assert 5 <= len(_docstring(folder).splitlines()) <= 15
