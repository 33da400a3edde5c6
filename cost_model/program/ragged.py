"""Entries of classes, lists of unlike lengths one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


class Ragged:
    """Entries of classes, `starts[c]` to `starts[c + 1]`."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def of(self, classes: Array) -> tuple[Array, Array]:
        """(position in `classes`, entry) of every entry of these classes."""
        counts = self.counts[classes]
        owner = np.repeat(np.arange(len(classes)), counts)
        first = np.cumsum(counts) - counts
        return owner, np.arange(len(owner)) - first[owner] + self.starts[classes][owner]
