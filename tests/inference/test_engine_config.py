"""What a user writes under `engine:` is checked before anything is started."""

from __future__ import annotations

import pytest

from areal_agents.inference import EngineConfig


def test_urls_lose_their_last_slash() -> None:
    urls = ("http://127.0.0.1:30000/", "https://gpu.example/engine", "http://[::1]:30001")
    config = EngineConfig(kind="sglang", urls=urls)
    assert config.urls == ("http://127.0.0.1:30000", "https://gpu.example/engine", "http://[::1]:30001")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "localhost:30000", "gpu.example", "http://", "http://:30000", "ftp://gpu:1",
            "http://gpu:port", "http://gpu:99999"]
)  # fmt: skip
def test_what_is_no_base_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port, got '") as caught:
        EngineConfig(kind="sglang", urls=("http://fine:30000", url))
    assert repr(url) in str(caught.value)
