"""The saturated proxy in miniature: all streams are open at the same time, and all turns are exact."""

from __future__ import annotations

import json

import pytest

from benchmarks.proxy.saturate import Load, run


@pytest.mark.slow
def test_every_stream_is_recorded_exactly(capfd: pytest.CaptureFixture[str]) -> None:
    figures = run(json=True, loads=(Load(40, 100, engines=2),))
    printed = capfd.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == figures
    assert figures["failures"] == 0, printed.out
    for name in ("40_streams_event_per_token", "40_streams_stream_interval"):
        measured = figures[name]
        assert measured["turns_recorded_exactly"] == 40
        assert measured["peak_mb"] >= measured["idle_mb"] > 0 and measured["tokens_per_s"] > 0
