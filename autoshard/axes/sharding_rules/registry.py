"""The registry: primitive name -> family and rule.

To add a rule, write it in the file of its family and list it in that file's `RULES`. A primitive
that has none on purpose goes into `special`, with the reason: a test asks for an entry of every
primitive that jax can lower.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.axes.sharding_rules import (
    attention,
    contraction,
    elementwise,
    indexing,
    linear_algebra,
    random_numbers,
    reduction,
    reshaping,
    shape,
    sorting,
    special,
    windows,
)
from autoshard.axes.sharding_rules.builder import Rule, replicated_rule
from autoshard.axes.sharding_rules.rule import ShardingRule
from autoshard.tracing.program import Eqn


class Coverage(enum.Enum):
    """What the registry knows of a primitive.

    RULE: its rule relates dimensions.
    STRUCTURAL: it has bodies, and `Eqn.mappings` relate dimensions; its rule links nothing.
    OPAQUE: it links nothing on purpose.
    """

    RULE = "rule"
    STRUCTURAL = "structural"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the registry holds for one primitive.

    Attributes:
        family: Which file or group of primitives it belongs to.
        coverage: Whether it has a rule of its own.
        rule: Its rule; may raise on parameters that it does not know (`rule_of` does not).
        reason: Why it links nothing, empty if it has a rule.
    """

    family: str
    coverage: Coverage
    rule: Rule
    reason: str = ""


_FAMILIES: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "elementwise": elementwise.RULES,
        "attention": attention.RULES,
        "contraction": contraction.RULES,
        "windows": windows.RULES,
        "shape": shape.RULES,
        "reshaping": reshaping.RULES,
        "indexing": indexing.RULES,
        "reduction": reduction.RULES,
        "sorting": sorting.RULES,
        "linear_algebra": linear_algebra.RULES,
        "random": random_numbers.RULES,
        "special": special.RULES,
    }
)


def _collect() -> Mapping[str, Entry]:
    """All entries, by primitive."""
    entries: dict[str, Entry] = {}

    def add(name: str, entry: Entry) -> None:
        assert name not in entries, f"{name} has two entries"
        entries[name] = entry

    for family, rules in _FAMILIES.items():
        for name, rule in rules.items():
            add(name, Entry(family, Coverage.RULE, rule))
    reason = "its bodies are mapped to its operands and results"
    for name in special.STRUCTURAL:
        add(name, Entry("structural", Coverage.STRUCTURAL, replicated_rule, reason))
    for name, reason in special.OPAQUE.items():
        add(name, Entry("opaque", Coverage.OPAQUE, replicated_rule, reason))
    return MappingProxyType(dict(sorted(entries.items())))


_ENTRIES = _collect()


def known_primitives() -> Mapping[str, Entry]:
    """Every primitive that the registry knows, by name."""
    return _ENTRIES


def rule_of(eqn: Eqn) -> ShardingRule:
    """The sharding rule of an equation; never raises.

    An unknown primitive, or one whose parameters are not as its rule expects (another jax, an
    extended shape), links nothing: that costs a layout, never a result.

    Args:
        eqn: Any equation.

    Returns:
        A rule with a factor for each dimension of each operand and result.
    """
    entry = _ENTRIES.get(eqn.primitive)
    if entry is None:
        return replicated_rule(eqn)
    try:
        return entry.rule(eqn)
    except Exception:  # rules read the parameters of a jax that may be newer than they are
        return replicated_rule(eqn)
