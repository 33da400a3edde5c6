"""`diff`: two tables side by side, for people: mesh, rules, leaves, numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from autoshard.evidence.candidate import winner_of
from autoshard.table.leaf_patterns import Each, fold, path_key
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable, candidates_of
from autoshard.text import bytes_text, printable, seconds_text


def diff_text(old: SpecTable, new: SpecTable) -> str:
    """What differs, one thing a line; "" if the two are the same plan with the same numbers."""
    return "\n".join(map(printable, _lines(old, new)))


def _lines(old: SpecTable, new: SpecTable) -> Iterator[str]:
    for name, before, after in (
        ("function", old.function, new.function),
        ("mesh", old.mesh.axes, new.mesh.axes),
        ("axis types", old.mesh.types, new.mesh.types),
        ("constraints", old.constraints, new.constraints),
    ):
        if before != after:
            yield f"{name}: {before} -> {after}"
    if old.rules != new.rules:
        yield "rules, in order:"
        for line in difflib.ndiff(old.rules, new.rules):
            if not line.startswith("?"):
                yield f"  {line}"
    yield from _leaf_lines("inputs", old.inputs, new.inputs)
    yield from _leaf_lines("outputs", old.outputs, new.outputs)
    if old.inside != new.inside:
        old_count, new_count = (sum(c.times for c in table.inside) for table in (old, new))
        yield f"constraints inside: {old_count} -> {new_count}"
    yield from _evidence_lines(old, new)
    yield from _number_lines(old, new)


# Leaves -------------------------------------------------------------------------------------------


def _leaf_lines(side: str, old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> Iterator[str]:
    changes = _changes(old, new)
    if changes:
        yield f"{side}:"
    for path, (each, text) in _folded(changes):
        numbers = f" (* is {'; '.join(each)})" if each else ""
        yield f"  {path}{numbers}: {text}"


def _changes(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> dict[str, str]:
    changes = {}
    for path in {**old, **new}:
        before, after = old.get(path), new.get(path)
        if before is None or after is None:
            changes[path] = f"- {_leaf_text(before)}" if before else f"+ {_leaf_text(after)}"
        elif (before.shape, before.dtype) != (after.shape, after.dtype):
            changes[path] = f"{_leaf_text(before)} -> {_leaf_text(after)}"
        elif before.spec != after.spec:
            changes[path] = f"{spec_text(before.spec)} -> {spec_text(after.spec)}"
    return changes


def _folded(changes: Mapping[str, str]) -> list[tuple[str, tuple[Each, str]]]:
    """Changes folded, those of leaves that came or went apart.

    So a pattern stands for leaves of one kind of change only.
    """
    by_kind: dict[str, dict[str, str]] = {}
    for path, text in changes.items():
        by_kind.setdefault(text[:2], {})[path] = text
    lines = [line for kind in sorted(by_kind) for line in fold(by_kind[kind]).items()]
    return sorted(lines, key=lambda line: path_key(line[0]))


def _leaf_text(leaf: Leaf | None) -> str:
    return "" if leaf is None else f"{leaf.dtype}{leaf.shape} {spec_text(leaf.spec)}"


# Numbers ------------------------------------------------------------------------------------------


def _evidence_lines(old: SpecTable, new: SpecTable) -> Iterator[str]:
    for table, name in ((old, "the first"), (new, "the second")):
        if table.edited:
            yield (
                f"{name} table's numbers are stale: its specs or rules were edited after the search"
            )
    if old.fingerprint != new.fingerprint:
        yield "program: they are of different programs (or of different versions of jax)"
    if old.verified != new.verified:
        yield f"verified: {old.verified} -> {new.verified}"


def _number_lines(old: SpecTable, new: SpecTable) -> Iterator[str]:
    """The winners' numbers, each under its provenance."""
    before, after = winner_of(candidates_of(old)), winner_of(candidates_of(new))
    if before is None or after is None:
        return
    if before.predicted and after.predicted:
        old_time, new_time = before.predicted.time_s, after.predicted.time_s
        yield f"predicted time: {seconds_text(old_time)} -> {seconds_text(new_time)}"
    if before.compiled and after.compiled:
        old_peak, new_peak = before.compiled.peak_bytes, after.compiled.peak_bytes
        yield f"compiled peak: {bytes_text(old_peak)} -> {bytes_text(new_peak)}"
        old_sent, new_sent = before.compiled.collective_bytes, after.compiled.collective_bytes
        yield f"compiled bytes sent: {bytes_text(old_sent)} -> {bytes_text(new_sent)}"
    if before.measured and after.measured:
        old_median, new_median = before.measured.median_s, after.measured.median_s
        yield f"measured median: {seconds_text(old_median)} -> {seconds_text(new_median)}"
