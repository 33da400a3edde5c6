"""A step's seconds by what they are spent on: compute, and collectives by the mesh axes they span.

    step = compute + communication - overlap * the shorter of the two

The overlap is a property of the hardware (`Hardware.overlap`): 0 where collectives block, 1 where
the shorter of the two is hidden entirely.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.collectives import joint
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.evidence.collectives import Collective

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepComponents:
    """A step's seconds by what they are spent on.

    Attributes:
        compute_s: Compute.
        comm_s: Collectives, by the mesh axes that they span.
    """

    compute_s: float
    comm_s: Mapping[Axes, float]

    def step_s(self, overlap: float) -> float:
        """Seconds of the step.

        >>> StepComponents(1.0, {("data",): 2.0, ("model",): 1.0}).step_s(overlap=0.5)
        3.5
        """
        return step_s(self.compute_s, sum(self.comm_s.values()), overlap)


@overload
def step_s(compute_s: float, comm_s: float, overlap: float) -> float: ...
@overload
def step_s(
    compute_s: NDArray[np.float64], comm_s: NDArray[np.float64], overlap: float
) -> NDArray[np.float64]: ...
def step_s(compute_s: Any, comm_s: Any, overlap: float) -> Any:
    """Seconds of a step: compute + communication - overlap * the shorter of the two.

    Args:
        compute_s: Seconds of compute, of one step or [layouts].
        comm_s: Seconds of collectives, likewise.
        overlap: Share of the shorter of the two that the longer one hides, 0 to 1.

    >>> step_s(1.0, 3.0, overlap=0.5)
    3.5
    >>> step_s(np.array([1.0, 4.0]), np.array([3.0, 2.0]), overlap=0.5).tolist()
    [3.5, 5.0]
    """
    if isinstance(compute_s, np.ndarray):
        return compute_s + comm_s - overlap * np.minimum(compute_s, comm_s)
    # not np.minimum here: its np.float64 would end up in tables and messages
    return compute_s + comm_s - overlap * min(compute_s, comm_s)


def step_components(
    hardware: Hardware,
    mesh_axes: Mapping[str, int],
    compute_s: float,
    collectives: Iterable[Collective],
) -> StepComponents:
    """The components of a step, from its seconds of compute and a summary of its collectives.

    Args:
        hardware: Its links.
        mesh_axes: Size of each mesh axis.
        compute_s: Seconds of compute.
        collectives: By kind and mesh axes.
    """
    comm_s: dict[Axes, float] = defaultdict(float)
    for collective in collectives:
        comm_s[collective.axes] += summary_s(hardware, mesh_axes, collective)
    return StepComponents(compute_s, dict(comm_s))


def summary_s(hardware: Hardware, mesh_axes: Mapping[str, int], collective: Collective) -> float:
    """Alpha-beta seconds of a summary of collectives.

    All its bytes go over the slowest link, with a ring's steps for each of the collectives.
    """
    link, group_size = joint(hardware, mesh_axes, collective.axes or tuple(mesh_axes))
    steps_of = {"all_reduce": 2 * (group_size - 1), "collective_permute": 1}
    steps = steps_of.get(collective.kind, group_size - 1)
    return collective.count * steps * link.alpha_s + collective.bytes / link.bytes_per_s
