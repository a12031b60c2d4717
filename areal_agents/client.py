"""Clients of the proxy's control API, for agents that open their own episodes and for tools around a run.

The two clients differ only in `await`. A refused call raises RequestError with the server's message, and
every call has a time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from areal_agents.core.reward_values import RewardValue, checked_reward
from areal_agents.direct_http import direct_async_client, direct_client
from areal_agents.errors import RequestError

_CONNECT_RETRIES = 2
_NOT_NOW = (503, 504)  # nothing answers, or another proxy is about to have the episode
_REPEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """The address and the key with which an agent makes its calls part of an episode.

    Attributes:
        id: the episode's id, by which all other calls name it.
        api_key: the episode's own key.
        base_url: the base URL for an OpenAI-compatible client.
    """

    id: str
    api_key: str
    base_url: str

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for an Anthropic client, which adds "/v1" by itself."""
        return self.base_url.removesuffix("/v1")

    @property
    def google_base_url(self) -> str:
        """The base URL for a client of Google's Gemini API, which adds the version by itself."""
        return self.base_url.removesuffix("/v1")


class Client:
    """A synchronous client of the proxy's control API. Also a context manager.

    Args:
        base_url: the proxy, for example "http://127.0.0.1:8000".
        admin_key: the proxy's admin key; not needed for a proxy on loopback that has none.
        timeout_s: time limit of each call, in seconds.
        http_proxy: URL of an HTTP proxy to connect through, if the server is reachable only through one.
            HTTP_PROXY and HTTPS_PROXY are ignored, because an HTTP proxy sees the keys.
    """

    def __init__(
        self,
        base_url: str,
        admin_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        http_proxy: str | None = None,
    ) -> None:
        self._http = direct_client(
            base_url=_checked_url(base_url),
            headers=_headers(admin_key),
            timeout_s=timeout_s,
            connect_retries=_CONNECT_RETRIES,
            http_proxy=http_proxy,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def open_episode(
        self,
        task: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        group: str | None = None,
        group_size: int | None = None,
        surplus: int | None = None,
        index: int | None = None,
        split: str = "train",
        metadata: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> OpenedEpisode:
        """Open an episode.

        Args:
            task: `{"id": …, "input": {…}}`.
            id: the episode's id, which no other episode may have; None: the proxy chooses one.
            group: the id of the episode's group; the members of a group share a baseline.
            group_size: the number of members that complete the group, the same for each of them.
            surplus: how many members beyond `group_size` may be open; those still open when the group is
                complete are aborted.
            index: the episode's index in its group; an index whose earlier attempt failed is a retry.
            split: "train" or "eval"; evaluation episodes are never trained on.
            metadata: a JSON object by which to find the episode again.
            limits: `max_turns`, `max_tokens`, `max_completion_tokens`, `context_tokens`, `time_s`.
            sampling: sampling parameters that replace those that the agent requests.
        """
        body = _opening(task, id, group, group_size, surplus, index, split, metadata, limits, sampling)
        return _opened(self._call("POST", "/episodes", body))

    def reward(
        self,
        episode_id: str,
        value: RewardValue,
        *,
        completion_id: str | None = None,
        name: str | None = None,
    ) -> None:
        """Reward an episode, or the turn that `completion_id` names; see `Episode.reward`."""
        self.post_to_episode(episode_id, "reward", _reward(value, completion_id, name))

    def finish(
        self,
        episode_id: str,
        *,
        truncated: bool = False,
        rewards: Sequence[Mapping[str, Any]] = (),
        require_turn: bool = False,
    ) -> dict[str, Any]:
        """Seal an episode: it takes no further model calls. If any part is refused, nothing is changed.

        Args:
            episode_id: the episode's id.
            truncated: whether the model ran into a limit.
            rewards: rewards to record in the same step, each `{"reward": …}` with `name` or `completion_id`.
            require_turn: refuse (code "no_turn") if the model was never called.
        """
        return self.post_to_episode(episode_id, "finish", _ending(truncated, rewards, require_turn))

    def fail(self, episode_id: str, error: str, *, aborted: bool = False) -> dict[str, Any]:
        """End an episode as failed or aborted, for a reason that is not the model's doing."""
        return self.post_to_episode(episode_id, "fail", {"error": error, "aborted": aborted})

    def begin_group(
        self,
        group: str,
        task: Mapping[str, Any],
        *,
        group_size: int,
        surplus: int,
        runner: str,
        at_most: int,
        at_step: int | None = None,
    ) -> dict[str, Any]:
        """Begin a training group for one of several rollout processes; the answer's `state` says whether.

        Args:
            group, task, group_size, surplus: see `open_episode`.
            runner: the name of the process, which alone may open episodes of the group, with the metadata
                `{"runner": name}`.
            at_most: refuse ("full") if the run would then have more untrained groups than this.
            at_step: refuse as well if this is not the step of the newest version.
        """
        body = _beginning(group, task, group_size, surplus, runner, at_most, at_step)
        return self._call("POST", "/groups", body)

    def claim_group(self, group: str, *, expected: str | None, runner: str | None) -> bool:
        """Take a pending group over from the rollout process `expected`; whether `runner` has it now."""
        body = {"expected": expected, "runner": runner}
        return bool(self._call("POST", f"/groups/{_segment(group)}/claim", body)["claimed"])

    def drop_group(self, group: str, reason: str) -> dict[str, Any]:
        """Drop a group: it will not be trained on."""
        return self._call("POST", f"/groups/{_segment(group)}/drop", {"reason": reason})

    def get_episode(self, episode_id: str, *, tokens: bool = False) -> dict[str, Any]:
        """Return an episode's status, rewards and turns; with `tokens`, also the token ids and logprobs."""
        return self._call(
            "GET", f"/episodes/{_segment(episode_id)}", params={"tokens": "1"} if tokens else None
        )

    def list_episodes(
        self, *, split: str | None = None, status: str | None = None, group: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the episodes with this split, status and group, the oldest first."""
        found: list[dict[str, Any]] = []
        filters = _filters(split, status, group)
        while True:
            answer = self._call("GET", "/episodes", params=filters)
            found += answer["episodes"]
            if answer.get("next") is None:
                return found
            filters["after"] = answer["next"]

    def served_version(self) -> int:
        """Return the policy version that the proxy's engine serves now."""
        return int(self._call("GET", "/ready")["version"])

    def post_to_episode(self, episode_id: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to one of an episode's endpoints."""
        return self._call("POST", f"/episodes/{_segment(episode_id)}/{path}", body)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _answer(response)


class AsyncClient:
    """The same client for asyncio; one instance serves any number of concurrent episodes.

    Args:
        base_url, admin_key, timeout_s, http_proxy: see `Client`.
        connections: the most calls at the same time; further calls wait.
        agents_url: the proxy as agents reach it, for `OpenedEpisode.base_url`; None: as the proxy says.
        patience_s: how long the calls that read, reward or end an episode are repeated while the proxy does
            not answer or does not have the episode yet, as when proxies are started again. Repeated, such a
            call has no further effect.
    """

    def __init__(
        self,
        base_url: str,
        admin_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        connections: int = 8,
        http_proxy: str | None = None,
        agents_url: str | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._agents_url = None if agents_url is None else _checked_url(agents_url)
        self._patience_s = patience_s
        # Calls wait here, because httpx walks its whole queue of waiting requests on every call.
        self._free = asyncio.Semaphore(connections)
        self._http = direct_async_client(
            base_url=_checked_url(base_url),
            headers=_headers(admin_key),
            timeout_s=timeout_s,
            connect_retries=_CONNECT_RETRIES,
            connections=connections,
            http_proxy=http_proxy,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def open_episode(
        self,
        task: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        group: str | None = None,
        group_size: int | None = None,
        surplus: int | None = None,
        index: int | None = None,
        split: str = "train",
        metadata: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> OpenedEpisode:
        """See `Client.open_episode`."""
        body = _opening(task, id, group, group_size, surplus, index, split, metadata, limits, sampling)
        opened = _opened(await self._call("POST", "/episodes", body))
        if self._agents_url is None:
            return opened
        return replace(opened, base_url=f"{self._agents_url}/e/{opened.base_url.rpartition('/e/')[2]}")

    async def reward(
        self,
        episode_id: str,
        value: RewardValue,
        *,
        completion_id: str | None = None,
        name: str | None = None,
    ) -> None:
        """See `Client.reward`."""
        await self.post_to_episode(episode_id, "reward", _reward(value, completion_id, name))

    async def finish(
        self,
        episode_id: str,
        *,
        truncated: bool = False,
        rewards: Sequence[Mapping[str, Any]] = (),
        require_turn: bool = False,
    ) -> dict[str, Any]:
        """See `Client.finish`."""
        return await self.post_to_episode(episode_id, "finish", _ending(truncated, rewards, require_turn))

    async def fail(self, episode_id: str, error: str, *, aborted: bool = False) -> dict[str, Any]:
        """See `Client.fail`."""
        return await self.post_to_episode(episode_id, "fail", {"error": error, "aborted": aborted})

    async def begin_group(
        self,
        group: str,
        task: Mapping[str, Any],
        *,
        group_size: int,
        surplus: int,
        runner: str,
        at_most: int,
        at_step: int | None = None,
    ) -> dict[str, Any]:
        """See `Client.begin_group`."""
        body = _beginning(group, task, group_size, surplus, runner, at_most, at_step)
        return await self._call("POST", "/groups", body)

    async def claim_group(self, group: str, *, expected: str | None, runner: str | None) -> bool:
        """See `Client.claim_group`."""
        body = {"expected": expected, "runner": runner}
        return bool((await self._call("POST", f"/groups/{_segment(group)}/claim", body))["claimed"])

    async def drop_group(self, group: str, reason: str) -> dict[str, Any]:
        """See `Client.drop_group`."""
        return await self._call("POST", f"/groups/{_segment(group)}/drop", {"reason": reason})

    async def get_episode(self, episode_id: str, *, tokens: bool = False) -> dict[str, Any]:
        """See `Client.get_episode`."""
        params = {"tokens": "1"} if tokens else None
        return await self._repeat("GET", f"/episodes/{_segment(episode_id)}", params=params)

    async def list_episodes(
        self, *, split: str | None = None, status: str | None = None, group: str | None = None
    ) -> list[dict[str, Any]]:
        """See `Client.list_episodes`."""
        found: list[dict[str, Any]] = []
        filters = _filters(split, status, group)
        while True:
            answer = await self._call("GET", "/episodes", params=filters)
            found += answer["episodes"]
            if answer.get("next") is None:
                return found
            filters["after"] = answer["next"]

    async def served_version(self) -> int:
        """See `Client.served_version`."""
        return int((await self._call("GET", "/ready"))["version"])

    async def post_to_episode(self, episode_id: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `Client.post_to_episode`."""
        return await self._repeat("POST", f"/episodes/{_segment(episode_id)}/{path}", body)

    async def _repeat(self, method: str, path: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        """As `_call`, repeated for `patience_s` while the proxy cannot answer."""
        give_up_at = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._call(method, path, *arguments, **named)
            except RequestError as error:
                if error.status not in _NOT_NOW or time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_REPEAT_S)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            async with self._free:
                response = await self._http.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _answer(response)


def _checked_url(base_url: str) -> str:
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
    return base_url.rstrip("/")


def _headers(admin_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {admin_key}"} if admin_key else {}


def _opening(
    task: Mapping[str, Any] | None,
    id: str | None,
    group: str | None,
    group_size: int | None,
    surplus: int | None,
    index: int | None,
    split: str,
    metadata: Mapping[str, Any] | None,
    limits: Mapping[str, Any] | None,
    sampling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    body = {
        "task": task,
        "id": id,
        "group": group,
        "group_size": group_size,
        "surplus": surplus,
        "index": index,
        "split": split,
        "metadata": metadata,
        "limits": limits,
        "sampling": sampling,
    }
    return {key: value for key, value in body.items() if value is not None}


def _beginning(
    group: str,
    task: Mapping[str, Any],
    group_size: int,
    surplus: int,
    runner: str,
    at_most: int,
    at_step: int | None,
) -> dict[str, Any]:
    return {
        "id": group,
        "task": task,
        "group_size": group_size,
        "surplus": surplus,
        "runner": runner,
        "at_most": at_most,
        "at_step": at_step,
    }


def _opened(answer: Mapping[str, Any]) -> OpenedEpisode:
    return OpenedEpisode(id=answer["id"], api_key=answer["key"], base_url=answer["base_url"])


def _reward(value: RewardValue, completion_id: str | None, name: str | None) -> dict[str, Any]:
    body = {"reward": checked_reward(value), "completion_id": completion_id, "name": name}
    return {key: item for key, item in body.items() if item is not None}


def _ending(truncated: bool, rewards: Sequence[Mapping[str, Any]], require_turn: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"truncated": truncated}
    if rewards:
        body["rewards"] = list(rewards)
    if require_turn:
        body["require_turn"] = True
    return body


def _filters(split: str | None, status: str | None, group: str | None) -> dict[str, str]:
    given = (("split", split), ("status", status), ("group", group))
    return {key: value for key, value in given if value is not None}


def _segment(value: str) -> str:
    return quote(value, safe="")


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_success:
        return response.json() if response.content else {}
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code") or "error"
    except (ValueError, KeyError, TypeError):
        message, code = response.text[:500] or response.reason_phrase, "error"
    raise RequestError(message, status=response.status_code, code=code)


def _unreachable(base_url: httpx.URL, error: httpx.HTTPError) -> RequestError:
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return RequestError(f"{base_url} did not answer in time", status=504, code="timeout")
    what = str(error) or type(error).__name__
    return RequestError(
        f"cannot reach {base_url}: {what}; is `areal-agents serve` running there?",
        status=503,
        code="unreachable",
    )
