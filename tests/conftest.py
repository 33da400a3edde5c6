"""Eight CPU devices for every test, set before anything touches a device."""

from __future__ import annotations

import contextlib
import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.sharding import AxisType, Mesh

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell does to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(RuntimeError):  # another conftest may have made the devices already
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def mesh_4x2() -> Mesh:
    """data=4, model=2 over 8 CPU devices; the axes are Auto."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.fixture(scope="session")
def mesh(mesh_4x2: Mesh) -> Mesh:
    """The same mesh, for tests that know one only."""
    return mesh_4x2
