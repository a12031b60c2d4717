"""Runs forward passes on fake CUDA tensors, without a GPU: shapes, types and devices are checked, values are
not computed. Prints one line for each pass.

A build of torch without CUDA has no device guard for CUDA, which even fake tensors need. The CPU's guard,
which does nothing, is used instead, so this program runs in a separate process. There is no backward pass,
because autograd's engine needs streams; `meta_gpu_worker.py` runs backward passes.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.inference.embedded.model.architecture import Architecture, read_architecture
from areal_agents.inference.embedded.model.runner import Rows
from areal_agents.inference.embedded.model.torch_runner import TorchRunner
from areal_agents.inference.embedded.model.weights import Weights, random_weights
from areal_agents.training.model import attention_gpu
from areal_agents.training.model.loading import build_model
from areal_agents.training.model.model import Policy
from benchmarks.trainer.data import Recorder, training_data

CUDA = torch.device("cuda", 0)


def add_guard() -> None:
    """Use the CPU's device guard for CUDA devices if torch was built without CUDA."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None:
        guards[1] = guards[0]


def fake_policy(model: PreTrainedModel) -> Policy:
    """Return the model with fake weights on the GPU, in bfloat16."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=torch.bfloat16, device=CUDA)
                module._parameters[name] = nn.Parameter(fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
    model.tie_weights()
    return Policy(model)


def train(name: str, policy: Policy, batch: MicroBatch) -> None:
    """Compute the logprobs and entropies of a micro-batch."""
    out = policy(batch)
    assert {out.logprobs.device, out.entropies.device} == {CUDA}
    print(name, out.logprobs.dtype, tuple(out.logprobs.shape), flush=True)


def serve(arch: Architecture, weights: Weights) -> None:
    """Run a step of the engine with one prompt and three decodes, and copy a prefix."""
    runner = TorchRunner(arch, slots=4, max_context=256, device=CUDA, dtype=torch.bfloat16)
    runner.load(weights)

    def array(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    logits = runner.forward(
        Rows(
            tokens=np.zeros(8, np.int32), slots=array(0, 0, 0, 0, 0, 1, 2, 3),
            positions=array(0, 1, 2, 3, 4, 7, 8, 9), prefix_slots=np.zeros(8, np.int32),
            prefix_lengths=np.zeros(8, np.int32), segment_starts=array(0, 5, 6, 7, 8),
            outputs=array(4, 5, 6, 7),
        )
    )  # fmt: skip
    runner.copy_prefix(0, 1, 3)
    assert logits.device == CUDA
    print("engine", logits.dtype, tuple(logits.shape), flush=True)


def main(folder: Path, vocab: int) -> None:
    add_guard()
    # use only the part of the compiler that needs no GPU
    flex = attention_gpu.compiled_flex("eager")
    attention_gpu.compiled_flex = lambda: flex  # type: ignore[assignment]
    samples = training_data([Recorder(vocab, seed=0).answers(0, prompt=64, lengths=[40] * 4)]).samples
    model, _ = build_model(folder)
    arch = read_architecture(folder)
    weights = random_weights(arch, 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        policy = fake_policy(model)
        for name, shared in (("documents", False), ("tree", True)):
            (batch,) = pack(samples, token_budget=1024, share_prefixes=shared)
            train(name, policy, batch.to(CUDA))
        serve(arch, weights)
        (batch,) = pack(samples, token_budget=1024)
        try:
            train("left on the CPU", policy, batch)
        except (RuntimeError, TypeError) as error:
            print("refused", type(error).__name__, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
