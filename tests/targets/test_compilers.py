"""The real compilers (`make test-targets` installs them); where they are not, these tests say
loudly that they skip."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from autoshard import Effort, NoFeasiblePlanError, optimize
from autoshard.compiler.cache import CompileCache, Refusal
from autoshard.compiler.compile import Reading
from autoshard.compiler.pool import CompilePool, Job, Outcome
from autoshard.jax_internals import executables
from tests.targets.steps import args, plan, step

pytestmark = pytest.mark.targets
VMEM = 128 * 2**20
"""Fast memory of a v5e: the compiler's peak holds it too, and only the full level fills it."""


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"NOT TESTED: {package} is not installed; run `make test-targets`"
    )


TPU, GPU = needs("libtpu"), needs("jax_cuda12_plugin")


def compiled(name: str, mesh: str, jobs: list[dict[str, Any]], **more: Any) -> list[Outcome]:
    made = plan(name, mesh, "fsdp", **more)
    found: dict[int, Outcome] = {}
    with CompilePool(made.mesh) as pool:
        pool.compile([Job(made.built, options) for options in jobs], found.__setitem__)
    return [found[number] for number in range(len(jobs))]


@TPU
@pytest.mark.parametrize("name", ["tpu:v5e:2x4", "tpu:v6e:2x4", "tpu:v5p:2x2x2", "tpu:v4:2x2x2"])
def test_quick_memory_is_close_to_full_memory(name: str) -> None:
    full, quick = compiled(
        name, "data=8", [{}, executables.quick_compile_options()], scale=2, batch=8 * 4096
    )
    assert isinstance(full, Reading)
    assert isinstance(quick, Reading)
    assert full.cycles is not None
    assert (
        0.85 * full.figures.peak_bytes - VMEM
        <= quick.figures.peak_bytes
        <= 1.15 * full.figures.peak_bytes
    )


@TPU
def test_the_tpu_compiler_refuses_what_does_not_fit() -> None:
    (refused,) = compiled("tpu:v5e:2x4", "data=8", [{}], scale=8, batch=2**20)
    assert isinstance(refused, Refusal)
    assert refused.needed_bytes > refused.available_bytes == int(15.75 * 2**30)


@GPU
@pytest.mark.parametrize("part", ["a100", "h100", "h200", "b200"])
def test_every_gpu_compiles(part: str) -> None:
    (found,) = compiled(f"gpu:{part}:2x4", "data=2,model=4", [{}])
    assert isinstance(found, Reading)
    assert found.figures.peak_bytes > 0
    assert found.cycles is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        pytest.param("tpu:v5e:2x4", "compiler", marks=TPU),
        pytest.param("gpu:h100:1x8", "predicted", marks=GPU),
    ],
)
def test_a_search_on_a_target(name: str, word: str, tmp_path: Path) -> None:
    effort = Effort(compiled=3, measured=0, full=2)
    found = optimize(
        step,
        args(),
        "data=4,model=2",
        target=name,
        donate_argnums=0,
        effort=effort,
        cache_dir=tmp_path,
        progress=False,
    )
    winner = next(candidate for candidate in found.candidates if candidate.status == "winner")
    assert winner.compiled is not None
    assert (winner.compiled.level, winner.compiled.compute_from) == ("full", word)
    assert not found.verified
    assert len(list(CompileCache(tmp_path)._folder.rglob("*.json"))) >= 2


@pytest.mark.parametrize(
    "name",
    [pytest.param("tpu:v5e:2x4", marks=TPU), pytest.param("gpu:h100:1x8", marks=GPU), "cpu:8"],
)
def test_nothing_fits(name: str, tmp_path: Path) -> None:
    with pytest.raises(NoFeasiblePlanError, match="budget"):
        optimize(
            step,
            args(),
            "data=8",
            target=name,
            donate_argnums=0,
            effort=Effort(compiled=2, measured=0, full=1),
            memory_budget_bytes="16MiB",
            cache_dir=tmp_path,
            progress=False,
        )


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        pytest.param("tpu:v5e:2x4", 3 * 2**16, "15.75 GiB.*the compiler refuses all", marks=TPU),
        pytest.param("gpu:h100:1x8", 2**23, "79.10 GiB.*the smallest compiled peak of", marks=GPU),
    ],
)
def test_what_the_part_cannot_hold_is_refused_by_its_own_number(
    name: str, batch: int, words: str, tmp_path: Path
) -> None:
    """The TPU compiler refuses; the GPU compiler compiles whatever it is given, and its figure is
    compared here."""
    with pytest.raises(NoFeasiblePlanError, match=words):
        optimize(
            step,
            args(scale=8, batch=batch),
            "data=8",
            target=name,
            donate_argnums=0,
            cache_dir=tmp_path,
            effort=Effort(compiled=2, measured=0, full=1),
            progress=False,
        )
