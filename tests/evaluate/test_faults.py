"""A sample of `tests.benchmarks.faults`: right layouts are accepted, faults are rejected."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.benchmarks import faults

SAMPLE = {"low_precision": 12, "mlp": 1, "noise": 0, "stencil": 1}
"""Models, and how many rounds over all models their seed is after the first."""


def seed_of(model: str, rounds: int) -> int:
    return sorted(faults.MODELS).index(model) + rounds * len(faults.MODELS)


@pytest.mark.parametrize("model", SAMPLE)
def test_a_right_layout_is_accepted_and_a_fault_in_it_rejected(model: str) -> None:
    layout, fault = faults.rows_of(seed_of(model, SAMPLE[model]), faulty=True)
    assert layout["right"]
    assert layout["accepted"]
    # what is lost of a gradient of nothing but noise is noise
    assert fault["counts"] == (model != "noise")
    assert fault["accepted"] == (model == "noise")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(32))
def test_more_of_them(seed: int) -> None:
    layout, *made = faults.rows_of(seed, faulty=True)
    assert layout["accepted"] == layout["right"]
    assert not any(fault["accepted"] for fault in made if fault["counts"])


PROGRAM = """
HloModule m, num_partitions=8

FileNames
1 "x.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4,6]) -> f32[8,6] {
  %x = f32[4,6]{1,0} parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  %id = u32[] partition-id()
  %r = f32[4,6]{1,0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add
  %p = f32[2,6]{1,0} collective-permute(%y), channel_id=2, source_target_pairs={{0,1},{1,2}}
  ROOT %g = f32[8,6]{1,0} all-gather(%r), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}
}
""".strip()


def test_a_partitioned_program_as_one_of_replicas() -> None:
    text = faults._of_replicas(PROGRAM)
    assert text.startswith("HloModule changed, replica_count=8\n%add")
    assert "FileNames" not in text
    assert "sharding=" not in text
    assert "replica_groups={{0,2,4,6},{1,3,5,7}}" in text
    assert "collective-permute(%y), source_target_pairs" in text
    assert "replica-id()" in text


@pytest.mark.parametrize(
    ("kind", "opcode", "wanted"),
    [
        ("removed", "all-reduce", "%r = f32[4,6]{1,0} copy(%x)"),
        ("removed", "all-gather", "concatenate(%r, %r), dimensions={0}"),
        ("short", "collective-permute", "pad(%p.cut, %p.zero), padding="),
        ("shifted", "all-gather", "replica_groups={{1,0},{3,2}}"),
        ("shifted", "collective-permute", "source_target_pairs={{0,2},{1,1}}"),
        ("index", "replica-id", "remainder(%id.next, %id.all)"),
    ],
)
def test_each_fault_changes_what_it_says(kind: str, opcode: str, wanted: str) -> None:
    lines = faults._of_replicas(PROGRAM).splitlines()
    (place,) = (
        place
        for place in faults.places(lines)
        if place.kind == kind and f" {opcode}(" in lines[place.line]
    )
    changed = faults.with_fault(lines, place, random.Random(0))
    assert any(wanted in line for line in changed)
    untouched = [line for number, line in enumerate(lines) if number != place.line]
    assert [line for line in changed if line in untouched] == untouched


def test_figures_count_what_is_wrong() -> None:
    layout = {"what": "layout", "right": True, "accepted": True, "in_tolerances": 0.5}
    fault = {"what": "fault", "kind": "short", "counts": True, "accepted": False}
    rows = [
        layout,
        {**layout, "accepted": False, "in_tolerances": 2.0},
        {**layout, "right": False},
        {**fault, "in_tolerances": 7.0},
        {**fault, "accepted": True, "in_tolerances": 0.9},
        {**fault, "counts": False, "in_tolerances": 0.0},
    ]
    counted = faults.figures(rows)
    assert counted["right but rejected"] == 1
    assert counted["wrong but accepted"] == 1
    assert counted["faults that count"] == {"short": 2}
    assert counted["counting but accepted"] == 1
    assert np.isclose(counted["smallest counting fault in tolerances"], 0.9)
