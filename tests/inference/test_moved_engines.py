"""Clients follow engines that are restarted at other addresses, even while no engine answers."""

from __future__ import annotations

import time

from areal_agents.errors import StoreError
from areal_agents.inference.pool import following_engines
from areal_agents.inference.sglang.client import SGLangEngine


def test_a_client_follows_its_engine_and_survives_an_outage_of_the_store() -> None:
    engines = [SGLangEngine("http://127.0.0.1:1"), SGLangEngine("http://127.0.0.1:2")]
    answers: list[dict[int, str]] = [{1: "http://127.0.0.1:3/"}]
    looks = 0

    def read() -> dict[int, str]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise StoreError("it is away")
        return answers[0]

    with following_engines(engines, read):
        deadline = time.monotonic() + 30
        while engines[1].base_url != "http://127.0.0.1:3":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert looks >= 2 and engines[0].base_url == "http://127.0.0.1:1"
