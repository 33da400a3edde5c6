"""What is particular to a platform, as jax names it (`cpu`, `gpu`, `tpu`).

How a compiler lowers, fuses and sends what a program says is a fact of its `Backend`
(`cost_model.hardware.backend`); here is what the rooms below need.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PlatformFacts:
    """Facts of a platform.

    Attributes:
        on_host: True where devices are the host's own processor: it can be divided into any number
            of devices, which share its memory, and nothing but jax is needed to compile for them.
        peak_has_temporaries: False where the peak that a compiled program states leaves its
            temporaries out (XLA:CPU, jax 0.10 and 0.12).
        has_quick_level: True where the compiler can be told to skip its optimisations, and what it
            then says of memory still holds.
        island: The attribute of a device that numbers what a slower network joins (slices of TPUs,
            hosts of GPUs); "" where there is none.
    """

    on_host: bool
    peak_has_temporaries: bool
    has_quick_level: bool
    island: str


PLATFORMS = MappingProxyType(
    {
        "cpu": PlatformFacts(
            on_host=True, peak_has_temporaries=False, has_quick_level=False, island=""
        ),
        "gpu": PlatformFacts(
            on_host=False, peak_has_temporaries=True, has_quick_level=False, island="process_index"
        ),
        "tpu": PlatformFacts(
            on_host=False, peak_has_temporaries=True, has_quick_level=True, island="slice_index"
        ),
    }
)
UNKNOWN = PlatformFacts(on_host=False, peak_has_temporaries=True, has_quick_level=False, island="")


def facts_of(platform: str) -> PlatformFacts:
    """The facts of a platform; of one that is not known, `UNKNOWN`.

    >>> facts_of("cpu").on_host, facts_of("tpu").on_host
    (True, False)
    """
    return PLATFORMS.get(platform, UNKNOWN)
