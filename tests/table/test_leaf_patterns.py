"""Folding regular leaves into patterns loses nothing, whatever the leaves are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.table.leaf_patterns import (
    alike,
    fold,
    likenesses,
    path_key,
    ranges_of,
    ranges_text,
    unfold,
)

parts = st.one_of(
    st.sampled_from(["w", "layers", "*", "", "a1b2", "01", "x*"]),
    st.integers(0, 12).map(str),
    st.integers(0, 12).map("layer_{}".format),
    st.text(max_size=4),
)
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, st.sampled_from("ab"), max_size=30))
def test_what_is_folded_unfolds_to_the_same_leaves(leaves: dict[str, str]) -> None:
    lines = fold(leaves)
    assert unfold(lines) == leaves
    assert list(lines) == sorted(lines, key=path_key)
    assert len(lines) <= len(leaves)


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.just("b")),
)
def test_two_numbers_fold_and_exceptions_are_lines(
    layers: int, experts: int, odd: dict[tuple[int, int], str]
) -> None:
    leaves = {f"l/{i}/e/{j}/w": odd.get((i, j), "a") for i in range(layers) for j in range(experts)}
    assert unfold(fold(leaves)) == leaves


def test_a_grid_is_one_line() -> None:
    leaves = {f"layers/{i}/experts/{j}/w": "a" for i in range(32) for j in range(8)}
    assert fold(leaves) == {"layers/*/experts/*/w": (("0-31", "0-7"), "a")}


def test_exceptions_and_gaps() -> None:
    leaves = {f"block_{i}/w": "b" if i in (3, 4) else "a" for i in range(12) if i != 7}
    assert fold(leaves) == {
        "block_*/w": (("0-6,8-11",), "a"),
        "block_3/w": ((), "b"),
        "block_4/w": ((), "b"),
    }


def test_two_layers_are_not_worth_a_pattern() -> None:
    assert list(fold({"l/0/w": "a", "l/1/w": "a"})) == ["l/0/w", "l/1/w"]


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranges_survive(numbers: set[int]) -> None:
    assert {n for run in ranges_of(ranges_text(numbers)) for n in run} == numbers


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-1", "1,1", "1-3,2", "1, 2", "\uff19", "1-2-3", "0-9999999999"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|rise"):
        ranges_of(text)


def test_two_patterns_that_speak_of_one_leaf_are_refused() -> None:
    lines = {"a/*/0": (("0-3",), "x"), "a/1/*": (("0-3",), "y")}
    with pytest.raises(ValueError, match="both speak of 'a/1/0'"):
        unfold(lines)
    assert unfold(lines | {"a/1/0": ((), "z")})["a/1/0"] == "z"


def test_outputs_are_like_the_argument_that_they_become() -> None:
    inputs = {f"{tree}/{leaf}": "a" for tree in ("params", "moment") for leaf in ("w", "b", "c")}
    outputs = {f"out/{i}/{leaf}": "a" for i in (0, 1) for leaf in ("w", "b", "c")} | {"out/2": "a"}
    carried = {
        f"out/{i}/{leaf}": f"{tree}/{leaf}"
        for i, tree in enumerate(("params", "moment"))
        for leaf in "wbc"
    }
    assert likenesses(outputs, inputs, carried) == {"out/0": "params", "out/1": "moment"}
    assert likenesses(outputs | dict.fromkeys(("out/0/w", "out/0/b"), "z"), inputs, carried) == {
        "out/1": "moment"
    }
    assert not alike(outputs, "out/0", inputs, "else")
