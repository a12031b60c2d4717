"""The shared code of the scripts that make a model: options, batches, required shares, and prefixes."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import EXAMPLES
from tokenizers import Tokenizer
from warmup.batches import endless_batches
from warmup.imitation import train_imitation
from warmup.network import Network, Shape, new_network
from warmup.optim import Rates
from warmup.options import option_parser
from warmup.stages import require_right
from warmup.tokenizer import DIGITS, VOCAB_SIZE, byte_tokenizer, prefix_text, train_tokenizer
from warmup.transcripts import Example


def examples_of(*lengths: int) -> list[Example]:
    return [Example(tuple(range(length)), ((1, length),)) for length in lengths]


def lengths_of(batches: list[list[Example]]) -> list[list[int]]:
    return [[len(example.ids) for example in batch] for batch in batches]


def test_the_options_and_their_defaults() -> None:
    parser = option_parser("Build it.", Path("here"))
    parser.add_argument("--careful-steps", type=int, default=3)
    defaults = {"out": Path("here/model"), "seed": 0, "threads": 1, "stages": None, "careful_steps": 3}
    assert vars(parser.parse_args([])) == defaults
    given = {"out": Path("o"), "seed": 2, "threads": 4, "stages": Path("s"), "careful_steps": 5}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert vars(parser.parse_args(words)) == given


def load_maker(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"make_{name}_model", EXAMPLES / name / "make_model.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


@pytest.mark.parametrize("name", ["multi_turn_math", "repair_tasks", "search_agent", "tool_math"])
def test_the_shipped_tokenizer_equals_the_generated_one(name: str) -> None:
    maker = load_maker(name)
    made = train_tokenizer(
        maker.tokenizer_texts(random.Random(0)),
        vocab_size=getattr(maker, "VOCAB_SIZE", VOCAB_SIZE),
        pieces=getattr(maker, "PIECES", DIGITS),
    )
    shipped = Tokenizer.from_file(str(EXAMPLES / name / "model" / "tokenizer.json"))
    assert made.to_str() == shipped.to_str()


def test_a_batch_has_examples_of_similar_length_and_pools_are_generated_on_demand() -> None:
    pools = iter([examples_of(5, 2, 9, 3), examples_of(8, 4, 6, 7)])
    rng, same = random.Random(0), random.Random(0)
    batches = endless_batches(lambda: next(pools), rng, size=2)
    expected = [[[2, 3], [5, 9]], [[4, 6], [7, 8]]]
    for pool in expected:
        same.shuffle(pool)
        assert lengths_of([next(batches), next(batches)]) == pool
    assert rng.getstate() == same.getstate()
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)


def test_batches_that_are_not_by_length_keep_the_order_of_the_examples() -> None:
    batches = endless_batches(lambda: examples_of(5, 2, 9, 3), random.Random(0), size=2, by_length=False)
    assert sorted(lengths_of([next(batches), next(batches)])) == [[5, 2], [9, 3]]


def test_a_share_below_the_required_one_is_an_error_with_advice() -> None:
    require_right(0.9, 0.9, stage="B", what="replies", advice="--careful-steps")
    wanted = (
        r"after stage B 0\.899 of the replies are right, 0\.9 was required: "
        r"give it more --careful-steps or another --seed"
    )
    with pytest.raises(RuntimeError, match=wanted):
        require_right(0.899, 0.9, stage="B", what="replies", advice="--careful-steps")
    with pytest.raises(RuntimeError, match="nan of the calls are right"):
        require_right(math.nan, 0.0, stage="B", what="calls", advice="--careful-steps")


def test_imitation_reports_at_regular_intervals_and_at_the_end() -> None:
    network, lines, scored = new_network(16, seed=0, threads=torch.get_num_threads()), [], iter("abc")
    batches = iter([examples_of(4, 4)] * 5)
    rates = Rates(muon=0.01, adam=1e-3)
    train_imitation(
        network,
        batches,
        prefix_length=1,
        steps=5,
        rates=rates,
        stage="B",
        report=lines.append,
        report_every=2,
        score=lambda: f"score {next(scored)}",
    )
    assert [line[: len("B: batch 0, loss ")] for line in lines] == [f"B: batch {n}, loss " for n in (2, 4, 5)]
    assert [line[-len(", score x") :] for line in lines] == [", score a", ", score b", ", score c"]


def test_the_weights_of_a_new_network_depend_only_on_the_seed() -> None:
    first, same, other = (new_network(16, seed=seed, threads=torch.get_num_threads()) for seed in (1, 1, 2))
    torch.manual_seed(1)
    plain = Network(Shape(vocab_size=16))
    for network in (same, plain):
        assert torch.equal(network.embedding.weight, first.embedding.weight)
    assert not torch.equal(other.embedding.weight, first.embedding.weight)


def test_the_text_of_a_prefix_has_no_markers() -> None:
    text = "<|im_start|>system\nAdd é.<|im_end|>\n"
    assert prefix_text(lambda plain: plain.encode(text).ids) == "system\nAdd é.\n"
    assert byte_tokenizer().encode(text).ids[0] == byte_tokenizer().token_to_id("<|im_start|>")
