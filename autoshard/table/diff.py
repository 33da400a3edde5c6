"""`diff`: two tables side by side, for people: mesh, rules, leaves, numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from autoshard.evidence.candidate import winner_of
from autoshard.table.leaf_patterns import Each, fold, path_key
from autoshard.table.spec_table import Leaf, SpecTable, candidates_of, spec_text
from autoshard.text import bytes_text, printable, seconds_text


def diff_text(old: SpecTable, new: SpecTable) -> str:
    """What differs, one thing a line; "" if the two are the same plan with the same numbers."""
    return "\n".join(map(printable, _lines(old, new)))


def _lines(old: SpecTable, new: SpecTable) -> Iterator[str]:
    for name, a, b in (
        ("function", old.function, new.function),
        ("mesh", old.mesh.axes, new.mesh.axes),
        ("axis types", old.mesh.types, new.mesh.types),
        ("constraints", old.constraints, new.constraints),
    ):
        if a != b:
            yield f"{name}: {a} -> {b}"
    rules = list(difflib.ndiff(old.rules, new.rules))
    if old.rules != new.rules:
        yield "rules, in order:"
        yield from (f"  {line}" for line in rules if not line.startswith("?"))
    for side, a_leaves, b_leaves in (
        ("inputs", old.inputs, new.inputs),
        ("outputs", old.outputs, new.outputs),
    ):
        changes = _changes(a_leaves, b_leaves)
        if changes:
            yield f"{side}:"
            for path, (each, text) in _folded(changes):
                numbers = f" (* is {'; '.join(each)})" if each else ""
                yield f"  {path}{numbers}: {text}"
    if len(old.inside) != len(new.inside) or old.inside != new.inside:
        yield f"constraints inside: {sum(c.times for c in old.inside)} -> {sum(c.times for c in new.inside)}"
    yield from _numbers(old, new)


def _folded(changes: Mapping[str, str]) -> list[tuple[str, tuple[Each, str]]]:
    """Changes folded, those of leaves that came or went apart, so that a pattern stands for what it
    says only.
    """
    kinds = {text[:2] for text in changes.values()}
    parts = [
        fold({p: text for p, text in changes.items() if text[:2] == kind}) for kind in sorted(kinds)
    ]
    return sorted(
        (line for part in parts for line in part.items()), key=lambda line: path_key(line[0])
    )


def _changes(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> dict[str, str]:
    found = {}
    for path in {**old, **new}:
        a, b = old.get(path), new.get(path)
        if a is None or b is None:
            found[path] = f"- {_leaf_text(a)}" if a is not None else f"+ {_leaf_text(b)}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            found[path] = f"{_leaf_text(a)} -> {_leaf_text(b)}"
        elif a.spec != b.spec:
            found[path] = f"{spec_text(a.spec)} -> {spec_text(b.spec)}"
    return found


def _leaf_text(leaf: Leaf | None) -> str:
    return "" if leaf is None else f"{leaf.dtype}{leaf.shape} {spec_text(leaf.spec)}"


def _numbers(old: SpecTable, new: SpecTable) -> Iterator[str]:
    """The winners' numbers, each under the word that says where it is from."""
    a, b = (winner_of(candidates_of(table)) for table in (old, new))
    for table, name in ((old, "the first"), (new, "the second")):
        if table.edited:
            yield f"{name} table's numbers are stale: its specs or rules were edited after the search"
    if old.fingerprint != new.fingerprint:
        yield "program: they are of different programs (or of different versions of jax)"
    if old.verified != new.verified:
        yield f"verified: {old.verified} -> {new.verified}"
    if a is None or b is None:
        return
    if a.predicted and b.predicted:
        yield f"predicted time: {seconds_text(a.predicted.time_s)} -> {seconds_text(b.predicted.time_s)}"
    if a.compiled and b.compiled:
        yield f"compiled peak: {bytes_text(a.compiled.peak_bytes)} -> {bytes_text(b.compiled.peak_bytes)}"
        sent = (bytes_text(t.collective_bytes) for t in (a.compiled, b.compiled))
        yield f"compiled bytes sent: {' -> '.join(sent)}"
    if a.measured and b.measured:
        yield f"measured median: {seconds_text(a.measured.median_s)} -> {seconds_text(b.measured.median_s)}"
