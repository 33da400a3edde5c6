"""The parser of compiled programs against saved programs of CPU, TPU and GPU; the numbers are
derived by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoshard.compiler.hlo_collectives import read_collectives, read_full_remat_warnings
from autoshard.compiler.hlo_text import (
    parse_instruction,
    shape_bytes,
    tuple_elements,
    without_layout,
)
from autoshard.evidence.collectives import Collective, collective_bytes, ring_bytes, summarise
from autoshard.evidence.replica_groups import MeshCoordinates, parse_groups

PROGRAMS = Path(__file__).parent / "programs"
MESH = {"data": 4, "model": 2}
BOTH_JAX = ("0.10.2", "0.12.0.1")


def saved(name: str) -> str:
    return (PROGRAMS / f"{name}.txt").read_text()


@pytest.mark.parametrize("version", BOTH_JAX)
def test_fsdp_scan_on_cpu(version: str) -> None:
    """5 layers; a weight is 16x32 f32 split over `model`: 1,024 B on one device once gathered over
    `data`."""
    ops = read_collectives(saved(f"cpu_fsdp_scan_jax{version}"), MESH)
    gathers = 5 * 2 * 2  # layers, weights, forward and backward
    assert summarise(ops) == (
        Collective("all_gather", ("data",), gathers, gathers * 1024 * 3 // 4),
        # both gradients in one all-reduce a layer (the CPU compiler has no reduce-scatter), and the
        # scalar loss
        Collective("all_reduce", ("data",), 5 + 1, 5 * 2 * 2048 * 3 // 4 + 2 * 4 * 3 // 4),
        # the activations 2x16 of one device, forward and backward
        Collective("all_reduce", ("model",), 5 * 2, 5 * 2 * (2 * (2 * 16 * 4) // 2)),
    )
    assert all(op.trip_count_known for op in ops)
    assert {op.source.partition(":")[0] for op in ops} == {"make_programs.py"}
    loss = next(op for op in ops if op.shape == "f32[]")
    assert loss.source == "make_programs.py:30"
    assert loss.op_name == "jit(step)/jvp()/reduce_sum"


@pytest.mark.parametrize("version", BOTH_JAX)
def test_nested_loops_on_cpu(version: str) -> None:
    ops = read_collectives(saved(f"cpu_loops_jax{version}"), MESH)
    assert [(op.trip_count, op.trip_count_known) for op in ops] == [
        (12, True),
        (1, False),
        (1, False),
    ]
    assert {op.axes for op in ops} == {("model",)}
    assert ops[0].sent_bytes == 2 * (4 * 16 * 4) // 2
    assert ops[0].total_bytes == 12 * ops[0].sent_bytes


@pytest.mark.parametrize("version", BOTH_JAX)
def test_every_kind_on_cpu(version: str) -> None:
    """x is 64x32 f32, 16x16 = 1,024 B on one device."""
    assert summarise(read_collectives(saved(f"cpu_moves_jax{version}"), MESH)) == (
        Collective(
            "all_gather", ("data",), 2, 2 * 4 * 1024 * 3 // 4
        ),  # by hand; of y^T in one branch of the cond
        Collective("reduce_scatter", ("data", "model"), 1, 1024 * 7 // 8),
        Collective("all_reduce", ("model",), 1, 2 * 1024 // 2),
        Collective(
            "all_to_all", ("data",), 3, 3 * 1024 * 3 // 4
        ),  # by hand; before and after the sort
        Collective("collective_permute", ("data",), 1, 3 * 16 * 4),  # roll by 3 rows
        Collective(
            "collective_permute", ("data", "model"), 1, 8 * 16 * 4
        ),  # rows from (data, model) to (model, data)
        Collective("collective_permute", ("model",), 1, 1024),
    )


# The wide step: up (1024, 4096), down (4096, 1024), x (4096, 1024), all bf16: 4 MiB a weight and 2
# MiB of activations on one device.
_WEIGHT, _ACTIVATIONS = 1024 * 2048 * 2, 1024 * 1024 * 2


@pytest.mark.parametrize(("program", "merged"), [("tpu_fsdp_scan", 1), ("gpu_fsdp_scan", 2)])
def test_fsdp_scan_on_accelerators(program: str, merged: int) -> None:
    """Both compilers move the same bytes; the GPU compiler merges the two weights of a layer into
    one collective."""
    ops = read_collectives(saved(f"{program}_jax0.12.0.1"), MESH)
    assert summarise(ops) == (
        Collective("all_gather", ("data",), 20 // merged, 20 * _WEIGHT * 3 // 4),
        Collective("reduce_scatter", ("data",), 10 // merged, 10 * _WEIGHT * 3 // 4),
        Collective("all_reduce", ("data",), 1, 6),
        Collective("all_reduce", ("model",), 10, 10 * _ACTIVATIONS),
    )
    assert all(op.trip_count_known for op in ops)
    assert all(op.source.startswith("train.py:") and op.op_name for op in ops)


def test_every_kind_on_accelerators() -> None:
    """x is 512x512 f32, 128x256 on one device. The compilers differ in dtype of y (TPU: bf16) and
    in the sort."""
    x = 128 * 256 * 4
    common = {
        Collective("reduce_scatter", ("data", "model"), 1, x * 7 // 8),
        Collective("all_reduce", ("model",), 1, x),
        Collective("collective_permute", ("data",), 1, 3 * 256 * 4),
        Collective("collective_permute", ("model",), 1, x),
    }
    gpu = set(summarise(read_collectives(saved("gpu_moves_jax0.12.0.1"), MESH)))
    tpu = set(summarise(read_collectives(saved("tpu_moves_jax0.12.0.1"), MESH)))
    assert gpu - common == {
        Collective("all_gather", ("data",), 2, 2 * 3 * x),
        Collective("all_to_all", ("data",), 3, 3 * x * 3 // 4),
        Collective("collective_permute", ("data", "model"), 1, x // 2),
    }
    assert tpu - common == {
        Collective("all_gather", ("data",), 2, 3 * x + 3 * x // 2),
        Collective(
            "all_to_all", ("data",), 4, 4 * x * 3 // 4
        ),  # the TPU sorts keys and values as two arrays
        Collective("collective_permute", ("data", "model"), 1, x // 4),
    }
    assert common <= gpu
    assert common <= tpu


LOOP_OF_PERMUTES = """\
HloModule jit_windowed, num_partitions=8

%body (p: (s32[], bf16[128,256], bf16[512,256])) -> (s32[], bf16[128,256], bf16[512,256]) {
  %p = (s32[]{:T(128)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[512,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  %x = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=1
  %acc = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %collective-permute-start = (bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=4, \
source_target_pairs={{0,6},{1,7},{2,0},{3,1},{4,2},{5,3},{6,4},{7,5}}, \
metadata={op_name="jit(f)/all-gather(x)/while(1)" source_file="/home/me/train \\"x\\".py" source_line=12}
  %collective-permute-done = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start)
  ROOT %t = (s32[]{:T(128)}, bf16[128,256]{1,0}, bf16[512,256]{1,0}) tuple(%next, %collective-permute-done, %acc)
}

%fused_compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[]{:T(128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%b, %a), direction=LT
}

%condition (q: (s32[], bf16[128,256], bf16[512,256])) -> pred[] {
  %q = (s32[]{:T(128)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[512,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %bound = s32[]{:T(128)} constant(9)
  ROOT %less = pred[]{:T(512)} fusion(%bound, %j), kind=kLoop, calls=%fused_compare
}

ENTRY %main (x.1: bf16[128,256], y: bf16[512,256]) -> bf16[512,256] {
  %x.1 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(1)
  %one = s32[]{:T(128)} constant(1)
  %copied = s32[]{:T(128)} copy(%one)
  %state = (s32[]{:T(128)}, bf16[128,256]{1,0}, bf16[512,256]{1,0}) tuple(%copied, %x.1, %y)
  %loop = (s32[]{:T(128)}, bf16[128,256]{1,0}, bf16[512,256]{1,0}) while(%state), condition=%condition, body=%body
  ROOT %out = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=2
}
"""


def test_windowed_loop_without_a_known_trip_count() -> None:
    """The counter runs 1, 3, 5, 7 below 9; start, step and bound are behind a copy and a fusion."""
    (op,) = read_collectives(LOOP_OF_PERMUTES, MESH)
    assert (op.kind, op.axes, op.group_size) == ("collective_permute", ("data",), 4)
    assert (op.trip_count, op.trip_count_known) == (4, True)
    assert op.sent_bytes == 128 * 256 * 2
    assert op.shape == "bf16[128,256]"
    assert op.op_name == "jit(f)/all-gather(x)/while(1)"
    assert op.source.endswith(".py:12")
    assert "/" not in op.source


def test_loop_whose_bound_is_data_counts_once() -> None:
    text = LOOP_OF_PERMUTES.replace(
        "%bound = s32[]{:T(128)} constant(9)", "%bound = s32[]{:T(128)} negate(%j)"
    )
    (op,) = read_collectives(text, MESH)
    assert (op.trip_count, op.trip_count_known) == (1, False)


WRAPPED = """\
HloModule jit_wrapped, num_partitions=8

%wrapped_scatter (p: f8e4m3fn[64,8]) -> f8e4m3fn[16,8] {
  %p = f8e4m3fn[64,8]{1,0} parameter(0)
  ROOT %rs = f8e4m3fn[16,8]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
}

%commands (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%c), replica_groups={}, to_apply=%add
}

%small (s: s4[10]) -> s4[10] {
  %s = s4[10]{0:E(4)} parameter(0)
  ROOT %b = s4[10]{0:E(4)} collective-broadcast(%s), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%large (l: s4[10]) -> s4[10] {
  %l = s4[10]{0:E(4)} parameter(0)
  %g = pred[4,10]{1,0} all-gather(%m), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  ROOT %m = s4[10]{0:E(4)} negate(%l)
}

ENTRY %main (x: f8e4m3fn[64,8], y: f32[8], z: s4[10], i: pred[]) -> f8e4m3fn[16,8] {
  %x = f8e4m3fn[64,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %z = s4[10]{0:E(4)} parameter(2)
  %i = pred[] parameter(3)
  %start = ((f8e4m3fn[64,8]{1,0}), f8e4m3fn[16,8]{1,0}, u32[]) async-start(%x), calls=%wrapped_scatter, \
metadata={op_name="jit(f)/psum_scatter" source_file="a/b.py" source_line=3}
  %done = f8e4m3fn[16,8]{1,0} async-done(%start)
  %run = f32[8]{0} call(%y), to_apply=%commands
  %which = s4[10]{0:E(4)} conditional(%i, %z, %z), true_computation=%small, false_computation=%large
  %sent = (f32[8]{0}, u32[], token[]) send(%y, %tok), channel_id=9, \
frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{2,3}}"}
  %send-done = token[] send-done(%sent), channel_id=9
  %recv = (f32[8]{0}, u32[], token[]) recv(%tok), channel_id=9, \
frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{2,3}}"}
  %host = (f32[8]{0:T(128)}, u32[]{:S(2)}, token[]) send(%y, %tok), channel_id=11, is_host_transfer=true
  %alone = f32[8]{0} all-reduce(%y), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %odd = f32[8]{0} all-reduce(%y), replica_groups={{0,3},{1,2},{4,7},{5,6}}, to_apply=%add
  ROOT %r = f8e4m3fn[16,8]{1,0} copy(%done)
}
"""


def test_wrapped_collectives_branches_and_sends() -> None:
    ops = read_collectives(WRAPPED, MESH)
    assert [(op.kind, op.axes, op.group_size, op.sent_bytes) for op in ops] == [
        ("reduce_scatter", ("data",), 4, 512 * 3 // 4),
        ("all_reduce", ("data", "model"), 8, 2 * 32 * 7 // 8),
        ("all_gather", ("data",), 4, 40 * 3 // 4),  # the other branch sends 5 bytes
        ("collective_permute", ("model",), 2, 32),
        ("collective_permute", (), 2, 32),
        ("all_reduce", (), 2, 32),  # no set of mesh axes
    ]
    assert (ops[0].source, ops[0].op_name) == ("b.py:3", "jit(f)/psum_scatter")
    assert collective_bytes(ops) == sum(op.sent_bytes for op in ops)


def test_unreadable_text_has_no_collectives() -> None:
    assert read_collectives("", MESH) == ()
    assert read_collectives("not a program\n  %x = all-reduce(\n}\n", MESH) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}, other={{9}}", [[0, 1], [2, 3]]),
        ("[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, y", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ],
)
def test_forms_of_replica_groups(text: str, expected: list[list[int]]) -> None:
    groups = parse_groups(text)
    assert groups is not None
    assert groups.tolist() == expected


def test_groups_to_mesh_axes() -> None:
    mesh = MeshCoordinates({"x": 2, "y": 2, "z": 4})
    assert mesh.spanned(np.arange(16).reshape(4, 4)) == ("z",)
    assert mesh.spanned(np.arange(16).reshape(2, 8)) == ("y", "z")
    assert mesh.spanned(np.arange(16).reshape(8, 2)) == ("z",)  # half of z
    assert mesh.spanned(np.array([[0, 4], [8, 12]])) == ("y",)
    assert mesh.spanned(np.array([[0, 12]])) == ()  # a diagonal
    assert mesh.spanned(np.array([[0, 1], [0, 4]])) == ()  # groups that disagree
    assert mesh.spanned(np.array([[0, 99]])) == ()
    assert mesh.moved_along([(0, 4), (0, 1)]) == ("y", "z")
    snake = MeshCoordinates({"x": 2, "y": 2}, np.array([[0, 1], [3, 2]]))
    assert snake.spanned(np.array([[0, 3], [1, 2]])) == ("x",)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]", 4),
        ("pred[3]", 3),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("s4[5]", 3),
        ("u2[9]", 3),
        ("f8e5m2[7]", 7),
        ("f4e2m1fn[4]", 2),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("f32[<=8,2]", 64),
        ("(f32[4]{0}, /*index=1*/(s64[2]{0:T(128)}, token[]))", 32),
    ],
)
def test_bytes_of_shapes(shape: str, expected: int) -> None:
    assert shape_bytes(shape) == expected


def test_tuple_shapes() -> None:
    shape = "((f32[2]{0:T(8,128)(2,1)}, u8[3]), /*index=1*/bf16[4,8]{1,0}, u32[])"
    assert tuple_elements(shape) == ("(f32[2]{0:T(8,128)(2,1)}, u8[3])", "bf16[4,8]{1,0}", "u32[]")
    assert without_layout(shape) == "((f32[2], u8[3]), bf16[4,8], u32[])"
    assert tuple_elements("f32[2]") == ()


def test_instruction_whose_text_looks_like_attributes() -> None:
    line = '  ROOT %c.1 = f32[2]{0} call(f32[2]{0} %a, %b.2), to_apply=%f, metadata={op_name="calls=%g, body=%h ) {"}'
    instruction = parse_instruction(line)
    assert instruction is not None
    assert (instruction.name, instruction.root, instruction.opcode) == ("c.1", True, "call")
    assert instruction.operands == ("a", "b.2")
    assert instruction.called() == {"to_apply": ("f",)}
    assert instruction.metadata("op_name") == "calls=%g, body=%h ) {"


def test_full_rematerialization_warnings_are_counted_once_each() -> None:
    message = "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {} to {} for HLO %"
    stderr = "\n".join(
        f"W1129 14:29:4{i}.111935 6033 spmd_partitioner.cc:666] {message}{'ab'[i % 2]}"
        for i in range(4)
    )
    assert read_full_remat_warnings(stderr) == 2
    assert read_full_remat_warnings("nothing of the kind") == 0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_group_of_one_sends_nothing(kind: str) -> None:
    assert ring_bytes(kind, 4096, 1) == 0
