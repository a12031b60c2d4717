"""The deep-search agent plays one conversation as one branch, within its limits, whatever the model does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import conversation
import laptop
import make_laptop_model
import numpy as np
import pytest
import research
import search
from demonstrations import SearchTranscriber
from integration_support import Stack, running_stack
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from real_tokenizers import qwen_folder
from research import CUT, LAST_TURN, SUMMARY_LABEL, Limits, Style
from retrieval import Index, Passage, build_index
from search_backends import LocalIndex
from tokenizers import Tokenizer

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import episode_samples
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.store import Store
from areal_agents.testing import Script, ScriptedCall, ScriptedReply

LONG_TEXT = "The river has many bridges, and each of them is older than the last. " * 200
PAGES = [
    Passage("a", "The Rhône flows through Lyon.", "Lyon", "https://x.example/lyon"),
    Passage("b", LONG_TEXT, "Rhône", "https://x.example/rhone"),
]
ANSWER = "<answer>the Rhône</answer>"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    folder = tmp_path_factory.mktemp("deep-search") / "index"
    build_index(PAGES, folder)
    index = Index(folder)
    yield LocalIndex(index)
    index.close()


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deep-search-store") / "store.db"


@pytest.fixture(scope="module")
def stack(store_path: Path) -> Iterator[Stack]:
    with running_stack(qwen_folder(), store_path) as stack:
        yield stack


@dataclass
class Played:
    """An episode that the agent has played."""

    answer: str | None
    messages: list[dict[str, Any]]
    episode: RecordedEpisode
    prompts: list[list[int]]  # of each call, as the engine read it

    @property
    def results(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "tool"]


@pytest.fixture
def play(stack: Stack, store_path: Path, backend: LocalIndex) -> Callable[..., Any]:
    async def play(replies: Script | Sequence[str | ScriptedReply], limits: Limits, **style: Any) -> Played:
        opened = stack.open_episode(replies)
        messages: list[dict[str, Any]] = []
        async with DefaultAsyncHttpxClient(timeout=60, trust_env=False) as http:
            client = AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"], http_client=http)
            answer = await research.research(
                client, "Which river?", backend, limits=limits, style=Style(**style), messages=messages
            )
        with Store.open(store_path) as store:
            episode = store.load_episode(opened["id"])
        prompts = [served.input_ids.tolist() for served in stack.engine.exchanges]
        return Played(answer, messages, episode, prompts)

    return play


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_exact_and_trained_once(played: Played, branches: int) -> None:
    """Every prompt is recorded as the engine read it, and each sampled token is trained in one sample."""
    episode = played.episode
    assert [episode.forest.prompt_ids(turn.id).tolist() for turn in episode.turns] == played.prompts
    assert len(episode.forest.leaves()) == branches
    samples = episode_samples(episode, np.ones(len(episode.turns)), group_id="g", config=AlgorithmConfig())
    assert len(samples) == branches
    trained = np.concatenate([sample.token_ids[sample.loss_mask] for sample in samples])
    sampled = np.concatenate([turn.completion.token_ids for turn in episode.turns])
    assert sorted(trained.tolist()) == sorted(sampled.tolist())


async def test_128_turns_are_one_branch_and_trained_once(play: Any) -> None:
    def script(asked: ScriptedCall) -> str:
        if LAST_TURN in asked.last_text:
            return ANSWER
        if asked.index % 2:
            return call("access", url="https://x.example/lyon")
        return f"Looking for fact {asked.index}.\n" + call("search", query=f"Lyon {asked.index}")

    limits = Limits(turns=128, reply_tokens=64, context_tokens=16_384, results=1, excerpt_characters=40)
    played = await play(script, limits)
    assert played.answer == ANSWER and len(played.episode.turns) == 128
    assert len(played.results) == 127 and played.results[0].startswith("[1] Lyon <https://x.example/lyon>\n")
    assert played.results[1] == f"Lyon <https://x.example/lyon>\n{PAGES[0].text}"
    check_exact_and_trained_once(played, branches=1)


async def test_the_turn_limit_withdraws_the_tools(play: Any) -> None:
    played = await play([call("search", query="Lyon")] * 3, Limits(turns=3, reply_tokens=64))
    assert played.answer is None and len(played.episode.turns) == 3 and len(played.results) == 2
    assert [result.endswith(LAST_TURN) for result in played.results] == [False, True]
    check_exact_and_trained_once(played, branches=1)


async def test_a_context_that_is_nearly_full_gets_a_last_turn(play: Any, stack: Stack) -> None:
    def script(asked: ScriptedCall) -> str:
        return ANSWER if LAST_TURN in asked.last_text else call("access", url="https://x.example/rhone")

    limits = Limits(turns=50, reply_tokens=100, context_tokens=3000, page_characters=3000)
    played = await play(script, limits)
    assert played.answer == ANSWER and 3 < len(played.episode.turns) < 10
    last = played.episode.turns[-1]
    assert len(played.prompts[-1]) + limits.reply_tokens <= limits.context_tokens
    assert len(played.prompts[-1]) > limits.context_tokens / 2, "most of the context is used"
    assert played.results[0].endswith(CUT) and len(last.completion) <= limits.reply_tokens
    check_exact_and_trained_once(played, branches=1)


async def test_a_result_that_does_not_fit_is_cut(play: Any) -> None:
    limits = Limits(turns=50, reply_tokens=100, context_tokens=1500, page_characters=100_000)
    played = await play([call("access", url="https://x.example/rhone"), ANSWER], limits)
    assert played.answer == ANSWER and played.results[0].endswith(f"{CUT}\n\n{LAST_TURN}")
    assert len(played.prompts[-1]) + limits.reply_tokens <= limits.context_tokens


async def test_invalid_tool_calls_return_an_error_to_the_model(play: Any) -> None:
    wrong = [
        call("browse", url="x"),
        call("search", question="Lyon"),
        call("search", query="  "),
        call("access", url="https://x.example/nowhere"),
        call("search", query="zzz"),
        call("search", query="z" * 2001),
    ]
    played = await play(["\n".join(wrong), "<answer>x</answer>"], Limits(reply_tokens=2500))
    assert played.results == [
        "Error: there is no tool browse; there is search and access.",
        "Error: search needs a query.",
        "Error: search needs a query.",
        "Error: there is no page https://x.example/nowhere",
        "No results.",
        "Error: a query has at most 2000 characters.",
    ]
    check_exact_and_trained_once(played, branches=1)


async def test_a_long_page_is_condensed_by_a_call_that_is_trained_too(play: Any) -> None:
    def script(asked: ScriptedCall) -> str:
        if "Condense a page" in asked.prompt_text:
            assert "Which river?" in asked.last_text and "older than the last" in asked.last_text
            return "It has many bridges."
        return ANSWER if "many bridges" in asked.last_text else call("access", url="https://x.example/rhone")

    played = await play(script, Limits(reply_tokens=100, summary_above=500))
    assert played.results == ["Summary of Rhône <https://x.example/rhone>\nIt has many bridges."]
    assert [turn.label for turn in played.episode.turns] == ["", SUMMARY_LABEL, ""]
    assert [turn.parent is None for turn in played.episode.turns] == [True, True, False]
    check_exact_and_trained_once(played, branches=2)
    short = await play(
        [call("access", url="https://x.example/lyon"), ANSWER], Limits(reply_tokens=100, summary_above=500)
    )
    assert len(short.episode.turns) == 2


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="room for two replies"):
        Limits(reply_tokens=600, context_tokens=1000)
    with pytest.raises(ValueError, match="at least 1"):
        replace(Limits(), turns=0)


async def test_the_laptop_agent_shows_the_model_the_inputs_that_it_was_trained_on() -> None:
    style, limits = laptop.QUICK_START, laptop.LIMITS
    assert style.opening("?") == conversation.opening("?")
    assert [*style.tools] == [conversation.SEARCH_TOOL]
    assert (limits.reply_tokens, limits.results) == (conversation.MAX_TOKENS, 2)
    for query in ("France", "Lyon"):
        shown = await research._searched(laptop.encyclopedia(), query, limits, style)
        assert shown.split("\n")[0] == search.search(query).split("\n")[0]
        found = await laptop.encyclopedia().search(query, limits.results)
        assert shown == make_laptop_model.shown([result.text for result in found])
    assert await research._searched(laptop.encyclopedia(), "zzz", limits, style) == search.NO_RESULTS


def test_demonstrations_cover_every_number_of_hops_and_fit_the_limits(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    demonstrator = make_laptop_model.Demonstrator(
        SearchTranscriber(tokenizer), laptop.encyclopedia().index, random.Random(0)
    )
    examples = next(demonstrator.batches()) + next(demonstrator.batches())
    assert {len(example.replies) for example in examples} >= {2, 3, 4}
    assert all(len(example.replies) <= laptop.LIMITS.turns for example in examples)
    assert all(
        end - start <= laptop.LIMITS.reply_tokens for example in examples for start, end in example.replies
    )
    assert max(len(example.ids) for example in examples) < laptop.LIMITS.context_tokens
    ours = model_folder.parents[1] / "deep_search" / "model"
    assert (ours / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()
    assert sum(file.stat().st_size for file in ours.iterdir()) < 4_000_000
