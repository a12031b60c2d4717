"""The experts that a real SGLang returns are those that transformers chooses, token by token."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_support import FreshIds, Missed, again_if_missed
from real_sglang import running_sglang
from test_engine_contract import check_aborted
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_agents.core.completion import Completion, SamplingParams, TokenIds, as_token_ids
from areal_agents.inference import SGLangEngine

pytestmark = pytest.mark.sglang

TOKENIZER = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
LAYERS, PER_TOKEN, VOCAB = 2, 2, 1024
PROMPT = as_token_ids(np.random.default_rng(0).integers(3, 1000, 20))
WAIT_S = 240.0


def build(folder: Path, seed: int) -> Path:
    """Write a random Qwen3-MoE model with a tokenizer."""
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=LAYERS, num_experts=8, num_experts_per_tok=PER_TOKEN, norm_topk_prob=True,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        initializer_range=0.15, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("experts")
    return build(root / "first", seed=0), build(root / "second", seed=1)


@pytest.fixture(scope="module")
def server(sglang_python: str, folders: tuple[Path, Path]) -> Iterator[str]:
    options = ("--enable-return-routed-experts", "--incremental-streaming-output")
    with running_sglang(sglang_python, folders[0], *options) as url:
        yield url


def choices(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the experts [N, LAYERS, PER_TOKEN] that transformers chooses, in ascending order."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    return torch.stack(chosen, dim=1).sort(-1).values.numpy()


def whole(completion: Completion) -> np.ndarray:
    return np.concatenate([PROMPT, completion.token_ids])


async def draw(
    engine: SGLangEngine,
    rid: str,
    count: int,
    *,
    start: int = 0,
    prompt: TokenIds = PROMPT,
    streams: bool = False,
) -> Completion:
    params = SamplingParams(count, ignore_eos=True, routed_experts_from=start)
    return await engine.generate(rid, prompt, params, (lambda chunk: None) if streams else None)


@pytest.mark.parametrize("streams", [False, True])
def test_the_experts_of_prompt_and_completion_are_those_of_transformers(
    server: str, folders: tuple[Path, Path], streams: bool
) -> None:
    async def ask() -> list[Completion]:
        async with SGLangEngine(server) as engine:  # later calls find the prompt in the cache
            return [await draw(engine, f"{streams}-{n}", 12, start=n * 13, streams=streams) for n in (0, 1)]

    for start, completion in zip((0, 13), asyncio.run(ask()), strict=True):
        tokens = whole(completion)
        assert (
            completion.routed_experts is not None
            and len(completion.routed_experts) == len(tokens) - 1 - start
        )
        expected = choices(folders[0], tokens)[start:-1]
        np.testing.assert_array_equal(np.sort(completion.routed_experts, axis=-1), expected)


@asynccontextmanager
async def begun(server: str) -> AsyncIterator[tuple[SGLangEngine, asyncio.Task[Completion]]]:
    """Yield a client, and a generation of 400 tokens of which the first have arrived."""
    async with FreshIds(server) as engine:
        first = asyncio.Event()
        params = SamplingParams(400, ignore_eos=True, routed_experts_from=0)
        call = asyncio.create_task(engine.generate("long", PROMPT, params, lambda chunk: first.set()))
        await asyncio.wait_for(first.wait(), WAIT_S)
        yield engine, call


@again_if_missed
async def test_after_a_swap_with_retraction_only_experts_of_the_new_weights_are_known(
    server: str, folders: tuple[Path, Path]
) -> None:
    async with begun(server) as (engine, call):
        for version, folder in ((1, folders[1]), (0, folders[0])):
            await engine.pause("retract")
            await engine.update_weights_from_disk(str(folder), version)
            await engine.resume()
            completion = await asyncio.wait_for(call, WAIT_S)
    old = int((completion.versions == 0).sum())
    if old == 400:
        raise Missed
    assert old > 0 and set(completion.versions.tolist()) == {0, 1}
    routing = completion.routed_experts
    assert routing is not None
    first = len(PROMPT) - 1  # the row of the token before the first sampled one
    expected = choices(folders[1], whole(completion))[:-1]
    expected[first : first + old] = -1
    np.testing.assert_array_equal(np.sort(routing, axis=-1), expected)


@again_if_missed
async def test_an_aborted_generation_returns_the_experts_of_its_tokens(
    server: str, folders: tuple[Path, Path]
) -> None:
    async with begun(server) as (engine, call):
        await engine.abort("long")
        completion = await asyncio.wait_for(call, WAIT_S)
    check_aborted(completion)
    assert completion.routed_experts is not None
    expected = choices(folders[0], whole(completion))[:-1]
    np.testing.assert_array_equal(np.sort(completion.routed_experts, axis=-1), expected)
