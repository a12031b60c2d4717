"""The implementations compared: this trainer, a padded Hugging Face loop, and TRL's GRPO step.

Each takes one optimizer step on the same samples from the same weights with the same AdamW and the same loss,
the token mean of the clipped loss with the current policy as the proximal one. A `step` is everything between
the samples and the new weights, padding or packing included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.samples import TrainingData
from areal_agents.core.sample import TrainingSample
from areal_agents.training.config import Fused, TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, StepResult, train_batch
from benchmarks.trainer.data import ALGORITHM

OPTIMIZER = TrainerConfig(lr=1e-6)
SEQUENCES = 8  # sequences of a padded micro-batch, as in GRPO recipes and TRL's default


@dataclass(frozen=True, slots=True)
class Setting:
    """The device and the precision with which all implementations compute."""

    folder: Path
    dtype: torch.dtype
    microbatch_tokens: int
    ranks: Ranks
    fused: Fused = "none"

    def autocast(self) -> torch.autocast:
        """Autocast as the loops use it: float32 weights, products in `dtype`."""
        return torch.autocast(
            self.ranks.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )


class Side(Protocol):
    """An implementation of a training step on samples."""

    def step(self, data: TrainingData) -> object:
        """Take one optimizer step on all samples."""


class Ours:
    """This project's trainer, called as in a run."""

    def __init__(self, setting: Setting, *, share_prefixes: bool = True) -> None:
        self._setting = setting
        self._options = StepOptions(
            microbatch_tokens=setting.microbatch_tokens,
            share_prefixes=share_prefixes,
            grad_clip=OPTIMIZER.grad_clip,
        )
        options = ModelOptions(dtype=setting.dtype, fused=setting.fused)
        self.policy = load_policy(setting.folder, setting.ranks, options=options)
        self._optimizer = make_optimizer(self.policy, OPTIMIZER)

    def share_prefixes(self, shared: bool) -> None:
        """Set whether the next steps compute common prefixes once."""
        self._options = replace(self._options, share_prefixes=shared)

    def step(self, data: TrainingData) -> StepResult:
        return train_batch(
            self.policy, self._optimizer, data, ALGORITHM, self._options,
            ranks=self._setting.ranks, version=0, seed=0,
        )  # fmt: skip


class PaddedLoop:
    """The straightforward loop: right-padded batches with a mask, and the logits of every position."""

    def __init__(self, setting: Setting) -> None:
        from transformers import AutoModelForCausalLM

        self._setting = setting
        model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32)
        self._model = model.to(setting.ranks.device).eval()
        self._optimizer = make_optimizer(self._model, OPTIMIZER)
        self.grad_norm = float("nan")

    def step(self, data: TrainingData) -> None:
        total = sum(int(sample.loss_mask.sum()) for sample in data.samples)
        for samples in _batches(data.samples):
            self._loss(samples, total).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.grad_clip)
        self.grad_norm = float(norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, samples: Sequence[TrainingSample], total: int) -> Tensor:
        rows = _padded(samples, "token_ids", np.int64), _padded(samples, "loss_mask", np.bool_)
        ids, mask = (array.to(self._setting.ranks.device) for array in rows)
        lengths = torch.tensor([len(sample) for sample in samples], device=ids.device)
        present = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with self._setting.autocast():
            logits = self._model(input_ids=ids, attention_mask=present.long(), use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = mask[:, 1:]

        def trained(name: str) -> Tensor:
            values = _padded(samples, name, np.float32).to(ids.device)
            return values[:, 1:][mask]

        current = logprobs[mask]
        loss, _, _ = policy_loss(
            current,
            Objective.of(ALGORITHM),
            proximal=current.detach(),
            behavior=trained("behavior_logprobs"),
            advantages=trained("advantages"),
            loss_weights=torch.full_like(current, 1 / total),
            sequence_ids=torch.arange(len(samples), device=ids.device)[:, None].expand_as(mask)[mask],
        )
        return loss


class Trl:
    """TRL's GRPO trainer on prepared completions, with its padding, loss and optimizer."""

    def __init__(self, setting: Setting, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._setting = setting
        model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32)
        self.trainer = grpo_trainer(
            model,
            scratch,
            loss_type="dapo",
            learning_rate=OPTIMIZER.lr,
            bf16=setting.dtype == torch.bfloat16,
            use_cpu=setting.ranks.device.type == "cpu",
        )
        self.trainer.create_optimizer()

    def step(self, data: TrainingData) -> None:
        inputs = {name: array.to(self._setting.ranks.device) for name, array in trl_inputs(data).items()}
        count = len(data.samples)
        trainer = self.trainer
        starts = range(0, count, SEQUENCES)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(starts)
        for start in starts:
            rows = {
                name: array if array.ndim == 0 else array[start : start + SEQUENCES]
                for name, array in inputs.items()
            }
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, rows)
            trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), OPTIMIZER.grad_clip)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def grpo_trainer(
    model: Any,
    scratch: Path,
    *,
    reward: Callable[..., list[float]] | None = None,
    rollout_func: Callable[..., dict[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Create a TRL GRPOTrainer around a model, for completions that are already recorded.

    Args:
        reward, rollout_func: as for GRPOTrainer; needed only if it scores completions itself.
        options: options of GRPOConfig, which override those set here: no reports, no reference policy,
            nothing recomputed.

    Raises:
        ImportError: TRL is not installed.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    settings: dict[str, Any] = dict(
        output_dir=str(scratch),
        per_device_train_batch_size=SEQUENCES,
        num_generations=SEQUENCES,
        beta=0.0,
        report_to=[],
        bf16=False,
        use_cpu=True,
        activation_checkpointing=False,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward or _no_reward,
        rollout_func=rollout_func,
        args=GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * SEQUENCES}),
        processing_class=tokenizer,
    )


def trl_inputs(data: TrainingData) -> Mapping[str, Tensor]:
    """Lay out samples of one turn as TRL does: prompts are padded on the left and completions on the right,
    both to the longest of the whole batch."""
    samples = data.samples
    starts = [int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples]
    longest_prompt = max(starts)
    longest = max(len(sample) - start for sample, start in zip(samples, starts, strict=True))
    shape = len(samples), longest_prompt
    arrays = {
        "prompt_ids": np.zeros(shape, np.int64),
        "prompt_mask": np.zeros(shape, np.int64),
        "completion_ids": np.zeros((len(samples), longest), np.int64),
        "completion_mask": np.zeros((len(samples), longest), np.int64),
    }
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        for name, tokens, place in (
            ("prompt", sample.token_ids[:start], slice(longest_prompt - start, None)),
            ("completion", sample.token_ids[start:], slice(0, len(sample) - start)),
        ):
            arrays[f"{name}_ids"][row, place] = tokens
            arrays[f"{name}_mask"][row, place] = 1
    advantages = [sample.advantages[start] for sample, start in zip(samples, starts, strict=True)]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors | {
        "advantages": torch.tensor(np.array(advantages)),
        "num_items_in_batch": tensors["completion_mask"].sum().float(),
    }


def _no_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def _batches(samples: Sequence[TrainingSample]) -> Iterator[Sequence[TrainingSample]]:
    for start in range(0, len(samples), SEQUENCES):
        yield samples[start : start + SEQUENCES]


def _padded(samples: Sequence[TrainingSample], name: str, dtype: type) -> Tensor:
    """Return [B, longest], an array of the samples, padded with zeros."""
    out: np.ndarray = np.zeros((len(samples), max(map(len, samples))), dtype)
    for row, sample in enumerate(samples):
        out[row, : len(sample)] = getattr(sample, name)
    return torch.from_numpy(out)
