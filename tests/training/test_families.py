"""Every causal family of transformers is refused when it is loaded, or computed as in transformers.

The long form trains a tiny random model of each family through packed samples with shared prefixes, and
compares logprobs and gradients with transformers' eager attention, one sequence at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families_support import build_family, families
from model_support import packed, reference, samples

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy

# These families must be compared: they may neither be refused nor fail to be built here. The others may
# change with releases of transformers.
COMPARED = {
    "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "flint", "gemma",
    "gemma3_text", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granite_swa", "hy_v3", "llama",
    "mimo_v2_flash", "minimax_m2", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
}  # fmt: skip
QUICK = {"gpt_oss", "llama", "olmo3"}


def test_the_families_that_are_compared_exist() -> None:
    assert set(families()) > COMPARED > QUICK


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in families()]
)
def test_a_family_is_refused_or_computed_as_transformers_does(
    family: str, tmp_path: Path, group: Ranks
) -> None:
    try:
        folder = build_family(family, tmp_path)
        want = reference(folder, samples())
    except Exception as error:
        if family in COMPARED:
            raise
        pytest.skip(f"transformers makes no tiny model of it from these sizes: {error}")
    try:
        policy = load_policy(folder, group)
    except TrainingError as error:
        assert family not in COMPARED, error
        return
    logprobs, gradients = packed(policy, samples())
    for got, wanted in zip(logprobs, want[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-5)
    assert gradients.keys() == want[1].keys()
    largest = max(gradient.abs().max() for gradient in want[1].values())
    for name, gradient in want[1].items():  # some are 0 up to rounding, such as those of the keys' biases
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-3 * gradient.abs().max() + 1e-6 * largest, (name, float(difference))
