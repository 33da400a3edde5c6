"""Properties of the alpha-beta model of collectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware.collectives import (
    all_gather_s,
    all_reduce_s,
    collective_permute_s,
    collective_s,
    joint,
    reduce_scatter_s,
    sent_bytes,
)
from autoshard.cost_model.hardware.hardware import Hardware, Link
from autoshard.errors import HardwareError
from autoshard.evidence.collectives import KINDS

kinds = st.sampled_from(KINDS)
# A device sends less of an all_to_all, the more devices share it.
growing_kinds = st.sampled_from([kind for kind in KINDS if kind != "all_to_all"])
sizes = st.integers(0, 10**13)
groups = st.integers(1, 4096)
links = st.builds(Link, alpha_s=st.floats(0, 1e-3), bytes_per_s=st.floats(1e6, 1e13))
ROUNDING = 1 + 1e-12


@given(kinds, sizes, sizes, links, groups)
def test_more_bytes_never_take_less_time(
    kind: str, one: int, other: int, link: Link, n: int
) -> None:
    fewer, more = sorted((one, other))
    assert collective_s(kind, fewer, link, n) <= collective_s(kind, more, link, n)


@given(growing_kinds, sizes, links, groups, groups)
def test_more_devices_never_take_less_time(
    kind: str, full_bytes: int, link: Link, one: int, other: int
) -> None:
    fewer, more = sorted((one, other))
    assert (
        collective_s(kind, full_bytes, link, fewer)
        <= collective_s(kind, full_bytes, link, more) * ROUNDING
    )


@given(links, st.integers(2, 4096))
def test_more_devices_never_take_less_latency_in_an_all_to_all(link: Link, n: int) -> None:
    assert collective_s("all_to_all", 0, link, n) <= collective_s("all_to_all", 0, link, n + 1)


@given(kinds, sizes, links)
def test_one_device_costs_nothing(kind: str, full_bytes: int, link: Link) -> None:
    assert collective_s(kind, full_bytes, link, 1) == 0
    assert sent_bytes(kind, full_bytes, 1) == 0


@given(sizes, links, groups)
def test_all_reduce_is_reduce_scatter_then_all_gather(full_bytes: int, link: Link, n: int) -> None:
    assert all_reduce_s(full_bytes, link, n) == reduce_scatter_s(
        full_bytes, link, n
    ) + all_gather_s(full_bytes, link, n)
    both = sent_bytes("reduce_scatter", full_bytes, n) + sent_bytes("all_gather", full_bytes, n)
    assert 0 <= sent_bytes("all_reduce", full_bytes, n) - both <= 1  # each is rounded down


@given(kinds, sizes, links, groups)
def test_never_below_the_bandwidth_bound(kind: str, full_bytes: int, link: Link, n: int) -> None:
    assert (
        collective_s(kind, full_bytes, link, n) * ROUNDING
        >= sent_bytes(kind, full_bytes, n) / link.bytes_per_s
    )


@given(kinds, links, st.integers(2, 4096))
def test_few_bytes_cost_the_steps(kind: str, link: Link, n: int) -> None:
    steps = {"all_reduce": 2 * (n - 1), "collective_permute": 1}.get(kind, n - 1)
    assert collective_s(kind, 0, link, n) == pytest.approx(steps * link.alpha_s)


def test_numbers_worked_by_hand() -> None:
    link = Link(alpha_s=1e-6, bytes_per_s=1e9)
    assert all_gather_s(8_000_000, link, 8) == pytest.approx(7e-6 + 7e-3)
    assert all_reduce_s(8_000_000, link, 8) == pytest.approx(14e-6 + 14e-3)
    assert collective_s("all_to_all", 8_000_000, link, 8) == pytest.approx(7e-6 + 7e-3 / 8)
    assert collective_permute_s(8_000_000, link, 8) == pytest.approx(1e-6 + 8e-3)


@given(kinds, st.integers(-(10**6), 0))
def test_a_group_without_devices_is_an_error(kind: str, n: int) -> None:
    link = Link(alpha_s=1e-6, bytes_per_s=1e9)
    with pytest.raises(HardwareError, match="at least 1 device"):
        collective_s(kind, 8, link, n)
    with pytest.raises(HardwareError, match="at least 1 device"):
        sent_bytes(kind, 8, n)


def test_negative_bytes_and_unknown_kinds_are_errors() -> None:
    link = Link(alpha_s=1e-6, bytes_per_s=1e9)
    with pytest.raises(HardwareError, match="full_bytes is -1"):
        all_gather_s(-1, link, 2)
    for call in (
        lambda: collective_s("broadcast", 8, link, 2),
        lambda: sent_bytes("broadcast", 8, 2),
    ):
        with pytest.raises(
            HardwareError, match=r"no such collective: 'broadcast'\. Kinds are all_gather"
        ):
            call()


@given(
    st.dictionaries(st.sampled_from("abcd"), links), st.lists(st.sampled_from("abcd"), unique=True)
)
def test_joint_takes_the_slowest_link_and_all_devices(
    named: dict[str, Link], axes: list[str]
) -> None:
    default = Link(alpha_s=1e-6, bytes_per_s=1e9)
    hardware = Hardware("x", {"float32": 1e12}, 1e12, 1, default, named)
    mesh_axes = {"a": 2, "b": 3, "c": 5, "d": 7}
    link, n = joint(hardware, mesh_axes, axes)
    product = 1
    for axis in axes:
        product *= mesh_axes[axis]
    assert n == product
    for axis in axes:
        assert link.bytes_per_s <= hardware.link_for(axis).bytes_per_s
    assert link in ([hardware.link_for(axis) for axis in axes] or [default])
