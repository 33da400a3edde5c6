"""Collectives on a ring: alpha-beta seconds and the bytes that one device sends.

With n devices, B bytes of the full value, alpha seconds a step and w bytes/s:

    all_gather, reduce_scatter   (n - 1) alpha + (n - 1)/n B / w
    all_reduce                   both, one after the other
    all_to_all                   (n - 1) alpha + (n - 1)/n (B/n) / w
                                 (n - 1) alpha + B/4 / w    on a ring
    collective_permute           alpha + b / w              (b: what one device holds)

"Full value" means the same as in `autoshard.evidence.ring_bytes`: what the group holds together
(all_gather, all_to_all), or the operand of one device (reductions). One device costs nothing.

Reference:
    Thakur, Rabenseifner, Gropp (2005), "Optimization of Collective Communication Operations in
    MPICH", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from autoshard.cost_model.hardware.hardware import Hardware, Link
from autoshard.errors import HardwareError
from autoshard.evidence.collectives import ring_bytes


def all_gather_s(full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one ring all_gather.

    Each of the n devices holds full_bytes / n and ends with full_bytes: n - 1 steps, each sending
    full_bytes / n, hence (n - 1) * alpha + (n - 1) / n * full_bytes / bandwidth. Overlap with
    compute is not modelled here.

    Args:
        full_bytes: Bytes of the gathered value on one device, >= 0.
        link: The slowest link of the mesh axes (alpha_s, bytes_per_s).
        group_size: Devices in the group, n >= 1; n == 1 costs 0.

    Returns:
        Seconds, >= 0.

    Raises:
        HardwareError: If group_size < 1 or full_bytes < 0.

    Reference:
        Thakur, Rabenseifner, Gropp (2005), section 4.1.

    >>> all_gather_s(4_000_000, Link(alpha_s=1e-6, bytes_per_s=1e9), group_size=4)
    0.003003
    """
    n = _checked_size(full_bytes, group_size)
    return (n - 1) * link.alpha_s + (n - 1) / n * full_bytes / link.bytes_per_s


def reduce_scatter_s(full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one ring reduce_scatter.

    The all_gather run backwards: each of the n devices holds a partial value of full_bytes and ends
    with full_bytes / n of the sum. The additions are not counted.

    Args:
        full_bytes: Bytes of the partial value on one device, >= 0.
        link: The slowest link of the mesh axes.
        group_size: Devices in the group, n >= 1; n == 1 costs 0.

    Returns:
        Seconds, >= 0.

    Raises:
        HardwareError: If group_size < 1 or full_bytes < 0.

    Reference:
        Thakur, Rabenseifner, Gropp (2005), section 4.3.

    >>> reduce_scatter_s(4_000_000, Link(alpha_s=1e-6, bytes_per_s=1e9), group_size=4)
    0.003003
    """
    return all_gather_s(full_bytes, link, group_size)


def all_reduce_s(full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one ring all_reduce: a reduce_scatter, then an all_gather.

    Hence the familiar 2 (n - 1) / n * full_bytes sent. Trees, which have fewer steps for few bytes,
    are not modelled.

    Args:
        full_bytes: Bytes of the partial value on one device, >= 0.
        link: The slowest link of the mesh axes.
        group_size: Devices in the group, n >= 1; n == 1 costs 0.

    Returns:
        Seconds, >= 0.

    Raises:
        HardwareError: If group_size < 1 or full_bytes < 0.

    Reference:
        Thakur, Rabenseifner, Gropp (2005), section 4.4.

    >>> all_reduce_s(4_000_000, Link(alpha_s=1e-6, bytes_per_s=1e9), group_size=4)
    0.006006
    """
    return reduce_scatter_s(full_bytes, link, group_size) + all_gather_s(
        full_bytes, link, group_size
    )


def all_to_all_s(full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one all_to_all.

    Each of the n devices holds full_bytes / n and sends an n-th of it to each other device. On a
    ring data goes the shorter way, through the devices between: the distances from a device sum to
    n^2 / 4, rounded down, so about full_bytes / 4 passes each of them.

    Args:
        full_bytes: Bytes of the value over all devices of the group, >= 0.
        link: The slowest link of the mesh axes.
        group_size: Devices in the group, n >= 1; n == 1 costs 0.

    Returns:
        Seconds, >= 0.

    Raises:
        HardwareError: If group_size < 1 or full_bytes < 0.

    Reference:
        Thakur, Rabenseifner, Gropp (2005), section 4.2 (pairwise exchange); for the ring, Austin et
        al., "How to Scale Your Model" (2025), chapter "Sharded Matrices" (a quarter of an
        all_gather).

    >>> all_to_all_s(4_000_000, Link(alpha_s=0.0, bytes_per_s=1e9), group_size=4)
    0.00075
    >>> all_to_all_s(4_000_000, Link(alpha_s=0.0, bytes_per_s=1e9, topology="ring"), group_size=4)
    0.001
    """
    n = _checked_size(full_bytes, group_size)
    passed_share = (n * n // 4) / (n * n) if link.topology == "ring" else (n - 1) / n / n
    return (n - 1) * link.alpha_s + passed_share * full_bytes / link.bytes_per_s


def collective_permute_s(full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one collective_permute.

    Every device sends what it holds to one other, in one step.

    Args:
        full_bytes: Bytes that one device sends, >= 0.
        link: The slowest link of the mesh axes.
        group_size: Devices among which the value moves, n >= 1; n == 1 costs 0.

    Returns:
        Seconds, >= 0.

    Raises:
        HardwareError: If group_size < 1 or full_bytes < 0.

    >>> collective_permute_s(4_000_000, Link(alpha_s=0.0, bytes_per_s=1e9), group_size=4)
    0.004
    """
    n = _checked_size(full_bytes, group_size)
    return 0.0 if n == 1 else link.alpha_s + full_bytes / link.bytes_per_s


_SECONDS: Mapping[str, Callable[[int, Link, int], float]] = MappingProxyType(
    {
        "all_gather": all_gather_s,
        "reduce_scatter": reduce_scatter_s,
        "all_reduce": all_reduce_s,
        "all_to_all": all_to_all_s,
        "collective_permute": collective_permute_s,
    }
)


def collective_s(kind: str, full_bytes: int, link: Link, group_size: int) -> float:
    """Predicts the seconds of one collective of a kind; see the function of that kind.

    Raises:
        HardwareError: If group_size < 1, full_bytes < 0, or there is no such kind.

    >>> collective_s("all_reduce", 4_000_000, Link(alpha_s=1e-6, bytes_per_s=1e9), group_size=4)
    0.006006
    """
    return _SECONDS[_checked_kind(kind)](full_bytes, link.of_kind(kind), group_size)


def sent_bytes(kind: str, full_bytes: int, group_size: int) -> int:
    """Bytes that one device sends in one collective on a ring.

    Args:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` or `collective_permute`.
        full_bytes: As for the seconds of that kind, >= 0.
        group_size: Devices in the group, n >= 1; n == 1 sends nothing.

    Returns:
        Bytes, rounded down.

    Raises:
        HardwareError: If group_size < 1, full_bytes < 0, or there is no such kind.

    >>> [sent_bytes(kind, 1024, 4) for kind in ("all_gather", "all_reduce", "all_to_all")]
    [768, 1536, 192]
    """
    return ring_bytes(_checked_kind(kind), full_bytes, _checked_size(full_bytes, group_size))


def joint(
    hardware: Hardware, mesh_axes: Mapping[str, int], axes: Sequence[str]
) -> tuple[Link, int]:
    """The slowest link, and the devices, of one collective over several mesh axes.

    Args:
        hardware: Its links.
        mesh_axes: Size of each mesh axis.
        axes: The mesh axes spanned; none make a group of one device.

    Returns:
        The link with the fewest bytes/s (the larger latency decides among equals), and the product
        of the sizes.

    >>> from autoshard.cost_model.hardware.hardware import h100
    >>> slow_data = h100.with_links({"data": Link(alpha_s=14e-6, bytes_per_s=5e10)})
    >>> joint(slow_data, {"data": 4, "model": 8}, ("data", "model"))
    (Link(alpha_s=1.4e-05, bytes_per_s=50000000000.0, topology='switch'), 32)
    """
    group_size = 1
    for axis in axes:
        group_size *= mesh_axes[axis]
    links = [hardware.link_for(axis) for axis in axes] or [hardware.link]
    return min(links, key=lambda link: (link.bytes_per_s, -link.alpha_s)), group_size


def _checked_size(full_bytes: int, group_size: int) -> int:
    """The group size, once both are known to be possible."""
    if group_size < 1:
        raise HardwareError(
            f"group_size is {group_size}; a collective needs at least 1 device (1 device costs 0)."
        )
    if full_bytes < 0:
        raise HardwareError(f"full_bytes is {full_bytes}; a value has at least 0 bytes.")
    return group_size


def _checked_kind(kind: str) -> str:
    """The kind, once it is known to be a collective."""
    if kind not in _SECONDS:
        raise HardwareError(f"no such collective: {kind!r}. Kinds are {', '.join(_SECONDS)}.")
    return kind
