"""Every case of every integration: which agent runs, in which environment, and what its model says to it.

A new one is a folder here and an entry in CASES. The ordinary tests run the cases that have `turns`;
`make integrations` runs all of them, and writes a row of docs/integrations.md for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from integrations.conversations import (
    AS_JSON,
    BROWSING,
    CODE,
    EXTRACTED,
    FINAL_ANSWER,
    GEMINI_CLI,
    MINI,
    PARALLEL,
    REACT,
    SHELL,
    STRUCTURED,
    TRAVEL,
    WEATHER,
    Conversation,
    and_then,
    call,
    shell_talk,
    weather_talk,
)

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
        cli: the name of a command-line agent, which runs as `agent: {cli: …}` runs it; with several questions
            in the Agent Client Protocol.
        cannot: why the agent is not run at all, for the table.
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
    cli: str = ""
    cannot: str = ""
    why: str = ""

    @property
    def id(self) -> str:
        """Names the case among the tests and in the table."""
        words = [key if value is True else str(value) for key, value in self.options.items() if value]
        return "-".join([self.folder, *filter(None, [self.name]), *words])


def _cli(
    cli: str, package: str, group: str = "", *, shell: str, argument: str = "command", more: str = ""
) -> Case:
    """Return the case of a command-line agent, of whose tools `shell` runs a command; `more` are further
    arguments of it, as JSON."""
    return Case("cli", package, group, shell_talk(shell, argument, more), name=cli, cli=cli)


def _acp(case: Case, *calls: str) -> Case:
    """Return the case of a command-line agent with a second prompt, in the Agent Client Protocol; the model
    makes the calls after it."""
    return replace(case, name=f"{case.name}-acp", conversation=and_then(case.conversation, *calls))


def _exact(case: Case, turns: tuple[Expected, ...], reused: float = 0.5) -> Case:
    """Return a case that the ordinary tests run too."""
    return replace(case, turns=turns, reused=reused)


def _each(case: Case, *options: Mapping[str, Any]) -> list[Case]:
    """Return a case once as it is, and once with each of these options."""
    return [case, *(replace(case, options=given) for given in options)]


_STREAM: dict[str, Any] = {"stream": True}
_CHAT: dict[str, Any] = {"api": "chat"}
_RESPONSES: dict[str, Any] = {"api": "responses"}

_HANDOFF = "a handoff changes the instructions, which are at the beginning of the prompt"
_UNDER_A_GRAMMAR = "replies are sampled under a grammar, and trained with `train_constrained`"
_GRAMMAR = f"the form of the answer is forced: {_UNDER_A_GRAMMAR}"
_FORCED_CALL = f"an `output_type` without `str` forces tool calls: {_UNDER_A_GRAMMAR}"
_ONE_MESSAGE = "all that came before is written into one message, so every call is a new sample"
_CALLS_AS_TEXT = "calls are sent back as text, so every call of the model is a new sample"
_FORCED_TEXT = f"{_CALLS_AS_TEXT}; each must call a tool (`tool_choice: required`): {_UNDER_A_GRAMMAR}"
_FORCED_STEPS = f"{_ONE_MESSAGE}; {_UNDER_A_GRAMMAR}"
_ONE_CALL = "each question is a conversation of its own"
_MOVED = "the answer to a question is sent back before the second round of calls that led to it"
_JOINED = "the thread joins the texts of all streamed replies to a question, and so changes them"

_OPENAI = Case("openai_sdk", "openai", "openai3")
_NODE = Case("openai_node", "openai")
_AGENTS = Case("openai_agents", "openai-agents", "openai3")
_PYDANTIC = Case("pydantic_ai", "pydantic-ai-slim", "openai3")
_LANGGRAPH = Case("langgraph", "langchain", "openai3")
_INSTRUCTOR = Case("instructor", "instructor", "openai2", EXTRACTED, why=f"{_ONE_CALL}; {_GRAMMAR}")
_SMOLAGENTS = Case("smolagents", "smolagents", "openai2", CODE, why=_CALLS_AS_TEXT)
_KERNEL = Case("semantic_kernel", "semantic-kernel", "openai2", weather_talk("Forecasts-weather"))

# The packages of these are in the extra `integrations`, and the frameworks start fast.
_EXACT: tuple[Case, ...] = (
    *(
        _exact(case, _WEATHER_TURNS)
        for case in (
            *_each(_OPENAI, _STREAM, _RESPONSES, _RESPONSES | _STREAM, {"api": "previous_response"}),
            *_each(_NODE, _STREAM, _RESPONSES, _RESPONSES | _STREAM),
            *_each(Case("anthropic_sdk", "anthropic", "openai3"), _STREAM),
            *_each(Case("google_genai", "google-genai", "google"), _STREAM),
            *_each(_LANGGRAPH, _STREAM, _RESPONSES),
            replace(_PYDANTIC, options={"api": "chat", "structured": False}),
        )
    ),
    *(
        _exact(case, (None, "new conversation", 1, 0, STRIPS, "edited", 5), reused=0.4)
        for case in _each(replace(_AGENTS, name="travel", conversation=TRAVEL, why=_HANDOFF), _STREAM, _CHAT)
    ),
    *(
        _exact(case, (None, "new conversation", 1, "new conversation", 3, 0))
        for case in _each(replace(_AGENTS, name="parallel", conversation=PARALLEL), _CHAT)
    ),
    *(
        _exact(case, (None, 0, 1, STRIPS), reused=0.4)
        for case in _each(
            replace(_PYDANTIC, name="structured", conversation=STRUCTURED, why=_FORCED_CALL),
            _CHAT,
            _CHAT | _STREAM,
        )
    ),
)

_IN_HARBOR = (
    "it is not a program of its own: Harbor runs it in the container of a task, and drives tmux there; run "
    "Harbor as the command"
)
_GEMINI_CLI = replace(
    _cli("gemini-cli", "@google/gemini-cli", shell="run_shell_command"), conversation=GEMINI_CLI
)
_OPENCODE = _cli("opencode", "opencode-ai", shell="bash", more=', "description": "x"')
_QWEN_CODE = _cli(
    "qwen-code", "@qwen-code/qwen-code", shell="run_shell_command", more=', "is_background": false'
)
_CLI: tuple[Case, ...] = (
    _cli("claude-code", "@anthropic-ai/claude-code", shell="Bash", more=', "description": "x"'),
    _cli("codex", "@openai/codex", shell="exec_command", argument="cmd"),
    _GEMINI_CLI,
    _acp(_GEMINI_CLI, call("read_file", '{ "file_path" :"notes.txt"}')),
    _OPENCODE,
    _acp(_OPENCODE, call("bash", '{"command":  "cat word.txt", "description": "x"}')),
    _cli("pi", "@mariozechner/pi-coding-agent", shell="bash"),
    _QWEN_CODE,
    _acp(_QWEN_CODE, call("run_shell_command", '{"command":  "cat word.txt", "is_background": false}')),
    _cli("mistral-vibe", "mistral-vibe", "vibe", shell="bash"),
    replace(_cli("mini-swe-agent", "mini-swe-agent", "openai2", shell="bash"), conversation=MINI),
    _cli("openhands", "openhands-sdk", "openhands", shell="terminal"),
    Case("cli", "harbor", "harbor", name="terminus-2", cannot=_IN_HARBOR),
)

CASES: tuple[Case, ...] = (
    *_EXACT,
    # openai 3
    replace(_OPENAI, conversation=AS_JSON, options={"api": "parse"}, why=_GRAMMAR),
    Case("deepagents", "deepagents", "openai3"),
    *_each(Case("autogen_agentchat", "autogen-agentchat", "openai3"), _STREAM),
    *_each(Case("ag2", "ag2", "openai3"), _STREAM),
    *_each(Case("agent_framework", "agent-framework-core", "openai3"), _CHAT, _CHAT | _STREAM),
    Case("qwen_agent", "qwen-agent", "openai3"),
    *_each(Case("agno", "agno", "openai3"), _STREAM, _RESPONSES),
    *_each(Case("haystack", "haystack-ai", "openai3"), _STREAM),
    *_each(Case("inspect_ai", "inspect-ai", "openai3"), _CHAT),
    *_each(Case("mcp_tools", "mcp", "openai3"), _STREAM),
    # openai 2
    *_each(Case("litellm", "litellm", "openai2"), _STREAM),
    Case("llama_index", "llama-index-core", "openai2"),
    Case("strands", "strands-agents", "openai2"),
    Case("dspy", "dspy", "openai2", REACT, why=_ONE_MESSAGE),
    _SMOLAGENTS,
    replace(_SMOLAGENTS, conversation=FINAL_ANSWER, options={"calls": "tools"}, why=_FORCED_TEXT),
    _INSTRUCTOR,
    replace(_INSTRUCTOR, conversation=AS_JSON, options={"mode": "JSON_SCHEMA"}),
    replace(_INSTRUCTOR, conversation=AS_JSON, options={"mode": "MD_JSON"}, why=_ONE_CALL),
    _KERNEL,
    replace(_KERNEL, options=_STREAM, why=_JOINED),
    Case("mini_swe_agent", "mini-swe-agent", "openai2", SHELL),
    # Each in an environment of its own.
    *_each(Case("google_adk", "google-adk", "adk"), _STREAM),
    Case("camel", "camel-ai", "camel", why=_MOVED),
    *_each(Case("crewai", "crewai", "crewai"), _STREAM),
    Case("browser_use", "browser-use", "browser", BROWSING, why=_ONE_MESSAGE),
    Case("browser_use", "browser-use", "browser", BROWSING, {"forced": True}, why=_FORCED_STEPS),
    # Node.
    *_each(Case("ai_sdk", "ai"), _STREAM, _RESPONSES, _RESPONSES | _STREAM),
    *_each(Case("langchain_js", "langchain"), _STREAM, _RESPONSES),
    *_each(Case("mastra", "@mastra/core"), _STREAM),
    *_CLI,
)
