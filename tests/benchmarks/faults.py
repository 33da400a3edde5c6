"""Faults that verification must see, and right layouts that it must not reject:
`python -m tests.benchmarks.faults --cache faults.jsonl --count 200`.

Layouts are drawn by seed: a model, a mesh, random axis rules. What the partitioner made of one (HLO
for one device) is read from the compiler, and compiled once more in two versions: as it is, in the
program's own precision and with every float widened to float64. The layout is *right* if in float64
it gives what the layout without rules gives in float64, up to what reordering does in the program's
own precision. Right layouts must be verified.

A *fault* is made in that program, at a place drawn by seed: a collective removed (every device goes
on with its own shard), a halo one row short, shards that arrive one device too far, a device that
takes itself for the next one. It counts if in float64 it changes some element of an output by more
than `COUNTS` times what reordering does to that element in the program's own precision. Every one
that counts must be rejected.

What reordering does is the largest move of an element over `ORDERS` orders of the sums, or half a
unit in its last place. `--cache` is a JSON-lines file: what is in it is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard.compiler.compile import Built, build
from autoshard.evaluate.verification.compare import distances, to_numpy
from autoshard.evaluate.verification.inputs import Inputs, inputs_for
from autoshard.evaluate.verification.reference import Reference, unsharded
from autoshard.evidence.replica_groups import parse_groups
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared
from tests.benchmarks.suite import random_layouts
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import mesh_of, prepared
from tests.whole_models.model import WholeModel
from tests.whole_models.other_architectures import recommender

COUNTS = 100.0
"""A fault counts if it does this many times what reordering does."""

ORDERS = 8
"""Orders of the sums that say what reordering does."""

MESHES: Sequence[Mapping[str, int]] = ({"data": 8}, {"data": 4, "model": 2})


def stencil() -> WholeModel:
    """Two steps of a diffusion on a grid, and its energy: halos."""

    def step(u: jax.Array, kappa: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(2):
            p = jnp.pad(u, 2, mode="edge")
            wide = p[:-4, 2:-2] + p[4:, 2:-2] + p[2:-2, :-4] + p[2:-2, 4:]
            near = p[1:-3, 2:-2] + p[3:-1, 2:-2] + p[2:-2, 1:-3] + p[2:-2, 3:-1]
            u = u + kappa * (near - wide / 16.0 - 3.75 * u)
        return u, jnp.sum(u * u)

    rng = np.random.default_rng(0)
    fields = rng.standard_normal((2, 32, 32)).astype(np.float32)
    return WholeModel(step, (fields[0], 0.1 * np.abs(fields[1])), ())


def convolutions() -> WholeModel:
    """A train step of two convolutions over a sequence, with Adam's first step."""
    optimizer = optax.adam(1e-2)
    rng = np.random.default_rng(0)
    params = {
        "first": (0.3 * rng.standard_normal((5, 8, 16))).astype(np.float32),
        "second": (0.3 * rng.standard_normal((3, 16, 8))).astype(np.float32),
    }

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for name in ("first", "second"):
                h = jax.lax.conv_general_dilated(
                    jnp.tanh(h), params[name], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
                )
            return jnp.mean((h - x) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.tree.map(np.asarray, optimizer.init(params))
    return WholeModel(step, (params, state, rng.standard_normal((8, 32, 8)).astype(np.float32)), ())


def noise() -> WholeModel:
    """A first Adam step on each picture and its negative: a gradient of nothing but rounding."""
    optimizer = optax.adam(1e-3)
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (256, 64)).astype(np.int8)
    x = rng.permutation(np.concatenate([x, -x]))
    w = np.zeros(64, np.float32)

    def step(w: jax.Array, state: Any, pixels: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(optax.sigmoid_binary_cross_entropy((pixels / 127.0) @ w, y))

        value, gradient = jax.value_and_grad(loss)(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    state = jax.tree.map(np.asarray, optimizer.init(w))
    return WholeModel(step, (w, state, x, np.ones(512, np.int32)), ())


def routing() -> WholeModel:
    """Tokens to the best of 8 experts with room for a few, by positions that are counted."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    router = rng.standard_normal((16, 8)).astype(np.float32)
    w = (0.2 * rng.standard_normal((8, 16, 32))).astype(np.float32)

    def step(router: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        gates = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 8)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        sent = jax.nn.one_hot(place, 12)
        h = jnp.einsum("tec,td->ecd", sent, x)
        h = jnp.einsum("ecd,edf->ecf", h, w)
        return jnp.einsum("tec,ecf,te->tf", sent, h, gates), place.astype(jnp.int32)

    return WholeModel(step, (router, w, x), ())


def mlp() -> WholeModel:
    """A train step of two layers."""
    return WholeModel(mlp_step, mlp_args(), ())


def low_precision() -> WholeModel:
    """Two layers in bfloat16, sums kept in float32 by the optimizer."""
    params, x, y = mlp_args()

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            h = jax.nn.gelu(x.astype(jnp.bfloat16) @ low["w1"] + low["b1"]) @ low["w2"]
            return jnp.mean((h.astype(jnp.float32) - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value

    return WholeModel(step, (params, x, y), ())


def decoder() -> WholeModel:
    """A train step of a scanned, rematerialised decoder."""
    args = decoder_args(8, 8, layers=2, d=16, heads=2, ff=32, vocab=32)
    return WholeModel(decoder_step, args, ())


MODELS: Mapping[str, Callable[[], WholeModel]] = {
    make.__name__: make
    for make in (
        mlp,
        low_precision,
        decoder,
        stencil,
        convolutions,
        noise,
        routing,
        recommender,
    )
}


@dataclass(frozen=True, eq=False)
class Setting:
    """A model on a mesh, with what its outputs are compared with.

    Attributes:
        made: The traced request.
        inputs: Its inputs.
        reference: What verification compares with.
        moves: By output, what reordering does to each element.
        wide: By output, its elements in float64.
    """

    made: Prepared
    inputs: Inputs
    reference: Reference
    moves: Sequence[np.ndarray]
    wide: Sequence[np.ndarray]


@lru_cache(maxsize=1)
def setting(model: str, mesh: int) -> Setting:
    """Traces a model, runs it in several orders, and once in float64."""
    whole = MODELS[model]()
    made = prepared(whole.step, whole.args, mesh_of(**MESHES[mesh]))
    inputs = inputs_for(made.traced.call, made.traced.program)
    ways = unsharded(made.traced, inputs, made.request.mesh)
    assert ways.each_alone is not None
    orders = []
    for seed in range(ORDERS + 1):
        leaves = inputs.place(ways.shardings)
        orders.append([to_numpy(leaf) for leaf in ways.each_alone(np.uint32(seed), *leaves)])
    moves = [np.zeros(leaf.shape) for leaf in orders[0]]
    for order in orders[1:]:
        for move, base, leaf in zip(moves, orders[0], order, strict=True):
            np.maximum(move, distances(base, leaf), out=move)
    dtypes = [value.dtype for value in made.traced.program.body.outputs]
    for move, base, dtype in zip(moves, orders[0], dtypes, strict=True):
        if np.issubdtype(base.dtype, np.floating):
            info: Any = jnp.finfo(dtype)
            np.maximum(move, 0.5 * float(info.eps) * np.abs(base), out=move)
    reference = Reference(ways, made.problem.logical_axes.classes, inputs)
    wide = Partitioned(build(made.traced, Layout(made.problem, ()), made.request.mesh))
    outputs = [shards[0] for shards in wide.run(inputs, wide=True)]
    return Setting(made, inputs, reference, moves, outputs)


class Partitioned:
    """A layout's program for one device, as text that can be changed, compiled and run."""

    def __init__(self, built: Built) -> None:
        """Compiles the layout, and reads what the partitioner made of it."""
        self.built = built
        lowered = built.lower()
        with tempfile.TemporaryDirectory() as folder:
            self.compiled = lowered.compile(
                compiler_options={
                    "xla_dump_to": folder,
                    "xla_dump_hlo_pass_re": "spmd-partitioning|control-dep-rewriter",
                    "xla_dump_hlo_as_text": True,
                    "xla_dump_large_constants": True,
                }
            )
            (path,) = Path(folder).glob("*after_spmd-partitioning*.txt")
            self.lines = _of_replicas(path.read_text()).splitlines()
        self._kept = sorted(lowered._lowering.compile_args["kept_var_idx"])

    def run(
        self, inputs: Inputs, lines: Sequence[str] | None = None, *, wide: bool = False
    ) -> list[list[np.ndarray]]:
        """By output, what each device has of it."""
        outputs = self._execute(inputs, lines or self.lines, wide)
        return [[np.asarray(shard) for shard in shards] for shards in outputs]

    def arrays(self, inputs: Inputs, lines: Sequence[str]) -> list[jax.Array]:
        """The outputs as global arrays, as a layout returns them."""
        outputs = self._execute(inputs, lines, wide=False)
        avals = jax.eval_shape(self.built.jitted, *self.built.avals)
        return [
            jax.make_array_from_single_device_arrays(aval.shape, sharding, shards)
            for aval, sharding, shards in zip(avals, self.built.out_shardings, outputs, strict=True)
        ]

    def _execute(self, inputs: Inputs, lines: Sequence[str], wide: bool) -> list[list[jax.Array]]:
        from jaxlib import _hlo, xla_client

        text = "\n".join(lines)
        if wide:
            text = re.sub(r"\b(?:bf16|f32)\[", "f64[", text)
        module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        stablehlo = xla_client._xla.mlir.hlo_to_stablehlo(module)
        devices = list(self.built.in_shardings[0].mesh.devices.flat)
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = len(devices), 1
        ids = np.array([[device.id] for device in devices])
        options.device_assignment = xla_client.DeviceAssignment.create(ids)
        # machine code is not what is tested here; without this, compiling takes twice as long
        debug = options.executable_build_options.debug_options
        debug.xla_backend_optimization_level = 0
        debug.xla_llvm_disable_expensive_passes = True
        executable = devices[0].client.compile_and_load(
            stablehlo,
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=options,
        )
        leaves = inputs.place(self.built.in_shardings)
        operands = [leaves[number] for number in self._kept]
        with jax.enable_x64(True):
            if wide:
                operands = [_widened(leaf) for leaf in operands]
            results = executable.execute_sharded(operands)
            return list(results.disassemble_into_single_device_arrays())


def _widened(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jax.device_put(np.asarray(leaf).astype(np.float64), leaf.sharding)


def _of_replicas(text: str) -> str:
    """A partitioned program as one of replicas: the partitioner is not to run again, and devices
    are numbered alike."""
    header, rest = text.split("\n", 1)
    count = re.search(r"num_partitions=(\d+)", header)
    assert count is not None
    rest = rest[re.search(r"^(?:%|ENTRY)", rest, re.MULTILINE).start() :]  # type: ignore[union-attr]
    lines = [f"HloModule changed, replica_count={count[1]}"]
    for line in rest.splitlines():
        for attribute in ("sharding", "metadata", "frontend_attributes"):
            line = _without(line, attribute)
        if re.search(r" (?:collective-permute|all-to-all)\(", line):
            line = re.sub(r", channel_id=\d+", "", line)
        line = line.replace(" partition-id(", " replica-id(")
        lines.append(_GROUPS.sub(_listed, line))
    return "\n".join(lines)


def _without(line: str, attribute: str) -> str:
    """A line without `, attribute={...}`, whatever is in the braces."""
    start = line.find(f", {attribute}={{")
    if start < 0:
        return line
    depth = 0
    for end in range(line.index("{", start), len(line)):
        depth += {"{": 1, "}": -1}.get(line[end], 0)
        if not depth:
            return line[:start] + line[end + 1 :]
    raise AssertionError(line)


_GROUPS = re.compile(
    r"replica_groups=((?:\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\}))"
)


def _listed(match: re.Match[str]) -> str:
    groups = parse_groups(match[1])
    assert groups is not None, match[1]
    return "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


# Faults -------------------------------------------------------------------------------------------

_LINE = re.compile(r"(\s*(?:ROOT )?)(%[\w.\-]+) = (\w+\[[\d,]*\](?:\{[^}]*\})?) ([\w\-]+)\((.*)$")


@dataclass(frozen=True)
class Place:
    """An instruction that a fault can be made in.

    Attributes:
        kind: Of the fault.
        line: Number of the line.
    """

    kind: str
    line: int


def places(lines: Sequence[str]) -> list[Place]:
    """Where which faults can be made in a program."""
    found = []
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        opcode = match[4] if match else ""
        if opcode in ("all-reduce", "collective-permute", "all-gather", "all-to-all"):
            found.append(Place("removed", number))
        if opcode == "collective-permute":
            found.append(Place("short", number))
        if opcode in ("collective-permute", "all-gather"):
            found.append(Place("shifted", number))
        if opcode == "replica-id":
            found.append(Place("index", number))
    return found


def with_fault(lines: Sequence[str], place: Place, rng: random.Random) -> list[str]:
    """The program with a fault."""
    match = _LINE.match(lines[place.line])
    assert match is not None
    make = {"removed": _removed, "short": _short, "shifted": _shifted, "index": _index}[place.kind]
    changed = make(match, rng)
    return [*lines[: place.line], *changed, *lines[place.line + 1 :]]


def _removed(match: re.Match[str], rng: random.Random) -> list[str]:
    """The collective is not there: each device goes on with what it has."""
    indent, name, shape, opcode, rest = match.groups()
    operand = rest[: rest.index(")")]
    assert "," not in operand, match[0]
    if opcode != "all-gather":
        return [f"{indent}{name} = {shape} copy({operand})"]
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    dim = re.search(r"dimensions=\{(\d+)\}", rest)
    assert groups is not None
    assert dim is not None
    copies = ", ".join([operand] * len(groups[1].split(",")))
    return [f"{indent}{name} = {shape} concatenate({copies}), dimensions={{{dim[1]}}}"]


def _short(match: re.Match[str], rng: random.Random) -> list[str]:
    """One row of what a neighbour sends is missing: zeros are in its place."""
    indent, name, shape, _, rest = match.groups()
    element, sizes = _read_shape(shape)
    dims = [d for d, size in enumerate(sizes) if size > 1] or list(range(len(sizes)))
    plain = f"{element}[{','.join(map(str, sizes))}]"
    zero = f"  {name}.zero = {element}[] constant(0)"
    sent = f"  {name}.sent = {shape} collective-permute({rest}"
    if not dims or sizes[dims[0]] == 1:
        return [zero, sent, f"{indent}{name} = {plain} broadcast({name}.zero), dimensions={{}}"]
    dim = min(dims, key=lambda d: sizes[d])  # along which a halo is thin
    first = rng.random() < 0.5
    cut = [[0, size] for size in sizes]
    cut[dim] = [1, sizes[dim]] if first else [0, sizes[dim] - 1]
    fewer = [high - low for low, high in cut]
    ranges = ", ".join(f"[{low}:{high}]" for low, high in cut)
    pads = ["0_0"] * len(sizes)
    pads[dim] = "1_0" if first else "0_1"
    part = f"{element}[{','.join(map(str, fewer))}]"
    return [
        zero,
        sent,
        f"  {name}.cut = {part} slice({name}.sent), slice={{{ranges}}}",
        f"{indent}{name} = {plain} pad({name}.cut, {name}.zero), padding={'x'.join(pads)}",
    ]


def _read_shape(shape: str) -> tuple[str, list[int]]:
    element, sizes = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()  # type: ignore[union-attr]
    return element, [int(size) for size in sizes.split(",") if size]


def _shifted(match: re.Match[str], rng: random.Random) -> list[str]:
    """Shards arrive one device too far."""
    line = match[0]
    if match[4] == "all-gather":

        def turned(group: re.Match[str]) -> str:
            first, *others = group[1].split(",")
            return "{" + ",".join([*others, first]) + "}"

        head, groups, tail = re.split(r"(replica_groups=\{\{.*?\}\})", line)
        return [head + re.sub(r"\{([\d,]+)\}", turned, groups) + tail]
    head, pairs, tail = re.split(r"(source_target_pairs=\{\{.*?\}\})", line)
    numbers = re.findall(r"\d+", pairs)
    sources, targets = numbers[::2], numbers[1::2]
    moved = zip(sources, [*targets[1:], targets[0]], strict=True)
    listed = ",".join(f"{{{source},{target}}}" for source, target in moved)
    return [f"{head}source_target_pairs={{{listed}}}{tail}"]


def _index(match: re.Match[str], rng: random.Random) -> list[str]:
    """Each device takes itself for the next one."""
    indent, name, shape, _, rest = match.groups()
    count = jax.device_count()
    return [
        f"  {name}.own = {shape} replica-id({rest}",
        f"  {name}.one = {shape} constant(1)",
        f"  {name}.all = {shape} constant({count})",
        f"  {name}.next = {shape} add({name}.own, {name}.one)",
        f"{indent}{name} = {shape} remainder({name}.next, {name}.all)",
    ]


# Trials -------------------------------------------------------------------------------------------

Row = dict[str, Any]


def in_moves(made: Setting, built: Built, outputs: Sequence[Sequence[np.ndarray]]) -> float:
    """How far outputs in float64 are from those of the unsharded function, in what reordering does;
    the worst element of any device."""
    worst = 0.0
    avals = jax.eval_shape(built.jitted, *built.avals)
    for wide, moves, aval, sharding, shards in zip(
        made.wide, made.moves, avals, built.out_shardings, outputs, strict=True
    ):
        where = sharding.devices_indices_map(aval.shape)
        for device, shard in zip(sharding.mesh.devices.flat, shards, strict=True):
            distance, move = distances(wide[where[device]], shard), moves[where[device]]
            tiny = 1e-30  # an output of 0 that nothing moves
            with np.errstate(invalid="ignore"):
                ratio = np.where(distance > 0, distance / np.maximum(move, tiny), 0.0)
            worst = max(worst, float(np.where(np.isinf(move), 0.0, ratio).max(initial=0.0)))
    return worst


def rows_of(seed: int, faulty: bool) -> Iterator[Row]:
    """One layout drawn by seed, and, if wanted, one fault in its program if it is right."""
    rng = random.Random(seed)
    model, mesh = sorted(MODELS)[seed % len(MODELS)], seed // len(MODELS) % len(MESHES)
    made = setting(model, mesh)
    problem = made.made.problem
    layout = next(random_layouts(problem, f"{seed}", 100, set()), Layout(problem, ()))
    head = {"seed": seed, "jax": jax.__version__, "model": model, "mesh": MESHES[mesh]}
    head["rules"] = [str(rule) for rule in layout.rules]
    try:
        parts = Partitioned(build(made.made.traced, layout, made.made.request.mesh))
    except Exception as error:
        yield {**head, "what": "layout", "failed": f"{type(error).__name__}: {str(error)[:200]}"}
        return
    leaves = made.inputs.place(parts.built.in_shardings)
    verified, agrees = made.reference.compare(list(parts.compiled(*leaves)))
    off = in_moves(made, parts.built, parts.run(made.inputs, wide=True))
    yield {
        **head,
        "what": "layout",
        "right": off <= 1.0,
        "moves": off,
        "accepted": agrees,
        "in_tolerances": verified.in_tolerances,
        "leaf": verified.leaf,
        "runs": made.reference._spread.runs,
    }
    everywhere = places(parts.lines)
    if off > 1.0 or not everywhere or not faulty:
        return
    kind = rng.choice(sorted({place.kind for place in everywhere}))
    place = rng.choice([one for one in everywhere if one.kind == kind])
    lines = with_fault(parts.lines, place, rng)
    off = in_moves(made, parts.built, parts.run(made.inputs, lines, wide=True))
    row = {**head, "what": "fault", "kind": kind, "line": parts.lines[place.line].strip()[:120]}
    row |= {"moves": off, "counts": off > COUNTS}
    verified, agrees = made.reference.compare(parts.arrays(made.inputs, lines))
    row |= {"accepted": agrees, "in_tolerances": verified.in_tolerances, "leaf": verified.leaf}
    yield row


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over all rows."""
    layouts = [row for row in rows if row["what"] == "layout" and "failed" not in row]
    right = [row for row in layouts if row["right"]]
    faults = [row for row in rows if row["what"] == "fault"]
    counting = [row for row in faults if row["counts"]]
    kinds = sorted({row["kind"] for row in counting})
    return {
        "layouts": len(layouts),
        "right": len(right),
        "right but rejected": sum(not row["accepted"] for row in right),
        "wrong": len(layouts) - len(right),
        "wrong but accepted": sum(row["accepted"] for row in layouts if not row["right"]),
        "nearest right layout to its tolerance": max(
            (row["in_tolerances"] for row in right), default=0.0
        ),
        "faults": len(faults),
        "faults that count": {k: sum(row["kind"] == k for row in counting) for k in kinds},
        "counting but accepted": sum(row["accepted"] for row in counting),
        "smallest counting fault in tolerances": min(
            (row["in_tolerances"] for row in counting), default=0.0
        ),
        "not compiled": sum("failed" in row for row in rows),
    }


def main() -> None:
    """Makes the layouts and faults that are not in the cache yet, and prints what came of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=200, help="layouts")
    parser.add_argument("--every", type=int, default=1, help="a fault in every so many layouts")
    parser.add_argument("--models", default="", help="only these, comma-separated")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [json.loads(line) for line in arguments.cache.open()] if arguments.cache.exists() else []
    known = {row["seed"] for row in rows if row["jax"] == jax.__version__}
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    # one model and mesh after the other, so that each is prepared once
    for seed in sorted(seeds, key=lambda seed: (seed % (len(MODELS) * len(MESHES)), seed)):
        model = sorted(MODELS)[seed % len(MODELS)]
        if seed in known or (arguments.models and model not in arguments.models.split(",")):
            continue
        new = list(rows_of(seed, faulty=seed % arguments.every == 0))
        rows += new
        with arguments.cache.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        for row in new:
            shown = {k: row[k] for k in ("right", "kind", "counts", "accepted") if k in row}
            print(seed, model, row["what"], shown, row.get("failed", ""), flush=True)
    print(json.dumps(figures(rows), indent=2))


if __name__ == "__main__":
    main()
