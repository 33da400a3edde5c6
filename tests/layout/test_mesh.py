"""Meshes: strings, axis types, and errors with the numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.devices.mesh_text import parse_axes
from autoshard.errors import MeshError
from autoshard.layout.mesh import resolve_mesh

axis_names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@given(st.dictionaries(axis_names, st.integers(1, 4096), min_size=1, max_size=4))
def test_a_mesh_string_is_read_in_order(axes: dict[str, int]) -> None:
    text = ", ".join(f"{name} = {size}" for name, size in axes.items())
    assert list(parse_axes(text).items()) == list(axes.items())


@pytest.mark.parametrize(
    "text",
    ["", "data", "data:4", "data=4,", "data=0", "data=-1", "data=4,data=2", "4=data", "data=4.0"],
)
def test_a_string_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(
        MeshError, match=r"Write distinct names with sizes >= 1, such as 'data=4,model=2'"
    ):
        parse_axes(text)


@pytest.mark.parametrize(("text", "need"), [("data=3", 3), ("data=4,model=4", 16), ("data=4", 4)])
def test_the_wrong_number_of_devices_is_refused_with_both_numbers(text: str, need: int) -> None:
    with pytest.raises(
        MeshError, match=rf"needs {need} devices, but this process has 8 cpu.*product is 8.*{need}"
    ):
        resolve_mesh(text)


def test_a_string_over_the_local_devices() -> None:
    info = resolve_mesh("data=4,model=2")
    assert info.axes == {"data": 4, "model": 2}
    assert info.axis_types == ("auto", "auto")
    assert list(info.user.devices.flat) == jax.devices()
    assert info.platform == "cpu"


def test_explicit_axes_are_kept_for_the_user_and_auto_inside() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    info = resolve_mesh(mesh)
    assert info.user is mesh
    assert info.explicit_axes == ("data",)
    assert info.axis_types == ("explicit", "auto")
    assert info.auto.axis_types == (AxisType.Auto, AxisType.Auto)
    assert (info.auto.devices == mesh.devices).all()
    assert info.sharding((("data",), ())).mesh is mesh


def test_a_mesh_over_a_part_of_the_devices_is_fine() -> None:
    assert resolve_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))).axes == {"data": 2}


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (8, "mesh is a int; pass a jax.sharding.Mesh or a string"),
        ({"data": 8}, "mesh is a dict"),
        (AbstractMesh((8,), ("data",)), "mesh is a AbstractMesh"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: Any, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        resolve_mesh(mesh)


def test_manual_axes_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Manual,))
    with pytest.raises(MeshError, match="Manual axes"):
        resolve_mesh(mesh)
