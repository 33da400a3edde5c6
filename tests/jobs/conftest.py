from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.postgres import Server, postgres, programs


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server."""
    if programs() is None:
        pytest.skip("NO POSTGRESQL HERE, ITS TESTS DO NOT RUN: apt-get install postgresql")
    with postgres() as running:
        yield running
