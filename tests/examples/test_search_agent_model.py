"""The shipped model is small, loads in transformers, and was trained on exactly the tokens of serving."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conversation import SEARCH_TOOL, opening
from corpus import encyclopedia
from demonstrations import FLAWED, PERFECT, Demonstrator, SearchTranscriber, reading_drill, search_call
from fiction import NameMaker, fictional_world
from mixture import BATCH, Mixture, examples
from questions import is_held_out, question_bank
from safetensors.torch import load_file
from search import search
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
from warmup.copying import LENGTHS, SPAN, copy_batch, train_copying
from warmup.export import save_model
from warmup.imitation import imitation_loss
from warmup.network import Network, Shape, load_hf_state, to_hf_state
from warmup.optim import Muon
from warmup.tokenizer import MARKERS, TAGS, train_tokenizer

from areal_agents.core.messages import Message
from areal_agents.rendering import ChatRenderer


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def transcriber(tokenizer: Tokenizer) -> SearchTranscriber:
    return SearchTranscriber(tokenizer)


@pytest.fixture(scope="module")
def names() -> NameMaker:
    return NameMaker(entity.name for entity in encyclopedia() if not is_held_out(entity))


def test_the_model_loads_in_transformers_and_is_small(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert isinstance(model, Qwen3ForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(file.stat().st_size for file in model_folder.iterdir()) < 5_000_000
    assert all(
        torch.isfinite(value).all() for value in load_file(model_folder / "model.safetensors").values()
    )


def test_tokenizer_is_the_same_in_both_libraries_and_round_trips(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    fast = AutoTokenizer.from_pretrained(model_folder)
    for text in (search("Lyon"), search_call("Coeur d'Alene"), "São Tomé 名\n\n 12.5", *MARKERS, *TAGS):
        assert fast.encode(text) == tokenizer.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert fast.eos_token == "<|im_end|>"
    assert all(len(tokenizer.encode(marker).ids) == 1 for marker in MARKERS + TAGS)


def test_a_name_has_the_same_tokens_in_prose_and_in_a_call(tokenizer: Tokenizer) -> None:
    def inside(text: str, name: str) -> list[int]:
        encoding = tokenizer.encode(text)
        start = text.index(name)
        return [
            token
            for token, (left, right) in zip(encoding.ids, encoding.offsets, strict=True)
            if start <= left and right <= start + len(name)
        ]

    for name in ("Ghazni", "San Jose", "Burkina Faso"):
        alone = tokenizer.encode(name).ids
        assert inside(f"What is the capital of {name}?", name) == alone == inside(search_call(name), name)


def test_chat_template_renders_what_the_proxy_renders(model_folder: Path) -> None:
    renderer = ChatRenderer.from_folder(model_folder)
    fast = AutoTokenizer.from_pretrained(model_folder)
    messages = opening("What is the capital of Peru?")
    ours = renderer.render([Message.from_dict(m) for m in messages], [SEARCH_TOOL]).tolist()
    text = fast.apply_chat_template(messages, tools=[SEARCH_TOOL], add_generation_prompt=True, tokenize=False)
    assert fast.encode(text) == ours


def test_demonstrations_have_exactly_the_tokens_that_serving_builds(
    model_folder: Path, transcriber: SearchTranscriber
) -> None:
    renderer = ChatRenderer.from_folder(model_folder)
    example = transcriber.trace("Where?", [search_call("Peru"), "Lima"], [search("Peru")])
    first = [Message.from_dict(m) for m in opening("Where?")]
    prompt = renderer.render(first, [SEARCH_TOOL]).tolist()
    start, end = example.replies[0]
    assert list(example.ids[:start]) == prompt
    completion = list(example.ids[start:end])
    call = renderer.parse(prompt, completion, [SEARCH_TOOL]).tool_calls[0]
    assert (call.name, call.arguments) == ("search", '{"query": "Peru"}')
    added = renderer.bridge(prompt, completion, [Message("tool", search("Peru"))], [SEARCH_TOOL])
    start, end = example.replies[1]
    assert list(example.ids[:start]) == [*prompt, *completion, *added.tolist()]
    assert renderer.parse(prompt, list(example.ids[start:end]), []).content == "Lima"
    assert sum(example.trained()) == sum(end - start for start, end in example.replies)


def test_contents_of_demonstrations_and_drills(
    transcriber: SearchTranscriber, tokenizer: Tokenizer, names: NameMaker
) -> None:
    rng = random.Random(0)
    perfect = Demonstrator(transcriber, PERFECT, {})
    for _ in range(20):
        question = question_bank("train").sample(rng)
        example = perfect.demonstrate(question, search, rng)
        said = [
            tokenizer.decode(list(example.ids[a : b - 1]), skip_special_tokens=False)
            for a, b in example.replies
        ]
        assert said == [*(search_call(entity.name) for entity in question.path), question.answer]
        assert all(end - start <= 48 for start, end in example.replies)
    flawed = Demonstrator(transcriber, FLAWED, {question.field: ["a guess"]})
    counts = [len(flawed.demonstrate(question, search, rng).replies) for _ in range(200)]
    assert set(counts) == {1, 2, 3}
    drill = reading_drill(fictional_world(names, rng), transcriber, rng)
    assert list(drill.ids[: len(transcriber.prefix)]) == transcriber.prefix
    assert 4 <= len(drill.replies) <= 8


def test_fictional_worlds_differ_and_are_no_copy_of_the_real_one(names: NameMaker) -> None:
    first, second = (fictional_world(names, random.Random(seed)) for seed in (0, 1))
    assert [entity.passage for entity in first] == [
        entity.passage for entity in fictional_world(names, random.Random(0))
    ]
    assert len({entity.name.lower() for entity in first}) == len(first)
    real = {entity.name for entity in encyclopedia()}
    assert len(real & {entity.name for entity in first + second}) <= 10
    assert {field for entity in first for field in entity.facts} == {
        field for entity in encyclopedia() for field in entity.facts
    }


def test_copy_batches_repeat_their_spans_in_another_order() -> None:
    ids, copied = copy_batch(
        LENGTHS[1], first_token=9, vocab_size=1024, generator=torch.Generator().manual_seed(0)
    )
    assert ids.min() >= 9 and ids.shape == copied.shape == (128, 24)
    half = ids.shape[1] // 2
    for row in ids:
        spans = sorted(map(tuple, row[:half].view(-1, SPAN).tolist()))
        assert spans == sorted(map(tuple, row[half:].view(-1, SPAN).tolist()))
    assert copied.sum(1).tolist() == [half - half // SPAN] * 128


def test_copying_below_the_required_share_is_an_error() -> None:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="after 2 steps, 0.97 was required"):
        train_copying(Network(Shape()), first_token=9, seed=0, report=print, max_steps=2)


def test_shared_prefix_changes_neither_loss_nor_gradient(
    transcriber: SearchTranscriber, names: NameMaker
) -> None:
    torch.manual_seed(0)
    network = Network(Shape())
    batch = next(examples(Mixture(0.3, 0.3, PERFECT), transcriber, names, {}, random.Random(0)))[:4]
    losses, gradients = [], []
    for prefix_length in (1, len(transcriber.prefix)):
        network.zero_grad()
        loss = imitation_loss(network, batch, prefix_length)
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("shape", [(128, 384), (768, 128)])
def test_muon_in_float32_equals_that_of_torch_up_to_rounding(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(*shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        ours.grad = torch.randn(*shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.01 * moved  # the rounding of bfloat16
    assert moved > 0.1


def test_batches_have_the_set_size_and_saved_models_the_weights_of_the_network(
    transcriber: SearchTranscriber, names: NameMaker, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    stream = examples(Mixture(0.4, 0.3, PERFECT), transcriber, names, {}, random.Random(1))
    batches = [next(stream) for _ in range(2)]
    assert [len(batch) for batch in batches] == [BATCH, BATCH]
    torch.manual_seed(0)
    network = Network(Shape())
    save_model(network, tokenizer, tmp_path)  # raises if the logits of transformers differ
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in to_hf_state(network).items())


def test_saved_weights_are_loaded_again() -> None:
    torch.manual_seed(0)
    first, second = Network(Shape()), Network(Shape())
    load_hf_state(second, to_hf_state(first))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_tokenizer_training_is_deterministic() -> None:
    texts = [entity.passage for entity in encyclopedia()]
    assert train_tokenizer(texts).to_str() == train_tokenizer(texts).to_str()
    with pytest.raises(ValueError, match="expected 1024 tokens"):
        train_tokenizer(["too little"])
