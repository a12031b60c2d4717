from __future__ import annotations

import inspect
import math
import socket

import pytest

from areal_agents import AsyncClient, Client
from areal_agents.errors import AgentError, RequestError


def test_an_episode_is_opened_rewarded_and_finished(echo) -> None:  # type: ignore[no-untyped-def]
    with Client(echo.url, "admin") as client:
        ep = client.open_episode({"id": "t", "input": {"q": 1}}, group="t@0", group_size=2, index=1)
        assert (ep.id, ep.api_key, ep.base_url) == ("e1", "ep-1", f"{echo.url}/e/ep-1/v1")
        client.reward(ep.id, True)
        client.reward(ep.id, {"a": 0.5})
        client.finish(ep.id, truncated=True)
        client.drop_group("t/1@0", "no use")
        assert client.list_episodes(split="train", status="open") == []
        assert client.served_version() == 3
    opening = {
        "task": {"id": "t", "input": {"q": 1}}, "group": "t@0", "group_size": 2, "index": 1, "split": "train"
    }  # fmt: skip
    assert echo.calls == [
        ("POST", "/episodes", "admin", opening),
        ("POST", "/episodes/e1/reward", "admin", {"reward": 1.0}),
        ("POST", "/episodes/e1/reward", "admin", {"reward": {"a": 0.5}}),
        ("POST", "/episodes/e1/finish", "admin", {"truncated": True}),
        ("POST", "/groups/t/1@0/drop", "admin", {"reason": "no use"}),
        ("GET", "/episodes", "admin", {"split": "train", "status": "open"}),
        ("GET", "/ready", "admin", {}),
    ]


async def test_the_async_client_sends_the_same_requests(echo) -> None:  # type: ignore[no-untyped-def]
    async with AsyncClient(echo.url) as client:
        ep = await client.open_episode(sampling={"temperature": 0.0}, limits={"max_turns": 3}, split="eval")
        await client.reward(ep.id, 0.5, completion_id="c", name="style")
        await client.fail(ep.id, "broken", aborted=True)
        await client.get_episode(ep.id, tokens=True)
    assert echo.calls == [
        (
            "POST",
            "/episodes",
            "",
            {"split": "eval", "sampling": {"temperature": 0.0}, "limits": {"max_turns": 3}},
        ),
        ("POST", "/episodes/e1/reward", "", {"reward": 0.5, "completion_id": "c", "name": "style"}),
        ("POST", "/episodes/e1/fail", "", {"error": "broken", "aborted": True}),
        ("GET", "/episodes/e1", "", {"tokens": "1"}),
    ]


def test_the_two_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, list[str]]:
        public = {n: f for n, f in inspect.getmembers(client, inspect.isfunction) if not n.startswith("_")}
        return {name: list(inspect.signature(f).parameters) for name, f in public.items()}

    assert methods(Client) == methods(AsyncClient)


def test_a_refusal_has_the_message_of_the_server(echo) -> None:  # type: ignore[no-untyped-def]
    echo.refuse_with = (409, {"error": {"message": "group t is full", "code": "group_full"}})
    with Client(echo.url) as client, pytest.raises(RequestError, match="group t is full") as caught:
        client.open_episode(group="t")
    assert (caught.value.status, caught.value.code) == (409, "group_full")


def test_an_unreachable_proxy_is_named_in_the_error(echo) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with (
            Client(url) as client,
            pytest.raises(RequestError, match=f"cannot reach {url}.*areal-agents serve") as e,
        ):
            client.finish("e1")
    assert (e.value.status, e.value.code) == (503, "unreachable")


def test_bad_arguments_are_refused_before_anything_is_sent(echo) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="must start with http"):
        Client("localhost:8000")
    with Client(echo.url) as client, pytest.raises(AgentError, match="finite"):
        client.reward("e1", math.nan)
    assert echo.calls == []
