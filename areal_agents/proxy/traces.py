"""Writes the spans of episodes and of their model calls, with OpenTelemetry's attributes for generative AI.

The parent of a call's span is the span in the header traceparent of its request, or else that of its episode.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from areal_agents.core.rollout import EpisodeStatus
from areal_agents.proxy.calls.record import CallRecord
from areal_agents.store import EpisodeRow
from areal_agents.telemetry import episode_context, opener_of, parse_traceparent

if TYPE_CHECKING:
    from areal_agents.telemetry.spans import Spans

_PROVIDER = "areal-agents"
_WITHOUT_MESSAGES = "completions"  # a dialect


class Traces:
    """Writes the spans of one proxy process.

    Args:
        agent: the name of the agent, which is that of the run; "" without a run.
    """

    def __init__(self, spans: Spans, agent: str = "") -> None:
        self._spans = spans
        self._agent = agent

    def call_ended(self, record: CallRecord) -> None:
        """Write the span of a model call; an `Observer`."""
        end_s = time.time()
        operation = "text_completion" if record.dialect == _WITHOUT_MESSAGES else "chat"
        caller = parse_traceparent(record.traceparent)
        row = record.episode
        episode = None if row is None else episode_context(row.id, opener_of(row.metadata))
        self._spans.add(
            f"{operation} {record.model}",
            start_s=end_s - record.duration_s,
            end_s=end_s,
            kind="client",
            parent=caller or episode,
            links=[episode] if caller and episode else [],
            error=record.message or record.code if record.code else None,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": None if record.upstream else _PROVIDER,
                "gen_ai.request.model": record.model,
                "gen_ai.request.stream": record.streamed or None,
                "gen_ai.response.time_to_first_chunk": record.first_piece_s,
                "error.type": record.code or None,
                "areal_agents.dialect": record.dialect,
                "areal_agents.label": record.label or None,
                **_of_episode(row),
                **(_reply(record) if record.turns else {}),
            },
        )

    def episode_ended(self, row: EpisodeRow, status: EpisodeStatus, error: str | None = None) -> None:
        """Write the span of an episode."""
        opener = opener_of(row.metadata)
        failed = status == "failed"
        self._spans.add(
            f"invoke_agent {self._agent}".strip(),
            start_s=row.created_at,
            end_s=time.time(),
            context=episode_context(row.id, opener),
            parent=opener,
            error=error or "failed" if failed else None,
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.agent.name": self._agent or None,
                "error.type": "failed" if failed else None,
                "areal_agents.episode.status": status,
                **_of_episode(row),
            },
        )


def _of_episode(row: EpisodeRow | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {
        "gen_ai.conversation.id": row.id,
        "areal_agents.task.id": row.task_id,
        "areal_agents.group.id": row.group_id,
        "areal_agents.split": row.split,
    }


def _reply(record: CallRecord) -> dict[str, Any]:
    """Return the attributes of an answered call. Only the first span of a repeated answer has its tokens."""
    turns, first = record.turns, record.turns[0]
    versions = [int(version) for turn in turns for version in turn.completion.versions]
    reasons = ["tool_calls" if t.reply.tool_calls else t.completion.finish_reason for t in turns]
    return {
        "gen_ai.response.id": first.id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.request.max_tokens": first.sampling.max_new_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.request.choice.count": len(turns) if len(turns) > 1 else None,
        "gen_ai.usage.input_tokens": None if record.repeated else record.prompt_tokens,
        "gen_ai.usage.output_tokens": None if record.repeated else sum(len(t.completion) for t in turns),
        "areal_agents.policy_version": max(versions, default=None),
        "areal_agents.policy_version.oldest": min(versions, default=None),
        "areal_agents.constrained": first.constrained or None,
        "areal_agents.repeated": record.repeated or None,
    }
