"""Integers as narrow as they may be: a search compares and hashes millions of them.

NumPy wraps what does not fit when it casts arrays (`np.array([200]).astype(np.int8)` gives -56),
and a wrapped dimension is another dimension. So the dtype is chosen once, where the range is known,
and every array gets into it through `narrowed`, which raises instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Narrow = NDArray[np.signedinteger[Any]]
"""Integers of the dtype that `narrow_dtype` chose."""

NarrowType = np.dtype[np.signedinteger[Any]]


def narrow_dtype(least: int, most: int) -> NarrowType:
    """The narrowest signed dtype that holds all integers from one to another.

    Raises:
        OverflowError: If int64 does not.

    >>> narrow_dtype(-2, 127), narrow_dtype(-2, 128)
    (dtype('int8'), dtype('int16'))
    """
    kinds: tuple[type[np.signedinteger[Any]], ...] = (np.int8, np.int16, np.int32, np.int64)
    for kind in kinds:
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise OverflowError(f"no integer dtype holds {least} to {most}: int64 ends at 2**63 - 1")


def narrowed(numbers: Sequence[int] | NDArray[np.integer[Any]], dtype: NarrowType) -> Narrow:
    """Integers in another dtype, all of which it holds.

    Raises:
        OverflowError: If it does not hold one of them.

    >>> narrowed([-2, 127], np.dtype(np.int8))
    array([ -2, 127], dtype=int8)
    """
    wide = np.asarray(numbers, dtype=np.int64)
    limits = np.iinfo(dtype)
    if wide.size and (wide.min() < limits.min or limits.max < wide.max()):
        raise OverflowError(
            f"{wide.min()} to {wide.max()} do not fit {dtype}, {limits.min} to {limits.max}"
        )
    return wide.astype(dtype)
