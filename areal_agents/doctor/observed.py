"""The observations of one episode: its recorded turns, the records of its calls, and all requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.doctor.surroundings import Host, Telemetry
from areal_agents.proxy.calls.record import CallRecord
from areal_agents.proxy.dialects.gemini.urls import GENERATE, STREAM, endpoint_of
from areal_agents.proxy.paths import split_path

MODEL_ENDPOINTS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", GENERATE, STREAM}
)
_CONTROL = ("/episodes", "/rewards", "/groups", "/health", "/ready", "/metrics")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that reached the proxy. `path` has neither the episode's key nor the name of a model."""

    method: str
    path: str
    status: int
    client: str


class RequestRecorder:
    """ASGI middleware that records every request except those of the control API, whatever its status."""

    def __init__(self, app: ASGIApp, seen: list[Seen]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_CONTROL):
            await self._app(scope, receive, send)
            return
        status = 499  # if no response starts

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            client = dict(scope["headers"]).get(b"user-agent", b"").decode("latin-1")
            self._seen.append(
                Seen(scope["method"], endpoint_of(split_path(scope["path"])[1]), status, client)
            )


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of one examined episode.

    Attributes:
        given: the episode that was opened for the agent.
        implicit: the episodes that calls without its key opened.
        records: one record per model call.
        requests: all requests that reached the proxy, except those of the control API.
        error: why the agent failed; None if it did not.
        overran: whether the agent was stopped at the time limit.
        is_command: whether the agent is a command.
        source_hosts: the outside hosts that the agent's source names.
        environment_hosts: the outside hosts that the environment names.
        http_proxy: an HTTP proxy through which calls to this machine go, if there is one.
        telemetry: the frameworks that report to outside servers.
        timeout_s: the time limit in seconds.
        imported: the names of the packages that the agent imports.
        turns: the turns of all the episodes.
    """

    given: RecordedEpisode
    implicit: tuple[RecordedEpisode, ...]
    records: tuple[CallRecord, ...]
    requests: tuple[Seen, ...]
    error: str | None
    overran: bool
    is_command: bool
    source_hosts: tuple[Host, ...] = ()
    environment_hosts: tuple[Host, ...] = ()
    http_proxy: Host | None = None
    telemetry: tuple[Telemetry, ...] = ()
    timeout_s: float = 0.0
    imported: frozenset[str] = frozenset()
    turns: tuple[Turn, ...] = field(init=False)

    def __post_init__(self) -> None:
        all_turns = (turn for episode in (self.given, *self.implicit) for turn in episode.turns)
        object.__setattr__(self, "turns", tuple(all_turns))
