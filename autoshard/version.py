"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Version of autoshard, `unknown` where it runs from a bare checkout."""
    try:
        return version("autoshard")
    except PackageNotFoundError:
        return "unknown"
