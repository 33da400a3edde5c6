"""Words that went: in no identifier of the package, and in none of its texts.

Each stood for something that Shardy, jax, Flax, Optuna or XLA have a word for, which stands beside
it. Where a word is meant in another sense, `KEPT` has the identifier with the reason.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

GONE = {
    "agreement": "process group",
    "aside": "transposed exchange",
    "barred": "disallowed (mesh axes)",
    "beater": "heartbeat",
    "bench": "device runner",
    "benches": "device runners",
    "board": "claims",
    "borrowed": "propagated (sharding)",
    "born": "applied to the producer",
    "challenger": "re-evaluated candidate",
    "challengers": "re-evaluated candidates",
    "climb": "select",
    "climbs": "selects",
    "decide": "first-writer-wins value, setdefault",
    "found": "the noun of the thing: rule, spec, prediction, rows",
    "ladder": "selection",
    "lend": "propagate",
    "lent": "propagated",
    "lose": "abandon",
    "made": "built, or the noun of the thing",
    "otherwise": "what-if",
    "person": "user",
    "picks": "arg-reductions",
    "race": "evaluation",
    "racer": "entry",
    "rederive": "rebind",
    "revise": "refit",
    "revision": "refit",
    "role": "logical axis",
    "roles": "logical axes",
    "said": "the noun of the thing",
    "sayable": "expressible",
    "shorten": "simplify",
    "shuffled": "collective_permute axes",
    "site": "source span",
    "sites": "source spans",
    "standing": "status",
    "statement": "source constraint",
    "statements": "source constraints",
    "tabulate": "from_plan",
    "tie": "body mapping",
    "ties": "body mappings",
    "told": "the noun of the thing",
    "trusted": "reference function",
    "turned": "transposed (all_to_all) exchange",
    "whose": "provenance",
    "works": "equation classes",
}
"""By word, what stands for it now. As identifiers or parts of one."""

GONE_FROM_TEXTS = (
    "barred",
    "beater",
    "climb",
    "climbs",
    "ladder",
    "person",
    "racer",
    "rederive",
    "role",
    "roles",
)
"""Words that prose has no other use for; the others occur in their ordinary sense."""

GONE_NAMES = ("DimRule", "LoopKind", "Roles", "Role")

KEPT = {
    "ModuleNotFoundError": "Python's own name",
    "PackageNotFoundError": "Python's own name",
}

KEPT_TEXTS = {
    "autoshard/table/migrate.py": "schema 2 called the logical axes of a leaf its roles",
    "search/study/storage.py": "PostgreSQL's word in its own error",
}

TEXTS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1))
"""Python 3.12 reads the words of an f-string as tokens of their own."""

TRIAL_ROOMS = ("search/",)
"""Where a trial is Optuna's trial."""


def sources() -> Iterator[Path]:
    for folder in ("autoshard", "cost_model", "search"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


FILES = {str(path.relative_to(ROOT)): path for path in sources()}


def tokens_of(name: str) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(FILES[name].read_text()).readline)


def words_of(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase identifier, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


@pytest.mark.parametrize("name", FILES)
def test_no_identifier_has_a_word_that_went(name: str) -> None:
    gone = {}
    for token in tokens_of(name):
        if token.type != tokenize.NAME or token.string in KEPT:
            continue
        for word in words_of(token.string) & GONE.keys():
            gone[f"{token.string}, line {token.start[0]}"] = f"say {GONE[word]}"
        if token.string in GONE_NAMES:
            gone[f"{token.string}, line {token.start[0]}"] = "the class has another name"
        if "trial" in words_of(token.string) and not name.startswith(TRIAL_ROOMS):
            gone[f"{token.string}, line {token.start[0]}"] = "a trial is Optuna's: say candidate"
    assert not gone


@pytest.mark.parametrize("name", FILES)
def test_no_text_has_a_word_that_went(name: str) -> None:
    """Comments, docstrings and messages."""
    gone: list[str] = []
    for token in tokens_of(name) if name not in KEPT_TEXTS else ():
        if token.type in TEXTS:
            words = set(re.findall(r"[a-z]+", token.string.lower()))
            for word in words & set(GONE_FROM_TEXTS):
                gone.append(f"line {token.start[0]}: {word}; say {GONE[word]}")
            for stage in re.findall(r"\bStage \d+|\bDESIGN\b", token.string):
                gone.append(f"line {token.start[0]}: {stage}; folders say what comes next")
    assert not gone


def test_the_test_sees_what_it_looks_for() -> None:
    assert words_of("_find_RoleNames") == {"find", "role", "names"}
    assert words_of("MLIRReader") == {"mlir", "reader"} or "reader" in words_of("MLIRReader")
    assert len(FILES) > 150
    assert set(GONE_FROM_TEXTS) <= GONE.keys()
