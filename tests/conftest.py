"""Eight CPU devices for every test, set before anything touches a device."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.sharding import AxisType, Mesh
from xdist.scheduler import LoadFileScheduling

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell does to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(RuntimeError):  # another conftest may have made the devices already
    jax.config.update("jax_num_cpu_devices", 8)


INDEPENDENT = ("tests/whole_models/test_whole_models.py::",)
"""Files whose tests take long and share nothing: they go to whichever worker is free. As one file
they would keep one worker busy for minutes when the others have nothing left."""


class _Files(LoadFileScheduling):
    """A file stays on one worker, so that what it compiles once serves all its tests."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(INDEPENDENT) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Files | None:
    return _Files(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def mesh_4x2() -> Mesh:
    """data=4, model=2 over 8 CPU devices; the axes are Auto."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.fixture(scope="session")
def mesh(mesh_4x2: Mesh) -> Mesh:
    """The same mesh, for tests that know one only."""
    return mesh_4x2
