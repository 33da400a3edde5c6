"""What a program of the packages gate is: a step that imports model code nobody here wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

Rules = Mapping[str, PartitionSpec]
"""By regular expression over leaf paths (the first that is found in a path counts), the spec."""


@dataclass(frozen=True)
class Program:
    """A step with concrete arguments.

    Attributes:
        distribution: The package on the registry.
        step: The step, as its users write it.
        args: Its arguments.
        rival: A layout of its arguments as an expert writes it: the package's own rules, or by hand
            (batch over all axes, weights FSDP, heads and FFN over the last axis). Leaves that no
            rule names are replicated.
        donate: Positions of what it replaces.
        axes: Names of the two mesh axes, of sizes 4 and 2.
    """

    distribution: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    rival: Rules = field(default_factory=dict)
    donate: tuple[int, ...] = ()
    axes: tuple[str, str] = ("data", "model")


def spec_of(rules: Rules, path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec that a layout by hand gives a leaf.

    Raises:
        ValueError: If it has more dimensions than the leaf: the layout is for another program.
    """
    for pattern, spec in rules.items():
        if re.search(pattern, path):
            if len(spec) > len(shape):
                raise ValueError(f"{pattern!r}: {spec} for {path} of shape {shape}")
            return spec
    return PartitionSpec()
