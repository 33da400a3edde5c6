"""Bytes, seconds and errors as people read them, and byte sizes read back from text."""

from __future__ import annotations

import re

from autoshard.errors import ArgumentError

BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Bytes of each binary unit, smallest first (IEC 80000-13). `bytes_text` writes these only."""

BYTES_OF_UNIT = {**BINARY_UNITS, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Bytes of each unit that text may use: binary ones, and decimal ones (SI) as vendors do."""

LINE_LENGTH = 300
"""Most characters of an error's message on one line: XLA's first lines may be pages long. Chosen by
hand, no test depends on it."""

MAX_SHOWN = 500
"""Most characters of a file's own text in an error. Chosen by hand, no test depends on it."""

_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*((?:[KMGT]i?)?B)\s*")


def bytes_text(count: float) -> str:
    """Bytes for people, in binary units.

    >>> bytes_text(1536), bytes_text(32), bytes_text(3 * 2**30)
    ('1.50 KiB', '32 B', '3.00 GiB')
    """
    unit = "B"
    for name, size in BINARY_UNITS.items():
        if abs(count) >= size:
            unit = name
    return f"{count:.0f} B" if unit == "B" else f"{count / BINARY_UNITS[unit]:.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds for people.

    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(4.2e-5)
    ('12.3 ms', '2.50 s', '42.0 us')
    """
    if seconds >= 100:
        return f"{seconds:.3g} s"
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    if seconds * 1e3 >= 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def _three_digits(number: float) -> str:
    """At least three significant digits, never an exponent."""
    if number < 10:
        return f"{number:.2f}"
    if number < 100:
        return f"{number:.1f}"
    return f"{number:.0f}"


def printable(line: str) -> str:
    """A line in which nothing acts on a terminal: names in tables and programs are anybody's."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def shown(value: object) -> str:
    r"""Text of a file that is safe to print, cut where it is very long.

    >>> shown("w" + chr(27) + "[31m")
    'w\\x1b[31m'
    """
    text = printable(str(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first_line(text: str) -> str:
    """The first line of a text, "" of an empty one: messages of XLA and of jax go on for pages."""
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def one_line(error: BaseException) -> str:
    r"""Type and first line of an error, for reasons and logs.

    >>> one_line(ValueError("no such axis\nin a call"))
    'ValueError: no such axis'
    """
    return f"{type(error).__name__}: {first_line(str(error))[:LINE_LENGTH]}"


def parse_bytes(size: int | str | None, name: str = "memory_budget_bytes") -> int | None:
    """A number of bytes from an int or text; `name` is the argument that it came by.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 KB"), parse_bytes(1024)
    (17179869184, 1500, 1024)

    Raises:
        ArgumentError: If it is neither.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    count = int(float(match[1]) * BYTES_OF_UNIT[match[2]]) if match is not None else 0
    if count <= 0:
        raise ArgumentError(
            f"{name}={size!r}; use a positive int, or text such as '16GiB' or '800MB'."
        )
    return count
