"""How regular leaves fold into patterns, and back: 32 unrolled layers are a few lines, not a few
hundred.

A pattern is a leaf path in which `*` stands for a number (`params/layers/*/wq`), with the numbers
it stands for (`"0-31"`, or `"0-6,8-31"`). Where two lines speak of one leaf, the one with fewer `*`
decides, so an exception is a line of its own and the pattern stays as it is. Folding is checked by
unfolding: what does not come back exactly is not folded.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

Each = tuple[str, ...]
"""For each `*` of a pattern, the numbers it stands for."""

MAX_LEAVES = 200_000
"""More leaves than any model has; a table that unfolds to more is a mistake or an attack. Without
it the hostile table of a trillion leaves in tests/table/test_spec_table.py fills the memory."""

MAX_DIGITS = 9
"""Digits of the ends of a range at most, one less of a number that folds: no count is longer, and
text of a million digits is not made a number. test_what_is_no_range_is_refused pins it."""

_MIN_FOLDED = 3
"""Leaves that are worth a pattern: test_two_layers_are_not_worth_a_pattern."""

_DIGITS = re.compile(r"([0-9]+)")
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")


def path_key(path: str) -> list[tuple[int, int, str]]:
    """Sorting key of leaf paths: part by part, numbers by size, `*` before what it stands for.

    >>> sorted(["w/10", "w/9", "w/*", "v"], key=path_key)
    ['v', 'w/*', 'w/9', 'w/10']
    """
    key = []
    for part in path.split("/"):
        if part.isdecimal() and part.isascii():
            key.append((1, int(part), part))
        else:
            key.append((0 if part == "*" else 2, 0, part))
    return key


def sorted_by_path(leaves: Mapping[str, T]) -> dict[str, T]:
    """Leaves in the order of their paths, numbers inside paths by size."""
    return dict(sorted(leaves.items(), key=lambda item: path_key(item[0])))


# Ranges -------------------------------------------------------------------------------------------


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers as text.

    >>> ranges_text([0, 1, 2, 3, 5, 7, 8])
    '0-3,5,7-8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranges_of(text: str) -> list[range]:
    """Reads what `ranges_text` writes.

    Raises:
        ValueError: If it is something else; the message says what.
    """
    runs: list[range] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is no range of numbers; write '0-31', or '0-6,8-31'")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or (runs and first <= runs[-1][-1]):
            raise ValueError(
                f"the numbers of {text[:40]!r} do not rise; write '0-31', or '0-6,8-31'"
            )
        runs.append(range(first, last + 1))
    return runs


# Unfolding ----------------------------------------------------------------------------------------


def unfold(lines: Mapping[str, tuple[Each, T]]) -> dict[str, T]:
    """The leaves that lines speak of.

    Raises:
        ValueError: If a pattern is malformed, two speak of one leaf and neither has fewer `*`, or
            they are too many.
    """
    leaves: dict[str, T] = {}
    line_of: dict[str, tuple[str, Each]] = {}
    total = 0
    # Fewest `*` first: what is there already stays.
    for path, (each, leaf) in sorted(lines.items(), key=lambda line: len(line[1][0])):
        pattern = _Pattern.parse(path, each)
        total += pattern.count
        if total > MAX_LEAVES:
            raise ValueError(
                f"{path!r} brings the table to {total} leaves; it may have {MAX_LEAVES} at most"
            )
        for name in pattern.names():
            if name not in leaves:
                leaves[name], line_of[name] = leaf, (path, each)
                continue
            other_path, other_each = line_of[name]
            if len(other_each) == len(each) and leaves[name] != leaf:
                raise ValueError(
                    f"{path!r} and {other_path!r} both speak of {name!r}; give it a line of its own"
                )
    return leaves


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A path cut at each `*`, and the numbers that belong there."""

    texts: list[str]
    numbers: list[list[range]]

    @classmethod
    def parse(cls, path: str, each: Each) -> _Pattern:
        """Raises ValueError if there is not a range for each `*`, or one is malformed."""
        texts = path.split("*") if each else [path]
        if each and len(texts) != len(each) + 1:
            raise ValueError(
                f"{path!r} has {len(texts) - 1} '*', but 'each' has {len(each)} ranges; give one "
                f"for each"
            )
        return cls(texts, [ranges_of(text) for text in each])

    @property
    def count(self) -> int:
        """How many leaves it stands for."""
        return math.prod(sum(map(len, runs)) for runs in self.numbers)

    def names(self) -> Iterator[str]:
        """Their paths."""
        head, *texts = self.texts
        for chosen in itertools.product(*(itertools.chain(*runs) for runs in self.numbers)):
            yield head + "".join(f"{n}{text}" for n, text in zip(chosen, texts, strict=True))


# Folding ------------------------------------------------------------------------------------------


def fold(leaves: Mapping[str, T]) -> dict[str, tuple[Each, T]]:
    """Folds leaves into patterns and exceptions, sorted; a line that is no pattern has no `Each`.

    >>> fold({f"layers/{i}/w": "split" if i != 2 else "whole" for i in range(5)})
    {'layers/*/w': (('0-4',), 'split'), 'layers/2/w': ((), 'whole')}
    """
    lines = _Folding(leaves).lines()
    try:
        exact = unfold(lines) == dict(leaves)
    except ValueError:
        exact = False
    if not exact:
        lines = {path: ((), leaf) for path, leaf in leaves.items()}
    return sorted_by_path(lines)


_Tokens = tuple[str, ...]
"""A path in tokens: text, number, text, ...; a number is its digits, or "*"."""


def _tokens(path: str) -> _Tokens:
    # A `*` of the path's own would stand for numbers, so such a path does not fold.
    return (path,) if "*" in path else tuple(_DIGITS.split(path))


@dataclass(frozen=True, slots=True)
class _Group:
    """Lines that differ in one number, and so may fold.

    Attributes:
        template: Their tokens with `*` at that number.
        each: The ranges of the `*` that they have already.
        at: Where among those the new one belongs.
        members: The number and the tokens of each line.
    """

    template: _Tokens
    each: Each
    at: int
    members: list[tuple[int, _Tokens]] = field(default_factory=list)

    @property
    def pattern_each(self) -> Each:
        """The ranges of the pattern."""
        numbers = ranges_text(number for number, _ in self.members)
        return (*self.each[: self.at], numbers, *self.each[self.at :])


class _Folding(Generic[T]):
    """Lines that are folded number by number, the groups that save most lines first."""

    def __init__(self, leaves: Mapping[str, T]) -> None:
        self._lines: dict[_Tokens, tuple[Each, T]] = {
            _tokens(path): ((), leaf) for path, leaf in leaves.items()
        }
        self._exceptions: set[_Tokens] = set()

    def lines(self) -> dict[str, tuple[Each, T]]:
        """The lines when nothing folds any more."""
        while self._fold_once():
            pass
        return {"".join(tokens): line for tokens, line in self._lines.items()}

    def _fold_once(self) -> bool:
        """Folds groups that do not share lines; False if there is none."""
        touched: set[_Tokens] = set()
        for group in self._groups():
            members = {tokens for _, tokens in group.members}
            # What folded in this round is gone from the groups, which are of its beginning.
            if group.template not in self._lines and members.isdisjoint(touched):
                touched |= members
                self._fold_group(group)
        return bool(touched)

    def _fold_group(self, group: _Group) -> None:
        leaf, _ = self._most_common(group)
        for _, tokens in group.members:
            if self._lines[tokens][1] == leaf:
                del self._lines[tokens]
            else:
                self._exceptions.add(tokens)
        self._lines[group.template] = group.pattern_each, leaf

    def _groups(self) -> list[_Group]:
        """What may fold: most members are equal."""
        folding = []
        for group in self._candidates():
            _, count = self._most_common(group)
            if count >= _MIN_FOLDED and count * 2 > len(group.members):
                folding.append((-count, "".join(group.template), group))
        return [group for _, _, group in sorted(folding, key=lambda item: item[:2])]

    def _candidates(self) -> Iterable[_Group]:
        """For every number of every line, the lines that differ from it there alone."""
        groups: dict[tuple[_Tokens, Each, int], _Group] = {}
        for tokens, (each, _) in self._lines.items():
            if tokens in self._exceptions:
                continue
            stars = 0
            for i in range(1, len(tokens), 2):
                if tokens[i] == "*":
                    stars += 1
                elif _is_plain(tokens[i]):
                    template = (*tokens[:i], "*", *tokens[i + 1 :])
                    group = groups.setdefault(
                        (template, each, stars), _Group(template, each, stars)
                    )
                    group.members.append((int(tokens[i]), tokens))
        return groups.values()

    def _most_common(self, group: _Group) -> tuple[T, int]:
        """The leaf that most members have, and how many."""
        leaves = [self._lines[tokens][1] for _, tokens in group.members]
        texts = list(map(repr, leaves))  # leaves need not be hashable
        text, count = Counter(texts).most_common(1)[0]
        return leaves[texts.index(text)], count


def _is_plain(digits: str) -> bool:
    """True for a number that its digits come back from."""
    return len(digits) < MAX_DIGITS and str(int(digits)) == digits


# Outputs like arguments ---------------------------------------------------------------------------


def likenesses(
    outputs: Mapping[str, T], inputs: Mapping[str, T], carried: Mapping[str, str]
) -> dict[str, str]:
    """Output subtrees that have the leaves of an input subtree, most of them equal.

    `{"out/0": "params"}`; the outermost ones, of two leaves or more. What differs inside is an
    exception, with a line of its own.

    Args:
        outputs: Output leaves by path.
        inputs: Argument leaves by path.
        carried: Output leaf to the argument leaf that it becomes in the next step; it decides where
            several are alike.
    """
    below_outputs, below_inputs = _subtrees(outputs), _subtrees(inputs)
    by_rests: dict[frozenset[str], list[str]] = {}
    for prefix, rests in below_inputs.items():
        by_rests.setdefault(frozenset(rests), []).append(prefix)
    likes: dict[str, str] = {}
    for prefix in sorted(below_outputs, key=lambda path: (path.count("/"), path_key(path))):
        rests = below_outputs[prefix]
        if len(rests) < 2 or any(prefix.startswith(f"{outer}/") for outer in likes):
            continue
        candidates = []
        for source in by_rests.get(frozenset(rests), ()):
            same = sum(carried.get(f"{prefix}/{rest}") == f"{source}/{rest}" for rest in rests)
            equal = sum(outputs[f"{prefix}/{rest}"] == inputs[f"{source}/{rest}"] for rest in rests)
            candidates.append((same, equal, source))
        _, equal, source = max(candidates, key=lambda c: c[:2], default=(0, 0, ""))
        if equal * 2 > len(rests):
            likes[prefix] = source
    return likes


def alike(outputs: Mapping[str, T], prefix: str, inputs: Mapping[str, T], source: str) -> bool:
    """True if the leaves below the two prefixes have the same names."""
    return _below(outputs, prefix) == _below(inputs, source)


def _below(leaves: Iterable[str], prefix: str) -> set[str]:
    return {path.removeprefix(f"{prefix}/") for path in leaves if path.startswith(f"{prefix}/")}


def _subtrees(leaves: Iterable[str]) -> dict[str, list[str]]:
    """By prefix that ends before a `/`, what follows."""
    below: dict[str, list[str]] = {}
    for path in leaves:
        for slash in re.finditer("/", path):
            below.setdefault(path[: slash.start()], []).append(path[slash.end() :])
    return below
