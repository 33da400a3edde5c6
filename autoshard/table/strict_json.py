"""Reads the text of a table strictly: what is wrong is said with its place, and nothing hostile
gets further.

JSON allows a key twice, numbers that are none, and nesting without end; a table that people merge
by hand and a file that somebody else sent may have all of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autoshard.errors import TableError

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""A table of 10,000 leaves is 3 MB."""


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        TableError: If it cannot be read, is too large or is no text.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TableError(
            f"{shown(path)}: cannot be read ({reason}). Write one with plan.table.save(path)."
        ) from None
    if len(data) > MAX_BYTES:
        raise TableError(
            f"{shown(path)}: is larger than {MAX_BYTES} bytes, so it is no spec table. Check the "
            f"path."
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError(
            f"{shown(path)}: is no JSON (byte {error.start} is no UTF-8). Restore it from version "
            f"control."
        ) from None


def parse(text: str, where: str) -> dict[str, Any]:
    """JSON text to a dict; `where` names the file.

    Raises:
        TableError: If it is no JSON object, or has a key twice in one object.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise TableError(
                f"{where}: has {shown(twice)!r} twice in one object{_line(text, twice)}, perhaps "
                f"after a merge. "
                f"Keep one."
            )
        return found

    def no_number(name: str) -> Any:
        raise TableError(
            f"{where}: is no JSON: {name} is no number in it. Restore it from version control."
        )

    try:
        found = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
        text.encode("utf-8")
    except RecursionError:
        raise TableError(
            f"{where}: is no spec table: it is nested too deeply. Check the path."
        ) from None
    except json.JSONDecodeError as error:
        raise TableError(
            f"{where}: is no JSON ({error.msg} in line {error.lineno} column {error.colno}), "
            f"perhaps cut short. "
            f"Restore it from version control."
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise TableError(
            f"{where}: is no spec table: {error}. Restore it from version control."
        ) from None
    if not isinstance(found, dict):
        raise TableError(
            f"{where}: is no spec table: Expected `object`, got a JSON {type(found).__name__}. "
            f"Check the path."
        )
    return found


def convert(value: Any, kind: Any, where: str, place: str, text: str) -> Any:
    """A part of a table as its type.

    Args:
        value: Plain data.
        kind: The type.
        where: The file.
        place: The part (`inputs['params/w']`).
        text: The file's text, in which the line of the part is looked up.

    Raises:
        TableError: If the part is not of that type.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise refusal(str(error) or "nested too deeply", where, place, text) from None


def refusal(why: str, where: str, place: str, text: str) -> TableError:
    """The error for a part of a table: the file, the line, the part, and why."""
    key = place.partition("['")[2].rpartition("']")[0] if place.endswith("']") else place
    at = f" at {shown(place)}" if place else ""
    return TableError(
        f"{where}: is no spec table: {shown(why)}{at}{_line(text, key)}. Mend it, or restore it "
        f"from version control."
    )


def _line(text: str, key: str) -> str:
    """Where a key first stands in the text, for people: one leaf has one line."""
    quoted = f"{json.dumps(key, ensure_ascii=False)}:"
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(quoted):
            return f" (line {number})"
    return ""


def shown(value: object) -> str:
    r"""Text that is safe to print: what a terminal would act on is escaped, and very long text is
    cut.

    >>> shown("w" + chr(27) + "[31m")
    'w\\x1b[31m'
    """
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))
    return text if len(text) <= 500 else f"{text[:500]}..."


def object_at(data: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A field that is an object.

    Raises:
        TableError: If it is missing or something else.
    """
    if name not in data:
        raise refusal(f"Object missing required field `{name}`", where, "", "")
    if not isinstance(data[name], dict):
        raise refusal(f"Expected `object`, got `{type(data[name]).__name__}`", where, name, "")
    return dict(data[name])
