"""The base URLs for clients of APIs other than OpenAI's."""

from __future__ import annotations

import pytest

from areal_agents import Client, Episode


def test_an_episode_has_a_url_for_clients_that_add_the_version(echo) -> None:  # type: ignore[no-untyped-def]
    with Client(echo.url) as client:
        opened = client.open_episode()
    for given in (opened, Episode("e1", opened.base_url, opened.api_key)):
        assert given.anthropic_base_url == given.google_base_url == f"{echo.url}/e/ep-1"


def test_outside_a_run_the_base_urls_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_AGENTS_EPISODE_ID", raising=False)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://somewhere")
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", "http://elsewhere")
    assert Episode.from_environment().anthropic_base_url == "http://somewhere"
    assert Episode.from_environment().google_base_url == "http://elsewhere"
    monkeypatch.delenv("ANTHROPIC_BASE_URL")
    monkeypatch.delenv("GOOGLE_GEMINI_BASE_URL")
    assert Episode.from_environment().anthropic_base_url == "https://api.anthropic.com"
    assert Episode.from_environment().google_base_url == "https://generativelanguage.googleapis.com"
