"""Provides a Slurm cluster of two emulated nodes, where Debian's packages of Slurm are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    missing = SlurmCluster.missing()
    if missing:
        pytest.skip(missing)
    with SlurmCluster() as cluster:
        yield cluster
