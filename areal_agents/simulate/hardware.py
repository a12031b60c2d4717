"""What GPUs can do with a model, computed from sizes: this project has measured none of it.

Everything that estimates time or money on GPUs takes its hardware from this module. `decode_step_s`,
`prefill_s` and `train_s` are times of one GPU; tests/simulate/test_hardware.py compares them with what others
have measured.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2  # of a weight, a key or a value, in bfloat16

# A step of decoding reads the weights and the keys and values of all running requests. These numbers were
# chosen by hand for nine published measurements, whose speeds they give within 35%
# (tests/simulate/test_hardware.py).
BANDWIDTH_USE = 0.7  # the share of the memory's bandwidth that a decoding step reaches
STEP_S = 2e-3  # seconds of a decoding step besides what it reads
REQUEST_S = 3e-5  # further seconds for each running request: sampling, scheduling, logprobs
PREFILL_USE = 0.6  # the share of the peak that an engine reaches while it reads prompts
# torchtitan reports 5,762 tokens per second and GPU for Llama 3.1 8B with FSDP on eight H100, which is 0.28,
# with sequences of one length (benchmarks/llama3_h100_202412_torchtitan.md); a batch here has all lengths.
TRAIN_USE = 0.25  # the share of the peak that a training step reaches, by 6 x parameters x tokens


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        memory: bytes. bandwidth: of the memory, bytes per second.
        flops: dense bfloat16 with sums in float32, per second, as the maker says.
        dollars: the rent of one hour, and `price` says whose.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    dollars: float
    price: str


@dataclass(frozen=True, slots=True)
class Model:
    """A dense model; `parameters` has all weights, the embedding too."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int = 128

    @property
    def weight_bytes(self) -> float:
        """Bytes that a decoding step reads, whatever it decodes."""
        return self.parameters * BYTES

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


H100 = Gpu("H100 SXM", 80e9, 3.35e12, 989e12, 3.99, "Lambda, eight of them on demand, September 2026")
RTX_4090 = Gpu("RTX 4090", 24e9, 1.008e12, 165e12, 0.60, "RunPod, on demand, March 2026")

MODELS = {
    "Qwen/Qwen3-0.6B": Model(0.60e9, 28, 8),
    "Qwen/Qwen3-1.7B": Model(1.72e9, 28, 8),
    "Qwen/Qwen3-8B": Model(8.19e9, 36, 8),
    "Qwen/Qwen3-32B": Model(32.8e9, 64, 8),
    "Qwen/Qwen2.5-1.5B-Instruct": Model(1.54e9, 28, 2),
    "Qwen/Qwen2.5-7B": Model(7.62e9, 28, 4),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Model(1.78e9, 28, 2),
}


def decode_step_s(model: Model, gpu: Gpu, *, running: float, context: float) -> float:
    """Seconds of a step that gives each of `running` requests, of `context` tokens on average, one token."""
    read = model.weight_bytes + running * context * model.token_bytes
    return STEP_S + running * REQUEST_S + read / (gpu.bandwidth * BANDWIDTH_USE)


def prefill_s(model: Model, gpu: Gpu, tokens: float) -> float:
    """Seconds to read so many tokens of prompts."""
    return 2 * model.parameters * tokens / (gpu.flops * PREFILL_USE)


def train_s(model: Model, gpu: Gpu, tokens: float, *, passes: float = 6.0) -> float:
    """Seconds to train on so many tokens.

    Args:
        passes: FLOPs for each parameter and token: 6 to train on it, 2 for each further forward pass.
    """
    return passes * model.parameters * tokens / (gpu.flops * TRAIN_USE)


def most_running(model: Model, gpu: Gpu, *, context: float, share: float) -> float:
    """Requests of `context` tokens whose keys and values fit beside the weights.

    Args:
        share: of the GPU's memory that the engine has.
    """
    return max(1.0, (gpu.memory * share - model.weight_bytes) / (context * model.token_bytes))
