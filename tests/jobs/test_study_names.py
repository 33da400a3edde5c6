"""Which searches share a study where nobody names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.search.study.shared_study import study_name
from autoshard.search.study.storage import close_storage, open_storage, study_names

IDENTITY = {
    "program": "3fa9",
    "leaf names": "77aa",
    "mesh": "data=4,model=2",
    "devices": "cpu",
    "hardware": "cpu 12ab",
    "memory budget": "None",
    "jax": "0.10.2",
    "autoshard": "0.1.0",
}


@pytest.mark.parametrize("part", ["program", "leaf names", "mesh", "jax", "autoshard"])
def test_what_decides_whether_a_study_can_be_read_is_in_its_name(part: str) -> None:
    assert study_name(IDENTITY | {part: "other"}) != study_name(IDENTITY)


@pytest.mark.parametrize("part", ["devices", "hardware", "memory budget"])
def test_what_is_only_set_otherwise_is_told_by_name(part: str) -> None:
    assert study_name(IDENTITY | {part: "other"}) == study_name(IDENTITY)


def searched(names: tuple[str, str], storage: str, **options: Any) -> autoshard.Plan:
    def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params[names[0]]) @ params[names[1]]

    params = {name: jax.ShapeDtypeStruct((16, 16), "float32") for name in names}
    return autoshard.optimize(
        step, (params, jax.ShapeDtypeStruct((8, 16), "float32")), "data=4,model=2",
        effort=autoshard.Effort(0, 0), storage=storage, progress=False, **options,
    )  # fmt: skip


def studies_in(where: str) -> list[str]:
    storage = open_storage(where)
    names = study_names(storage)
    close_storage(storage)
    return names


@pytest.mark.parametrize("names", [("up", "down"), ("wq", "wo\udc80"), ("w_in*", "w in")])
def test_leaves_of_other_names_have_a_study_of_their_own(
    names: tuple[str, str], tmp_path: Path
) -> None:
    where = f"journal:{tmp_path / 'study.log'}"
    for of_step in (("a", "b"), names, ("a", "b")):
        searched(of_step, where)
    assert len(studies_in(where)) == 2
    with pytest.raises(autoshard.StudyError, match=r"something else \(memory budget: 'None' there"):
        searched(("a", "b"), where, memory_budget_bytes="1GiB")


def test_another_jax_has_a_study_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"journal:{tmp_path / 'study.log'}"
    searched(("a", "b"), where)
    monkeypatch.setattr(jax, "__version__", "99.0")
    searched(("a", "b"), where)
    assert len(studies_in(where)) == 2
