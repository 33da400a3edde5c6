"""The examples do what they say. The demo itself is `make demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import autoshard
from autoshard import Effort

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))


def test_the_textbook_mlp_is_column_then_row_split_under_its_budget() -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "mlp.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "equal the NumPy computation" in found.stdout


def test_without_a_budget_replication_wins_at_that_size() -> None:
    import mlp

    arguments = {k: v for k, v in mlp.factory().items() if k != "memory_budget_bytes"}
    plan = autoshard.optimize(
        mesh="data=8", effort=Effort(compiled=3, measured=0), progress=False, **arguments
    )
    assert not plan.rules


def test_the_demo_applies_fsdp_at_a_third_of_the_bytes_and_half_of_the_temporaries() -> None:
    import transformer

    inside, outside = (
        autoshard.apply(
            mesh="data=4,model=2", layout="fsdp", constraints=c, **transformer.factory()
        )
        .compile()
        .evidence
        for c in ("anchors", "arguments")
    )
    assert inside.collective_bytes * 3 <= outside.collective_bytes
    assert inside.temp_bytes * 2 <= outside.temp_bytes


SMALL = {
    "nnx_llama": "P('data', 'model')",
    "equinox_mlp": "yes (outputs equal those of the unsharded function",
    "logical_rules": "'up': P(",
}


@pytest.mark.parametrize("name", SMALL)
def test_small_examples_run_and_stay_small(name: str, tmp_path: Path) -> None:
    file = ROOT / "examples" / f"{name}.py"
    assert len(file.read_text().splitlines()) < 65
    found = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert SMALL[name] in found.stdout
