"""Peak memory of one training step in its own process: `python -m benchmarks.trainer.memory`.

The two modes differ only in the logits, which are computed in chunks, as in the trainer, or whole.
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Literal

import torch

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import ranks
from areal_agents.training.model.model import Policy, PolicyOutput, hidden_rows
from benchmarks.trainer.data import Recorder, training_data
from benchmarks.trainer.peers import Ours, Setting

Way = Literal["chunked", "whole"]
EPISODES, PROMPT = 4, 16
_LONGEST_S = 1800.0


def peak_bytes(folder: Path, *, way: Way, tokens: int, device: str) -> int:
    """Peak memory of a step on `tokens` tokens in its own process: resident memory on a CPU, PyTorch's
    allocations on a GPU.

    Raises:
        TrainingError: the process failed, or did not end in time.
    """
    command = [sys.executable, "-m", __name__, str(folder), way, str(tokens), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        raise TrainingError(f"the memory measurement ({way}) took more than {_LONGEST_S:g} s") from None
    if done.returncode:
        raise TrainingError(f"the memory measurement ({way}) failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def measure(folder: Path, *, way: Way, tokens: int, device: str) -> int:
    """Run the step in this process, and return the peak in bytes."""
    with ranks(device) as joined:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        side = Ours(Setting(folder, dtype, tokens, joined))
        if way == "whole":
            side.policy.forward = types.MethodType(_whole_logits, side.policy)  # type: ignore[method-assign]
        recorder = Recorder(side.policy.shape.vocab, seed=0)
        group = recorder.answers(0, prompt=PROMPT, lengths=[tokens // EPISODES - PROMPT] * EPISODES)
        side.step(training_data([group]))
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # ru_maxrss would also count the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def _whole_logits(
    policy: Policy, batch: MicroBatch, *, entropy_gradient: bool = False, teacher: None = None
) -> PolicyOutput:
    """`Policy.forward` with all logits at once, without the entropies, which would need even more memory."""
    logits = policy.model.get_output_embeddings()(hidden_rows(policy.model, batch)).float()
    logprobs = torch.log_softmax(logits, -1).gather(1, batch.target_ids[:, None])[:, 0]
    return PolicyOutput(logprobs, torch.zeros_like(logprobs))


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), way=sys.argv[2], tokens=int(sys.argv[3]), device=sys.argv[4]))  # type: ignore[arg-type]
