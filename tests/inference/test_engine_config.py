"""The settings under `engine:` are checked before anything is started."""

from __future__ import annotations

import pytest

from areal_agents.inference import EngineConfig


def test_a_slash_at_the_end_of_a_url_is_removed() -> None:
    urls = ("http://127.0.0.1:30000/", "https://gpu.example/engine", "http://[::1]:30001")
    config = EngineConfig(kind="sglang", urls=urls)
    assert config.urls == ("http://127.0.0.1:30000", "https://gpu.example/engine", "http://[::1]:30001")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "localhost:30000", "gpu.example", "http://", "http://:30000", "ftp://gpu:1",
            "http://gpu:port", "http://gpu:99999"]
)  # fmt: skip
def test_an_invalid_base_url_is_named_in_the_error(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port, got '") as caught:
        EngineConfig(kind="sglang", urls=("http://fine:30000", url))
    assert repr(url) in str(caught.value)


ATTACHED = {"kind": "sglang", "urls": ("http://gpu:1",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sglang"}, "needs python: path/to/environment/bin/python to start it, or urls"),
        ({"urls": ("http://gpu:1",)}, "urls are for kind: sglang"),
        ({"python": "p"}, "python is for kind: sglang"),
        ({"arguments": ("--tp", "2")}, "arguments is for kind: sglang"),
        ({"routed_experts": True}, "routed_experts is for kind: sglang"),
        ({"kind": "sglang", "python": "p", "arguments": ["--port=1"]}, "--port=1 is set from"),
        ({"kind": "sglang", "python": "p", "router": "http://r:1"}, "name them in urls"),
        (ATTACHED | {"replicas": 2}, "replicas is for engines that the run starts"),
        (ATTACHED | {"colocate": "split"}, "colocate: split is for engines"),
        (ATTACHED | {"python": "p"}, "python is for engines that the run starts"),
    ],
)
def test_conflicting_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (ATTACHED, ()),
        (ATTACHED | {"routed_experts": True, "start_timeout_s": 5, "colocate": "sleep"}, ()),
        (ATTACHED | {"slots": 32, "device": "cuda", "max_context": 99}, ("slots", "max_context", "device")),
        (ATTACHED | {"dtype": "float32", "threads": 0}, ("threads", "dtype")),  # set to the defaults
        ({"kind": "sglang", "python": "p", "slots": 32, "threads": 2}, ("slots",)),
        ({"slots": 32, "device": "cpu"}, ()),
    ],
)
def test_settings_without_effect_are_listed(options: dict[str, object], names: tuple[str, ...]) -> None:
    assert EngineConfig.model_validate(options).without_effect == names
