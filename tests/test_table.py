"""The spec table: a file that people review, that survives a round trip and says what is wrong with it."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard.errors import TableError
from autoshard.table import SpecTable, spec_from_entry, spec_to_entry
from tests.models import decoder_args, decoder_step
from tests.stages import mesh_of


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.apply(decoder_step, decoder_args(), mesh_of(data=4, model=2), "fsdp", donate_argnums=(0, 1))


@pytest.fixture
def table(plan: autoshard.Plan) -> SpecTable:
    return plan.table


def test_a_saved_table_is_loaded_as_it_was(table: SpecTable, tmp_path: Path) -> None:
    path = tmp_path / "specs" / "deeper" / "step.json"
    table.save(path)
    assert SpecTable.load(path) == table
    assert SpecTable.load(str(path)).dumps() == table.dumps()


def test_it_holds_what_a_colleague_needs(table: SpecTable) -> None:
    assert table.function == "decoder_step"
    assert table.mesh.axes == {"data": 4, "model": 2}
    assert table.mesh.types == ["auto", "auto"]
    assert {"jax", "autoshard"} <= set(table.versions)
    assert table.rules
    assert table.verified.startswith("no (")
    assert set(table.inputs) == {f"{tree}/{n}" for tree in ("params", "moment") for n in decoder_args()[0]} | {"tokens"}
    assert table.inputs["params/wq"].shape == [2, 64, 4, 16]
    assert all(re.fullmatch(r"\S+\.py:\d+", entry.source) for entry in table.inside)


def test_one_leaf_a_line_in_a_stable_order(table: SpecTable, plan: autoshard.Plan) -> None:
    lines = table.dumps().splitlines()
    for path, leaf in table.inputs.items():
        (line,) = (x for x in lines if x.startswith(f'    "{path}":'))
        assert json.loads(line.split(":", 1)[1].rstrip(",")) == msgspec.to_builtins(leaf)
    assert table.dumps() == plan.table.dumps()
    assert list(json.loads(table.dumps())) == list(SpecTable.__struct_fields__)


def test_a_diff_shows_only_what_changed(table: SpecTable) -> None:
    changed = msgspec.structs.replace(
        table, inputs={**table.inputs, "tokens": msgspec.structs.replace(table.inputs["tokens"], spec=[None, "data"])}
    )
    diff = list(difflib.unified_diff(table.dumps().splitlines(), changed.dumps().splitlines(), n=0, lineterm=""))
    assert [line[0] for line in diff[3:]] == ["-", "+"]
    assert '"tokens"' in diff[3]


def test_layers_are_ordered_by_number() -> None:
    from autoshard.plan import sorted_rows

    names = [f"layers/{i}/w" for i in range(12)]
    assert [row[0] for row in sorted_rows([(n, 0) for n in sorted(names)])] == names


def broken(table: SpecTable, how: str) -> bytes:
    text = table.dumps()
    data: dict[str, Any] = json.loads(text)
    match how:
        case "cut short":
            return text[: len(text) // 2].encode()
        case "empty":
            return b""
        case "not text":
            return b"\xff\xfe\x00"
        case "a list":
            return b"[]"
        case "another file":
            return b'{"params": {"w": 1}}'
        case "a newer schema":
            data["schema"] = 99
        case "a field too many":
            data["surprise"] = 1
        case "a field too few":
            del data["rules"]
        case "a wrong spec":
            data["inputs"]["tokens"]["spec"] = [1]
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut short", r"no JSON.*cut short. Restore it from version control"),
        ("empty", r"no JSON"),
        ("not text", r"no JSON|no spec table"),
        ("a list", r"no spec table: Expected `object`"),
        ("another file", r"no spec table: "),
        ("a newer schema", r"schema 99, this autoshard reads schema 1. Upgrade"),
        ("a field too many", r"no spec table: .*`surprise`"),
        ("a field too few", r"no spec table: .*`rules`"),
        ("a wrong spec", r"no spec table: .*\$\.inputs\[\.\.\.\]\.spec"),
    ],
)
def test_a_file_that_is_no_table_says_where(table: SpecTable, tmp_path: Path, how: str, words: str) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(broken(table, how))
    with pytest.raises(TableError, match=rf"step\.json: .*({words})"):
        SpecTable.load(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"absent\.json: cannot be read .*plan\.table\.save"):
        SpecTable.load(tmp_path / "absent.json")
    with pytest.raises(TableError, match="cannot be read"):
        SpecTable.load(tmp_path)


def test_saving_is_all_or_nothing(table: SpecTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec_from_entry(entry)]
    assert found == list(spec)[: len(found)]
    assert not any(spec[len(found) :])


def test_numbers_of_the_evidence_are_rounded_so_that_a_diff_stays_quiet(table: SpecTable) -> None:
    noisy = msgspec.structs.replace(table, evidence=[{"measured": {"median_s": 0.012345678, "rounds": 7}}])
    assert '"median_s": 0.01235, "rounds": 7' in noisy.dumps()
