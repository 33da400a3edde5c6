"""The compiler's own sharding rule of each operation, from `sdy-populate-op-sharding-rules`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jax_internals.mlir import callee, functions, parse_module, rank, run_passes, walk

_RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"


_FACTOR = re.compile(r"[a-z](?:_\d+)?")


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
        if "sdy.sharding_rule" in op.attributes:
            rules.append(_parse_rule(op.name, str(op.attributes["sdy.sharding_rule"])))

    walk(run_passes(module, _RULES_PIPELINE), visit)
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """One operation of a program without loops and branches.

    Attributes:
        name: Name of the operation (`stablehlo.dot_general`).
        operands: Numbers of the values it reads.
        results: Numbers of the values it makes.
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
    by_name = functions(operation)
    ranks: list[int] = []
    ops: list[LoweredOp] = []

    def number(value: Any) -> int:
        ranks.append(rank(value.type))
        return len(ranks) - 1

    def enter(function: Any, arguments: Sequence[int]) -> tuple[int, ...]:
        block = function.regions[0].blocks[0]
        numbers: dict[Any, int] = dict(zip(block.arguments, arguments, strict=True))
        *body, end = (view.operation for view in block)
        for op in body:
            operands = tuple(numbers[value] for value in op.operands)
            if op.name == "func.call":
                results = enter(by_name[callee(op)], operands)
            else:
                results = tuple(number(value) for value in op.results)
                stated = "sdy.sharding_rule" in op.attributes
                rule = (
                    _parse_rule(op.name, str(op.attributes["sdy.sharding_rule"]))
                    if stated
                    else None
                )
                ops.append(LoweredOp(op.name, operands, results, rule, _combine(op)))
            numbers.update(zip(op.results, results, strict=True))
        return tuple(numbers[value] for value in end.operands)

    main = by_name["main"]
    arguments = tuple(number(value) for value in main.regions[0].blocks[0].arguments)
    results = enter(main, arguments)
    return LoweredOps(arguments, results, tuple(ops), tuple(ranks))


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


def _parse_rule(name: str, text: str) -> OpRule:
    """Parses `#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=32, k=16}
    reduction={k}>`.
    """
    left, right = text.split("->", 1)
    sizes = {factor: int(size) for factor, size in re.findall(r"(\w+)=(\d+)", right)}
    kinds = {
        kind: tuple(factors.split(", "))
        for kind, factors in re.findall(r"(\w+)=\{([^}]*)\}", right)
    }
    return OpRule(name, _mappings(left), _mappings(right[: right.index(")")]), sizes, kinds, text)


def _mappings(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    tensors = re.findall(r"\[([^\]]*)\]", text)
    return tuple(tuple(tuple(_FACTOR.findall(d)) for d in t.split(", ") if d) for t in tensors)
