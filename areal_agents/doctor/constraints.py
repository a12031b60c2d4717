"""Says which setting of an agent's framework lets the model answer without a grammar.

Frameworks that ask for a declared type force a tool call or a JSON schema. Their turns are sampled under a
grammar, and not trained on by default.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_ANY_FRAMEWORK = (
    "Let the model answer freely: leave out response_format (text.format, output_config), set tool_choice to "
    "auto, and ask for the form in the prompt"
)


@dataclass(frozen=True, slots=True)
class _Framework:
    """A framework, the package that it is imported as, and the setting; `client` is in its User-Agent."""

    name: str
    package: str
    setting: str
    client: str = ""


_FRAMEWORKS = (
    _Framework(
        "smolagents",
        "smolagents",
        'give the model tool_choice="auto": OpenAIServerModel(…, tool_choice="auto")',
    ),
    _Framework(
        "pydantic-ai",
        "pydantic_ai",
        "give the model profile={'supports_forced_tool_choice': False} and keep output_type as it is; "
        "NativeOutput is constrained, and so is PromptedOutput unless the profile has "
        "'supports_json_object_output': False",
        client="pydantic-ai/",
    ),
    _Framework(
        "langchain-openai",
        "langchain_openai",
        'with_structured_output(…, method="function_calling", tool_choice="auto"), or an output parser; '
        "json_mode and json_schema are constrained, and so is create_agent(response_format=…)",
    ),
    _Framework(
        "instructor",
        "instructor",
        "mode=instructor.Mode.MD_JSON; the other modes for OpenAI's API are constrained",
    ),
    _Framework(
        "browser-use",
        "browser_use",
        "ChatOpenAI(…, add_schema_to_system_prompt=True, dont_force_structured_output=True)",
    ),
    _Framework(
        "openai-agents",
        "agents",
        "leave out output_type, and ask for the form in the instructions",
        client="Agents/Python",
    ),
)


def lifting(clients: Collection[str], imported: Collection[str]) -> str:
    """Return how to lift the constraint, by the User-Agents of the calls and the imported packages."""
    settings = [
        f"{known.name}: {known.setting}"
        for known in _FRAMEWORKS
        if known.package in imported or (known.client and any(known.client in client for client in clients))
    ]
    return "; ".join(settings) or _ANY_FRAMEWORK
