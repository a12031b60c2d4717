"""The benchmark of the web page in miniature, on a small run."""

from __future__ import annotations

import json

import pytest

from benchmarks.view.run import run


def test_every_page_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run(json=True, episodes=1024, turns=5, live_s=0.5)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures) == 16 and all(figure["ms"] > 0 for figure in figures.values())
