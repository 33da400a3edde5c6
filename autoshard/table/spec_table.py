"""The spec table: a small JSON file that a training repo commits and a colleague reviews."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import PartitionSpec

from autoshard.arguments import check_kind
from autoshard.errors import TableError
from autoshard.evidence.candidate import Candidate
from autoshard.table.read_table import read_table
from autoshard.table.schema import TableData, checksum_of, plan_parts
from autoshard.table.spec_entry import spec_from_entry
from autoshard.table.strict_json import read_text
from autoshard.table.write_table import write_table
from autoshard.text import shown

MAX_NUMBER = 1e30
"""Seconds, bytes and operations of a candidate at most, so that texts and plots of them end.
Chosen by hand; test_numbers_that_cannot_be_are_refused has some above it."""


class SpecTable(TableData, frozen=True):
    """A plan as data, every leaf by its path.

    Attributes:
        function: Name of the function.
        mesh: The mesh it is for.
        rules: Axis rules in order, as text.
        constraints: `anchors` (stated inside the function) or `arguments`.
        inputs: Argument leaves by path.
        outputs: Output leaves by path.
        inside: The constraints put inside the function.
        outputs_like: Output subtrees written down as "like that input subtree": `{"out/0":
            "params"}`.
        evidence: How it is known to be good.
    """

    @staticmethod
    def load(path: str | Path) -> SpecTable:
        """Reads and validates a table, of this schema or an older one.

        Raises:
            TableError: If the file is missing, is no JSON, or is no table of a known schema; the
                place is named.
        """
        check_kind("path", path, (str, PathLike), "the path of a table", TableError)
        return SpecTable.loads(read_text(path), shown(path))

    @staticmethod
    def loads(text: str, where: str = "table") -> SpecTable:
        """Reads and validates the text of a table; `where` names it in errors.

        Raises:
            TableError: As `load`.
        """
        check_kind("text", text, str, "the text of a table", TableError)
        return SpecTable(*msgspec.structs.astuple(read_table(text, where)))

    def save(self, path: str | Path) -> None:
        """Writes the table, and the directory if it does not exist.

        The file appears whole or not at all. A device or a pipe (`/dev/stdout`) is written to.
        """
        check_kind("path", path, (str, PathLike), "where the table goes", TableError)
        target = Path(path)
        if target.exists() and not target.is_file():
            target.write_text(self.dumps(), encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: others may save the same table at this time.
        draft = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        draft.write_text(self.dumps(), encoding="utf-8")
        draft.replace(target)

    def dumps(self) -> str:
        """The text of the file: one leaf or pattern, rule, constraint or candidate a line."""
        return write_table(self)

    def checksum(self) -> str:
        """Digest of mesh, rules, constraints and leaves, however they are written down."""
        return checksum_of(plan_parts(self))

    @property
    def edited(self) -> bool:
        """True if specs, rules or mesh were changed after the table was written.

        Then its numbers are of another plan.
        """
        return self.evidence.checksum not in ("", self.checksum())

    @property
    def fingerprint(self) -> str:
        """Of the traced program."""
        return self.evidence.fingerprint

    @property
    def versions(self) -> dict[str, str]:
        """Of jax and autoshard when it was written."""
        return self.evidence.versions

    @property
    def verified(self) -> str:
        """`yes (against ...)` or `no (reason)`."""
        return self.evidence.verified

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by leaf path."""
        return {path: spec_from_entry(leaf.spec) for path, leaf in self.inputs.items()}

    def output_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of each output leaf."""
        return {path: spec_from_entry(leaf.spec) for path, leaf in self.outputs.items()}


def candidates_of(table: SpecTable) -> list[Candidate]:
    """The candidates in a table's evidence.

    Raises:
        TableError: If a record is none.
    """
    try:
        candidates = [msgspec.convert(record, Candidate) for record in table.evidence.candidates]
    except (msgspec.ValidationError, RecursionError) as error:
        raise _bad_candidate(shown(error) or "nested too deeply") from None
    for candidate in candidates:
        if not all(map(_possible, _numbers(candidate.to_dict()))):
            raise _bad_candidate(
                f"a number of {shown(candidate.name)!r} is not between 0 and {MAX_NUMBER:.0e}"
            )
    return candidates


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in plain data."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _possible(number: float) -> bool:
    return 0 <= number <= MAX_NUMBER


def _bad_candidate(fault: str) -> TableError:
    return TableError(
        f"the table's evidence has a candidate that is none ({fault}). Restore it from version "
        f"control."
    )
