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
    # Of a copy, since passes work in place and the program is compiled afterwards.
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
    """Mesh axes per dimension of a printed sharding.

    >>> dim_shardings('#sdy.sharding<@mesh, [{"data"}, {}], replicated={"model"}>', 2)
    (('data',), ())
    """
    text = sharding[sharding.index(", [") :] if ", [" in sharding else ""
    dims = [tuple(axis_names(dim)) for dim in _BRACES.findall(text)[:rank]]
    return tuple(dims + [()] * (rank - len(dims)))


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    operations = (view.operation for view in module.regions[0].blocks[0])
    return {op.attributes["sym_name"].value: op for op in operations if op.name == "func.func"}


def signature(function: Any, attribute: str, part: str) -> tuple[tuple[DimSharding, ...], ...]:
    """Shardings of the arguments or results of a function.

    Args:
        function: The function.
        attribute: `arg_attrs` or `res_attrs`.
        part: `inputs` or `results`.
    """
    types = getattr(ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value), part)
    attributes: list[Any] = [{}] * len(types)
    if attribute in function.attributes:
        attributes = list(ir.ArrayAttr(function.attributes[attribute]))
    shardings = []
    for own, type_ in zip(attributes, types, strict=True):
        sharding = str(own["sdy.sharding"]) if "sdy.sharding" in own else ""
        shardings.append(dim_shardings(sharding, rank(type_)))
    return tuple(shardings)


def stated_sharding(value: Any) -> tuple[DimSharding, ...] | None:
    """The sharding stated at a value's producer, None for a block argument or where it has none."""
    if isinstance(value.owner, ir.Block):
        return None
    attributes = value.owner.attributes
    if "out_sharding" in attributes:
        return dim_shardings(str(attributes["out_sharding"]), rank(value.type))
    if "sdy.sharding" in attributes:
        # Printed as `<...>, <...>`, one sharding for each result.
        stated = re.split(r"(?<=>), (?=<)", str(attributes["sdy.sharding"]))
        number = ir.OpResult(value).result_number
        return dim_shardings(stated[number], rank(value.type)) if number < len(stated) else None
    return None


def rank(type_: Any) -> int:
    """Number of dimensions of a tensor type, 0 of any other type."""
    return len(type_.shape) if isinstance(type_, ir.RankedTensorType) else 0


def local_bytes(type_: Any, shards: Sequence[int]) -> int:
    """Bytes of one device's shard; a dimension that does not divide is padded, as XLA does.

    Args:
        type_: A tensor type.
        shards: Shard count of each dimension; empty for the whole tensor.
    """
    tensor = ir.RankedTensorType(type_)
    sizes = list(tensor.shape)
    if shards:
        sizes = [-(-size // count) for size, count in zip(sizes, shards, strict=True)]
    return -(-math.prod(sizes) * element_bits(str(tensor.element_type)) // 8)


def element_bits(element: str) -> int:
    """Bits of one element of a printed element type.

    >>> [element_bits(element) for element in ("bf16", "complex<f32>", "f8E4M3FN", "i1")]
    [16, 64, 8, 8]
    """
    if element.startswith("complex<"):
        return 2 * element_bits(element[len("complex<") : -1])
    digits = re.match(r"[a-z]+(\d+)", element)
    return 8 if element == "i1" or digits is None else int(digits[1])


def location(op: Any) -> tuple[str, str]:
    """`file.py:line` and name stack of an operation, "" where unknown.

    An operation that the passes inserted has no source line: it takes the one of its first user.
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


def _producer(value: Any, name: str) -> Any:
    """The operation that a value is the result of, if it has this name; else None."""
    owner = value.owner
    return owner if not isinstance(owner, ir.Block) and owner.name == name else None


def _integer(value: Any) -> int | None:
    """The number of a scalar integer constant, None for any other value."""
    owner = value.owner
    constants = ("stablehlo.constant", "sdy.constant")
    if isinstance(owner, ir.Block) or owner.name not in constants:
        return None
    numbers = dense_integers(owner.attributes["value"])
    return int(numbers) if numbers is not None and numbers.ndim == 0 else None


def _state_index(value: Any, block: Any) -> int | None:
    """Which argument of a block a value is."""
    return ir.BlockArgument(value).arg_number if value.owner == block else None


def trip_count(loop: Any) -> int | None:
    """Executions of a while body, as `scan` and `fori_loop` lower to it.

    That is, `state[k] < n` with a constant start and step; None for any other loop.
    """
    bound = _loop_bound(loop.regions[0].blocks[0])
    if bound is None:
        return None
    index, end = bound
    first, step = _integer(loop.operands[index]), _loop_step(loop.regions[1].blocks[0], index)
    if first is None or step is None:
        return None
    return max(0, -(-(end - first) // step))  # rounded up


def _loop_bound(condition: Any) -> tuple[int, int] | None:
    """(index of the counter, end) of a condition `counter < end` or `counter <= end - 1`."""
    compare = _producer(list(condition)[-1].operation.operands[0], "stablehlo.compare")
    if compare is None:
        return None
    direction = re.search(r"\b(LT|LE)\b", str(compare.attributes["comparison_direction"]))
    index, bound = _state_index(compare.operands[0], condition), _integer(compare.operands[1])
    if index is None or bound is None or direction is None:
        return None
    return index, bound + (direction[1] == "LE")


def _loop_step(body: Any, index: int) -> int | None:
    """What a trip adds to the counter, if that is a positive constant."""
    add = _producer(list(body)[-1].operation.operands[index], "stablehlo.add")
    if add is None:
        return None
    left, right = add.operands
    for counter, step in ((left, right), (right, left)):
        size = _integer(step)
        if _state_index(counter, body) == index and size is not None and size > 0:
            return size
    return None
