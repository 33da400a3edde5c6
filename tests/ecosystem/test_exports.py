"""Each exported form is read by the library or habit that it is for, and every leaf gets the plan's
sharding."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import msgspec
import pytest
import yaml
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.table.export import FORMS, export, leaves_of
from autoshard.table.leaf_patterns import unfold
from autoshard.table.spec_table import SpecTable
from examples.transformer import factory as demo
from tests.ecosystem.library_models import equinox_args, equinox_step, nnx_args, nnx_step

ROOT = Path(__file__).parent.parent.parent
MESH = "data=4,model=2"
JOBS: dict[str, Any] = {
    "demo": demo,
    "nnx": lambda: {"fn": nnx_step, "example_args": nnx_args(), "donate_argnums": (0, 1)},
    "equinox": lambda: {"fn": equinox_step, "example_args": equinox_args()},
}
LAYOUTS = {"demo": "fsdp+tp", "nnx": "fsdp", "equinox": "tp"}


@pytest.fixture(scope="module", params=list(JOBS))
def plan(request: pytest.FixtureRequest) -> autoshard.Plan:
    return autoshard.apply(mesh=MESH, layout=LAYOUTS[request.param], **JOBS[request.param]())


@pytest.fixture
def table(plan: autoshard.Plan) -> SpecTable:
    return SpecTable.loads(plan.table.dumps())


def module(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "exported.py", "exec"), names)
    return names


def named(tree: Any, name: str) -> dict[str, Any]:
    """Leaves by path, as EasyLM's `named_tree_map` names them."""
    leaves = jax.tree.leaves_with_path(tree)
    return {
        "/".join([name, *(jax.tree_util.keystr((k,), simple=True) for k in path)]): x
        for path, x in leaves
    }


def arguments(plan: autoshard.Plan) -> dict[str, Any]:
    """The plan's arguments, by name."""
    args, _ = plan.traced.call.rebuild(plan.traced.call.leaves)
    names = dict.fromkeys(path.split("/")[0] for path in plan.specs)
    return dict(zip(names, args, strict=True))


def same(spec: P, expected: P, rank: int, mesh: Mesh) -> bool:
    return NamedSharding(mesh, spec).is_equivalent_to(NamedSharding(mesh, expected), rank)


# Python -------------------------------------------------------------------------------------------


def test_the_python_module_places_every_leaf_as_the_plan_does(
    plan: autoshard.Plan, table: SpecTable
) -> None:
    text = export(table, "python")
    assert "autoshard" not in "".join(line for line in text.splitlines() if "import" in line)
    names = module(text)
    assert names["INPUTS"] == plan.specs
    assert names["OUTPUTS"] == table.output_specs()
    for name, tree in arguments(plan).items():
        shardings = names["shardings_of"](name, tree, plan.mesh.user)
        arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
        of_arrays = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, NamedSharding))
        placed = [jax.device_put(a, s) for a, s in zip(arrays, of_arrays, strict=True)]
        expected = [x for x in jax.tree.leaves(plan.place(name, tree)) if hasattr(x, "shape")]
        assert all(
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            for a, b in zip(placed, expected, strict=True)
        )


def test_the_python_module_runs_without_autoshard(plan: autoshard.Plan, tmp_path: Path) -> None:
    (tmp_path / "specs.py").write_text(export(plan.table, "python"))
    script = "import sys; sys.modules['autoshard'] = None; import specs; print(len(specs.INPUTS))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == len(plan.specs)


def test_a_leaf_that_the_python_module_does_not_know_is_an_error(plan: autoshard.Plan) -> None:
    names = module(export(plan.table, "python"))
    name = next(iter(arguments(plan)))
    with pytest.raises(KeyError, match="stranger is not in this table"):
        names["specs_of"](name, {"stranger": jax.ShapeDtypeStruct((), "float32")})


# Regular expressions ------------------------------------------------------------------------------


def match_partition_rules(rules: Any, leaves: dict[str, Any]) -> dict[str, P]:
    """EasyLM's matcher (its `match_partition_rules`), but that it does not give scalars a spec of
    its own."""

    def spec(name: str) -> P:
        for rule, its_spec in rules:
            if re.search(rule, name) is not None:
                return its_spec
        raise ValueError(f"Partition rule not found for param: {name}")

    return {name: spec(name) for name in leaves}


def test_regular_expressions_give_every_leaf_its_spec(
    plan: autoshard.Plan, table: SpecTable
) -> None:
    rules = module(export(table, "regex"))["RULES"]
    assert len(rules) < len(plan.specs)
    for name, tree in arguments(plan).items():
        leaves = {path: x for path, x in named(tree, name).items() if hasattr(x, "shape")}
        assert match_partition_rules(rules, leaves) == {path: plan.specs[path] for path in leaves}


def test_regular_expressions_of_one_argument_have_paths_of_its_own(
    plan: autoshard.Plan, table: SpecTable
) -> None:
    name = next(iter(plan.specs)).split("/")[0]
    rules = module(export(table, "regex", name))["RULES"]
    leaves = {
        path.removeprefix(f"{name}/"): spec
        for path, spec in plan.specs.items()
        if path.startswith(f"{name}/")
    }
    assert match_partition_rules(rules, leaves) == leaves
    assert len(rules) <= 16


# Logical axes -------------------------------------------------------------------------------------


def logical(
    table: SpecTable, argument: str | None = None
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """As MaxText reads its YAML: rules as lists of lists, an empty list for what is not split."""
    exported = yaml.safe_load(export(table, "logical-axis-rules", argument))
    assert exported == json.loads(export(table, "logical-axis-rules", argument))
    rules = [(name, tuple(axes) or None) for name, axes in exported["logical_axis_rules"]]
    return rules, exported["logical_axes"]


def test_linen_and_maxtext_read_the_logical_rules(plan: autoshard.Plan, table: SpecTable) -> None:
    rules, names = logical(table)
    mesh = plan.mesh.user
    with nn.logical_axis_rules(rules):  # as MaxText does with its `logical_axis_rules`
        shardings = nn.logical_to_mesh_sharding(
            {path: P(*dims) for path, dims in names.items()}, mesh
        )
    for path, spec in plan.specs.items():
        rank = len(names[path])
        assert shardings[path].is_equivalent_to(NamedSharding(mesh, spec), rank), path
        assert same(P(*nn.logical_to_mesh_axes(names[path], rules)), spec, rank, mesh)


def test_a_levanter_like_dict_reads_the_logical_rules(
    plan: autoshard.Plan, table: SpecTable
) -> None:
    rules, names = logical(table)
    axis_resources = dict(rules)
    assert len(axis_resources) == len(rules)
    for path, spec in plan.specs.items():
        assert same(
            P(*(axis_resources[n] for n in names[path])), spec, len(names[path]), plan.mesh.user
        )


def test_names_are_mostly_the_logical_axes(table: SpecTable) -> None:
    rules, _ = logical(table)
    assert sum(":" in name for name, _ in rules) <= len(rules) // 2


def test_nnx_reads_the_logical_rules_as_metadata() -> None:
    plan = autoshard.apply(mesh=MESH, layout="fsdp+tp", **JOBS["nnx"]())
    rules, names = logical(plan.table, "model")
    model = nnx_args()[0]
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        variable.set_metadata(out_sharding=tuple(names["/".join(map(str, (*path, "value")))]))
    with nnx.logical_axis_rules(rules):
        specs = nnx.get_partition_spec(state)
    leaves = nnx.to_flat_state(specs)
    assert len(list(leaves)) == len(names)
    for path, spec in leaves:
        full = "/".join(["model", *map(str, path), "value"])
        own = spec if isinstance(spec, P) else spec.get_value()
        assert same(
            own, plan.specs[full], len(names[full.removeprefix("model/")]), plan.mesh.user
        ), full


# For people ---------------------------------------------------------------------------------------


def spec_of(text: str) -> P:
    return eval(text, {"P": P})


def test_constraints_name_lines_of_the_model_and_can_be_pasted(
    plan: autoshard.Plan, table: SpecTable
) -> None:
    blocks = export(table, "constraints").split("\n\n")[1:]
    assert blocks
    stated = 0
    for block in blocks:
        where, *lines = block.strip().splitlines()
        file, line = re.fullmatch(r"# (\S+\.py):(\d+)", where).groups()
        assert file
        assert int(line) > 0
        for comment, code in zip(lines[::2], lines[1::2], strict=True):
            shape = ast.literal_eval(re.search(r"shape (\[.*?\])", comment)[1])
            call = ast.parse(code).body[0].value
            spec = spec_of(ast.unparse(call.args[1]))
            if P.UNCONSTRAINED not in tuple(spec) and stated < 8:  # the others say less
                x = jax.ShapeDtypeStruct(tuple(shape), "float32")
                compiled = jax.jit(
                    lambda x, s=spec: jax.lax.with_sharding_constraint(
                        x, NamedSharding(plan.mesh.auto, s)
                    )
                )
                out = compiled.lower(x).compile().output_shardings
                assert out.is_equivalent_to(NamedSharding(plan.mesh.auto, spec), len(shape))
                stated += 1
    assert stated


def test_lines_of_the_demo_are_lines_of_the_demo() -> None:
    text = export(autoshard.apply(mesh=MESH, layout="fsdp+tp", **demo()).table, "constraints")
    source = (ROOT / "examples" / "transformer.py").read_text().splitlines()
    lines = {int(line) for line in re.findall(r"^# transformer\.py:(\d+)$", text, re.MULTILINE)}
    assert {"wq", "wk", "wv", "wo", "w_down"} <= {
        n for line in lines for n in re.findall(r'"(\w+)"', source[line - 1])
    }


def test_csv_has_every_leaf(plan: autoshard.Plan, table: SpecTable) -> None:
    rows = list(csv.DictReader(io.StringIO(export(table, "csv"))))
    assert {r["leaf"]: spec_of(r["spec"]) for r in rows if r["side"] == "input"} == plan.specs
    assert {
        r["leaf"]: spec_of(r["spec"]) for r in rows if r["side"] == "output"
    } == table.output_specs()


def test_markdown_has_every_leaf(plan: autoshard.Plan, table: SpecTable) -> None:
    text = export(table, "markdown")
    body = text.partition("## Arguments")[2].partition("## Outputs")[0]
    rows = [
        re.split(r"(?<!\\) \| ", line.strip("| "))
        for line in body.splitlines()
        if line.startswith("| `")
    ]
    lines = {
        path.strip("`"): (tuple(each.split("; ")) if each else (), spec.strip("`"))
        for path, _, spec, *rest in rows
        for each in ["".join(rest)]
    }
    assert {path: spec_of(spec) for path, spec in unfold(lines).items()} == plan.specs


def test_forms_and_arguments_that_do_not_exist(table: SpecTable) -> None:
    with pytest.raises(autoshard.ArgumentError, match="no form 'toml'"):
        export(table, "toml")
    with pytest.raises(autoshard.ArgumentError, match="no leaf lies below 'nothing'"):
        leaves_of(table, "nothing")
    with pytest.raises(autoshard.ArgumentError, match="whole table"):
        export(table, "csv", "params")


def test_odd_names_do_no_harm(table: SpecTable) -> None:
    leaf = next(iter(table.inputs.values()))
    odd = ['"""\nimport os', "a|b`c", "{i}", "x[0].y(z)+$", "w\x1b[31m", "=1+1", "\\d", "'"]
    strange = msgspec.structs.replace(
        table, function='f"""\n', inputs=table.inputs | dict.fromkeys(odd, leaf)
    )
    assert module(export(strange, "python"))["INPUTS"] == strange.specs
    assert (
        match_partition_rules(module(export(strange, "regex"))["RULES"], strange.inputs)
        == strange.specs
    )
    assert set(json.loads(export(strange, "logical-axis-rules"))["logical_axes"]) == set(
        strange.inputs
    )
    for form in FORMS:
        if form != "csv":  # a CSV cell may hold any text
            assert all(line.isprintable() for line in export(strange, form).split("\n")), form


def test_the_command_writes_a_file(table: SpecTable, tmp_path: Path) -> None:
    table.save(tmp_path / "x.json")
    command = [
        sys.executable,
        "-m",
        "autoshard",
        "export",
        "x.json",
        "--to",
        "regex",
        "--out",
        "made/rules.py",
    ]
    subprocess.run(
        command,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert (tmp_path / "made" / "rules.py").read_text() == export(table, "regex")
