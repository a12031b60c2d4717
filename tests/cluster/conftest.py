"""Provides a Slurm cluster of two emulated nodes, where Debian's packages of Slurm are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """The cluster; a test may give its keyword arguments as the fixture's parameter."""
    missing = SlurmCluster.missing()
    if missing:
        pytest.skip(missing)
    with SlurmCluster(**getattr(request, "param", {})) as cluster:
        yield cluster
