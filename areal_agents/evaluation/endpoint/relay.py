"""Relays the chat completions of agents to an endpoint, and counts what each episode costs.

Agents call it as they call the proxy, with the key of an episode; they see neither the endpoint's key nor the
name of its model. It has the part of the proxy's control API that running an agent needs, so that limits,
failures and rewards mean the same. Nothing is recorded token by token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_agents.core.rollout import Reward, Split
from areal_agents.errors import ConfigError, RequestError
from areal_agents.evaluation.endpoint.counting import TokenEstimates
from areal_agents.evaluation.endpoint.journal import JournalEntry
from areal_agents.evaluation.endpoint.streams import StreamedReply
from areal_agents.evaluation.results import AttemptResult
from areal_agents.proxy.episodes.control_forms import final_rewards_of, rewards_of

_REFUSING = (401, 403, 404)
_SHOWN = 200  # characters of an answer that is no chat completion
ONLY_CHAT = (
    "an evaluation of an endpoint relays chat completions only (POST /v1/chat/completions); agents that use "
    "another API can be evaluated with a model folder"
)


@dataclass(slots=True)
class RelayedEpisode:
    """An episode whose agent runs, or has ended."""

    id: str
    key: str
    task: Mapping[str, Any]
    index: int
    limits: Mapping[str, Any]
    temperature: float | None
    split: Split = "eval"
    opened_at: float = field(default_factory=time.time)
    status: str = "open"
    limit_reached: str | None = None
    rewards: dict[tuple[str, str, str], Reward] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    # Of each turn: its messages with the reply, and the tools that it was offered.
    conversations: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    tokens_estimated: bool = False
    calls: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the episode in the form of GET /episodes/{id}."""
        return {
            "id": self.id,
            "task": self.task,
            "status": self.status,
            "limit_reached": self.limit_reached,
            "turns": self.turns,
            "rewards": [
                {"scope": r.scope, "target": r.target, "name": r.name, "value": r.value}
                for r in self.rewards.values()
            ],
        }

    def record(self, asked: Mapping[str, Any], reply: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        """Add a call; it continues the longest earlier conversation, with the same tools, that its messages
        begin with."""
        messages, tools = asked["messages"], asked.get("tools") or []
        parent, shared = None, 0
        for turn, (conversation, offered) in zip(self.turns, self.conversations, strict=True):
            count = len(conversation)
            if offered != tools:
                continue  # the proxy renders such a call anew, too
            if count > shared and [_same(m) for m in messages[:count]] == [_same(m) for m in conversation]:
                parent, shared = turn["id"], count
        new = messages[shared:]
        turn_id = f"turn-{len(self.turns)}"
        recorded = {"id": turn_id, "parent": parent, "new_messages": new, "reply": dict(reply)}
        self.turns.append(recorded if parent or not tools else {**recorded, "tools": tools})
        self.conversations.append(([*messages, reply], tools))
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.sampled_tokens += usage.get("completion_tokens") or 0

    def entry(self, error: str | None) -> JournalEntry:
        """Return the ended attempt for the journal."""
        failed = self.status == "failed"
        result = AttemptResult(
            episode=self.id,
            index=self.index,
            status=self.status,
            score=0.0 if failed else sum(reward.value for reward in self.rewards.values()),
            rewards={r.name: r.value for r in self.rewards.values() if r.scope == "episode"},
            turns=len(self.turns),
            sampled_tokens=self.sampled_tokens,
            prompt_tokens=self.prompt_tokens,
            seconds=round(time.time() - self.opened_at, 3),
            error=error,
            tokens_estimated=self.tokens_estimated,
            tool_calls=dict(Counter(name for turn in self.turns for name in _called(turn["reply"]))),
        )
        return JournalEntry(dict(self.task), result, tuple(self.turns), self.split)


class Relay:
    """The ASGI app of a relay; it is used by one event loop.

    Args:
        base_url: the endpoint, with its /v1.
        model: the name of the model that the endpoint is asked for.
        key: the endpoint's key; None sends none.
        client: makes the requests to the endpoint.
        admin_key: the key of the control API.
        ended: called with each ended attempt.
        estimates: counts the tokens that the endpoint does not report.

    Attributes:
        fault: why no call can be answered: the endpoint has refused one before it answered any, or tokens
            cannot be counted; None if calls can be answered.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        key: str | None,
        client: httpx.AsyncClient,
        admin_key: str,
        ended: Callable[[JournalEntry], None],
        estimates: TokenEstimates,
    ) -> None:
        self.fault: str | None = None
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = client
        self._admin_key = admin_key
        self._ended = ended
        self._estimates = estimates
        self._has_answered = False
        self._by_id: dict[str, RelayedEpisode] = {}
        self._by_key: dict[str, RelayedEpisode] = {}
        self.app = Starlette(
            routes=[
                Route("/e/{key}/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/episodes", self._open, methods=["POST"]),
                Route("/episodes/{id}", self._show, methods=["GET"]),
                Route("/episodes/{id}/reward", self._reward, methods=["POST"]),
                Route("/episodes/{id}/finish", self._finish, methods=["POST"]),
                Route("/episodes/{id}/fail", self._fail, methods=["POST"]),
                Route("/{path:path}", self._other, methods=["GET", "POST"]),
            ],
            exception_handlers={RequestError: _refused},
        )

    async def _other(self, request: Request) -> Response:
        raise RequestError(ONLY_CHAT, status=404, code="not_found")

    # Control

    async def _open(self, request: Request) -> Response:
        if _bearer(request) != self._admin_key:
            raise RequestError("the admin key is needed", status=401, code="invalid_api_key")
        body = await request.json()
        episode = RelayedEpisode(
            id=f"episode-{secrets.token_hex(8)}",
            key=f"ep-{secrets.token_urlsafe(24)}",
            task=body["task"],
            index=body["metadata"]["attempt"],
            limits=body.get("limits") or {},
            temperature=body["sampling"]["temperature"],
            split=body["split"],
        )
        self._by_id[episode.id] = self._by_key[episode.key] = episode
        root = f"http://127.0.0.1:{request.scope['server'][1]}/e/{episode.key}"
        return JSONResponse({"id": episode.id, "key": episode.key, "base_url": f"{root}/v1"})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._reachable(request).describe())

    async def _reward(self, request: Request) -> Response:
        episode = self._reachable(request)
        _give(episode, rewards_of(await request.json()))
        return JSONResponse({"id": episode.id, "status": episode.status})

    async def _finish(self, request: Request) -> Response:
        episode, body = self._reachable(request), await request.json()
        if body.get("require_turn") and not episode.turns:
            raise RequestError(f"episode {episode.id} has no model call", status=409, code="no_turn")
        _give(episode, final_rewards_of(body))
        is_truncated = body.get("truncated") or episode.limit_reached is not None
        return await self._seal(episode, "truncated" if is_truncated else "finished", None)

    async def _fail(self, request: Request) -> Response:
        episode, body = self._reachable(request), await request.json()
        return await self._seal(episode, "failed", str(body.get("error") or "failed"))

    async def _seal(self, episode: RelayedEpisode, status: str, error: str | None) -> Response:
        if episode.status == "open":
            episode.status = status
            await asyncio.to_thread(self._ended, episode.entry(error))
            del self._by_key[episode.key]
        return JSONResponse({"id": episode.id, "status": episode.status, "turns": len(episode.turns)})

    def _reachable(self, request: Request) -> RelayedEpisode:
        episode = self._by_id.get(request.path_params["id"])
        if episode is None:
            raise RequestError("no such episode", status=404, code="not_found")
        if _bearer(request) not in (self._admin_key, episode.key):
            raise RequestError("this key has no access to that episode", status=403, code="wrong_episode")
        return episode

    # Calls

    async def _complete(self, request: Request) -> Response:
        episode = self._by_key.get(request.path_params["key"])
        if episode is None:
            raise RequestError("no open episode has this key", status=401, code="invalid_api_key")
        body = await request.json()
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list):
            raise RequestError("messages must be a list", param="messages")
        if body.get("n") not in (None, 1):
            raise RequestError(
                "an evaluation of an endpoint relays one choice a call, so n must be 1", param="n"
            )
        _refuse_over_limit(episode)
        sent = _sent(body, self._model, episode)
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        if sent.get("stream"):
            sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        episode.calls += 1
        try:
            built = self._client.build_request(
                "POST", f"{self._base_url}/chat/completions", json=sent, headers=self._headers
            )
            answer = await self._client.send(built, stream=bool(sent.get("stream")))
            if not answer.is_success:
                return await self._refusal(answer)
        except httpx.HTTPError as error:
            raise RequestError(
                f"the endpoint did not answer: {_described(error)}", status=502, code="unreachable"
            ) from error
        self._has_answered = True
        if not sent.get("stream"):
            await self._record(episode, body, *_completion_of(answer))
            return Response(answer.content, media_type="application/json")
        streamed = self._streamed(answer, episode, body, wants_usage=wants_usage)
        return StreamingResponse(streamed, media_type="text/event-stream")

    async def _refusal(self, answer: httpx.Response) -> Response:
        content = await answer.aread()
        await answer.aclose()
        if answer.status_code in _REFUSING and not self._has_answered:
            shown = content.decode(errors="replace")[:500]
            self.fault = f"refuses the calls: {answer.status_code}: {shown}"
        kept = {name: answer.headers[name] for name in ("retry-after",) if name in answer.headers}
        return Response(content, status_code=answer.status_code, headers=kept, media_type="application/json")

    async def _record(
        self,
        episode: RelayedEpisode,
        asked: Mapping[str, Any],
        reply: Mapping[str, Any],
        usage: Mapping[str, Any],
    ) -> None:
        """Record a call. Raises RequestError if its tokens are not reported and cannot be estimated."""
        try:
            usage, estimated = await asyncio.to_thread(
                self._estimates.completed, usage, asked["messages"], reply
            )
        except ConfigError as error:
            self.fault = f"reports no usage, and its tokens cannot be estimated: {error}"
            raise RequestError(f"the endpoint {self.fault}", status=502, code="not_a_completion") from error
        episode.tokens_estimated |= estimated
        episode.record(asked, reply, usage)

    async def _streamed(
        self, answer: httpx.Response, episode: RelayedEpisode, asked: Mapping[str, Any], *, wants_usage: bool
    ) -> AsyncIterator[bytes]:
        """Pass the events on, and record the reply before the end of the stream.

        A stream that cannot be read ends with an event that has the error, which OpenAI's clients raise.
        """
        reply, is_recorded = StreamedReply(), False
        try:
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    await self._record(episode, asked, *_reply_of(reply))
                    is_recorded = True
                elif _added(reply, data) and not wants_usage:
                    continue  # the usage alone, which the client has not asked for
                yield f"data: {data}\n\n".encode()
            if not is_recorded:
                if not reply.has_ended:
                    raise _unreadable("it ended before the reply did")
                await self._record(episode, asked, *_reply_of(reply))  # some servers leave out [DONE]
        except RequestError as error:
            yield f"data: {json.dumps({'error': _as_error(error)})}\n\n".encode()
        except httpx.HTTPError as error:
            broken = _unreadable(_described(error))
            yield f"data: {json.dumps({'error': _as_error(broken)})}\n\n".encode()
        finally:
            await answer.aclose()


def _added(reply: StreamedReply, data: str) -> bool:
    """Add a chunk; return whether it has nothing but the usage. Raises RequestError if it is no chunk."""
    try:
        return reply.add(json.loads(data))
    except (ValueError, TypeError, AttributeError, LookupError):
        raise _unreadable(
            f"it has a line that is not a chunk of a chat completion: {data[:_SHOWN]!r}"
        ) from None


def _reply_of(reply: StreamedReply) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the reply and the usage of a stream. Raises RequestError if the usage has no numbers."""
    if not _is_usage(reply.usage):
        raise _unreadable(f"its usage has no token counts: {str(reply.usage)[:_SHOWN]}")
    return reply.message(), reply.usage


def _is_usage(usage: Any) -> bool:
    numbers = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _unreadable(what: str) -> RequestError:
    return RequestError(f"the endpoint's stream cannot be read: {what}", status=502, code="not_a_completion")


def _described(error: Exception) -> str:
    return str(error) or type(error).__name__


def _completion_of(answer: httpx.Response) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the reply and the usage of a chat completion. Raises RequestError 502 for any other answer."""
    try:
        tree = answer.json()
        reply, usage = tree["choices"][0]["message"], tree.get("usage") or {}
        is_completion = isinstance(reply, Mapping) and _is_usage(usage)
    except (ValueError, LookupError, TypeError, AttributeError):
        is_completion = False
    if not is_completion:
        raise RequestError(
            f"the endpoint's answer is not a chat completion: {answer.text[:_SHOWN]!r}",
            status=502,
            code="not_a_completion",
        )
    return reply, usage


def _sent(body: Mapping[str, Any], model: str, episode: RelayedEpisode) -> dict[str, Any]:
    """Return the request for the endpoint: its model, the temperature of the evaluation, and the limits."""
    sent = {**body, "model": model}
    if episode.temperature is not None:
        sent["temperature"] = episode.temperature
    limit = episode.limits.get("max_completion_tokens")
    if limit is not None:
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        sent[name] = min(limit, body.get(name) or limit)
    return sent


def _refuse_over_limit(episode: RelayedEpisode) -> None:
    """Raise RequestError 403 if the episode has used up one of its limits, as the proxy does."""
    most_turns, most_tokens = episode.limits.get("max_turns"), episode.limits.get("max_tokens")
    if most_turns is not None and episode.calls >= most_turns:
        episode.limit_reached = "max_turns"
    elif most_tokens is not None and episode.sampled_tokens >= most_tokens:
        episode.limit_reached = "max_tokens"
    else:
        return
    raise RequestError(
        f"episode {episode.id} has reached its limit ({episode.limit_reached})",
        status=403,
        code="episode_limit",
    )


def _called(reply: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tools that a reply calls; calls of other kinds are left out."""
    for call in reply.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"]


def _give(episode: RelayedEpisode, rewards: list[Reward]) -> None:
    for reward in rewards:
        episode.rewards[reward.scope, reward.target, reward.name] = reward


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _same(message: Any) -> Any:
    """Return what two messages are compared by: clients leave out fields that are empty."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value not in (None, "", []) and key in _COMPARED}


_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(
        {"error": _as_error(error)}, status_code=error.status, headers={"x-should-retry": "false"}
    )


def _as_error(error: RequestError) -> dict[str, Any]:
    return {
        "message": error.message,
        "type": "invalid_request_error",
        "code": error.code,
        "param": error.param,
    }
