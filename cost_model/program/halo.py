"""What moves where a dimension is split that an operation shifts: halos of slices, pads and
windows.

The partitioner cuts the result of such an operation evenly. Device i of n then needs a window of
the operand, `[first(i), last(i))`, of which it holds `[i s, (i + 1) s)` (s elements: its shard);
what lies beside its shard comes from other devices by collective_permutes, each of one slice for
all devices.

Reference:
    XLA, `xla/service/spmd/spmd_partitioner_util.cc`: `ExchangeHalo`, `ExchangeHaloCompact` and
    `ExchangeHaloAndGetValidData`, which chooses between the two and replicating the operand.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

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
    """How an operation gets along with a split of a dimension that is no slice, pad or window.

    SHARD: every device sends all it holds to another one.
    TRANSPOSED: it is carried out with another dimension split (all_to_all of the operands, then of the
    result). GATHER: it needs the whole dimension.
    """

    SHARD = "shard"
    TRANSPOSED = "aside"
    GATHER = "gather"


Asked = tuple[Window, ...] | Exchange


def exchanges(eqn: Eqn, rule: ShardingRule) -> tuple[tuple[int, int, Asked], ...]:
    """(operand, dimension, what it asks for) of every dimension over which a PERMUTATION loop runs."""
    if FactorKind.PERMUTATION not in rule.kinds:
        return ()
    return tuple(
        (i, dim, _exchange(eqn, i, dim))
        for i, factors in enumerate(rule.operands)
        for dim, factor in enumerate(factors)
        if rule.kinds[factor] is FactorKind.PERMUTATION
    )


def shards_sent(eqn: Eqn, asked: Asked, pieces: int) -> float:
    """Shards of the operand that one device sends where a dimension is cut into pieces.

    Negative for what is no halo: `TRANSPOSED` or `GATHERED`.
    """
    if asked is Exchange.TRANSPOSED:
        result = eqn.outputs[0]
        others = (size for dim, size in enumerate(result.shape) if dim != eqn.params["dimension"])
        return TRANSPOSED if any(size % pieces == 0 for size in others) else GATHERED
    if isinstance(asked, Exchange):
        return 1.0 if asked is Exchange.SHARD else GATHERED
    total = 0.0
    for window in asked:
        sent = halo_elements(window, pieces)
        if sent is None:
            return GATHERED
        total += sent / max(-(-window.size // pieces), 1)
    return total


TRANSPOSED, GATHERED = -2.0, -1.0


def _exchange(eqn: Eqn, operand: int, dim: int) -> Asked:
    """What a split of a dimension of an operand asks for: windows, one for each result that has its
    own.
    """
    params, value = eqn.params, eqn.inputs[operand]
    match eqn.primitive:
        case "slice":
            strides = params["strides"] or (1,) * len(value.shape)
            return (
                Window(
                    value.shape[dim],
                    eqn.outputs[0].shape[dim],
                    strides[dim],
                    -params["start_indices"][dim],
                ),
            )
        case "split":
            starts = [sum(params["sizes"][:i]) for i in range(len(params["sizes"]))]
            sizes = zip(starts, params["sizes"], strict=True)
            return tuple(
                Window(value.shape[dim], int(size), low=-int(start)) for start, size in sizes
            )
        case "pad" if operand == 0:
            low, _, interior = (int(n) for n in params["padding_config"][dim])
            return (
                Window(value.shape[dim], eqn.outputs[0].shape[dim], low=low, dilation=interior + 1),
            )
        case "conv_general_dilated" if operand == 0:
            numbers = params["dimension_numbers"]
            image, kernel, out = (
                ints(numbers.lhs_spec),
                ints(numbers.rhs_spec),
                ints(numbers.out_spec),
            )
            axis = image.index(dim) - 2
            size = eqn.inputs[1].shape[kernel[axis + 2]]
            return (
                Window(
                    value.shape[dim],
                    eqn.outputs[0].shape[out[axis + 2]],
                    int(params["window_strides"][axis]),
                    int(params["padding"][axis][0]),
                    (size - 1) * int(params["rhs_dilation"][axis]) + 1,
                    int(params["lhs_dilation"][axis]),
                ),
            )
        case "reduce_window" | "reduce_window_max" | "reduce_window_min" | "reduce_window_sum":
            reach = (int(params["window_dimensions"][dim]) - 1) * int(
                params["window_dilation"][dim]
            ) + 1
            return (
                Window(
                    value.shape[dim],
                    eqn.outputs[0].shape[dim],
                    int(params["window_strides"][dim]),
                    int(params["padding"][dim][0]),
                    reach,
                    int(params["base_dilation"][dim]),
                ),
            )
        case "concatenate":
            return Exchange.TRANSPOSED
        case "dynamic_slice" | "unstack":
            return Exchange.GATHER
        case _:
            return Exchange.SHARD


@functools.lru_cache(maxsize=65536)
def halo_elements(window: Window, pieces: int) -> int | None:
    """Elements along the dimension that one device sends where it is cut into pieces; None if all
    is gathered instead.

    >>> halo_elements(Window(size=16, windows=16, low=1, reach=3), pieces=4)  # a 3x3 convolution: a row on each side
    2
    >>> halo_elements(Window(size=64, windows=32), pieces=4)  # the first half: 16 rows one device on, 8 rows two
    24
    """
    if not window.size or not window.windows:
        return 0
    shard, share = -(-window.size // pieces), -(-window.windows // pieces)
    left, right = [], []
    for i in range(pieces):
        start = i * share * window.stride - window.low
        limit = start + (share - 1) * window.stride + window.reach
        left.append(i * shard - -(-start // window.dilation))
        right.append((limit - 1) // window.dilation + 1 - (i + 1) * shard)
    needed = shard + max(a + b for a, b in zip(left, right, strict=True))
    if window.dilation == 1 and max(*left, *right) > 2 * needed:
        if 2 * needed >= pieces * shard:
            return None
        return _compact(left, right, shard, window.size)
    return _shifts(left, right, shard)


def _shifts(left: Sequence[int], right: Sequence[int], shard: int) -> int:
    """Elements sent where every device gets a piece from the neighbour so and so many shards
    away.
    """
    total = 0
    for near, far in ((left[1:], right), (right[:-1], left)):
        most = max(near, default=0)
        skipped = max(-(max(far) + shard), 0)  # beside the shard, needed by no device
        for away in range(-(-most // shard)):
            size = min(most - shard * away, shard) - max(skipped - shard * away, 0)
            total += max(size, 0)
    return total


def _compact(left: Sequence[int], right: Sequence[int], shard: int, size: int) -> int:
    """Elements sent where windows are small and far away: each permute serves as many pairs of
    devices as it can.
    """
    pieces = len(left)
    wanted: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(pieces)
    ]  # by source: offset, target, from, to
    for i in range(pieces):
        start, limit = i * shard - left[i], min((i + 1) * shard + right[i], size)
        at = max(start, 0)
        while at < limit:
            source, begin = divmod(at, shard)
            length = min(shard - begin, limit - at)
            if source != i:
                wanted[source].append((at - start, i, begin, begin + length))
            at += length
    for found in wanted:
        found.sort(key=lambda halo: halo[0])
    total = 0
    while any(wanted):
        begin, end = shard, 0
        targets: set[int] = set()
        for found in wanted:
            if not found:
                continue
            _, target, first, last = found[0]
            apart = (begin > last and end == shard and first == 0) or (
                end < first and begin == 0 and last == shard
            )
            if targets and (target in targets or apart):
                continue
            targets.add(target)
            begin, end = min(begin, first), max(end, last)
            found.pop(0)
        total += end - begin
    return total
