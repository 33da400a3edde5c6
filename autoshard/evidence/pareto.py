"""The Pareto set of two costs: what no other item beats in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def pareto(items: Iterable[T], key: Callable[[T], tuple[Any, ...]]) -> list[T]:
    """Items that no other one beats in both costs, in the order of the first.

    Args:
        items: In any order.
        key: The two costs of an item (smaller is better), then what decides between items that are
            equal in both.

    >>> pareto([(1, 3), (2, 2), (3, 2), (4, 1)], key=lambda costs: costs)
    [(1, 3), (2, 2), (4, 1)]
    """
    front: list[T] = []
    least_second = math.inf
    for item in sorted(items, key=key):
        second = key(item)[1]
        if second < least_second:
            front.append(item)
            least_second = second
    return front
