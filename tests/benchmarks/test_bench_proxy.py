"""The proxy's benchmark in miniature: every figure is measured, and no call fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proxy.run import Counts, run

TINY = Counts(
    waves=1,
    episodes=10,
    litellm_waves=1,
    long_episodes=10,
    memory_episodes=10,
    memory_turns=2,
    streamed=3,
    pause=0.1,
)
KEYS = {
    "cpu_ms_4k",
    "cpu_ms_32k",
    "turn64_over_turn2",
    "peak_rss_mb",
    "ttft_overhead_ms_p50",
    "litellm_cpu_ms_4k",
    "vs_passthrough_4k",
    "vs_passthrough_32k",
    "throughput_2_workers",
    "failures",
}
# Ratios of processor times, whose resolution is 10 ms: for so few calls the divisor may be zero.
RATIOS = {"turn64_over_turn2", "vs_passthrough_4k", "vs_passthrough_32k"}


@pytest.mark.slow
def test_every_figure_is_measured_and_no_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AREAL_AGENTS_LITELLM", str(tmp_path / "absent"))
    figures = run(json=True, counts=TINY)
    printed = capfd.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == figures
    assert set(figures) >= KEYS
    assert figures["failures"] == 0, printed.out
    # Without its environment LiteLLM is left out, and the output says how to install it.
    assert figures["litellm_cpu_ms_4k"] is None
    assert "make litellm" in printed.err
    measured = {name: figures[name] for name in KEYS - RATIOS - {"failures", "litellm_cpu_ms_4k"}}
    assert all(value is not None and value > 0 for value in measured.values()), measured
    assert all(figures[name] is None or figures[name] > 0 for name in RATIOS), figures
