"""Hardware: the rates and links that predictions rest on, each number with its source.

A device does `flops_per_s(dtype)` and moves `memory_bytes_per_s`; a mesh axis is a ring of `Link`s.
Presets are datasheet numbers and published efficiencies: good enough to rank layouts, not to
promise seconds. Numbers measured on the devices themselves go into a `Hardware` of one's own, kept
as a JSON file (`save`, `load`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from autoshard.arguments import check_kind
from autoshard.errors import HardwareError
from autoshard.text import BINARY_UNITS, shown

_GIB = BINARY_UNITS["GiB"]

MAX_FILE_BYTES = 2**20
"""Of a hardware description: one is a page long, and another file named by mistake is not read.
Without it test_what_is_read_is_bounded fails."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects neighbours along a mesh axis.

    Attributes:
        alpha_s: Latency of one step of a collective, seconds, >= 0.
        bytes_per_s: What one device sends along the ring, > 0; both directions together where a
            ring uses both.
        topology: `ring`: data for a far device passes through those between (an axis of a torus is
            one); `switch`: every device reaches every other one directly.
        kinds: Links as calibration measured them for particular kinds of collective; the others use
            this one.
    """

    alpha_s: float
    bytes_per_s: float
    topology: Literal["ring", "switch"] = "switch"
    kinds: Mapping[str, Link] = field(default_factory=dict, hash=False, repr=False)

    def of_kind(self, kind: str) -> Link:
        """The link for this kind of collective."""
        return self.kinds.get(kind, self)

    def __post_init__(self) -> None:
        if self.topology not in ("ring", "switch"):
            raise HardwareError(
                f"Link.topology is {self.topology!r}; use 'ring' (a torus axis is one) or 'switch'."
            )
        object.__setattr__(self, "kinds", MappingProxyType(dict(self.kinds)))
        if not (math.isfinite(self.alpha_s) and self.alpha_s >= 0):
            raise HardwareError(
                f"Link.alpha_s is {self.alpha_s}; a latency is finite and >= 0 seconds. Use for "
                f"example 1e-6."
            )
        _check_rate("Link.bytes_per_s", self.bytes_per_s, "9e10 (90 GB/s)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and how it is connected.

    Attributes:
        name: Name of the preset, or of one's own choice.
        peak_flops_per_s: Peak rate by dtype name; `float32` must be there and serves every dtype
            not named. `float8` and `int4` serve all their variants.
        memory_bytes_per_s: Rate of the device's main memory.
        memory_bytes: Its size.
        link: The link of every mesh axis not in `links`.
        links: Links of particular mesh axes.
        dcn: The link of mesh axes that leave a TPU slice or a GPU host; None where it is not known.
        efficiency: Share of the peak that real contractions reach, 0 < efficiency <= 1.
        overlap: Share of the shorter of compute and communication that the longer one hides, 0 to
            1.
        source: Where the numbers come from.
        op_s: What an operation takes besides its arithmetic and traffic (launch, dispatch), >= 0.
        measured_on: The kind of device that a calibration measured, "" for datasheet numbers.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    efficiency: float = 1.0
    overlap: float = 0.0
    source: str = ""
    dcn: Link | None = None
    op_s: float = 0.0
    measured_on: str = ""

    def __post_init__(self) -> None:
        self._check_rates()
        self._check_shares()
        for name in ("peak_flops_per_s", "links"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def _check_rates(self) -> None:
        where = f"Hardware {self.name!r}"
        if "float32" not in self.peak_flops_per_s:
            raise HardwareError(
                f"{where}: peak_flops_per_s names {sorted(self.peak_flops_per_s)}, but 'float32' "
                f"is needed: it serves every dtype not named. Add 'float32'."
            )
        for dtype, rate in self.peak_flops_per_s.items():
            _check_rate(f"{where}: peak_flops_per_s[{dtype!r}]", rate, "1e14")
        _check_rate(f"{where}: memory_bytes_per_s", self.memory_bytes_per_s, "1e12")
        _check_rate(f"{where}: memory_bytes", self.memory_bytes, f"{16 * _GIB} (16 GiB)")

    def _check_shares(self) -> None:
        where = f"Hardware {self.name!r}"
        if not 0 < self.efficiency <= 1:
            raise HardwareError(
                f"{where}: efficiency is {self.efficiency}; a share of the peak is above 0, at "
                f"most 1."
            )
        if not 0 <= self.overlap <= 1:
            raise HardwareError(
                f"{where}: overlap is {self.overlap}; it goes from 0 (nothing is hidden) to 1 (the "
                f"shorter one is)."
            )
        if not (math.isfinite(self.op_s) and self.op_s >= 0):
            raise HardwareError(
                f"{where}: op_s is {self.op_s}; it is finite and >= 0 seconds. Use 0.0 if unknown."
            )

    def flops_per_s(self, dtype: str) -> float:
        """The rate that contractions of a dtype reach: peak times efficiency, flops/s.

        >>> rates = [h100.flops_per_s(d) for d in ("float8_e4m3fn", "bfloat16", "float32")]
        >>> rates == sorted(rates, reverse=True)
        True
        """
        peaks = self.peak_flops_per_s
        family = next((f for f in ("float8", "int4") if dtype.startswith(f)), dtype)
        return peaks.get(dtype, peaks.get(family, peaks["float32"])) * self.efficiency

    def link_for(self, mesh_axis: str) -> Link:
        """The link of a mesh axis."""
        return self.links.get(mesh_axis, self.link)

    def with_links(self, links: Mapping[str, Link | str]) -> Hardware:
        """The same device with other links for some mesh axes.

        Args:
            links: For each of them a `Link`, `"dcn"` for the one that leaves a slice or host, or
                `"link"` for the one inside.

        >>> between_hosts = Link(alpha_s=14e-6, bytes_per_s=5e10)
        >>> h100.with_links({"hosts": between_hosts}).link_for("hosts").bytes_per_s
        50000000000.0
        >>> tpu_v5e.with_links({"data": "dcn"}).link_for("data") == tpu_v5e.dcn
        True

        Raises:
            HardwareError: If a link is named that this device does not have.
        """
        resolved = {axis: self._named_link(axis, link) for axis, link in links.items()}
        return replace(self, links={**self.links, **resolved})

    def _named_link(self, axis: str, link: Link | str) -> Link:
        if isinstance(link, Link):
            return link
        own = {"dcn": self.dcn, "link": self.link}.get(link)
        if own is None:
            reason = " (its dcn is not known)" if link == "dcn" else ""
            raise HardwareError(
                f"links={{{axis!r}: {link!r}}}: hardware {self.name!r} has no such link{reason}. "
                f"Use 'link' (inside a slice or host), 'dcn' (between them), or a "
                f"Link(alpha_s=..., bytes_per_s=...)."
            )
        return own

    def for_devices(self, device_kind: str, where: str) -> Hardware:
        """Itself, unless a calibration measured another kind of device.

        Args:
            device_kind: What `jax.Device.device_kind` says of the devices to predict for.
            where: The file that it came from, for the message.

        Raises:
            HardwareError: If it was measured on others.
        """
        if self.measured_on and self.measured_on != device_kind:
            raise HardwareError(
                f"hardware={where!r} was calibrated on {self.measured_on!r} devices; this mesh has "
                f"{device_kind!r}. Calibrate again there (autoshard calibrate --out FILE), or name "
                f"a preset: {', '.join(PRESETS)}."
            )
        return self

    def with_far_axes(self, mesh_axes: Iterable[str]) -> Hardware:
        """The same device with `dcn` as the link of these mesh axes, unless `links` has another.

        Args:
            mesh_axes: Mesh axes that leave a slice or host.
        """
        if self.dcn is None:
            return self
        return self.with_links({axis: self.dcn for axis in mesh_axes if axis not in self.links})

    def to_json(self) -> str:
        """As JSON; `from_json` reads it back."""
        fields = {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}
        return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Hardware:
        """Reads what `to_json` wrote.

        Raises:
            HardwareError: If the text is not that, or a number in it is impossible.
        """
        check_kind("text", text, (str, bytes), "what Hardware.to_json gave", HardwareError)
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            fault = shown(error) or "nested too deeply"
            raise HardwareError(
                f"this is no hardware description: {fault}. Write one with Hardware(...).to_json()."
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes it to a file, as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Reads a file that `save` wrote.

        Raises:
            HardwareError: If the file cannot be read or is no hardware description.
        """
        check_kind("path", path, (str, PathLike), "a file that calibration wrote", HardwareError)
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                raise HardwareError(
                    f"larger than {MAX_FILE_BYTES} bytes; that is no hardware description."
                )
            return cls.from_json(text)
        except OSError as error:
            raise HardwareError(
                f"cannot read hardware description {str(path)!r}: {error.strerror}."
            ) from error
        except HardwareError as error:
            raise HardwareError(f"{path}: {error}") from error


def _plain(value: Any) -> Any:
    """Links and mappings as dicts."""
    if isinstance(value, Link):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def _check_rate(name: str, value: float, example: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise HardwareError(
            f"{name} is {value}; it must be finite and above 0. Use for example {example}."
        )


# TPU numbers: Austin et al., "How to Scale Your Model" (2025), chapter "How to Think About TPUs",
# tables of chips and of ICI bandwidth (bidirectional: a ring uses both directions), and chapter
# "Sharded Matrices", "A note on ICI latency": about 1 us a hop. jax multiplies float32 in bfloat16
# by default on TPU (jax.default_matmul_precision), hence equal peaks. Efficiency: PaLM (Chowdhery
# et al. 2022, section 4.1) reached a hardware FLOPs utilisation of 57.8 % on TPU v4. Overlap: the
# same book bounds a step by max(T_math, T_comms) and T_math + T_comms; 0.5 is the middle, for want
# of a measurement.
_TPU = (
    "peak, memory, ICI, 1 us a hop: 'How to Scale Your Model' (2025); efficiency: PaLM (2022) "
    "section 4.1, 57.8 % hardware FLOPs utilisation; overlap: middle of the book's two bounds, not "
    "measured"
)

# Between slices, a chip's share of the data-centre network. v5e and v6e: Cloud TPU documentation,
# 6.4 and 25.6 Tbit/s a pod of 256 chips. v5p: 'How to Scale Your Model', 6.25 GB/s. v4: PaLM
# section 4, 81 Tbit/s across pods of 6,144 chips in all. Latency: none is published; that of NCCL's
# network step stands in. Memory: what the TPU compiler says is there ("exceeds available HBM
# (15.75G)"), less than the 16, 32 and 96 GiB of the part.
_NETWORK_STEP_S = 14e-6
"""Latency of one step over a network: NCCL's src/graph/tuning.cc, ring, Simple protocol."""


def _tpu(
    name: str,
    *,
    bf16: float,
    int8: float,
    memory_bytes_per_s: float,
    gib: float,
    ici_bytes_per_s: float,
    dcn_bytes_per_s: float,
) -> Hardware:
    return Hardware(
        name=name,
        peak_flops_per_s={
            "bfloat16": bf16,
            "float16": bf16,
            "float32": bf16,
            "int8": int8,
            "uint8": int8,
        },
        memory_bytes_per_s=memory_bytes_per_s,
        memory_bytes=int(gib * _GIB),
        link=Link(alpha_s=1e-6, bytes_per_s=ici_bytes_per_s, topology="ring"),
        efficiency=0.578,
        overlap=0.5,
        source=_TPU,
        dcn=Link(alpha_s=_NETWORK_STEP_S, bytes_per_s=dcn_bytes_per_s),
    )


tpu_v4 = _tpu(
    "tpu_v4",
    bf16=2.75e14,
    int8=2.75e14,
    memory_bytes_per_s=1.2e12,
    gib=30.75,
    ici_bytes_per_s=9e10,
    dcn_bytes_per_s=1.65e9,
)
tpu_v5p = _tpu(
    "tpu_v5p",
    bf16=4.59e14,
    int8=9.18e14,
    memory_bytes_per_s=2.8e12,
    gib=95.73,
    ici_bytes_per_s=1.8e11,
    dcn_bytes_per_s=6.25e9,
)
tpu_v5e = _tpu(
    "tpu_v5e",
    bf16=1.97e14,
    int8=3.94e14,
    memory_bytes_per_s=8.1e11,
    gib=15.75,
    ici_bytes_per_s=9e10,
    dcn_bytes_per_s=3.125e9,
)
tpu_v6e = _tpu(
    "tpu_v6e",
    bf16=9.20e14,
    int8=1.84e15,
    memory_bytes_per_s=1.6e12,
    gib=31.24,
    ici_bytes_per_s=1.8e11,
    dcn_bytes_per_s=1.25e10,
)

# GPUs: dense rates (no sparsity), SXM modules. XLA multiplies float32 in TF32 by default on these.
# NVLink: the datasheets give both directions together; one device sends half of it. Step latency:
# NCCL's tuning table, ring over NVLink with the Simple protocol, 3.4 us; over a network, 14 us.
# `link` is inside one NVLink domain, `dcn` outside: a GPU's own InfiniBand port in NVIDIA's DGX
# A100 (200 Gbit/s), DGX H100, H200 and B200 (400 Gbit/s). Memory: what CUDA reports on these parts
# (see autoshard.devices.parts).
_HDR_INFINIBAND = Link(_NETWORK_STEP_S, 2.5e10)
_NDR_INFINIBAND = Link(_NETWORK_STEP_S, 5e10)

_NVLINK_STEP_S = 3.4e-6
"""See above: NCCL's tuning table."""

_NCCL = (
    "NVLink step 3.4 us: NCCL src/graph/tuning.cc; overlap: middle between none and all, not "
    "measured"
)

a100 = Hardware(
    name="a100",
    peak_flops_per_s={
        "bfloat16": 3.12e14,
        "float16": 3.12e14,
        "float32": 1.56e14,
        "float64": 1.95e13,
        "int8": 6.24e14,
        "uint8": 6.24e14,
    },
    memory_bytes_per_s=2.039e12,
    memory_bytes=int(79.1 * _GIB),
    link=Link(alpha_s=_NVLINK_STEP_S, bytes_per_s=3.0e11),
    # Narayanan et al. (2021), table 1: up to 52 % of peak on 3072 A100.
    efficiency=0.52,
    overlap=0.5,
    source=(
        f"NVIDIA A100 datasheet, 80 GB SXM (600 GB/s NVLink); efficiency: Narayanan et al. (2021) "
        f"table 1; {_NCCL}"
    ),
    dcn=_HDR_INFINIBAND,
)

h100 = Hardware(
    name="h100",
    peak_flops_per_s={
        "bfloat16": 9.89e14,
        "float16": 9.89e14,
        "float32": 4.94e14,
        "float64": 6.7e13,
        "float8": 1.979e15,
        "int8": 1.979e15,
        "uint8": 1.979e15,
    },
    memory_bytes_per_s=3.35e12,
    memory_bytes=int(79.1 * _GIB),
    link=Link(alpha_s=_NVLINK_STEP_S, bytes_per_s=4.5e11),
    # Llama 3 (2024), table 4: 38 to 43 % of the bfloat16 peak on 8,192 to 16,384 H100,
    # communication included.
    efficiency=0.43,
    overlap=0.5,
    source=(
        f"NVIDIA H100 datasheet, SXM (900 GB/s NVLink); efficiency: Llama 3 (2024) table 4; {_NCCL}"
    ),
    dcn=_NDR_INFINIBAND,
)

h200 = replace(
    h100,
    name="h200",
    memory_bytes_per_s=4.8e12,
    memory_bytes=int(139.8 * _GIB),
    source=f"NVIDIA H200 datasheet, SXM (141 GB, 4.8 TB/s); all else as h100; {_NCCL}",
)

b200 = replace(
    h100,
    name="b200",
    peak_flops_per_s={
        "bfloat16": 2.25e15,
        "float16": 2.25e15,
        "float32": 1.1e15,
        "float64": 3.7e13,
        "float8": 4.5e15,
        "int8": 4.5e15,
        "uint8": 4.5e15,
    },
    memory_bytes_per_s=7.7e12,
    memory_bytes=int(178.4 * _GIB),
    link=Link(alpha_s=_NVLINK_STEP_S, bytes_per_s=9.0e11),
    source=(
        f"NVIDIA HGX B200 datasheet (1.8 TB/s NVLink), dense rates; efficiency: that of h100, "
        f"unmeasured; {_NCCL}"
    ),
)

# Fake CPU devices (`jax_num_cpu_devices`) share the cores, so these are rates per device while all
# 8 work, and "links" are copies through memory. Measured by `make bench`
# (tests/cost_model/test_cpu_preset.py) on 2026-11-29, 8 devices on 2 cores, jax 0.10.2: matmuls of
# 128 to 512 rows 3.5e10 to 4.9e10 flops/s; streaming 1 to 16 MiB 0.9e10 to 1.8e10 bytes/s;
# all_gather and all_reduce of few bytes over 2, 4, 8 devices 8 to 40 us a step (fewer for more
# devices); of 1 to 4 MiB 0.9e9 to 5e9 bytes/s. Efficiency: what is left of the matmul rate in the
# train step of examples/transformer.py, whose matmuls are smaller. Overlap: the collectives of
# XLA:CPU block. Memory: 24 GiB for 8 devices and the rest of the system.
cpu = Hardware(
    name="cpu",
    peak_flops_per_s={"float32": 4.0e10},
    memory_bytes_per_s=1.0e10,
    memory_bytes=2 * _GIB,
    link=Link(alpha_s=15e-6, bytes_per_s=2.0e9),
    efficiency=0.5,
    overlap=0.0,
    source=(
        "measured 2026-11-29 with `make bench`: 8 fake devices on 2 cores, jax 0.10.2; rates per "
        "device, all busy"
    ),
)

_PRESETS = (tpu_v4, tpu_v5e, tpu_v5p, tpu_v6e, a100, h100, h200, b200, cpu)
PRESETS: Mapping[str, Hardware] = MappingProxyType(
    {hardware.name: hardware for hardware in _PRESETS}
)

# How `jax.Device.device_kind` starts, in lower case, longest first; jax calls v5e "TPU v5 lite" and
# v6e "TPU v6 lite".
_DEVICE_KINDS = (
    ("tpu v5 lite", tpu_v5e),
    ("tpu v5litepod", tpu_v5e),
    ("tpu v6 lite", tpu_v6e),
    ("nvidia a100", a100),
    ("nvidia h100", h100),
    ("nvidia h200", h200),
    ("nvidia b200", b200),
    ("tpu v5e", tpu_v5e),
    ("tpu v5p", tpu_v5p),
    ("tpu v6e", tpu_v6e),
    ("tpu v4", tpu_v4),
    ("tpu v5", tpu_v5p),
    ("cpu", cpu),
)


def hardware_for(name_or_device_kind: str) -> Hardware:
    """The preset of this name, or of devices of this kind.

    Args:
        name_or_device_kind: A preset's name, or what `jax.Device.device_kind` says.

    Raises:
        HardwareError: If there is no such preset.

    >>> [hardware_for(name).name for name in ("h100", "TPU v5 lite", "NVIDIA H200")]
    ['h100', 'tpu_v5e', 'h200']
    """
    wanted = name_or_device_kind.strip().lower()
    if wanted in PRESETS:
        return PRESETS[wanted]
    for kind, hardware in _DEVICE_KINDS:
        if wanted.startswith(kind):
            return hardware
    raise HardwareError(
        f"hardware={name_or_device_kind!r} is not known; presets are {', '.join(PRESETS)}. Pass "
        f"the preset that comes closest, or a Hardware(...) with numbers of your own: the time of "
        f"a large matmul and of a large copy give peak_flops_per_s and memory_bytes_per_s, an "
        f"all_gather of few and of many bytes give the link."
    )


def check_hardware(hardware: Any) -> None:
    """Refuses what is neither a description nor a name of one."""
    use = f"a Hardware, a file of one, or a preset: {', '.join(PRESETS)}"
    check_kind("hardware", hardware, (str, PathLike, Hardware), use, HardwareError)


def resolve_hardware(
    hardware: Hardware | str | None, device_kind: str, far_axes: Iterable[str] = ()
) -> Hardware:
    """The hardware to predict for: as described, as named, or that of the devices.

    Args:
        hardware: A description, taken as it is; the path of one (`.json`); the name of a preset;
            None for the preset of the devices.
        device_kind: What `jax.Device.device_kind` says of the devices to predict for.
        far_axes: Mesh axes that leave a slice or host: their link is the preset's or file's `dcn`.

    Raises:
        HardwareError: If there is no such preset or file, or the file was calibrated on other
            devices.

    >>> resolve_hardware(None, "TPU v5 lite", ["data"]).link_for("data") == tpu_v5e.dcn
    True
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        check_hardware(hardware)
    if hardware is not None and Path(hardware).suffix == ".json":
        described = Hardware.load(hardware).for_devices(device_kind, hardware)
    else:
        described = hardware_for(device_kind if hardware is None else hardware)
    return described.with_far_axes(far_axes)
