"""Where an Anthropic client is pointed."""

from __future__ import annotations

import pytest

from areal_agents import Client, Episode


def test_an_episode_has_a_url_for_anthropic_clients(echo) -> None:  # type: ignore[no-untyped-def]
    with Client(echo.url) as client:
        opened = client.open_episode()
    assert opened.anthropic_base_url == f"{echo.url}/e/ep-1"
    assert Episode("e1", opened.base_url, opened.api_key).anthropic_base_url == f"{echo.url}/e/ep-1"


def test_outside_a_run_it_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_AGENTS_EPISODE_ID", raising=False)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://somewhere")
    assert Episode.from_environment().anthropic_base_url == "http://somewhere"
    monkeypatch.delenv("ANTHROPIC_BASE_URL")
    assert Episode.from_environment().anthropic_base_url == "https://api.anthropic.com"
