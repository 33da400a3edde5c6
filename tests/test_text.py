"""Texts for people, and byte sizes read back from them."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import ArgumentError
from autoshard.text import bytes_text, parse_bytes


@pytest.mark.parametrize(
    ("size", "count"),
    [("16GiB", 2**34), (" 1.5 KB ", 1500), (".5MiB", 2**19), ("7B", 7), (1024, 1024), (None, None)],
)
def test_sizes_are_read(size: Any, count: int | None) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize("count", [1, 1023, 2**10, 2**20, 3 * 2**30, 2**40])
def test_a_size_that_was_written_is_read_again(count: int) -> None:
    assert parse_bytes(bytes_text(count)) == count


@pytest.mark.parametrize("size", ["16iB", "1.2.3GB", "GiB", "0GiB", "-1GB", "16 gib", 0, -1, True])
def test_what_is_no_size_is_refused_by_name(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^budget=.*use a positive int, or text such as"):
        parse_bytes(size, "budget")
