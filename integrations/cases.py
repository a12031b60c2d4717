"""Every case of every integration: which agent runs, in which environment, and what its model says to it.

A new one is a folder here and an entry in CASES. The ordinary tests run the cases that have `turns`;
`make integrations` runs all of them, and writes a row of docs/integrations.md for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from integrations.conversations import PARALLEL, STRUCTURED, TRAVEL, WEATHER, Conversation

# A turn that continues turn i is expected as i; a root as None if it is the first, else as its reason.
Expected = int | str | None
# With the default `proxy.reasoning`, the template drops the reasoning before the second question, so a root
# begins there.
STRIPS = "template strips reasoning"
_WEATHER_TURNS = (None, 0, 1, STRIPS, 3)


@dataclass(frozen=True)
class Case:
    """One agent, run once.

    Attributes:
        folder: the folder of the agent, which has an agent.py or an agent.mjs unless there is a `command`.
        package: the distribution, or the npm package, whose version the table names.
        group: the environment that the agent runs in: a file of groups/, without .txt. "" if the folder has a
            package.json, from which its environment is made.
        conversation: what is asked, and what the model says.
        options: further keyword arguments of the agent's `run`; an agent.mjs reads them beside the questions.
        name: tells the cases of a folder apart.
        turns: in the ordinary tests, where each recorded turn must hang, in the order of recording (in any
            order if calls run at the same time). Empty: only `make integrations` runs the case.
        reused: in the ordinary tests, at least this share of all prompt tokens must be recorded ids.
        command: the words that start the agent, if it is a command. The questions follow as further words,
            the last line of its standard output must be the answer, and the programs of its environment are
            on the PATH.
        environment: variables that the agent needs, besides those that say where the proxy is.
        why: why not everything is reused and trained, for the table.
    """

    folder: str
    package: str
    group: str = ""
    conversation: Conversation = WEATHER
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    turns: tuple[Expected, ...] = ()
    reused: float = 0.5
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def id(self) -> str:
        """Names the case among the tests and in the table."""
        words = [key if value is True else str(value) for key, value in self.options.items() if value]
        return "-".join([self.folder, *filter(None, [self.name]), *words])


def _exact(folder: str, package: str, **options: Any) -> Case:
    """Return a weather agent that the ordinary tests run too."""
    return Case(folder, package, "openai3", options=options, turns=_WEATHER_TURNS)


def _node(**options: Any) -> Case:
    """Return the weather agent on the Node client, which the ordinary tests run too."""
    return Case("openai_node", "openai", options=options, turns=_WEATHER_TURNS)


def _travel(**options: Any) -> Case:
    turns = (None, "new conversation", 1, 0, STRIPS, "edited", 5)
    why = "the handoff changes the instructions, which are at the beginning of the prompt"
    return Case(
        "openai_agents", "openai-agents", "openai3", TRAVEL, options, "travel", turns, reused=0.4, why=why
    )


def _parallel(**options: Any) -> Case:
    turns = (None, "new conversation", 1, "new conversation", 3, 0)
    return Case("openai_agents", "openai-agents", "openai3", PARALLEL, options, "parallel", turns)


def _structured(**options: Any) -> Case:
    turns = (None, 0, 1, STRIPS)
    why = "the model must call a tool (`tool_choice: required`), so replies are sampled under a grammar"
    package = "pydantic-ai-slim"
    return Case(
        "pydantic_ai", package, "openai3", STRUCTURED, options, "structured", turns, reused=0.4, why=why
    )


CASES: tuple[Case, ...] = (
    _exact("openai_sdk", "openai"),
    _exact("openai_sdk", "openai", stream=True),
    _exact("openai_sdk", "openai", api="responses"),
    _exact("openai_sdk", "openai", api="responses", stream=True),
    _exact("openai_sdk", "openai", api="previous_response"),
    _node(),
    _node(stream=True),
    _node(api="responses"),
    _node(api="responses", stream=True),
    _exact("anthropic_sdk", "anthropic"),
    _exact("anthropic_sdk", "anthropic", stream=True),
    Case("google_genai", "google-genai", "google", turns=_WEATHER_TURNS),
    Case("google_genai", "google-genai", "google", options={"stream": True}, turns=_WEATHER_TURNS),
    _travel(),
    _travel(stream=True),
    _travel(api="chat"),
    _parallel(api="chat"),
    _exact("langgraph", "langchain"),
    _exact("langgraph", "langchain", stream=True),
    _exact("langgraph", "langchain", api="responses"),
    _exact("pydantic_ai", "pydantic-ai-slim", api="chat", structured=False),
    _structured(),
    _structured(api="chat"),
    _structured(api="chat", stream=True),
)
