"""Which commands SGLang gets, and in which order; test_weight_swap.py tests their effect."""

from __future__ import annotations

from typing import Any

import pytest

from areal_agents.errors import EngineRejected
from areal_agents.inference.sglang.control import SGLangControl


class RecordingTransport:
    """Replaces `HttpTransport`: answers as SGLang does, and records the requests."""

    base_url = "http://engine"

    def __init__(self, **settings: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self._settings = settings

    async def call(self, method: str, path: str, body: Any, **_: Any) -> dict[str, Any]:
        self.sent.append((path, body))
        if path == "/update_weights_from_distributed":
            raise EngineRejected("there is no such process group")
        return self._settings if path == "/server_info" else {"success": True}


def control_of(transport: RecordingTransport) -> SGLangControl:
    return SGLangControl(transport, control_timeout_s=1.0, update_timeout_s=1.0)  # type: ignore[arg-type]


async def test_a_pause_that_aborts_completes_the_step_of_a_request_that_has_just_ended() -> None:
    transport = RecordingTransport(disable_radix_cache=False)
    control = control_of(transport)
    await control.pause("abort")
    await control.update_weights_from_disk("/w", 3)
    assert transport.sent == [
        ("/pause_generation", {"mode": "abort"}),
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": "/w", "weight_version": "3", "flush_cache": True}),
    ]


@pytest.mark.parametrize(
    ("settings", "waits", "flushes"),
    [
        ({"disable_radix_cache": False}, True, True),
        ({"disable_radix_cache": True}, False, False),
        ({}, False, True),  # the embedded engine completes its steps by itself
    ],
)
async def test_an_update_without_a_pause_waits_for_the_last_step_where_it_flushes_the_cache(
    settings: dict[str, bool], waits: bool, flushes: bool
) -> None:
    transport = RecordingTransport(**settings)
    await control_of(transport).update_weights_from_disk("/w", 3)
    paths = [path for path, _ in transport.sent if path != "/server_info"]
    assert paths == ["/update_weights_from_distributed"] * waits + ["/update_weights_from_disk"]
    assert transport.sent[-1][1]["flush_cache"] is flushes
