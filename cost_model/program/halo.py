"""Collectives of an operation that shifts a dimension: halos of slices, pads and windows.

The partitioner cuts the result of such an operation evenly. Device i of n then needs a window of
the operand, `[first(i), last(i))`, of which it holds `[i s, (i + 1) s)` (s elements: its shard);
the halo, what lies outside its shard, comes from other devices by collective_permutes, each of one
slice for all devices.

Reference:
    XLA, `xla/service/spmd/spmd_partitioner_util.cc`: `ExchangeHalo`, `ExchangeHaloCompact` and
    `ExchangeHaloAndGetValidData`, which chooses between the two and replicating the operand.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import ints
from autoshard.tracing.program import Eqn


@dataclass(frozen=True, slots=True)
class Window:
    """What each element of a result needs of a dimension of an operand.

    Element r needs positions `r * stride - low` up to `reach` further of the operand, in which its
    elements lie `dilation` apart.

    Attributes:
        size: Elements of the operand.
        windows: Elements of the result.
        stride: From one window to the next, in positions.
        low: Positions before the first element, negative where the first elements are cut off.
        reach: Positions that a window covers.
        dilation: Positions from one element of the operand to the next.
    """

    size: int
    windows: int
    stride: int = 1
    low: int = 0
    reach: int = 1
    dilation: int = 1


class Exchange(enum.Enum):
    """What an operation that is no slice, pad or window does where a dimension it shifts is split.

    SHARD: every device sends all it holds to another one.
    TRANSPOSED: it is carried out with another dimension split (all_to_all of the operands, then of
    the result). GATHER: it needs the whole dimension.
    """

    SHARD = "shard"
    TRANSPOSED = "transposed"
    GATHER = "gather"


Requirement = tuple[Window, ...] | Exchange
"""What a split of a dimension requires: windows of it, one for each result that has its own, or
another exchange."""


class ShiftedDim(NamedTuple):
    """A dimension of an operand over which a PERMUTATION factor runs.

    Attributes:
        operand: Number of the operand.
        dim: The dimension.
        requirement: What a split of it requires.
    """

    operand: int
    dim: int
    requirement: Requirement


def exchanges(eqn: Eqn, rule: ShardingRule) -> tuple[ShiftedDim, ...]:
    """The dimensions of operands over which a PERMUTATION factor runs."""
    if FactorKind.PERMUTATION not in rule.kinds:
        return ()
    shifted = []
    for operand, factors in enumerate(rule.operands):
        for dim, factor in enumerate(factors):
            if rule.kinds[factor] is FactorKind.PERMUTATION:
                shifted.append(ShiftedDim(operand, dim, _requirement(eqn, operand, dim)))
    return tuple(shifted)


TRANSPOSED, GATHERED = -2.0, -1.0
"""Answers of `shards_sent` that are no halo; negative, because a halo is at least 0 shards."""


def shards_sent(eqn: Eqn, requirement: Requirement, shard_count: int) -> float:
    """Shards of the operand that one device sends where a dimension is cut into so many shards.

    Negative for what is no halo: `TRANSPOSED` or `GATHERED`.
    """
    if requirement is Exchange.SHARD:
        return 1.0
    if requirement is Exchange.TRANSPOSED:
        return TRANSPOSED if _other_dim_divides(eqn, shard_count) else GATHERED
    if requirement is Exchange.GATHER:
        return GATHERED
    total = 0.0
    for window in requirement:
        sent = halo_elements(window, shard_count)
        if sent is None:
            return GATHERED
        total += sent / max(_ceil_div(window.size, shard_count), 1)
    return total


def _other_dim_divides(eqn: Eqn, shard_count: int) -> bool:
    """True if another dimension of a concatenation can be split instead of the one it joins."""
    for dim, size in enumerate(eqn.outputs[0].shape):
        if dim != eqn.params["dimension"] and size % shard_count == 0:
            return True
    return False


def _requirement(eqn: Eqn, operand: int, dim: int) -> Requirement:
    """What a split of a dimension of an operand requires."""
    if eqn.primitive == "concatenate":
        return Exchange.TRANSPOSED
    if eqn.primitive in ("dynamic_slice", "unstack"):
        return Exchange.GATHER
    # Operands after the first have no windows: the kernel of a convolution, a padding value.
    if eqn.primitive in _FIRST_OPERAND_WINDOWS and operand == 0:
        return _FIRST_OPERAND_WINDOWS[eqn.primitive](eqn, dim)
    if eqn.primitive in _REDUCE_WINDOWS:
        return _reduce_windows(eqn, operand, dim)
    return Exchange.SHARD


def _slice_windows(eqn: Eqn, dim: int) -> tuple[Window, ...]:
    size, strides = eqn.inputs[0].shape[dim], eqn.params["strides"]
    stride = strides[dim] if strides else 1
    return (Window(size, eqn.outputs[0].shape[dim], stride, -eqn.params["start_indices"][dim]),)


def _split_windows(eqn: Eqn, dim: int) -> tuple[Window, ...]:
    windows, start = [], 0
    for size in eqn.params["sizes"]:
        windows.append(Window(eqn.inputs[0].shape[dim], int(size), low=-start))
        start += int(size)
    return tuple(windows)


def _pad_windows(eqn: Eqn, dim: int) -> tuple[Window, ...]:
    low, _, interior = ints(eqn.params["padding_config"][dim])
    size, windows = eqn.inputs[0].shape[dim], eqn.outputs[0].shape[dim]
    return (Window(size, windows, low=low, dilation=interior + 1),)


def _convolution_windows(eqn: Eqn, dim: int) -> tuple[Window, ...]:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    space = ints(numbers.lhs_spec).index(dim) - 2  # batch and channels come first
    out_dim, kernel_dim = ints(numbers.out_spec)[space + 2], ints(numbers.rhs_spec)[space + 2]
    kernel_size = eqn.inputs[1].shape[kernel_dim]
    window = Window(
        size=eqn.inputs[0].shape[dim],
        windows=eqn.outputs[0].shape[out_dim],
        stride=int(params["window_strides"][space]),
        low=int(params["padding"][space][0]),
        reach=(kernel_size - 1) * int(params["rhs_dilation"][space]) + 1,
        dilation=int(params["lhs_dilation"][space]),
    )
    return (window,)


def _reduce_windows(eqn: Eqn, operand: int, dim: int) -> tuple[Window, ...]:
    params = eqn.params
    window = Window(
        size=eqn.inputs[operand].shape[dim],
        windows=eqn.outputs[0].shape[dim],
        stride=int(params["window_strides"][dim]),
        low=int(params["padding"][dim][0]),
        reach=(int(params["window_dimensions"][dim]) - 1) * int(params["window_dilation"][dim]) + 1,
        dilation=int(params["base_dilation"][dim]),
    )
    return (window,)


_REDUCE_WINDOWS = frozenset(
    {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
)
_FIRST_OPERAND_WINDOWS: dict[str, Callable[[Eqn, int], tuple[Window, ...]]] = {
    "conv_general_dilated": _convolution_windows,
    "pad": _pad_windows,
    "slice": _slice_windows,
    "split": _split_windows,
}


@functools.lru_cache(maxsize=65536)  # only so that a long-lived process does not grow for ever
def halo_elements(window: Window, shard_count: int) -> int | None:
    """Elements of the dimension that one device sends; None if all is gathered instead.

    Args:
        window: What each element of the result needs.
        shard_count: How many shards the dimension is cut into.

    >>> convolution_3x3 = Window(size=16, windows=16, low=1, reach=3)
    >>> halo_elements(convolution_3x3, shard_count=4)  # a row on each side
    2
    >>> first_half = Window(size=64, windows=32)
    >>> halo_elements(first_half, shard_count=4)  # 16 rows one device on, 8 rows two
    24
    """
    if not window.size or not window.windows:
        return 0
    shard = _ceil_div(window.size, shard_count)
    left, right = _halo_bounds(window, shard, shard_count)
    # Shard and halos together on the device that needs most.
    needed = shard + max(a + b for a, b in zip(left, right, strict=True))
    # Both factors of 2 are those of XLA's `ExchangeHaloAndGetValidData`.
    far_away = max(*left, *right) > 2 * needed
    if window.dilation == 1 and far_away:
        if 2 * needed >= shard_count * shard:
            return None
        return _compact_elements(left, right, shard, window.size)
    return _neighbour_elements(left, right, shard)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _halo_bounds(window: Window, shard: int, shard_count: int) -> tuple[list[int], list[int]]:
    """By device, the elements that it needs before its shard and after it.

    Negative where what it needs begins after the start of its shard, or ends before its end.
    """
    share = _ceil_div(window.windows, shard_count)
    left, right = [], []
    for device in range(shard_count):
        start = device * share * window.stride - window.low
        limit = start + (share - 1) * window.stride + window.reach
        left.append(device * shard - _ceil_div(start, window.dilation))
        # Positions between the elements of a dilated operand hold nothing.
        right.append((limit - 1) // window.dilation + 1 - (device + 1) * shard)
    return left, right


def _neighbour_elements(left: Sequence[int], right: Sequence[int], shard: int) -> int:
    """Elements that one device sends by `ExchangeHalo`.

    One collective_permute for each distance in shards, from either side; all devices send as much
    as the one that must send most.
    """
    total = 0
    for near, far in ((left[1:], right), (right[:-1], left)):
        most = max(near, default=0)
        skipped = max(-(max(far) + shard), 0)  # next to the shard, needed by no device
        for distance in range(_ceil_div(most, shard)):
            size = min(most - shard * distance, shard) - max(skipped - shard * distance, 0)
            total += max(size, 0)
    return total


class _Slice(NamedTuple):
    """What one device sends another: elements `begin` to `end` of its shard.

    Attributes:
        offset: Where the slice goes, from the start of what the target needs.
        target: The device that needs it.
        begin: Its first element in the shard.
        end: The element after its last.
    """

    offset: int
    target: int
    begin: int
    end: int


def _compact_elements(left: Sequence[int], right: Sequence[int], shard: int, size: int) -> int:
    """Elements that one device sends by `ExchangeHaloCompact`.

    Where windows are small and far away, each permute serves as many pairs of devices as it can.
    """
    slices = _slices_by_source(left, right, shard, size)
    total = 0
    while any(slices):
        total += _serve(slices, shard)
    return total


def _slices_by_source(
    left: Sequence[int], right: Sequence[int], shard: int, size: int
) -> list[list[_Slice]]:
    """By device, the slices of its shard that others need, in the order of their offsets."""
    slices: list[list[_Slice]] = [[] for _ in left]
    for target in range(len(left)):
        start = target * shard - left[target]
        limit = min((target + 1) * shard + right[target], size)
        element = max(start, 0)
        while element < limit:
            source, begin = divmod(element, shard)
            length = min(shard - begin, limit - element)
            if source != target:
                slices[source].append(_Slice(element - start, target, begin, begin + length))
            element += length
    for of_source in slices:
        of_source.sort(key=lambda one: one.offset)
    return slices


def _serve(slices: list[list[_Slice]], shard: int) -> int:
    """Elements of one collective_permute; takes the slices that it serves out of the lists.

    All devices send the same range of their shards. It serves the first slice of each source whose
    target gets nothing yet, unless the range would have to grow over a gap to the other end of the
    shard.
    """
    begin, end = shard, 0
    targets: set[int] = set()
    for of_source in slices:
        if not of_source:
            continue
        first = of_source[0]
        if targets and (first.target in targets or _at_other_end(first, begin, end, shard)):
            continue
        targets.add(first.target)
        begin, end = min(begin, first.begin), max(end, first.end)
        of_source.pop(0)
    return end - begin


def _at_other_end(one: _Slice, begin: int, end: int, shard: int) -> bool:
    """True if a range at one end of the shard would have to cover all of it for this slice."""
    if one.begin == 0:
        return end == shard and one.end < begin
    return one.end == shard and begin == 0 and end < one.begin
