"""The settings of a run that a rerun may change: those that decide what is learned from given episodes."""

from __future__ import annotations

from collections.abc import Sequence

from areal_agents.config import Config
from areal_agents.errors import ConfigError

_TRAINER = frozenset(
    {
        "optimizer", "lr", "warmup_steps", "schedule", "min_lr_ratio", "weight_decay", "beta1", "beta2",
        "adam_epsilon", "muon_momentum", "offload", "grad_clip", "microbatch_tokens", "share_prefixes",
        "activation_checkpointing", "dtype", "fused", "router_dtype", "device", "ranks", "replicas",
        "context_parallel", "rank_timeout_s", "threads", "lora", "critic_model", "critic_lr",
        "reference_model", "teacher_model", "checkpoint_every", "async_checkpoints", "keep_checkpoints",
        "record_tokens", "trackers",
    }
)  # fmt: skip
_NO_EPISODES = "a rerun plays no episodes, it trains on those of the run"
_NO_ENGINE = "a rerun starts no engine and publishes no weights"
_REFUSED = {
    **dict.fromkeys(
        ("rollout", "data", "environment", "environments", "agent", "ablation", "trial", "loop"), _NO_EPISODES
    ),
    **dict.fromkeys(("engine", "proxy", "trainer.publish", "trainer.keep_weights"), _NO_ENGINE),
    "eval": "a rerun evaluates nothing; evaluate its weights with areal-agents eval CONFIG --model OUT@final",
    "store": "a rerun only reads the store of the run",
    "model": "a rerun starts from the weights of the run",
    "name": "--out names the folder of the rerun",
    "run_dir": "--out names the folder of the rerun",
    "profile": "it stands for several settings; name those to change",
    "trainer.steps": "--steps says where the rerun ends; schedules of the learning rate are those of the run",
    "trainer.batch_timeout_s": "a rerun never waits for a batch",
    **dict.fromkeys(
        ("trainer.start", "trainer.nodes", "trainer.node_rank", "trainer.master", "trainer.join_timeout_s"),
        "a rerun starts all of trainer.ranks on this machine",
    ),
    **dict.fromkeys(("trainer.teacher_url", "trainer.teacher_timeout_s"), "a rerun calls no server"),
    "algorithm.preset": "the other settings of the algorithm would stay; give algorithm=… instead",
    "algorithm.replay": "the groups of each batch are those of the run",
    "algorithm.replay_groups": "the groups of each batch are those of the run",
    "algorithm.replay_uses": "the groups of each batch are those of the run",
    "algorithm.refill_equal_groups": "the groups of each batch are those of the run",
}


def check_changes(changes: Sequence[str]) -> None:
    """Refuse settings that a rerun cannot change, or that have no effect on it.

    Raises:
        ConfigError: names the first of them and why.
    """
    for change in changes:
        key = change.partition("=")[0]
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            if (why := _REFUSED.get(".".join(parts[:length]))) is not None:
                raise ConfigError(f"{key} cannot be changed in a rerun: {why}")
        known = parts[0] in ("algorithm", "reward", "seed")
        if not known and not (parts[0] == "trainer" and len(parts) > 1 and parts[1] in _TRAINER):
            raise ConfigError(
                f"{key} cannot be changed in a rerun: it does not decide what is learned from episodes; "
                "change algorithm=…, reward=…, seed=… or settings of the optimizer such as trainer.lr=…"
            )
        if parts[0] == "reward" and change.partition("=")[2] in ("", "null", "~"):
            raise ConfigError(
                "reward: the rewards that the agent gave are not stored apart from those of a function; name "
                "the function to use, for example reward=rewards.py:score"
            )


def changes_rewards(changes: Sequence[str]) -> bool:
    """Whether the settings have a reward function, so that the rewards are computed again."""
    return any(change.partition("=")[0].split(".")[0] == "reward" for change in changes)


def check_against(config: Config, original: Config, *, step: int) -> None:
    """Refuse settings that do not fit the checkpoint of `step`, or that need a server.

    Raises:
        ConfigError: names the setting and what to do.
    """
    if config.algorithm.teacher == "engine":
        raise ConfigError(
            "algorithm.teacher: engine asks a running server, and a rerun calls none; use "
            "teacher: model with trainer.teacher_model"
        )
    for key in ("lora", "optimizer"):
        if step and getattr(config.trainer, key) != getattr(original.trainer, key):
            raise ConfigError(
                f"trainer.{key}: the checkpoint of step {step} was written with another; start from the "
                "initial weights with --steps 0:…"
            )
