"""Bytes, seconds and lines as people read them, and back."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from rich.console import Console

from autoshard.errors import ArgumentError

if TYPE_CHECKING:
    pass


WIDTH = 176


def bytes_text(count: float) -> str:
    """Bytes for people, in binary units.

    >>> bytes_text(1536), bytes_text(32), bytes_text(3 * 2**30)
    ('1.50 KiB', '32 B', '3.00 GiB')
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024 or unit == "TiB":
            break
    return f"{count:.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds for people.

    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(4.2e-5)
    ('12.3 ms', '2.50 s', '42.0 us')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return (
                f"{seconds * factor:.3g} {unit}"
                if unit == "s" and seconds >= 100
                else f"{_three(seconds * factor)} {unit}"
            )
    raise AssertionError


def _three(number: float) -> str:
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def render(*parts: object, width: int = WIDTH) -> str:
    """Plain text of rich renderables."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False
    )
    for part in parts:
        console.print(part)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(printable(line.rstrip()) for line in file.getvalue().split("\n")).rstrip("\n")


def printable(line: str) -> str:
    """A line without what a terminal would act on: names in tables and programs may be
    anybody's.
    """
    return (
        line
        if line.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    )


_SIZE = re.compile(r"^\s*([0-9.]+)\s*([KMGT]?i?B)\s*$")


_UNITS = {"B": 1, **{f"{u}iB": 2 ** (10 * i) for i, u in enumerate("KMGT", 1)},
          **{f"{u}B": 10 ** (3 * i) for i, u in enumerate("KMGT", 1)}}  # fmt: skip


def parse_bytes(size: int | str | None, name: str = "memory_budget_bytes") -> int | None:
    """A number of bytes from an int or text; `name` is the argument that it came by.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 kB".replace("k", "K")), parse_bytes(1024)
    (17179869184, 1500, 1024)

    Raises:
        ArgumentError: If it is neither.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None:
        raise ArgumentError(
            f"{name}={size!r}; use a positive int, or text such as '16GiB' or '800MB'."
        )
    return int(float(match[1]) * _UNITS[match[2]])
