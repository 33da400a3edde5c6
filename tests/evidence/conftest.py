"""Eight CPU devices for the tests of this folder, whichever conftest comes first."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

with contextlib.suppress(RuntimeError):  # the devices may exist already
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """data=4, model=2; the axes are Auto."""
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs 8 CPU devices")
    return Mesh(np.array(devices[:8]).reshape(4, 2), ("data", "model"))
