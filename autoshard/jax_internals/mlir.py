"""MLIR modules: passes run on them, and small readers of their operations, types and attributes.

MLIR's Python objects are untyped here (`Any`): their classes differ between jaxlib releases, their
methods do not.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager

DimSharding = tuple[str, ...]
"""Mesh axes of one dimension, major first; a sub-axis as `model:(1)2`."""

_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_BRACES = re.compile(r"\{([^{}]*)\}")
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_NAME_STACK = re.compile(r'loc\("([^"]+)"\(')


PassError = ir.MLIRError
"""What a pass raises."""


def run_passes(module: Any, pipeline: str) -> Any:
    """Runs passes on a copy; diagnostics go into the exception, not to the terminal.

    Raises:
        PassError: If a pass fails.
    """
    with module.context as context, _silenced(context):
        operation = module.operation.clone()
        passmanager.PassManager.parse(pipeline).run(operation)
        return operation


@contextlib.contextmanager
def _silenced(context: Any) -> Iterator[None]:
    handler = context.attach_diagnostic_handler(lambda diagnostic: True)
    try:
        yield
    finally:
        handler.detach()


def parse_module(text: str) -> Any:
    """The module of a StableHLO text, in a context that knows all dialects of jax."""
    module: Any = jax.jit(lambda: None).lower().compiler_ir("stablehlo")
    with module.context:
        return ir.Module.parse(text)


def walk(operation: Any, visit: Callable[[Any], None]) -> None:
    """Calls `visit` with every operation below, innermost first."""

    def advance(op: Any) -> Any:
        visit(op)
        return ir.WalkResult.ADVANCE

    operation.walk(advance)


def callee(call: Any) -> str:
    """The name of the function that a `func.call` calls."""
    name: str = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    return name


def dense_integers(attribute: Any) -> np.ndarray | None:
    """The numbers of a dense attribute of integers; None for another attribute."""
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return None
    return np.array(ir.DenseIntElementsAttr(attribute))


def axis_names(text: str) -> list[str]:
    """All mesh axes that a printed attribute names, in its order; a sub-axis as `model:(1)2`."""
    return [f"{name}:({pre}){size}" if size else name for name, pre, size in _AXIS.findall(text)]


def dim_shardings(sharding: str, rank: int) -> tuple[DimSharding, ...]:
    """Mesh axes per dimension of a printed sharding (`#sdy.sharding<@mesh, [{"data"}, {}],
    replicated={"model"}>`).
    """
    text = sharding[sharding.index(", [") :] if ", [" in sharding else ""
    dims = [tuple(axis_names(dim)) for dim in _BRACES.findall(text)[:rank]]
    return tuple(dims + [()] * (rank - len(dims)))


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    operations = (view.operation for view in module.regions[0].blocks[0])
    return {op.attributes["sym_name"].value: op for op in operations if op.name == "func.func"}


def signature(function: Any, attribute: str, part: str) -> tuple[tuple[DimSharding, ...], ...]:
    """Shardings of the arguments (`arg_attrs`, `inputs`) or results (`res_attrs`, `results`) of a
    function.
    """
    types = getattr(ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value), part)
    has = attribute in function.attributes
    attributes: list[Any] = (
        list(ir.ArrayAttr(function.attributes[attribute])) if has else [{}] * len(types)
    )
    return tuple(
        dim_shardings(str(a["sdy.sharding"]) if "sdy.sharding" in a else "", rank(type_))
        for a, type_ in zip(attributes, types, strict=True)
    )


def stated_sharding(value: Any) -> tuple[DimSharding, ...] | None:
    """The sharding stated where a value is made, None if it is a block argument or states none."""
    if isinstance(value.owner, ir.Block):
        return None
    attributes = value.owner.attributes
    if "out_sharding" in attributes:
        return dim_shardings(str(attributes["out_sharding"]), rank(value.type))
    if "sdy.sharding" in attributes:
        stated = re.split(r"(?<=>), (?=<)", str(attributes["sdy.sharding"]))
        number = ir.OpResult(value).result_number
        return dim_shardings(stated[number], rank(value.type)) if number < len(stated) else None
    return None


def rank(type_: Any) -> int:
    """Number of dimensions of a tensor type, 0 of any other type."""
    return len(type_.shape) if isinstance(type_, ir.RankedTensorType) else 0


def local_bytes(type_: Any, shards: Sequence[int]) -> int:
    """Bytes of one device's part; a dimension that does not divide is padded, as XLA does."""
    tensor = ir.RankedTensorType(type_)
    parts = (
        [-(-size // count) for size, count in zip(tensor.shape, shards, strict=True)]
        if shards
        else tensor.shape
    )
    return -(-math.prod(parts) * element_bits(str(tensor.element_type)) // 8)


def element_bits(element: str) -> int:
    """Bits of one element of a printed element type.

    >>> element_bits("bf16"), element_bits("complex<f32>"), element_bits("f8E4M3FN"), element_bits("i1")
    (16, 64, 8, 8)
    """
    if element.startswith("complex<"):
        return 2 * element_bits(element[len("complex<") : -1])
    digits = re.match(r"[a-z]+(\d+)", element)
    return 8 if element == "i1" or digits is None else int(digits[1])


def location(op: Any) -> tuple[str, str]:
    """`file.py:line` and name stack of an operation, "" where unknown.

    An operation that the passes made without a place of its own takes the one of its first user.
    """
    text = str(op.location)
    source = _source(text)
    if not source and (use := next(iter(op.results[0].uses), None)) is not None:
        source = _source(str(use.owner.location))
    stack = _NAME_STACK.match(text)
    return source, stack[1].rstrip(":") if stack else ""


def _source(text: str) -> str:
    place = _PLACE.search(text)
    return f"{PurePath(place[1]).name}:{place[2]}" if place and place[1] != "-" else ""


def _integer(value: Any) -> int | None:
    if isinstance(value.owner, ir.Block) or value.owner.name not in (
        "stablehlo.constant",
        "sdy.constant",
    ):
        return None
    numbers = dense_integers(value.owner.attributes["value"])
    return int(numbers) if numbers is not None and numbers.ndim == 0 else None


def _state_index(value: Any, block: Any) -> int | None:
    return ir.BlockArgument(value).arg_number if value.owner == block else None


def trip_count(loop: Any) -> int | None:
    """Executions of a while body: `state[k] < n` with a constant start and step, as `scan` and
    `fori_loop` lower to.
    """
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    compare = list(condition)[-1].operation.operands[0].owner
    if isinstance(compare, ir.Block) or compare.name != "stablehlo.compare":
        return None
    direction = str(compare.attributes["comparison_direction"])
    index, bound = _state_index(compare.operands[0], condition), _integer(compare.operands[1])
    if index is None or bound is None or not re.search(r"\b(LT|LE)\b", direction):
        return None
    first = _integer(loop.operands[index])
    add = list(body)[-1].operation.operands[index].owner
    if first is None or isinstance(add, ir.Block) or add.name != "stablehlo.add":
        return None
    for counter, step in ((add.operands[0], add.operands[1]), (add.operands[1], add.operands[0])):
        size = _integer(step)
        if _state_index(counter, body) == index and size is not None and size > 0:
            return max(0, -(-(bound + ("LE" in direction) - first) // size))
    return None
