"""The seeds of samples depend on the episode's seed and the tokens before the sample, and none repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from scripted_sampler import ScriptedSampler

from areal_agents.core.completion import as_token_ids
from areal_agents.proxy.calls.sampling import SampleSeeds
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.seeds import episode_seed

ASK = [{"role": "user", "content": "question"}]


def seeds(proxy: RunningProxy, episode: dict[str, Any]) -> list[int | None]:
    """Return the seeds of an episode's turns, in the order of recording."""
    return [turn.sampling.seed for turn in proxy.store.load_episode(episode["id"]).turns]


def say(proxy: RunningProxy, episode: dict[str, Any], messages: list[Any] = ASK, **fields: Any) -> Any:
    client = proxy.openai(episode)
    return client.chat.completions.create(model="m", messages=messages, **fields).choices[0].message


def converse(
    proxy: RunningProxy, order: Callable[[list[str]], list[str]] = list, **opening: Any
) -> dict[str, int]:
    """Play a tool loop of two calls and two other conversations; return their seeds by name."""
    proxy.engine.script = lambda call: tool_call(query="x")
    episode = proxy.open_episode(**opening)
    first = say(proxy, episode, tools=[SEARCH])
    extended = [
        *ASK,
        first.model_dump(exclude_none=True),
        {"role": "tool", "content": "found", "tool_call_id": first.tool_calls[0].id},
    ]
    asked = {
        "more": extended,
        "b": [{"role": "user", "content": "b"}],
        "c": [{"role": "user", "content": "c"}],
    }
    given = {"first": seeds(proxy, episode)[0]}
    for name in order(list(asked)):
        say(proxy, episode, asked[name], tools=[SEARCH])
        given[name] = seeds(proxy, episode)[-1]
    assert None not in given.values() and len(set(given.values())) == len(given)
    return given  # type: ignore[return-value]


def test_seeds_depend_only_on_the_seed_of_the_episode_and_the_conversation(proxy: RunningProxy) -> None:
    sampling = {"base_seed": 7}
    given = converse(proxy, sampling=sampling)
    assert converse(proxy, lambda names: names[::-1], sampling=sampling) == given
    other = converse(proxy, sampling={"base_seed": 8})
    assert not set(other.values()) & set(given.values())
    evaluated = converse(proxy, sampling=sampling, split="eval")
    assert evaluated == given


def test_a_second_sample_after_the_same_tokens_gets_another_seed(proxy: RunningProxy) -> None:
    drawn = []
    for _ in range(2):
        episode = proxy.open_episode(sampling={"base_seed": 7})
        for _ in range(3):
            say(proxy, episode)
        drawn.append(seeds(proxy, episode))
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_each_of_several_choices_has_its_own_seed(proxy: RunningProxy) -> None:
    episode = proxy.open_episode(sampling={"base_seed": 7})
    say(proxy, episode, n=3)
    assert len(set(seeds(proxy, episode))) == 3


def test_turns_after_two_equal_samples_have_different_seeds(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: tool_call(query="x")
    episode = proxy.open_episode(sampling={"base_seed": 7})
    for sample in [say(proxy, episode, tools=[SEARCH]) for _ in range(2)]:
        found = {"role": "tool", "content": "found", "tool_call_id": sample.tool_calls[0].id}
        say(proxy, episode, [*ASK, sample.model_dump(exclude_none=True), found], tools=[SEARCH])
    turns = proxy.store.load_episode(episode["id"]).turns
    assert [turn.parent for turn in turns] == [None, None, turns[0].id, turns[1].id]
    assert turns[2].new_prompt_ids.tolist() == turns[3].new_prompt_ids.tolist()
    assert len(set(seeds(proxy, episode))) == 4


def test_a_restarted_proxy_does_not_repeat_seeds(renderer: ChatRenderer, tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        with running_proxy(tmp_path / "store.db", ScriptedSampler(renderer)) as proxy:
            if not drawn:
                episode = proxy.open_episode(sampling={"base_seed": 7})
            path = episode["base_url"].split("/", 3)[3]
            say(proxy, {**episode, "base_url": f"{proxy.url}/{path}"})
            drawn = seeds(proxy, episode)
    assert len(set(drawn)) == 2


def test_the_seed_of_an_agent_is_ignored_in_training_and_used_in_evaluation(
    proxy: RunningProxy,
) -> None:
    episode = proxy.open_episode()
    say(proxy, episode, seed=5)
    assert seeds(proxy, episode) == [None]  # training ignores the agent's seed
    episode = proxy.open_episode(split="eval", sampling={"base_seed": 7})
    say(proxy, episode, seed=5)
    assert seeds(proxy, episode) == [5]


@pytest.mark.parametrize("value", ["7", 1.5, True])
def test_the_seed_of_an_episode_must_be_a_whole_number(proxy: RunningProxy, value: Any) -> None:
    answer: httpx.Response = proxy.http.post("/episodes", json={"sampling": {"base_seed": value}})
    assert answer.status_code == 400 and "base_seed" in answer.text


def test_the_seed_of_an_episode_depends_on_every_part_of_its_name() -> None:
    named = [
        (0, "g", 0, 0),
        (1, "g", 0, 0),
        (0, "h", 0, 0),
        (0, "g", 1, 0),
        (0, "g", 0, 1),
        (0, "eval", "g", 0),
    ]
    found = {episode_seed(*name) for name in named}
    assert len(found) == len(named) and all(0 <= seed < 2**63 for seed in found)
    assert episode_seed(0, "g", 0, 0) == episode_seed(0, "g", 0, 0)


def test_seeds_are_in_the_range_that_engines_accept() -> None:
    draws = SampleSeeds([])
    drawn = [draws.next_seed(base, None, as_token_ids([1, 2])) for base in range(64)]
    assert all(0 <= seed < 2**63 for seed in drawn) and len(set(drawn)) == 64
