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
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Each = tuple[str, ...]
"""For each `*` of a pattern, the numbers it stands for."""

MAX_LEAVES = 200_000
"""More leaves than any model has; a table that unfolds to more is a mistake or an attack."""

_MIN_FOLDED = 3
_DIGITS = re.compile(r"([0-9]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def path_key(path: str) -> list[tuple[int, int, str]]:
    """Sorting key of leaf paths: part by part, numbers by size, `*` before the numbers it stands
    for.

    >>> sorted(["w/10", "w/9", "w/*", "v"], key=path_key)
    ['v', 'w/*', 'w/9', 'w/10']
    """
    parts = path.split("/")
    return [
        (1, int(p), p) if p.isdecimal() and p.isascii() else (0 if p == "*" else 2, 0, p)
        for p in parts
    ]


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
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


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


def fold(leaves: Mapping[str, T]) -> dict[str, tuple[Each, T]]:
    """Folds leaves into patterns and exceptions, sorted; a line that is no pattern has no `Each`.

    >>> fold({f"layers/{i}/w": "split" if i != 2 else "whole" for i in range(5)})
    {'layers/*/w': (('0-4',), 'split'), 'layers/2/w': ((), 'whole')}
    """
    lines = _folded(leaves)
    try:
        exact = unfold(lines) == dict(leaves)
    except ValueError:
        exact = False
    if not exact:
        lines = {path: ((), leaf) for path, leaf in leaves.items()}
    return dict(sorted(lines.items(), key=lambda line: path_key(line[0])))


def unfold(lines: Mapping[str, tuple[Each, T]]) -> dict[str, T]:
    """The leaves that lines speak of.

    Raises:
        ValueError: If a pattern is malformed, two speak of one leaf and neither has fewer `*`, or
            they are too many.
    """
    found: dict[str, tuple[int, T, str]] = {}
    total = 0
    for path, (each, leaf) in sorted(lines.items(), key=lambda line: len(line[1][0])):
        texts = path.split("*") if each else [path]
        if each and len(texts) != len(each) + 1:
            raise ValueError(
                f"{path!r} has {len(texts) - 1} '*', but 'each' has {len(each)} ranges; give one "
                f"for each"
            )
        numbers = [ranges_of(text) for text in each]
        total += math.prod(sum(map(len, runs)) for runs in numbers)
        if total > MAX_LEAVES:
            raise ValueError(
                f"{path!r} brings the table to {total} leaves; it may have {MAX_LEAVES} at most"
            )
        for chosen in itertools.product(*(itertools.chain(*runs) for runs in numbers)):
            name = texts[0] + "".join(
                f"{n}{text}" for n, text in zip(chosen, texts[1:], strict=True)
            )
            if name not in found:
                found[name] = (len(each), leaf, path)
            elif found[name][0] == len(each) and found[name][1] != leaf:
                raise ValueError(
                    f"{path!r} and {found[name][2]!r} both speak of {name!r}; give it a line of "
                    f"its own"
                )
    return {name: leaf for name, (_, leaf, _) in found.items()}


# A path in tokens: text, number, text, ...; a number is its digits, or "*".
_Tokens = tuple[str, ...]
_Line = tuple[Each, T]


def _tokens(path: str) -> _Tokens:
    return (path,) if "*" in path else tuple(_DIGITS.split(path))


def _folded(leaves: Mapping[str, T]) -> dict[str, _Line[T]]:
    lines: dict[_Tokens, _Line[T]] = {_tokens(path): ((), leaf) for path, leaf in leaves.items()}
    exceptions: set[_Tokens] = set()
    while True:
        groups = _groups(lines, exceptions)
        touched: set[_Tokens] = set()
        for template, each, at, members in groups:
            if template in lines or any(tokens in touched for _, tokens in members):
                continue
            leaf, _ = _most_common([lines[tokens][1] for _, tokens in members])
            touched |= {tokens for _, tokens in members}
            for _, tokens in members:
                if lines[tokens][1] == leaf:
                    del lines[tokens]
                else:
                    exceptions.add(tokens)
            lines[template] = ((*each[:at], ranges_text(n for n, _ in members), *each[at:]), leaf)
        if not touched:
            return {"".join(tokens): line for tokens, line in lines.items()}


def _groups(
    lines: Mapping[_Tokens, _Line[T]], exceptions: set[_Tokens]
) -> list[tuple[_Tokens, Each, int, list[tuple[int, _Tokens]]]]:
    """(template, other ranges, place among them, members) of what may fold, the most lines saved
    first.
    """
    groups: dict[tuple[_Tokens, Each, int], list[tuple[int, _Tokens]]] = {}
    for tokens, (each, _) in lines.items():
        if tokens in exceptions:
            continue
        stars = 0
        for i in range(1, len(tokens), 2):
            digits = tokens[i]
            if digits == "*":
                stars += 1
            elif len(digits) < 9 and str(int(digits)) == digits:
                template = (*tokens[:i], "*", *tokens[i + 1 :])
                groups.setdefault((template, each, stars), []).append((int(digits), tokens))
    folding = []
    for (template, each, at), members in groups.items():
        _, count = _most_common([lines[tokens][1] for _, tokens in members])
        if count >= _MIN_FOLDED and count * 2 > len(members):
            folding.append((-count, "".join(template), (template, each, at, members)))
    return [group for _, _, group in sorted(folding, key=lambda f: f[:2])]


def _most_common(leaves: Sequence[T]) -> tuple[T, int]:
    counts = Counter(map(repr, leaves))
    text, count = counts.most_common(1)[0]
    return next(leaf for leaf in leaves if repr(leaf) == text), count


def likenesses(
    outputs: Mapping[str, T], inputs: Mapping[str, T], carried: Mapping[str, str]
) -> dict[str, str]:
    """Output subtrees that have the leaves of an input subtree, most of them equal: `{"out/0":
    "params"}`.

    The outermost ones, of two leaves or more. What differs inside is an exception, with a line of
    its own.

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
    found: dict[str, str] = {}
    for prefix in sorted(below_outputs, key=lambda p: (p.count("/"), path_key(p))):
        rests = below_outputs[prefix]
        if len(rests) < 2 or any(prefix.startswith(f"{outer}/") for outer in found):
            continue
        candidates = []
        for source in by_rests.get(frozenset(rests), ()):
            same = sum(carried.get(f"{prefix}/{r}") == f"{source}/{r}" for r in rests)
            equal = sum(outputs[f"{prefix}/{r}"] == inputs[f"{source}/{r}"] for r in rests)
            candidates.append((same, equal, source))
        _, equal, source = max(candidates, key=lambda c: c[:2], default=(0, 0, ""))
        if equal * 2 > len(rests):
            found[prefix] = source
    return found


def alike(outputs: Mapping[str, T], prefix: str, inputs: Mapping[str, T], source: str) -> bool:
    """True if the leaves below the two prefixes have the same names."""
    return _below(outputs, prefix) == _below(inputs, source)


def _below(leaves: Iterable[str], prefix: str) -> set[str]:
    return {path.removeprefix(f"{prefix}/") for path in leaves if path.startswith(f"{prefix}/")}


def _subtrees(leaves: Iterable[str]) -> dict[str, list[str]]:
    """By prefix that ends before a `/`, what follows."""
    below: dict[str, list[str]] = {}
    for path in leaves:
        for match in re.finditer("/", path):
            below.setdefault(path[: match.start()], []).append(path[match.end() :])
    return below
