"""The sandbox benchmark in miniature: every measured sandbox ran a command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.sandbox import measure_sandboxes


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed; make sandbox-tools")
async def test_a_few_sandboxes_are_measured(tmp_path: Path) -> None:
    figures = await measure_sandboxes(tmp_path, sandboxes=3)
    assert figures.sandboxes == 3
    assert 0 < figures.warm_p50_ms <= figures.warm_p99_ms and 0 < figures.cold_p50_ms <= figures.cold_p99_ms
    assert 0 < figures.host_p50_ms <= figures.host_p99_ms
    assert 0 <= figures.take_p99_ms <= figures.at_once_p99_ms and figures.resident_mb > 0.1
