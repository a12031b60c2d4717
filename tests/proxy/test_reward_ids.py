"""A reward may name its turn by the id that any API gave it."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_support import RunningProxy


def say(proxy: RunningProxy, opened: dict[str, Any]) -> str:
    """Make one call, and return the digits of its id."""
    answer = proxy.openai(opened).chat.completions.create(
        model="p", messages=[{"role": "user", "content": "hello"}]
    )
    return answer.id.removeprefix("chatcmpl-")


def rewards_of(proxy: RunningProxy, opened: dict[str, Any]) -> list[Any]:
    return proxy.tokens(opened)["rewards"]


@pytest.mark.parametrize("prefix", ["chatcmpl-", "resp_", "msg_", "cmpl-"])
def test_a_turn_is_rewarded_by_its_id_in_any_form(proxy: RunningProxy, prefix: str) -> None:
    opened = proxy.open_episode()
    digits = say(proxy, opened)
    body = {"reward": 0.25, "completion_id": prefix + digits}
    assert proxy.http.post(f"/episodes/{opened['id']}/reward", json=body).status_code == 200
    assert proxy.http.post("/rewards", json=body | {"name": "other"}).status_code == 200
    given = [(item["scope"], item["target"], item["name"]) for item in rewards_of(proxy, opened)]
    assert given == [("turn", f"chatcmpl-{digits}", "return"), ("turn", f"chatcmpl-{digits}", "other")]


def test_a_reward_dict_is_by_turn_if_its_keys_are_ids_and_of_the_episode_if_they_are_names(
    proxy: RunningProxy,
) -> None:
    opened = proxy.open_episode()
    first, second = say(proxy, opened), say(proxy, opened)
    mixed = {f"msg_{first}": 2.0, "style": 3.0}
    for reward, status in (
        ({f"msg_{first}": 1.0, f"resp_{second}": 0.5}, 200),
        ({"correct": 2.0, "style": 3.0}, 200),
        (mixed, 400),
    ):
        answer = proxy.http.post(f"/episodes/{opened['id']}/reward", json={"reward": reward})
        assert answer.status_code == status, answer.text
    given = {
        (item["scope"], item["target"], item["name"], item["value"]) for item in rewards_of(proxy, opened)
    }
    assert given == {
        ("turn", f"chatcmpl-{first}", "return", 1.0),
        ("turn", f"chatcmpl-{second}", "return", 0.5),
        ("episode", "", "correct", 2.0),
        ("episode", "", "style", 3.0),
    }


def test_an_opened_episode_names_a_url_for_either_api(proxy: RunningProxy) -> None:
    opened = proxy.open_episode()
    root = f"{proxy.url}/e/{opened['key']}"
    assert opened["base_url"] == f"{root}/v1"
    assert opened["base_urls"] == {"openai": f"{root}/v1", "anthropic": root, "google": root}
