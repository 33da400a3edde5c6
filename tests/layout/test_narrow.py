"""Narrow integers: the dtype is the smallest that holds the range, and nothing ever wraps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.layout.narrow import narrow_dtype, narrowed

DTYPES = [np.dtype(kind) for kind in (np.int8, np.int16, np.int32, np.int64)]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_the_dtype_holds_both_ends_and_no_narrower_one_does(one: int, other: int) -> None:
    least, most = min(one, other), max(one, other)
    dtype = narrow_dtype(least, most)
    assert narrowed([least, most], dtype).tolist() == [least, most]
    for narrower in DTYPES[: DTYPES.index(dtype)]:
        with pytest.raises(OverflowError, match="do not fit"):
            narrowed([least, most], narrower)


@pytest.mark.parametrize(
    ("most", "dtype"),
    [(0, "int8"), (127, "int8"), (128, "int16"), (2**15, "int32"), (2**31, "int64")],
)
def test_the_first_number_that_does_not_fit_takes_the_next_dtype(most: int, dtype: str) -> None:
    assert narrow_dtype(-2, most) == np.dtype(dtype)


def test_what_no_dtype_holds_is_refused() -> None:
    with pytest.raises(OverflowError, match="int64 ends at"):
        narrow_dtype(0, 2**63)


def test_arrays_are_checked_like_lists() -> None:
    assert narrowed(np.array([], np.int64), DTYPES[0]).dtype == np.int8
    with pytest.raises(OverflowError, match="128 to 200 do not fit int8, -128 to 127"):
        narrowed(np.array([128, 200]), DTYPES[0])
