"""The parts that can be a target: numbers only, each with its source.

TPU: `hbm_bytes` is what the TPU compiler itself says is there ("exceeds available HBM (15.75G)",
libtpu 0.0.42.1 and 0.0.50.1, 2026-11-29). `clock_hz` turns the compiler's estimated cycles into
seconds: the peak rate of the part over what its matrix units do in a cycle (v4, v5p: 2 cores x 4
units of 128x128; v5e: 4 of 128x128; v6e: as much as 4 of 256x256; two operations a multiply-add).
It agrees with the compiler: the estimates of an 8192-cubed bfloat16 product and of a stream over 2
GiB, times this clock, are 70 to 93 % of the peak and 71 to 82 % of the memory rate on all four. v4:
1.05 GHz is also the clock in Jouppi et al. (2023), table 4.

GPU: what `cudaGetDeviceProperties` says of the SXM parts: NVIDIA CUDA C++ Programming Guide, table
"Technical Specifications per Compute Capability" (limits per block and SM), and the architecture
papers of Ampere (A100), Hopper (H100, H200) and Blackwell (B200) for SMs, clock, level-2 cache and
memory rate; `memory_bytes` is the capacity that CUDA reports on these parts (79.1, 79.1, 139.8 and
178.4 GiB), less than what is printed on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from autoshard.errors import TargetError
from autoshard.text import BINARY_UNITS

_KIB, _MIB, _GIB = BINARY_UNITS["KiB"], BINARY_UNITS["MiB"], BINARY_UNITS["GiB"]


@dataclass(frozen=True, slots=True)
class TpuPart:
    """A TPU chip.

    Attributes:
        device_kind: As jax names it.
        largest: Largest slice, chips by dimension.
        hbm_bytes: Memory of a chip that a program may use.
        clock_hz: Cycles a second of the compiler's estimates.
        megacore: True where two cores have to be asked to work as one.
    """

    device_kind: str
    largest: tuple[int, ...]
    hbm_bytes: int
    clock_hz: float
    megacore: bool = False


_TPUS = {
    "v4": TpuPart("TPU v4", (16, 16, 16), int(30.75 * _GIB), 1.05e9, megacore=True),
    "v5e": TpuPart("TPU v5 lite", (16, 16), int(15.75 * _GIB), 1.503e9),
    "v5p": TpuPart("TPU v5", (16, 20, 28), int(95.73 * _GIB), 1.751e9),
    "v6e": TpuPart("TPU v6 lite", (16, 16), int(31.24 * _GIB), 1.751e9),
}
TPUS: Mapping[str, TpuPart] = MappingProxyType(_TPUS)


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A GPU as the compiler needs to know it; see the module for the sources.

    Attributes:
        device_kind: As jax names it.
        compute_capability: Major and minor.
        multiprocessors: SMs.
        clock_ghz: Boost clock.
        memory_bytes: As CUDA reports it.
        memory_bytes_per_s: Of the main memory.
        l2_bytes: Level-2 cache.
        shared_bytes: Shared memory of an SM.
        shared_bytes_of_block: What one block may ask for.
    """

    device_kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_bytes: int
    shared_bytes_of_block: int

    def description(self) -> str:
        """As the GPU compiler reads it: the text form of its target configuration."""
        major, minor = self.compute_capability
        # Instructions that one architecture has alone (wgmma: sm_90a, not sm_90); without them the
        # compiler would plan for slower matmuls.
        accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
  name: "{self.device_kind}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  core_count: {self.multiprocessors}
  fpus_per_core: {64 if major == 8 else 128}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.memory_bytes_per_s}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {self.shared_bytes_of_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.device_kind}"
"""


_GPUS = {
    "a100": GpuPart(
        device_kind="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        multiprocessors=108,
        clock_ghz=1.41,
        memory_bytes=int(79.1 * _GIB),
        memory_bytes_per_s=2_039_000_000_000,
        l2_bytes=40 * _MIB,
        shared_bytes=164 * _KIB,
        shared_bytes_of_block=163 * _KIB,
    ),
    "h100": GpuPart(
        device_kind="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        multiprocessors=132,
        clock_ghz=1.98,
        memory_bytes=int(79.1 * _GIB),
        memory_bytes_per_s=3_350_000_000_000,
        l2_bytes=50 * _MIB,
        shared_bytes=228 * _KIB,
        shared_bytes_of_block=227 * _KIB,
    ),
    "h200": GpuPart(
        device_kind="NVIDIA H200",
        compute_capability=(9, 0),
        multiprocessors=132,
        clock_ghz=1.98,
        memory_bytes=int(139.8 * _GIB),
        memory_bytes_per_s=4_800_000_000_000,
        l2_bytes=50 * _MIB,
        shared_bytes=228 * _KIB,
        shared_bytes_of_block=227 * _KIB,
    ),
    "b200": GpuPart(
        device_kind="NVIDIA B200",
        compute_capability=(10, 0),
        multiprocessors=148,
        clock_ghz=1.965,
        memory_bytes=int(178.4 * _GIB),
        memory_bytes_per_s=7_700_000_000_000,
        l2_bytes=126 * _MIB,
        shared_bytes=228 * _KIB,
        shared_bytes_of_block=227 * _KIB,
    ),
}
GPUS: Mapping[str, GpuPart] = MappingProxyType(_GPUS)


MAX_DESCRIPTION_BYTES = 2**20
"""Read of a captured description at most, which is a page long. Chosen by hand; no test depends on
it: what is cut there is refused by the compiler."""


def gpu_description(part: str, name: str, forms: str) -> str:
    """The description of a part that is listed here, or the text of a captured one.

    Args:
        part: A name of `GPUS`, or a path.
        name: The whole target, for messages.
        forms: What targets there are, for messages.

    Raises:
        TargetError: If it is neither.
    """
    if part in GPUS:
        return GPUS[part].description()
    path = Path(part)
    if not path.is_file():
        raise TargetError(
            f"target {name!r}: there is no GPU {part!r}, and no file of that name. {forms}"
        )
    with path.open("rb") as file:
        text = file.read(MAX_DESCRIPTION_BYTES).decode("utf-8", "replace")
    if "gpu_device_info" not in text or "cuda_compute_capability" not in text:
        raise TargetError(
            f"target {name!r}: {part} is no description of a GPU (it names no gpu_device_info with "
            f"a cuda_compute_capability). Write one on a machine that has the GPU: autoshard "
            f"capture-target --out {part}."
        )
    return text
