"""OpenEnv's TrainingTrace: the exact tokens of each call, with a mask of the tokens that may be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_agents.errors import ConfigError


def trace(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of an episode; a call that sampled nothing is not in it.

    The tokens of constrained calls are masked: their logprobs are those of another distribution than the
    policy's. The format has no place for rewards, which are in the metadata of each call.

    Args:
        episode: the episode with its tokens, in the form of GET /episodes/{id}?tokens=1.

    Raises:
        ConfigError: the episode was imported, so that it has no logprobs, which the format must have.
    """
    if any(turn["logprobs"] is None for turn in episode["turns"]):
        raise ConfigError(
            f"episode {episode['id']} was imported and has no logprobs, without which OpenEnv's trace cannot "
            "be written; export it as messages, sft or atif"
        )
    outcome = {
        "episode": episode["id"],
        "task": episode["task"]["id"],
        "group": episode["group"],
        "status": episode["status"],
        "score": episode["score"],
    }
    turns = [_turn(turn, outcome) for turn in episode["turns"] if len(turn["token_ids"])]
    return {"schema_version": 1, "turns": turns}


def _turn(turn: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    prompt = [int(token) for token in turn["prompt_ids"]]
    completion = [int(token) for token in turn["token_ids"]]
    trained = 0 if turn["constrained"] else 1
    return {
        "node_id": turn["id"],
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [float(logprob) for logprob in turn["logprobs"]],
        "loss_mask": [0] * len(prompt) + [trained] * len(completion),
        "request": {"messages": turn["new_messages"], "continues": turn["parent"]},
        "response": {"choices": [{"message": turn["reply"], "finish_reason": turn["finish_reason"]}]},
        "metadata": {**outcome, "versions": [int(version) for version in turn["versions"]]},
    }
