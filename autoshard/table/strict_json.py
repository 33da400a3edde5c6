"""Reads JSON strictly: what is wrong is named with its place, and nothing hostile gets further.

JSON allows a key twice, numbers that are none, and nesting without end; a table that people merge
by hand and a file that somebody else sent may have all of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autoshard.errors import TableError
from autoshard.text import shown

MAX_BYTES = 64 * 2**20
"""Most bytes of a file that is read: a table of 10,000 leaves is 3 MB (measured). Without it
test_a_file_too_large_to_be_a_table_is_not_read fails."""

MAX_DEPTH = 32
"""Objects and lists inside each other: a table has 7 at most. Without it test_sizes_are_bounded
ends in a RecursionError when the table is written again."""


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


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a file, and what errors call the file."""

    text: str
    where: str

    def convert(self, value: Any, kind: Any, part: str = "") -> Any:
        """A part of the data as its type.

        Args:
            value: Plain data.
            kind: The type.
            part: What it is (`inputs['params/w']`), "" for the whole.

        Raises:
            TableError: If it is not of that type.
        """
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self.error(str(error) or "nested too deeply", part) from None

    def error(self, fault: str, part: str = "") -> TableError:
        """The error for a part of the data: the file, the fault, the part and its line."""
        key = part.partition("['")[2].rpartition("']")[0] if part.endswith("']") else part
        at = f" at {shown(part)}" if part else ""
        return TableError(
            f"{self.where}: is no spec table: {shown(fault)}{at}{self.line_of(key)}. Mend it, or "
            f"restore it from version control."
        )

    def line_of(self, key: str) -> str:
        """Where a key first stands in the text, for people: one leaf has one line."""
        quoted = f"{json.dumps(key, ensure_ascii=False)}:"
        for number, line in enumerate(self.text.splitlines(), 1):
            if line.lstrip().startswith(quoted):
                return f" (line {number})"
        return ""


def parse(source: Source) -> dict[str, Any]:
    """JSON text to a dict.

    Raises:
        TableError: If it is no JSON object, or has a key twice in one object.
    """
    where = source.where

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = _first_repeated([key for key, _ in pairs])
            raise TableError(
                f"{where}: has {shown(twice)!r} twice in one object{source.line_of(twice)}, "
                f"perhaps after a merge. Keep one."
            )
        return fields

    def no_number(name: str) -> Any:
        raise TableError(
            f"{where}: is no JSON: {name} is no number in it. Restore it from version control."
        )

    try:
        data = json.loads(source.text, object_pairs_hook=unique, parse_constant=no_number)
        # Half a surrogate is text to Python, and to nobody else; the file may hold its escape.
        _check_encodable(source.text, data)
    except RecursionError:
        raise TableError(
            f"{where}: is no spec table: it is nested too deeply. Check the path."
        ) from None
    except json.JSONDecodeError as error:
        raise TableError(
            f"{where}: is no JSON ({error.msg} in line {error.lineno} column {error.colno}), "
            f"perhaps cut short. Restore it from version control."
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise TableError(
            f"{where}: is no spec table: {error}. Restore it from version control."
        ) from None
    if not isinstance(data, dict):
        raise TableError(
            f"{where}: is no spec table: Expected `object`, got a JSON {type(data).__name__}. "
            f"Check the path."
        )
    if _deeper_than(data, MAX_DEPTH):
        raise TableError(
            f"{where}: is no spec table: it is nested too deeply, more than {MAX_DEPTH} times. "
            f"Check the path."
        )
    return data


def _check_encodable(text: str, data: Any) -> None:
    """Raises ValueError (as it comes from the codec) if a text of the data cannot be encoded."""
    text.encode("utf-8")
    if "\\ud" in text or "\\uD" in text:
        json.dumps(data, ensure_ascii=False).encode("utf-8")


def _deeper_than(data: Any, depth: int) -> bool:
    """True if objects and lists are inside each other more than so many times."""
    level: list[Any] = [data]
    for _ in range(depth):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


def _first_repeated(keys: list[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return ""


def object_at(data: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A field that is an object.

    Raises:
        TableError: If it is missing or something else.
    """
    source = Source("", where)
    if name not in data:
        raise source.error(f"Object missing required field `{name}`")
    if not isinstance(data[name], dict):
        raise source.error(f"Expected `object`, got `{type(data[name]).__name__}`", name)
    return dict(data[name])
