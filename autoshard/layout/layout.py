"""Layouts: axis rules to specs, by first-fit with divisibility.

An axis rule sends a logical axis to a mesh axis. For each array the rules are tried in order: a
rule takes the (first or last) dimension of its logical axis if its mesh axis is still unused in
this array and divides what is left of the dimension. The same first-fit over the *factors* of an
equation says how its computation is sharded.

Where a logical axis is present but its mesh axis divides none of its dimensions, and nothing else
takes that mesh axis, the dimensions that no rule split are *open*: inside the function they are
left to the partitioner (`PartitionSpec.UNCONSTRAINED`), which may split the mesh axis into
divisors, and never pinned replicated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.problem import BoundRule, Fit, Problem, Signature, bind, first_fit
from autoshard.layout.spec import Spec
from autoshard.tracing.program import Eqn, Value


@dataclass(frozen=True, eq=False)
class Layout:
    """Axis rules bound to a problem: answers how any value or equation is sharded.

    Attributes:
        problem: The problem.
        rules: The axis rules, in order.
        inside: True if constraints are stated at the anchors inside the function; False for
            arguments only.
        bound: The rules as numbers, without those of mesh axes with one device.
    """

    problem: Problem
    rules: tuple[AxisRule, ...]
    inside: bool = True
    bound: tuple[BoundRule, ...] = field(init=False, repr=False)
    _fits: dict[Signature, Fit] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        bound = [bind(self.problem, rule) for rule in self.rules]
        object.__setattr__(self, "bound", tuple(rule for rule in bound if rule.size > 1))

    def fit_signature(self, signature: Signature) -> Fit:
        """First-fit of a signature, remembered."""
        if signature not in self._fits:
            self._fits[signature] = first_fit(signature, self.bound)
        return self._fits[signature]

    def fit(self, value: Value) -> Fit:
        """Spec and open dimensions of a value; a pin decides where there is one."""
        pin = self.problem.pins.get(value.index)
        if pin is not None:
            return Fit(pin, frozenset())
        return self.fit_signature(self.problem.value_signature(value))

    def factor_sharding(self, eqn: Eqn) -> Fit:
        """How the factors of an equation are split, and which of them are open."""
        return self.fit_signature(self.problem.factor_signature(eqn))

    def input_specs(self) -> tuple[Spec, ...]:
        """Specs of the argument leaves."""
        return tuple(self.fit(value).spec for value in self.problem.program.body.inputs)

    def output_specs(self) -> tuple[Spec, ...]:
        """Specs of the output leaves."""
        return tuple(self.fit(value).spec for value in self.problem.program.body.outputs)

    def key(self) -> str:
        """Digest of the effective layout: equal for rule lists that split every value and every
        equation alike.
        """
        seen = self.problem.signatures if self.inside else self.problem.edge_signatures
        fits = [self.fit_signature(signature) for signature in seen]
        return hashlib.blake2b(repr((self.inside, fits)).encode(), digest_size=10).hexdigest()
