"""ATIF, the Agent Trajectory Interchange Format of Harbor, with the exact tokens of each call.

A document is one conversation of an episode. Conversations of one episode have its id as their session; what
a later one shares with an earlier one is marked as copied context, so that no call counts twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_agents.version import __version__

SCHEMA_VERSION = "ATIF-v1.7"


def documents(episode: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a document for each conversation of an episode, in the order of their last replies.

    Args:
        episode: the episode with its tokens, in the form of GET /episodes/{id}?tokens=1.
    """
    turns = {turn["id"]: turn for turn in episode["turns"]}
    parents = {turn["parent"] for turn in episode["turns"]}
    seen: set[str] = set()
    leaves = [turn for turn in episode["turns"] if turn["id"] not in parents]
    for number, leaf in enumerate(leaves):
        path = [leaf]
        while path[-1]["parent"] is not None:
            path.append(turns[path[-1]["parent"]])
        path.reverse()
        yield _document(episode, path, number, seen)
        seen |= {turn["id"] for turn in path}


def _document(
    episode: Mapping[str, Any], path: Sequence[Mapping[str, Any]], number: int, seen: set[str]
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for turn in path:
        for message in turn["new_messages"]:
            _add_message(steps, message)
        steps.append(_agent_step(turn["reply"]) | {"metrics": _metrics(turn), "llm_call_count": 1})
        if turn["id"] in seen:
            steps[-1]["is_copied_context"] = True
    for index, step in enumerate(steps, start=1):
        step["step_id"] = index
    own = [turn for turn in path if turn["id"] not in seen]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": episode["id"],
        "trajectory_id": f"{episode['id']}-{number}",
        "agent": {"name": "areal-agents", "version": __version__, "model_name": "policy"},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn["prompt_ids"]) for turn in own),
            "total_completion_tokens": sum(len(turn["token_ids"]) for turn in own),
            "total_steps": len(steps),
        },
        "extra": {
            "task": episode["task"],
            "status": episode["status"],
            "score": episode["score"],
            "rewards": [dict(reward) for reward in episode["rewards"]],
            "group": episode["group"],
            "split": episode["split"],
        },
    }


def _add_message(steps: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Add a message of the prompt: a tool's result to the step that called it, any other as a step."""
    if message["role"] == "tool":
        result = {"content": _text(message)}
        called = next((s for s in reversed(steps) if _calls(s, message.get("tool_call_id"))), None)
        if called is not None:
            result["source_call_id"] = message["tool_call_id"]
        target = called or (steps[-1] if steps else None)
        if target is None:
            target = {"source": "user", "message": ""}
            steps.append(target)
        target.setdefault("observation", {"results": []})["results"].append(result)
    elif message["role"] == "assistant":  # an earlier reply that the client rendered again
        steps.append(_agent_step(message) | {"is_copied_context": True})
    else:
        source = "system" if message["role"] in ("system", "developer") else "user"
        steps.append({"source": source, "message": _text(message)})


def _calls(step: Mapping[str, Any], call_id: Any) -> bool:
    return any(call["tool_call_id"] == call_id for call in step.get("tool_calls", ()))


def _agent_step(message: Mapping[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": _text(message)}
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return step


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call; arguments that are no JSON object are kept as they were written in `extra`."""
    written = call["function"]["arguments"]
    try:
        arguments = json.loads(written)
    except ValueError:
        arguments = None
    found = {"tool_call_id": call["id"], "function_name": call["function"]["name"]}
    if isinstance(arguments, dict):
        return {**found, "arguments": arguments}
    return {**found, "arguments": {}, "extra": {"arguments_as_written": written}}


def _metrics(turn: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": len(turn["prompt_ids"]),
        "completion_tokens": len(turn["token_ids"]),
        "prompt_token_ids": [int(token) for token in turn["prompt_ids"]],
        "completion_token_ids": [int(token) for token in turn["token_ids"]],
        "extra": {
            "completion_id": turn["id"],
            "constrained": turn["constrained"],
            "finish_reason": turn["finish_reason"],
        },
    }
    if turn["logprobs"] is not None:  # imported turns have none
        found["logprobs"] = [float(logprob) for logprob in turn["logprobs"]]
        found["extra"]["versions"] = [int(version) for version in turn["versions"]]
    return found


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)
