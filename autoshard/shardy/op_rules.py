"""The compiler's own sharding rule of each operation, from `sdy-populate-op-sharding-rules`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jax_internals.mlir import callee, functions, parse_module, rank, run_passes, walk

_RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"

_FACTOR = re.compile(r"[a-z](?:_\d+)?")
"""Shardy prints factors as i ... z, then i_1 ..., those of one dimension without a separator."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """The compiler's own sharding rule of one operation.

    Attributes:
        op: Name of the operation (`stablehlo.dot_general`).
        operands: Per operand and dimension, its factors, major first (`(("i",), ("k",))`).
        results: The same per result.
        sizes: Size of each factor.
        kinds: Factors by kind: `reduction`, `need_replication`, `permutation`,
            `blocked_propagation`.
        text: The rule as Shardy prints it.
    """

    op: str
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, tuple[str, ...]]
    text: str


def op_sharding_rule(lowered: jax.stages.Lowered | str) -> tuple[OpRule, ...]:
    """The compiler's sharding rule of every operation that has one, in program order.

    Args:
        lowered: A lowered program, or the text of a StableHLO module.
    """
    module = parse_module(lowered) if isinstance(lowered, str) else lowered.compiler_ir("stablehlo")
    rules: list[OpRule] = []

    def visit(op: Any) -> None:
        rule = _rule_of(op)
        if rule is not None:
            rules.append(rule)

    walk(run_passes(module, _RULES_PIPELINE), visit)
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """One operation of a program without loops and branches.

    Attributes:
        name: Name of the operation (`stablehlo.dot_general`).
        operands: Numbers of the values it reads.
        results: Numbers of its results.
        rule: The compiler's sharding rule; None where it states none.
        combine: How it combines what it reduces (the operation in its body), "add" where it has no
            body.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: OpRule | None
    combine: str


@dataclass(frozen=True, slots=True)
class LoweredOps:
    """A lowered program as its operations in order, calls of functions entered.

    Attributes:
        arguments: Numbers of the arguments.
        results: Numbers of what is returned.
        ops: The operations.
        ranks: By value number, the number of dimensions.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    ops: tuple[LoweredOp, ...]
    ranks: tuple[int, ...]


def lowered_ops(lowered: jax.stages.Lowered) -> LoweredOps:
    """The operations of a lowered program, each with the compiler's own sharding rule."""
    operation = run_passes(lowered.compiler_ir("stablehlo"), _RULES_PIPELINE)
    return _Reader(functions(operation)).read()


class _Reader:
    """Numbers the values of a module and lists its operations, calls of functions entered."""

    def __init__(self, by_name: Mapping[str, Any]) -> None:
        self._functions = by_name
        self._ranks: list[int] = []
        self._ops: list[LoweredOp] = []

    def read(self) -> LoweredOps:
        main = self._functions["main"]
        arguments = self._numbered(main.regions[0].blocks[0].arguments)
        results = self._enter(main, arguments)
        return LoweredOps(arguments, results, tuple(self._ops), tuple(self._ranks))

    def _numbered(self, values: Iterable[Any]) -> tuple[int, ...]:
        """New numbers for these values."""
        first = len(self._ranks)
        self._ranks += [rank(value.type) for value in values]
        return tuple(range(first, len(self._ranks)))

    def _enter(self, function: Any, arguments: Sequence[int]) -> tuple[int, ...]:
        """Lists the operations of one call of a function; the numbers of what it returns."""
        block = function.regions[0].blocks[0]
        numbers: dict[Any, int] = dict(zip(block.arguments, arguments, strict=True))
        *body, end = (view.operation for view in block)
        for op in body:
            operands = tuple(numbers[value] for value in op.operands)
            if op.name == "func.call":
                results = self._enter(self._functions[callee(op)], operands)
            else:
                results = self._numbered(op.results)
                self._ops.append(LoweredOp(op.name, operands, results, _rule_of(op), _combine(op)))
            numbers.update(zip(op.results, results, strict=True))
        return tuple(numbers[value] for value in end.operands)


_COMBINE = {
    "maximum": "max",
    "minimum": "min",
    "multiply": "mul",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


def _combine(op: Any) -> str:
    """How a reduction combines, from the first operation of its body."""
    if not len(op.regions) or not len(op.regions[0].blocks):
        return "add"
    first = next(iter(op.regions[0].blocks[0])).operation.name
    return _COMBINE.get(first.removeprefix("stablehlo."), "add")


def _rule_of(op: Any) -> OpRule | None:
    """The rule that Shardy's pass attached to an operation, if it did."""
    if "sdy.sharding_rule" not in op.attributes:
        return None
    return _parse_rule(op.name, str(op.attributes["sdy.sharding_rule"]))


def _parse_rule(name: str, text: str) -> OpRule:
    """Parses `#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, ...} reduction={k}>`."""
    operands, rest = text.split("->", 1)
    results = rest[: rest.index(")")]
    sizes = {factor: int(size) for factor, size in re.findall(r"(\w+)=(\d+)", rest)}
    kinds = {}
    for kind, factors in re.findall(r"(\w+)=\{([^}]*)\}", rest):
        kinds[kind] = tuple(factors.split(", "))
    return OpRule(name, _factors_of(operands), _factors_of(results), sizes, kinds, text)


def _factors_of(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """By array and dimension of `([ij, k], [k])`, the factors."""
    arrays = []
    for array in re.findall(r"\[([^\]]*)\]", text):
        dims = [dim for dim in array.split(", ") if dim]
        arrays.append(tuple(tuple(_FACTOR.findall(dim)) for dim in dims))
    return tuple(arrays)
