"""The names that agent code imports: `@episode`, the `Episode` handle, and `current_key`.

This module needs only the standard library, so that it loads beside any agent framework. The same agent
function runs in three ways: inside a training run, which passes the handle; as a command that a run starts,
which finds the episode in its environment; and on its own, where it calls the server that OPENAI_BASE_URL
names.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from areal_agents.core.reward_values import RewardValue, checked_reward
from areal_agents.errors import AgentError

EPISODE_ID_VARIABLE = "AREAL_AGENTS_EPISODE_ID"
DEFAULT_BASE_URL = "https://api.openai.com/v1"  # the default of the OpenAI SDK
DEFAULT_ANTHROPIC_BASE_URL = "https://api.anthropic.com"
DEFAULT_GOOGLE_BASE_URL = "https://generativelanguage.googleapis.com"
PLACEHOLDER_KEY = "EMPTY"  # for servers that check no key; the SDKs refuse to be without one

Agent = TypeVar("Agent", bound=Callable[..., Any])
Report = Callable[[str, dict[str, Any]], None]

_current: ContextVar[Episode | None] = ContextVar("areal_agents_episode", default=None)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where an episode leaves the recorded one that it repeats (`areal-agents fork`).

    An agent that can bring its environment there by itself need not repeat the earlier calls: its first call
    may be that of the fork, with these messages.

    Attributes:
        episode: the id of the recorded episode.
        turn: the number, from 1, of the turn that is sampled again.
        messages: the conversation that this turn answered, in the form of chat completions.
        results: the recorded results of tool calls, by the id of the call.
    """

    episode: str
    turn: int
    messages: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    results: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One attempt at a task, as the agent sees it.

    Attributes:
        id: the episode's id; "" outside a run.
        base_url: the base URL for an OpenAI-compatible client; calls through it are recorded in this episode.
        api_key: the episode's own key.
        report: called with a path and a body to send a reward or a failure to the run; does nothing outside.
        fork: where this episode leaves a recorded one; None for nearly all episodes.
    """

    id: str
    base_url: str
    api_key: str
    report: Report = field(default=lambda path, body: None, repr=False)
    fork: ForkPoint | None = None

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for an Anthropic client, which adds "/v1" by itself.

        Outside a run it is ANTHROPIC_BASE_URL or, if that is not set, Anthropic's API.
        """
        if self.id:
            return self.base_url.removesuffix("/v1")
        return os.environ.get("ANTHROPIC_BASE_URL") or DEFAULT_ANTHROPIC_BASE_URL

    @property
    def google_base_url(self) -> str:
        """The base URL for a client of Google's Gemini API, which adds the version by itself.

        Outside a run it is GOOGLE_GEMINI_BASE_URL or, if that is not set, Google's API.
        """
        if self.id:
            return self.base_url.removesuffix("/v1")
        return os.environ.get("GOOGLE_GEMINI_BASE_URL") or DEFAULT_GOOGLE_BASE_URL

    def reward(self, value: RewardValue, completion_id: str | None = None, name: str = "return") -> None:
        """Reward the whole episode, or the turn that `completion_id` names.

        A completion id is the id of a response, as the API that the agent called returned it.

        Rewards with different names are summed; a reward under a name that was used before replaces the
        earlier one. A dict gives several rewards at once: by turn if its keys are completion ids, else by
        name.

        Raises:
            AgentError: a reward is not a finite number.
        """
        body: dict[str, Any] = {"reward": checked_reward(value)}
        if not isinstance(value, Mapping):
            body["name"] = name
        if completion_id is not None:
            body["completion_id"] = completion_id
        self.report("reward", body)

    def recorded_result(self, call_id: str) -> str | None:
        """Return the recorded result of a tool call that this episode repeats; None: run the tool.

        Tools that must not run again, or whose results change, are repeated in a fork like this:
        ``result = ep.recorded_result(call.id)``, and ``if result is None: result = tool(...)``.
        """
        return None if self.fork is None else self.fork.results.get(call_id)

    def fail(self, error: str) -> None:
        """Mark the episode as failed, for a reason that is not the model's doing; it will be retried."""
        self.report("fail", {"error": error})

    @classmethod
    def from_environment(cls) -> Episode:
        """Return the episode that a run named in this process's environment, or a handle without an episode.

        A handle without an episode uses OPENAI_BASE_URL and OPENAI_API_KEY, and discards its rewards.
        """
        base_url = os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
        api_key = os.environ.get("OPENAI_API_KEY") or PLACEHOLDER_KEY
        episode_id = os.environ.get(EPISODE_ID_VARIABLE, "")
        if not episode_id:
            return cls("", base_url, api_key)
        return cls(episode_id, base_url, api_key, report=_report_over_http(episode_id, base_url, api_key))


def episode(agent: Agent) -> Agent:
    """Mark a function as an agent that can be trained.

    The function is ``async def agent(task: dict, ep: Episode) -> None | bool | float | dict``, or the same
    without ``async``. Its return value is the episode's reward, named "return"; None gives no reward. The
    function can still be called directly: ``agent(task)`` without an episode uses OPENAI_BASE_URL.

    Build a client from the handle, ``AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)``, or derive it
    from a shared client, ``client.with_options(base_url=ep.base_url, api_key=ep.api_key)``, which costs
    almost nothing because the connection pool is shared. A client made at module level takes
    ``api_key=areal_agents.current_key`` instead.

    Raises:
        AgentError: the function cannot be called as ``agent(task, ep)``.
    """
    check_signature(agent)
    if inspect.iscoroutinefunction(agent):

        @functools.wraps(agent)
        async def run_async(task: Mapping[str, Any], ep: Episode | None = None) -> Any:
            if ep is not None:
                return await agent(task, ep)
            with _called_directly() as own:
                return _rewarded(own, await agent(task, own))

        return cast(Agent, run_async)

    @functools.wraps(agent)
    def run_sync(task: Mapping[str, Any], ep: Episode | None = None) -> Any:
        if ep is not None:
            return agent(task, ep)
        with _called_directly() as own:
            return _rewarded(own, agent(task, own))

    return cast(Agent, run_sync)


class _AwaitableKey(str):
    """A key that can also be awaited: sync clients call for a string, async clients for an awaitable."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, str]:
        return str(self)
        yield


def current_key() -> Any:
    """Return the key of the episode that runs in this context, for ``api_key=current_key`` of a client.

    It works for ``OpenAI`` and ``AsyncOpenAI``. The client calls it once per request, in the context of the
    caller, and it never suspends, so concurrent episodes can share one client. In a thread that the agent
    starts itself, run the function in ``contextvars.copy_context()`` (``asyncio.to_thread`` does this by
    itself). Outside an episode the key is OPENAI_API_KEY.

    Raises:
        AgentError: no episode runs in this context, and OPENAI_API_KEY is not set.
    """
    running = _current.get()
    key = running.api_key if running is not None else os.environ.get("OPENAI_API_KEY")
    if not key:
        raise AgentError(
            "current_key() was called where no episode is running, and OPENAI_API_KEY is not set; in a "
            "thread that your agent starts, run the call in contextvars.copy_context()"
        )
    return _AwaitableKey(key)


def running_episode() -> Episode:
    """Return the episode that runs in this context. Raises AgentError if none does."""
    running = _current.get()
    if running is None:
        raise AgentError("no episode runs here; pass the episode, or call this in an @episode function")
    return running


@contextmanager
def running(ep: Episode) -> Iterator[Episode]:
    """Make `current_key` return the key of `ep` inside the block."""
    token = _current.set(ep)
    try:
        yield ep
    finally:
        _current.reset(token)


def check_signature(agent: Callable[..., Any]) -> None:
    """Raise AgentError unless `agent` can be called as ``agent(task, ep)``."""
    name = getattr(agent, "__name__", repr(agent))
    if not callable(agent):
        raise AgentError(f"an agent must be a function, got {name}")
    try:
        inspect.signature(agent).bind({}, None)
    except TypeError as error:
        raise AgentError(
            f"{name}{inspect.signature(agent)} cannot be called as {name}(task, ep): {error}"
        ) from error
    if inspect.isasyncgenfunction(agent) or inspect.isgeneratorfunction(agent):
        raise AgentError(
            f"{name} is a generator function; an agent must return its reward, or None, and not yield"
        )


@contextmanager
def _called_directly() -> Iterator[Episode]:
    with running(Episode.from_environment()) as own:
        yield own


def _rewarded(own: Episode, value: Any) -> Any:
    if value is not None and own.id:
        own.reward(value)
    return value


def _report_over_http(episode_id: str, base_url: str, api_key: str) -> Report:
    def report(path: str, body: dict[str, Any]) -> None:
        from areal_agents.client import Client  # imported late, because it loads an HTTP library

        with Client(base_url.split("/e/")[0].removesuffix("/v1"), api_key) as client:
            client.post_to_episode(episode_id, path, body)

    return report
