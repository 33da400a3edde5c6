"""The fewest annotations: found, pasted into the model's source by program, and compiled without
the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.layout.constraints import constraints_for
from autoshard.report.minimise import fewest
from autoshard.report.source_constraints import as_constraints, source_constraints_for
from autoshard.report.source_expressions import SourceSpan, paste
from examples import transformer
from tests import models
from tests.report.pasted import compiled_collectives, pasted_module
from tests.whole_models import mixture_of_experts
from tests.whole_models.model import Array


@given(st.sets(st.integers(0, 39)))
def test_fewest_finds_exactly_what_is_needed(needed: set[int]) -> None:
    tries = []

    def enough(some: Any) -> bool:
        tries.append(some)
        return needed <= set(some)

    assert set(fewest(list(range(40)), enough)) == needed
    assert len(tries) <= 2 + 9 * len(needed)


def test_fewest_keeps_all_where_even_all_is_not_enough() -> None:
    assert fewest([1, 2, 3], lambda some: False) == [1, 2, 3]


def span(text: str, part: str) -> SourceSpan:
    """The only occurrence of a part of a text of one line."""
    start = text.encode().index(part.encode())
    return SourceSpan("x.py", 1, start, 1, start + len(part.encode()))


def test_pasting_nests_and_counts_bytes() -> None:
    text = "y = f(\u00fc, a @ b)\n"
    wanted = [
        (span(text, "a @ b"), P("x")),
        (span(text, "a @ b"), P()),
        (span(text, "a"), P(("x", "y"), None)),
    ]
    assert paste(text, wanted).splitlines()[-1] == (
        "y = f(\u00fc, with_sharding_constraint(with_sharding_constraint("
        "with_sharding_constraint(a, P(('x', 'y'), None)) @ b, P('x')), P()))"
    )


def test_pasted_text_gets_its_imports_once_and_after_those_of_the_file() -> None:
    text = '"""Doc."""\n\nfrom __future__ import annotations\n\nimport jax\n\ny = jax.f(a)\n'
    once = paste(text, [(SourceSpan("x.py", 7, 4, 7, 12), P("x"))])
    assert once.splitlines()[3:7] == [
        "",
        "import jax",
        "from jax.lax import with_sharding_constraint",
        "from jax.sharding import PartitionSpec as P",
    ]
    twice = paste(once, [(SourceSpan("x.py", 9, 4, 9, 12), P("y"))])
    assert twice.count("import with_sharding_constraint") == 1


def demo() -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    config = transformer.Config(
        layers=2, d_model=64, heads=4, d_ff=128, length=32, batch=16, vocabulary=64
    )
    params = transformer.init_params(jax.random.key(0), config)
    tokens = np.zeros((config.batch, config.length + 1), np.int32)
    return transformer.train_step, (params, transformer.OPTIMIZER.init(params), tokens), (0, 1)


@pytest.mark.parametrize(
    ("make", "preset", "most"),
    [
        (demo, "fsdp+tp", 3),
        (lambda: (models.mlp_step, models.mlp_args(), (0,)), "fsdp", 3),
        (lambda: (models.mlp_step, models.mlp_args(), (0,)), "tp", 0),
    ],
    ids=["transformer", "mlp", "mlp needs none"],
)
def test_pasted_constraints_compile_to_the_collectives_of_the_plan(
    make: Any, preset: str, most: int, mesh_4x2: Mesh, tmp_path: Path
) -> None:
    fn, args, donated = make()
    plan = autoshard.apply(fn, args, mesh_4x2, preset, donate_argnums=donated)
    minimal = plan.minimise()
    print(minimal)
    assert minimal.same
    assert not minimal.inexpressible
    assert len(minimal.constraints) <= most < minimal.stated
    module = pasted_module(minimal, Path(fn.__code__.co_filename), tmp_path)
    collectives = compiled_collectives(plan, getattr(module, fn.__name__), args, donated)
    assert collectives == plan.compile().evidence.collectives


@pytest.mark.slow
def test_a_mixture_of_experts_needs_two_of_hundreds(mesh_4x2: Mesh, tmp_path: Path) -> None:
    model = mixture_of_experts.moe_one_hot()
    plan = autoshard.apply(model.step, model.args, mesh_4x2, "fsdp+tp", donate_argnums=model.donate)
    minimal = plan.minimise()
    print(minimal)
    assert minimal.same
    assert len(minimal.constraints) <= 4 < minimal.stated
    module = pasted_module(minimal, Path(mixture_of_experts.__file__), tmp_path)
    collectives = compiled_collectives(plan, module.moe_one_hot().step, model.args, model.donate)
    assert collectives == plan.compile().evidence.collectives


def convolved_and_rolled(w: Array, x: Array) -> Array:
    def loss(w: Array) -> Array:
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jnp.concatenate([y[:, 1:], y[:, :1]], 1) * y).sum()

    return jax.grad(loss)(w)


def test_source_constraints_state_all_that_the_plan_states(mesh_4x2: Mesh) -> None:
    args = np.ones((3, 3, 8, 8), np.float32), np.ones((4, 16, 16, 8), np.float32)
    layout = autoshard.apply(convolved_and_rolled, args, mesh_4x2, ["x.1->data"]).layout
    stated = constraints_for(layout)
    assert any(c.before_reshard for c in stated.eqns.values())
    expressed = as_constraints(source_constraints_for(layout.problem.logical_axes.classes, stated))
    assert expressed.eqns == stated.eqns


def best_rows(x: Array, w: Array) -> Array:
    return jax.lax.top_k(x @ w, 2)[0]


def test_what_runs_by_pieces_is_said_to(mesh_4x2: Mesh) -> None:
    args = np.ones((16, 8), np.float32), np.ones((8, 8), np.float32)
    plan = autoshard.apply(best_rows, args, mesh_4x2, ["x.0->data", "x.0->model"])
    minimal = plan.minimise()
    assert minimal.same
    assert minimal.constraints == ()
    (line,) = minimal.shard_maps
    assert "top_k in a jax.shard_map, in_specs=" in line
    assert line in str(minimal)


def test_a_plan_of_arguments_only_needs_nothing(mesh_4x2: Mesh) -> None:
    plan = autoshard.apply(
        models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", constraints="arguments"
    )
    assert plan.minimise().constraints == ()


def test_the_patch_names_the_file_and_the_line(mesh_4x2: Mesh) -> None:
    plan = autoshard.apply(models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", donate_argnums=0)
    minimal = plan.minimise()
    patch = minimal.patch()
    assert "tests/models.py" in patch
    assert "+        return ((jax.nn.gelu(with_sharding_constraint(" in patch
    assert all(line.startswith("models.py:") for line in minimal.lines)
