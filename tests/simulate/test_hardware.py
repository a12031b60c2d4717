"""The computed speeds of GPUs are near published measurements.

The estimates in docs/recipes.md are based on these speeds. Nothing here was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from areal_agents.simulate.hardware import H100, MODELS, RTX_4090, Gpu, decode_step_s, prefill_s, train_s


@dataclass(frozen=True, slots=True)
class Measured:
    """A published measurement of one engine on one GPU under a constant load.

    Attributes:
        running: number of concurrent requests. prompt, completion: number of tokens of each request.
        tokens_per_s: number of tokens that all requests sample per second.
    """

    model: str
    gpu: Gpu
    running: float
    prompt: float
    completion: float
    tokens_per_s: float
    source: str

    def computed(self) -> float:
        """Return the computed number of sampled tokens per second."""
        model = MODELS[self.model]
        context = self.prompt + self.completion / 2
        decode = decode_step_s(model, self.gpu, running=self.running, context=context) / self.running
        return 1 / (decode + prefill_s(model, self.gpu, self.prompt / self.completion))


_ML_ENERGY = "ml-energy/leaderboard, vLLM"
_SILYBENCH = "tgarg01/silybench-data, vLLM 0.30"
DECODING = (
    Measured("Qwen/Qwen3-8B", H100, 16, 100, 660, 1_745, f"{_ML_ENERGY}, chat; prompt of 100 assumed"),
    Measured("Qwen/Qwen3-8B", H100, 128, 100, 641, 5_930, f"{_ML_ENERGY}, chat; prompt of 100 assumed"),
    Measured("Qwen/Qwen3-8B", H100, 256, 100, 654, 7_719, f"{_ML_ENERGY}, chat; prompt of 100 assumed"),
    Measured("Qwen/Qwen3-8B", H100, 16, 200, 7_861, 1_345, f"{_ML_ENERGY}, GPQA; prompt of 200 assumed"),
    Measured("Qwen/Qwen3-8B", H100, 63, 200, 8_367, 2_510, f"{_ML_ENERGY}, GPQA; prompt of 200 assumed"),
    Measured("Qwen/Qwen3-8B", H100, 396, 128, 1_024, 13_322, _SILYBENCH),
    Measured("Qwen/Qwen3-8B", H100, 40, 2_048, 2_048, 2_815, _SILYBENCH),
    Measured("Qwen/Qwen3-8B", H100, 80, 1_024, 128, 3_018, _SILYBENCH),
    Measured(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", RTX_4090, 150, 100, 600, 8_310,
        "databasemart.com, 300 requests at once to vLLM; 150 at a time assumed",
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "measured", DECODING, ids=lambda one: f"{one.gpu.name}-{one.running:.0f}-{one.source[:9]}"
)
def test_an_engine_samples_about_as_fast_as_others_measured(measured: Measured) -> None:
    assert 1 / 1.36 < measured.computed() / measured.tokens_per_s < 1.36


def test_training_is_about_as_fast_as_others_measured() -> None:
    """torchtitan's pretraining of an 8B, and AReaL's loop (arXiv 2505.24298), limited by its trainers."""
    torchtitan = 1 / train_s(MODELS["Qwen/Qwen3-8B"], H100, 1)
    assert 0.8 < torchtitan / 5_762 < 1.2
    distilled = MODELS["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"]
    areal = 2 / train_s(
        distilled, H100, 1, passes=8
    )  # two of eight GPUs train; docs/simulator.md has the table
    assert 0.65 < areal / 47_800 < 1.2
