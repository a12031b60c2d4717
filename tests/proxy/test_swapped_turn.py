"""A turn during which weights are swapped, with a real client, proxy and engine: its tokens are exact."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from proxy_support import MODEL, SEARCH, RecordingEngine, running_proxy
from test_exact_tokens import check_invariant, replayed

from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.embedded.model.architecture import read_architecture
from areal_agents.inference.embedded.model.weights import expected_shapes
from areal_agents.rendering import ChatRenderer
from areal_agents.training.model.folder import write_model
from areal_agents.training.publish.disk import swap

CONTEXT = 16_384


def endless_model(folder: Path, renderer: ChatRenderer, *, seed: int) -> Path:
    """Write random weights that never end a turn, so that each generation has its maximum length.

    The first component of every embedding is 1, and no layer adds to it. In the head, the rows of the stop
    tokens read only this component, with a large negative weight.
    """
    like = folder / "like"
    like.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (like / file).write_bytes((MODEL / file).read_bytes())
    config = json.loads((like / "config.json").read_text())
    config |= {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    config |= {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    (like / "config.json").write_text(json.dumps(config))
    random_numbers = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=random_numbers) * 0.2
        for name, shape in expected_shapes(read_architecture(like)).items()
    }
    weights["model.embed_tokens.weight"][:, 0] = 1
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    for stop in renderer.stop_token_ids:
        weights["lm_head.weight"][stop] = 0
        weights["lm_head.weight"][stop, 0] = -1e4
    write_model(weights, folder / "model", like=like, dtype=torch.float32)
    return folder / "model"


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    """Earlier reasoning stays in the prompt, so that a conversation with several questions is one path."""
    return ChatRenderer.from_folder(MODEL, options={"thinking_retention": "all"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, renderer: ChatRenderer) -> list[Path]:
    return [endless_model(tmp_path_factory.mktemp("m"), renderer, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def embedded(models: list[Path]) -> Iterator[str]:
    """An engine that computes a whole prompt in the step that admits it."""
    with running_engine(models[0], threads=1, slots=4, max_context=CONTEXT, prefill_tokens=CONTEXT) as url:
        yield url


class Conversation:
    """An agent that re-serialises replies before it sends them back, as frameworks do."""

    def __init__(self, client: AsyncOpenAI, rng: random.Random) -> None:
        self.client, self.rng = client, rng
        self.messages: list[Any] = [{"role": "user", "content": f"question {rng.randrange(99)}"}]

    async def turn(self, max_tokens: int) -> str:
        """Make one call, add results of its tool calls or a question, and return the completion's id."""
        answer = await self.client.chat.completions.create(
            model="p", messages=self.messages, tools=[SEARCH], max_tokens=max_tokens
        )
        message = answer.choices[0].message
        self.messages.append(replayed(self.rng, message.to_dict()))
        for call in message.tool_calls or ():
            content = f"result {self.rng.randrange(99)}"
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not message.tool_calls:
            self.messages.append({"role": "user", "content": f"question {self.rng.randrange(99)}"})
        return answer.id


async def until_sampling(trainer: SGLangEngine, calling: asyncio.Task[str]) -> None:
    """Wait until the call's request runs. Its prompt took one step, so it has sampled its first token."""
    while not calling.done() and not (await trainer._call("GET", "/server_info"))["running"]:
        await asyncio.sleep(0.001)


async def turn_with_a_swap(
    agent: Conversation, engine: RecordingEngine, trainer: SGLangEngine, models: list[Path]
) -> str:
    """Swap to the next version while a turn is generated, and return the id of that turn.

    If the machine stalls, a generation may end before the swap; then a longer one is made.
    """
    version = (await trainer.model_info()).version
    for length in (1000, 2000, 4000):
        version += 1
        calling = asyncio.create_task(agent.turn(length))
        await until_sampling(trainer, calling)
        await swap(trainer, str(models[version % 2]), version)
        turn_id = await calling
        completion = engine.calls[-1].completion
        if completion is not None and len(set(completion.versions)) == 2:
            return turn_id
    raise AssertionError("the swap came after the end of every generation")


@pytest.mark.parametrize("seed", range(3))
async def test_a_turn_during_which_weights_are_swapped_is_recorded_exactly(
    renderer: ChatRenderer, models: list[Path], embedded: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    engine = RecordingEngine(embedded, renderer)
    with running_proxy(tmp_path / "store.db", engine) as proxy:
        episode = await asyncio.to_thread(proxy.open_episode)
        async with (
            SGLangEngine(embedded) as trainer,
            AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client,
        ):
            agent = Conversation(client, rng)
            for _ in range(rng.randrange(1, 4)):
                await agent.turn(rng.randrange(1, 60))
            swapped_id = await turn_with_a_swap(agent, engine, trainer, models)
            new = (await trainer.model_info()).version
            for _ in range(rng.randrange(1, 4)):
                await agent.turn(rng.randrange(1, 60))
        recorded = proxy.store.load_episode(episode["id"])
        continued = check_invariant(proxy.store, episode["id"], engine.calls)
    # The conversation is one path, so the trainer sees exactly what the engine received and returned.
    (trajectory,) = recorded.forest.trajectories()
    assert len(trajectory.turns) == len(recorded.turns) == continued + 1
    (swapped,) = (turn for turn in recorded.turns if turn.id == swapped_id)
    assert recorded.turns[0] is not swapped and recorded.turns[-1] is not swapped
    versions = swapped.completion.versions
    assert versions[0] == new - 1 and versions[-1] == new
    assert np.count_nonzero(np.diff(versions)) == 1  # [old, …, old, new, …, new]
    assert {new - 1, new} <= set(trajectory.versions.tolist())
