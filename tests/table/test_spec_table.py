"""The spec table: a file that people review, that survives a round trip and says what is wrong with
it."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import TableError
from autoshard.report.plan_text import table_text
from autoshard.table.schema import json_schema
from autoshard.table.spec_entry import spec_from_entry, spec_text, spec_to_entry
from autoshard.table.spec_table import SpecTable
from tests.models import decoder_args, decoder_step
from tests.stages import mesh_of

GOLDEN = Path(__file__).parents[1] / "golden" / "tables"
SPECS = (
    "schema",
    "function",
    "mesh",
    "rules",
    "constraints",
    "inputs",
    "outputs",
    "outputs_like",
    "inside",
)


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.apply(
        decoder_step, decoder_args(), mesh_of(data=4, model=2), "fsdp+tp", donate_argnums=(0, 1)
    )


@pytest.fixture
def table(plan: autoshard.Plan) -> SpecTable:
    return plan.table


def spec_lines(text: str) -> list[str]:
    """The lines of the leaves."""
    lines = text.splitlines()
    start, end = (
        next(i for i, x in enumerate(lines) if x.startswith(f'  "{n}"'))
        for n in ("inputs", "inside")
    )
    return lines[start:end]


def test_a_saved_table_is_loaded_as_it_was(table: SpecTable, tmp_path: Path) -> None:
    path = tmp_path / "specs" / "deeper" / "step.json"
    table.save(path)
    assert SpecTable.load(path) == table
    assert SpecTable.load(str(path)).dumps() == table.dumps()
    assert not SpecTable.load(path).edited


def test_a_pipe_is_written_to_and_stays_a_pipe(table: SpecTable, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text)
        table.save(pipe)
        assert text.result() == table.dumps()
    assert pipe.is_fifo()


def test_it_holds_what_a_colleague_needs(table: SpecTable) -> None:
    assert table.function == "decoder_step"
    assert table.mesh.axes == {"data": 4, "model": 2}
    assert table.mesh.types == ["auto", "auto"]
    assert {"jax", "autoshard"} <= set(table.versions)
    assert table.rules
    assert table.verified.startswith("no (")
    assert set(table.inputs) == {
        f"{tree}/{n}" for tree in ("params", "moment") for n in decoder_args()[0]
    } | {"tokens"}
    assert table.inputs["params/wq"].shape == [2, 64, 4, 16]
    assert len(table.inputs["params/wq"].logical_axes) == 4
    assert {leaf.group for leaf in table.inputs.values()} == {"parameters", "optimizer", "data"}
    assert table.evidence.primitives["dot_general"] > 10
    assert table.evidence.hardware == {"platform": "cpu", "kind": "cpu", "devices": "8"}
    assert all(re.fullmatch(r"\S+\.py:\d+", entry.source) for entry in table.inside)


def test_one_leaf_a_line_with_the_spec_as_people_write_it(
    table: SpecTable, plan: autoshard.Plan
) -> None:
    lines = table.dumps().splitlines()
    for path, leaf in table.inputs.items():
        (line,) = (x for x in lines if x.startswith(f'    "{path}":'))
        fields = json.loads(line.split(":", 1)[1].rstrip(","))
        assert fields.pop("text") == spec_text(leaf.spec)
        assert fields == msgspec.to_builtins(leaf)
    assert table.dumps() == plan.table.dumps()
    assert (
        '    "params/wq": {"spec": [null, "data", "model"], "text": "P(None, \'data\', '
        "'model')\", " in table.dumps()
    )


def test_outputs_that_feed_the_next_step_are_not_listed_again(table: SpecTable) -> None:
    data = json.loads(table.dumps())
    assert data["outputs_like"] == {"out/0": "params", "out/1": "moment"}
    assert list(data["outputs"]) == ["out/2"]
    assert len(table.outputs) == 2 * len(decoder_args()[0]) + 1


def test_a_diff_shows_only_what_changed(table: SpecTable) -> None:
    changed = msgspec.structs.replace(
        table,
        inputs={
            **table.inputs,
            "tokens": msgspec.structs.replace(table.inputs["tokens"], spec=[None, "data"]),
        },
    )
    diff = list(
        difflib.unified_diff(
            table.dumps().splitlines(), changed.dumps().splitlines(), n=0, lineterm=""
        )
    )
    assert [line[0] for line in diff[3:]] == ["-", "+"]
    assert '"tokens"' in diff[3]
    assert changed.edited
    assert SpecTable.loads(changed.dumps()).edited


def test_only_the_evidence_holds_dates_and_versions(table: SpecTable) -> None:
    later = msgspec.structs.replace(
        table.evidence, when="2030-01-01T00:00:00Z", search_s=7.0, versions={"jax": "9"}
    )
    one, other = (
        json.loads(t.dumps()) for t in (table, msgspec.structs.replace(table, evidence=later))
    )
    assert [one[name] for name in SPECS] == [other[name] for name in SPECS]
    assert set(one) == {*SPECS, "evidence"}
    assert one["evidence"] != other["evidence"]


def test_two_searches_with_one_seed_give_the_same_bytes_but_for_the_evidence() -> None:
    texts = [
        autoshard.optimize(
            decoder_step,
            decoder_args(),
            mesh_of(data=4, model=2),
            donate_argnums=(0, 1),
            seed=3,
            progress=False,
            effort=autoshard.Effort(compiled=2, measured=0),
        ).table.dumps()
        for _ in range(2)
    ]
    halves = [text.partition('  "evidence": {')[0] for text in texts]
    assert halves[0] == halves[1]
    assert '"rules"' in halves[0]
    assert '"inside"' in halves[0]
    assert all('"when": "20' in text for text in texts)


# Compressed ---------------------------------------------------------------------------------------

LAYERS = 32


def unrolled_step(params: Any, moments: Any, tokens: jax.Array) -> Any:
    """A step of an unrolled Llama-like decoder with two moments."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def loss(p: Any) -> jax.Array:
        x = p["embedding"][tokens]
        for w in p["layers"]:
            h = norm(x, w["norm1"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[n]) for n in ("wq", "wk", "wv"))
            weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k), -1)
            x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, v), w["wo"])
            h = norm(x, w["norm2"])
            x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return jnp.mean(jnp.square(norm(x, p["norm"]) @ p["head"]))

    value, grads = jax.value_and_grad(loss)(params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mu"], grads)
    nu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, moments["nu"], grads)
    params = jax.tree.map(lambda w, m, n: w - 0.1 * m / (jnp.sqrt(n) + 1e-6), params, mu, nu)
    return params, {"count": moments["count"] + 1, "mu": mu, "nu": nu}, value


def unrolled_args(layers: int = LAYERS, d: int = 32) -> tuple[Any, Any, Any]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    layer = {
        "norm1": array(d),
        "norm2": array(d),
        "wq": array(d, 4, 8),
        "wk": array(d, 4, 8),
        "wv": array(d, 4, 8),
        "wo": array(4, 8, d),
        "gate": array(d, 64),
        "up": array(d, 64),
        "down": array(64, d),
    }
    params = {
        "embedding": array(128, d),
        "layers": [dict(layer) for _ in range(layers)],
        "norm": array(d),
        "head": array(d, 128),
    }
    moments = {"mu": params, "nu": params, "count": jax.ShapeDtypeStruct((), np.int32)}
    return params, moments, jax.ShapeDtypeStruct((8, 16), np.int32)


@pytest.fixture(scope="module")
def deep() -> autoshard.Plan:
    return autoshard.apply(
        unrolled_step, unrolled_args(), mesh_of(data=4, model=2), "fsdp+tp", donate_argnums=(0, 1)
    )


def test_32_unrolled_layers_are_at_most_60_lines_of_specs(deep: autoshard.Plan) -> None:
    text = deep.table.dumps()
    lines = spec_lines(text)
    assert len(lines) <= 60, len(lines)
    assert any('"params/layers/*/wq"' in line and '"each": ["0-31"]' in line for line in lines)
    loaded = SpecTable.loads(text)
    assert loaded == deep.table
    assert len(loaded.inputs) == 3 * (3 + 9 * LAYERS) + 2
    assert list(loaded.inputs).index("params/layers/2/wq") < list(loaded.inputs).index(
        "params/layers/10/wq"
    )
    assert "layers/*/wq" in table_text(loaded)


def test_changing_the_spec_of_one_layer_changes_one_hunk(deep: autoshard.Plan) -> None:
    path = "params/layers/7/wq"
    pinned = autoshard.apply(
        unrolled_step,
        unrolled_args(),
        mesh_of(data=4, model=2),
        deep.table,
        donate_argnums=(0, 1),
        pins={path: P(None, "model", "data")},
    )
    assert pinned.specs[path] == P(None, "model", "data")
    before, after = spec_lines(deep.table.dumps()), spec_lines(pinned.table.dumps())
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    assert [line[:2] for line in diff] == ["@@", "+ "]
    assert path in diff[1]
    loaded = SpecTable.loads(pinned.table.dumps())
    assert (
        loaded.inputs[path].spec
        == loaded.outputs["out/0/layers/7/wq"].spec
        == [None, "model", "data"]
    )
    assert loaded.inputs["params/layers/8/wq"] == deep.table.inputs["params/layers/8/wq"]


# Older schemas, the JSON Schema -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "decoder"])
def test_tables_of_schema_1_are_read(name: str) -> None:
    path = GOLDEN / f"{name}_schema_1.json"
    old, new = json.loads(path.read_text()), SpecTable.load(path)
    assert {p: leaf.spec for p, leaf in new.inputs.items()} == {
        p: leaf["spec"] for p, leaf in old["inputs"].items()
    }
    assert {p: leaf.spec for p, leaf in new.outputs.items()} == {
        p: leaf["spec"] for p, leaf in old["outputs"].items()
    }
    assert (new.rules, new.fingerprint, new.verified) == (
        old["rules"],
        old["fingerprint"],
        old["verified"],
    )
    assert len(new.evidence.candidates) == len(old["evidence"])
    assert not new.edited
    assert SpecTable.loads(new.dumps()) == new
    table_text(new)


@pytest.mark.parametrize("name", ["mlp", "decoder", "unrolled"])
def test_tables_of_schema_2_are_read(name: str) -> None:
    path = GOLDEN / f"{name}_schema_2.json"
    old, new = json.loads(path.read_text()), SpecTable.load(path)
    for field in ("function", "rules", "constraints", "outputs_like"):
        assert getattr(new, field) == old[field]
    for path, leaf in old["inputs"].items():
        read = new.inputs[path.replace("*", "0")]
        assert (read.spec, read.shape, read.group) == (leaf["spec"], leaf["shape"], leaf["group"])
    assert len(new.evidence.candidates) == len(old["evidence"].get("candidates", []))
    assert not new.edited
    assert SpecTable.loads(new.dumps()) == new
    table_text(new)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_table_of_an_older_schema_is_applied(schema: int) -> None:
    path = GOLDEN / f"decoder_schema_{schema}.json"
    plan = autoshard.apply(
        decoder_step, decoder_args(), "data=4,model=2", path, donate_argnums=(0, 1)
    )
    assert plan.specs["params/wq"] == spec_from_entry(SpecTable.load(path).inputs["params/wq"].spec)


def test_the_json_schema_is_shipped_and_holds(table: SpecTable, deep: autoshard.Plan) -> None:
    shipped = json.loads((Path(autoshard.__file__).parent / "table" / "schema.json").read_text())
    assert shipped == json_schema()
    check = jsonschema.Draft202012Validator(shipped)
    check.check_schema(shipped)
    for text in (table.dumps(), deep.table.dumps()):
        check.validate(json.loads(text))
    wrong = json.loads(table.dumps())
    wrong["inputs"]["tokens"]["spec"] = [1]
    with pytest.raises(jsonschema.ValidationError):
        check.validate(wrong)


# What is wrong with a file ------------------------------------------------------------------------


def leaf_twice(text: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith('    "tokens"'))
    return text.replace(line, f"{line},\n{line}")


TEXT_FAULTS: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "another file": lambda text: '{"params": {"w": 1}}',
    "a wrong spec": lambda text: text.replace(
        '"tokens": {"spec": ["data"], "text": "P(\'data\')"', '"tokens": {"spec": [1]'
    ),
    "text against spec": lambda text: text.replace(
        '"tokens": {"spec": ["data"]', '"tokens": {"spec": ["model"]'
    ),
    "a leaf twice": leaf_twice,
}

MATRIX: dict[str, Any] = {"shape": [8, 32], "dtype": "int32"}
SCALAR: dict[str, Any] = {"spec": [], "shape": [], "dtype": "int32"}
FIELD_FAULTS: dict[str, dict[str, Any]] = {
    "a newer schema": {"schema": 99},
    "a schema that is none": {"schema": True},
    "a field too many": {"surprise": 1},
    "like nothing": {"outputs_like": {"out/0": "nothing"}},
}
MISSING_FIELDS = {"a field too few": "rules", "no leaves": "inputs"}
LEAF_FAULTS: dict[str, dict[str, Any]] = {
    "an axis twice": {"tokens": {"spec": ["data", "data"], **MATRIX}},
    "too many dimensions": {"tokens": {"spec": [None, None, "data"], **MATRIX}},
    "a negative size": {"tokens": {"spec": ["data"], "shape": [-8, 32], "dtype": "int32"}},
    "ranges that fall": {"l/*": {**SCALAR, "each": ["5-1"]}},
    "more stars than ranges": {"l/*/*": {**SCALAR, "each": ["0-1"]}},
}


def broken(table: SpecTable, how: str) -> bytes:
    text = table.dumps()
    if how == "not text":
        return b"\xff\xfe\x00"
    if how in TEXT_FAULTS:
        return TEXT_FAULTS[how](text).encode()
    data: dict[str, Any] = json.loads(text) | FIELD_FAULTS.get(how, {})
    if how in MISSING_FIELDS:
        del data[MISSING_FIELDS[how]]
    else:
        data["inputs"] |= LEAF_FAULTS.get(how, {})
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "cut short",
            r"no JSON \(.*line \d+ column \d+\).*cut short. Restore it from version control",
        ),
        ("empty", r"no JSON"),
        ("not text", r"no JSON \(byte 0 is no UTF-8\)"),
        ("a list", r"no spec table: Expected `object`"),
        ("another file", r"no spec table: "),
        ("a newer schema", r"schema 99, this autoshard reads schema 1 to 3. Upgrade"),
        ("a schema that is none", r"no spec table: .*`schema`"),
        ("a field too many", r"no spec table: .*`surprise`"),
        ("a field too few", r"no spec table: .*`rules`"),
        ("no leaves", r"no spec table: .*`inputs`"),
        (
            "a wrong spec",
            r"no spec table: Expected .* at `\$\.spec\[0\]` at inputs\['tokens'\] \(line \d+\)",
        ),
        ("an axis twice", r"uses a mesh axis twice at inputs\['tokens'\]"),
        (
            "text against spec",
            r"P\('data'\) says otherwise than the spec, P\('model'\).*inputs\['tokens'\] \(line "
            r"\d+\)",
        ),
        ("too many dimensions", r"2 dimensions at inputs\['tokens'\]"),
        ("a negative size", r"Expected `int` >= 0.*inputs\['tokens'\]"),
        ("a leaf twice", r"has 'tokens' twice .*\(line \d+\).*merge"),
        ("ranges that fall", r"'5-1' do not rise.*inputs"),
        ("more stars than ranges", r"2 '\*', but 'each' has 1"),
        ("like nothing", r"no input leaf lies below 'nothing'"),
    ],
)
def test_a_file_that_is_no_table_says_where(
    table: SpecTable, tmp_path: Path, how: str, words: str
) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(broken(table, how))
    with pytest.raises(TableError, match=rf"step\.json: .*({words})"):
        SpecTable.load(path)


HOSTILE = {
    "nested without end": "[" * 200_000,
    "nested in a field": '{"schema": 2, "inputs": ' + '{"a":' * 150_000,
    "a number of a million digits": '{"schema": ' + "9" * 1_000_000 + "}",
    "a number that is none": '{"schema": NaN}',
    "half a surrogate": '{"schema": 2, "function": "\\ud800"}',
    "a trillion leaves": '{"schema": 2, "inputs": {"w/*/*": {"spec": [], "shape": [], "dtype": "f"'
    ', "each": ["0-999999", "0-999999"]}}, "outputs": {}}',
    "an escape code in a key": '{"schema": 2, "inputs": {"w\\u001b[31m": 3}}',
    "an escape code in a field's name": '{"schema": 2, "inputs": {}, "outputs": {}, '
    '"\\u001b[2J": 3}',
    "a key twice with an escape code": '{"\\u001b[2J": 3, "\\u001b[2J": 3}',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_a_clear_error_on_one_safe_line(what: str) -> None:
    with pytest.raises(TableError) as error:
        SpecTable.loads(HOSTILE[what], "step.json")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 2000


def test_a_file_too_large_to_be_a_table_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(TableError, match="larger than"):
        SpecTable.load(path)


def test_odd_names_are_kept_and_shown_safely(table: SpecTable) -> None:
    odd = [
        "../../etc/passwd",
        "w\x1b[31m",
        "w\u202eb",
        "a*b",
        "名前",
        "<script>",
        "w/²",
        "w/007",
        "w/\n",
    ]
    leaf = table.inputs["tokens"]
    strange = msgspec.structs.replace(
        table, function="f\x1b[2J", inputs={**table.inputs, **dict.fromkeys(odd, leaf)}
    )
    text = strange.dumps()
    assert all(line.isprintable() for line in text.splitlines())
    assert set(SpecTable.loads(text).inputs) == {*table.inputs, *odd}
    assert SpecTable.loads(text).dumps() == text
    assert all(line.isprintable() for line in table_text(strange).split("\n"))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"absent\.json: cannot be read .*plan\.table\.save"):
        SpecTable.load(tmp_path / "absent.json")
    with pytest.raises(TableError, match="cannot be read"):
        SpecTable.load(tmp_path)
    with pytest.raises(TableError, match="cannot be read"):
        SpecTable.load("a\0b")


def test_saving_is_all_or_nothing(
    table: SpecTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.json"
    table.save(path)
    before = path.read_bytes()

    def full(self: Path, text: str, **_: Any) -> int:
        self.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    changed = msgspec.structs.replace(table, function="another")
    with pytest.raises(OSError, match="No space"):
        changed.save(path)
    assert path.read_bytes() == before


axes = st.lists(st.sampled_from(["data", "model", "fsdp"]), max_size=3, unique=True).map(tuple)


@given(st.lists(axes, max_size=4).map(tuple))
def test_specs_survive_as_json(spec: tuple[tuple[str, ...], ...]) -> None:
    entry = json.loads(json.dumps(spec_to_entry(spec)))
    by_dim = [
        () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in spec_from_entry(entry)
    ]
    assert by_dim == list(spec)[: len(by_dim)]
    assert not any(spec[len(by_dim) :])
    assert eval(spec_text(entry), {"P": P}) == spec_from_entry(entry)


def test_numbers_of_the_evidence_are_rounded_so_that_a_diff_stays_quiet(table: SpecTable) -> None:
    record = {"measured": {"median_s": 0.012345678, "rounds": 7}}
    noisy = msgspec.structs.replace(
        table,
        evidence=msgspec.structs.replace(table.evidence, candidates=[record], search_s=1.23456),
    )
    assert '"median_s": 0.01235, "rounds": 7' in noisy.dumps()
    assert '"search_s": 1.235' in noisy.dumps()


def like_many(data: dict[str, Any]) -> None:
    data["outputs_like"] = {f"o{i}": "params" for i in range(1001)}


BOUNDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a mesh of two to the 31": (lambda d: d["mesh"].update(axes={"data": 2**31, "model": 1}), "2147483648 devices"),
    "a mesh in all": (lambda d: d["mesh"].update(axes={"data": 2**20, "model": 2}), "at most 1048576"),
    "a leaf path": (lambda d: d["inputs"].update({"w" * 4097: SCALAR}), "4097 characters, 4096 at most"),
    "likenesses": (like_many, "1001 subtrees are like others, 1000 at most"),
    "depth": (lambda d: d["evidence"].update(candidates=[{"a": json.loads("[" * 40 + "]" * 40)}]), "more than 32 times"),
    "a structured dtype": (lambda d: d["inputs"].update(w=SCALAR | {"dtype": "i4,f4"}), "'i4,f4' is the dtype of no array"),
    "a dtype that is run": (lambda d: d["inputs"].update(w=SCALAR | {"dtype": "float32;"}), "dtype of no array"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOUNDS)
def test_sizes_are_bounded(what: str, table: SpecTable) -> None:
    data = json.loads(table.dumps())
    change, words = BOUNDS[what]
    change(data)
    with pytest.raises(TableError, match=words):
        SpecTable.loads(json.dumps(data), "step.json")


def test_empty_texts_of_the_evidence_are_written(table: SpecTable) -> None:
    evidence = msgspec.structs.replace(table.evidence, fingerprint="", verified="")
    empty = msgspec.structs.replace(table, evidence=evidence)
    assert SpecTable.loads(empty.dumps()) == empty
