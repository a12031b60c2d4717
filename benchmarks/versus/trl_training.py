"""Trains the quick start with TRL.

    python -m benchmarks.versus.trl_training OUT --steps N --every K --seed S

Model, tasks, reward, batch, learning rate, clipping, and what an episode may do are those of
`examples/search_agent/config.yaml`. The tool loop is TRL's own: `GRPOTrainer(tools=[search])`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLE = Path("examples/search_agent").resolve()
GROUPS, GROUP_SIZE = 8, 16
LR, WARMUP_STEPS = 5.0e-4, 5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LONGEST = 512  # tokens of a completion with its tool results


def train(out: Path, *, steps: int, every: int, seed: int) -> None:
    """Train, and write the time of each step to OUT/steps.jsonl and weights to OUT/checkpoint-N.

    Args:
        every: steps between weights that are written; the time that takes is left out.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from areal_agents.rewards import exact_match

    begun = time.monotonic()
    # Modules of the example, which lie beside each other without a package.
    talk, questions, encyclopedia = map(import_module, ("conversation", "questions", "search"))

    def search(query: str) -> str:
        """Search the encyclopedia.

        Args:
            query: what to look for.
        """
        return encyclopedia.search(query) if isinstance(query, str) else "Error: search needs a query."

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        finals = [messages[-1] for messages in completions]
        said = [
            message.get("content")
            if message["role"] == "assistant" and not message.get("tool_calls")
            else None
            for message in finals
        ]
        return [exact_match(text, wanted) for text, wanted in zip(said, answer, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    tokenizer.response_template = qwen3_template  # the model writes tool calls in this form
    rendered = tokenizer.apply_chat_template

    def with_the_tool_of_the_agent(*arguments: Any, tools: Any = None, **options: Any) -> Any:
        """Show the model the tool as it was shown in its warm-up, not as TRL describes functions."""
        return rendered(*arguments, tools=[talk.SEARCH_TOOL] if tools else None, **options)

    tokenizer.apply_chat_template = with_the_tool_of_the_agent
    tasks = questions.train_tasks(seed=seed)
    rows = [{"prompt": talk.opening(task["question"]), "answer": task["answer"]} for task in tasks]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype="float32"),
        reward_funcs=exact,
        tools=[search],
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows[: GROUPS * steps]),
        args=GRPOConfig(
            output_dir=str(out),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=GROUPS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=LONGEST,
            max_tool_calling_iterations=talk.MAX_MODEL_CALLS - 1,
            learning_rate=LR,
            warmup_steps=WARMUP_STEPS,
            lr_scheduler_type="constant_with_warmup",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            loss_type="dapo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
        ),
    )
    trainer.generation_config.max_new_tokens = (
        talk.MAX_TOKENS
    )  # of one call; else each may fill the completion

    class Times(TrainerCallback):
        spent_on_saving = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            row = {"step": state.global_step, "time_s": time.monotonic() - begun - self.spent_on_saving}
            with (out / "steps.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if state.global_step % every == 0:
                since = time.monotonic()
                folder = out / f"checkpoint-{state.global_step}"
                trainer.model.save_pretrained(folder)
                AutoTokenizer.from_pretrained(EXAMPLE / "model").save_pretrained(folder)
                self.spent_on_saving += time.monotonic() - since

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with (out / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")

    trainer.add_callback(Times())
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for option in ("--steps", "--every", "--seed"):
        parser.add_argument(option, type=int, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(EXAMPLE))
    train(given.out, steps=given.steps, every=given.every, seed=given.seed)
