"""The readers of compiled programs on saved programs of both compilers and both jax; numbers
derived by hand.

5 layers of up 1024x4096 and down 4096x1024 in bfloat16: 8 MiB a weight.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.compiler.hlo_cycles import read_cycles
from autoshard.evidence.collectives import Collective, summarise

PROGRAMS = Path(__file__).parent / "programs"
WEIGHT = 8 * 2**20
VERSIONS = ("0.10.2", "0.12.0.1")


def saved(name: str, version: str) -> str:
    return gzip.decompress((PROGRAMS / f"{name}_jax{version}.txt.gz").read_bytes()).decode()


@pytest.mark.parametrize("version", VERSIONS)
def test_fsdp_on_gpu(version: str) -> None:
    """Gathered for the forward and the backward pass; both weights of a layer are scattered
    together."""
    ops = read_collectives(saved("gpu_fsdp", version), {"data": 4, "model": 2})
    assert summarise(ops) == (
        Collective("all_gather", ("data", "model"), 10, 20 * WEIGHT * 7 // 8),
        Collective("reduce_scatter", ("data", "model"), 5, 10 * WEIGHT * 7 // 8),
        Collective("all_reduce", ("data", "model"), 1, 7),
    )
    assert all(op.trip_count_known for op in ops)
    assert read_cycles(saved("gpu_fsdp", version)) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_fsdp_on_tpu(version: str) -> None:
    """An asynchronous gather is repeated in every fusion that it runs beside, and counts once."""
    ops = read_collectives(saved("tpu_fsdp", version), {"data": 4, "model": 2})
    gathered = [c for c in summarise(ops) if c.kind == "all_gather"]
    assert gathered == [Collective("all_gather", ("data", "model"), 20, 20 * WEIGHT * 7 // 8)]
    assert all(op.trip_count_known for op in ops)


@pytest.mark.parametrize("version", VERSIONS)
def test_slices_send_to_each_other(version: str) -> None:
    ops = read_collectives(saved("tpu_slices", version), {"data": 4, "model": 2})
    assert any(op.kind == "collective_permute" and not op.axes for op in ops)
    assert all(op.trip_count_known for op in ops)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["tpu_fsdp", "tpu_tp"])
def test_cycles_are_those_of_the_work(name: str, version: str) -> None:
    """Each device multiplies 5 layers x 2 weights x 3 passes; the units of a v5e do 131,072
    operations a cycle."""
    cycles = read_cycles(saved(name, version))
    assert cycles is not None
    least = 5 * 2 * 3 * 2 * 4096 * 1024 * 4096 // 8 // 131_072
    assert least < cycles < 2 * least


CYCLES = """\
HloModule m, num_partitions=2

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p), index=1
  %f = f32[8] fusion(%x), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"100"}
  %g = f32[8] copy(%f), backend_config={"estimated_cycles":"18446744073709551615"}
  ROOT %t = (s32[], f32[8]) tuple(%i, %g)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]) parameter(0)
  ROOT %l = pred[] constant(true)
}

%one (a: f32[8]) -> f32[8] {
  ROOT %a1 = f32[8] copy(%a), backend_config={"estimated_cycles":"5"}
}

%two (b: f32[8]) -> f32[8] {
  ROOT %b1 = f32[8] copy(%b), backend_config={"estimated_cycles":"9"}
}

ENTRY %main (s: (s32[], f32[8])) -> f32[8] {
  %s = (s32[], f32[8]) parameter(0)
  %w = (s32[], f32[8]) while(%s), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %r = f32[8] conditional(%k, %u, %u), branch_computations={%one, %two}
}
"""


def test_cycles_count_loops_and_the_longest_branch() -> None:
    assert read_cycles(CYCLES) == 7 * 100 + 9
    assert read_cycles("HloModule m\n") is None
