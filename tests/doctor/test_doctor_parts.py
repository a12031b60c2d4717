"""The doctor's parts that need no episode: generated values, tools in prompts, an agent's surroundings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Task
from areal_agents.core.trajectory import Fork, ForkReason, Turn
from areal_agents.doctor.changing_text import changing_texts, rules_of
from areal_agents.doctor.constraints import lifting
from areal_agents.doctor.forks import EXPLANATIONS, explanation_of
from areal_agents.doctor.instances import instance_of
from areal_agents.doctor.observed import Observed
from areal_agents.doctor.run import read_task
from areal_agents.doctor.scripted_model import tools_in
from areal_agents.doctor.surroundings import (
    hosts_in_environment,
    hosts_in_sources,
    http_proxy_in_the_way,
    imports_of,
    sources_of,
    telemetry_of,
)
from areal_agents.doctor.tiny_model import write_tiny_model
from areal_agents.errors import ConfigError
from areal_agents.proxy.volatile import VolatileRule, VolatileText
from areal_agents.rendering import ChatRenderer


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "example"),
        ({"type": "string", "maxLength": 3}, "exa"),
        ({"type": "string", "minLength": 9}, "examplexx"),
        ({"type": "string", "format": "date"}, "2025-01-15"),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "number", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": ["null", "boolean"]}, True),
        ({"enum": ["b", "a"]}, "b"),
        ({"const": 7}, 7),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
        ({"properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}, {"a": "example"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, 1),
        ({"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]}, {"a": 1}),
    ],
)
def test_instances_fit_their_schema(schema: dict[str, Any], value: object) -> None:
    assert instance_of(schema) == value


def test_the_instance_of_a_recursive_schema_is_finite() -> None:
    schema = {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}}
    assert json.dumps(instance_of({**schema, "$ref": "#/$defs/n"})).startswith('{"n": {"n"')


def test_the_built_in_model_encodes_every_string(tmp_path: Path) -> None:
    renderer = ChatRenderer.from_folder(write_tiny_model(tmp_path))
    assert renderer.family == "qwen3"
    text = "héllo \U0001f600 \x00\n<tool_call>"
    assert renderer.tokenizer.decode(renderer.tokenizer.encode(text)) == text
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
    }
    prompt = renderer.tokenizer.decode(renderer.render([Message("user", "Hi")], [tool]).tolist())
    assert [(tool.name, tool.parameters) for tool in tools_in(prompt)] == [("f", {"type": "object"})]


def test_calls_are_not_mistaken_for_tools() -> None:
    assert tools_in('{"name": "f", "arguments": {"parameters": {}}} {"name": "g", "parameters": 1}') == []


def test_every_reason_for_a_fork_is_explained() -> None:
    assert set(EXPLANATIONS) == set(get_args(ForkReason))
    assert explanation_of(Fork("t", "edited", 2)) == EXPLANATIONS["edited"]
    assert "system message" in explanation_of(Fork("t", "edited", 0)).fix


def test_hosts_in_the_environment_are_named_without_their_secrets() -> None:
    environment = {
        "OPENAI_BASE_URL": "https://api.openai.com/v1",
        "JUDGE_BASE_URL": "https://user:secret@judge.example.com/v1?key=secret",
        "LOCAL_ENDPOINT": "http://127.0.0.1:1",
        "HOME_PAGE": "https://example.com",
        "BAD_ENDPOINT": "https://[",
    }
    found = hosts_in_environment(environment, overridden={"OPENAI_BASE_URL"})
    assert [(host.host, host.where) for host in found] == [("judge.example.com", "JUDGE_BASE_URL")]


def test_an_http_proxy_is_named_unless_this_machine_is_excluded() -> None:
    environment = {"HTTP_PROXY": "http://proxy.example.com:3128"}
    proxy = http_proxy_in_the_way(environment)
    assert proxy is not None and proxy.host == "proxy.example.com"
    assert http_proxy_in_the_way({**environment, "NO_PROXY": "example.org, 127.0.0.1"}) is None
    assert http_proxy_in_the_way({}) is None


def test_telemetry_is_named_unless_it_is_off() -> None:
    (found,) = telemetry_of({"crewai", "json"}, [], {})
    assert (found.variable, found.value) == ("CREWAI_DISABLE_TELEMETRY", "true")
    assert telemetry_of({"crewai"}, [], {"CREWAI_DISABLE_TELEMETRY": "1"}) == []
    assert telemetry_of({"agno"}, [], {"AGNO_TELEMETRY": "0"}) == []
    (seen,) = telemetry_of((), ["Agents/Python 0.24.0"], {"OPENAI_AGENTS_DISABLE_TRACING": "0"})
    assert seen.framework == "openai-agents"
    assert telemetry_of({"agents"}, [], {}, "RunConfig(tracing_disabled=True)") == []


def test_sources_are_read_with_the_modules_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import json\nfrom tools import search\n")
    (tmp_path / "tools.py").write_text('import crewai.llm\nURL = "https://api.example.com/x"\n')
    (tmp_path / "other.py").write_text('URL = "https://other.example.com"\n')
    files = sources_of(["python", str(tmp_path / "agent.py")], None)
    assert [path.name for path in files] == ["agent.py", "tools.py"]
    assert imports_of(files) == {"json", "tools", "crewai"}
    assert [(host.host, host.where) for host in hosts_in_sources(files)] == [
        ("api.example.com", "tools.py:2")
    ]
    (tmp_path / "broken.py").write_text("def")
    assert imports_of(sources_of([str(tmp_path / "broken.py")], None)) == set()


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_task_must_be_a_json_object(text: str) -> None:
    assert read_task('{"question": 1}') == {"question": 1}
    with pytest.raises(ConfigError, match="--task must be a JSON object"):
        read_task(text)


def observed(*conversations: tuple[Message, ...]) -> Observed:
    """Return an episode with a root for each conversation, to which the policy replied "ok"."""
    turns = tuple(
        Turn(
            id=f"t{index}",
            parent=None,
            new_messages=messages,
            new_prompt_ids=[index],
            completion=Completion([1], [-0.5], [0], "stop"),
            reply=Message("assistant", "ok"),
            sampling=SamplingParams(8),
        )
        for index, messages in enumerate(conversations)
    )
    episode = RecordedEpisode("e", Task("t", {}), turns, "finished", ())
    return Observed(episode, (), (), (), None, False, False)


def talk(*systems: str, user: str = "Hi.") -> Observed:
    """Return a conversation with a different system message at each call."""
    said = [Message("user", user)]
    found = []
    for system in systems:
        found.append((Message("system", system), *said))
        said += [Message("assistant", "ok"), Message("user", "Go on.")]
    return observed(*found)


@pytest.mark.parametrize(
    ("first", "second", "third", "pattern"),
    [
        ("Time: 9:05. Go.", "Time: 10:00. Go.", "Time: 11:10. Go.", "Time: [0-9A-Za-z_:.+/-]+"),
        ("Count is 9", "Count is 10", "Count is 311", "Count is [0-9]+"),
        ("A; cch=fa690; b", "A; cch=71fea; b", "A; cch=00000; b", "A; cch=[0-9a-f]+"),
        ('{"name": "a b"}', '{"name": "c"}', '{"name": "d, e"}', r'\{"name": "[^\n"]+'),
        ("Note: a b\nGo.", "Note: c\nGo.", "Note: \nGo.", r"Note: [^\n]*"),
        ("Go.\nAt (x) 1", "Go.\nAt (x) 2", "Go.\nAt (x) 33", r"At \(x\) [0-9]+"),
        ("It is Mon 1 May.", "It is Tue 2 May.", "It is Wed 31 May.", r"It is [^\n]+"),
    ],
)
def test_the_proposed_rule_matches_all_forms_of_a_changing_text(
    first: str, second: str, third: str, pattern: str
) -> None:
    texts = changing_texts(talk(first, second, third))
    rules = VolatileText({n: VolatileRule.model_validate(rule) for n, rule in rules_of(texts).items()})
    marked = rules.marked([Message("system", text) for text in (first, second, third)], "")
    assert [text.pattern for text in texts] == [pattern] and texts[0].turns == [2, 3]
    assert len({message.digest for message in marked}) == 1


@pytest.mark.parametrize(
    "seen",
    [
        talk("Be brief.", "Be brief."),
        talk("1", "2"),  # no text precedes the change
        talk("You are Ann. " * 200, "Reply in verse! " * 300),
        observed((Message("user", "a"),), (Message("user", "Item 2"), Message("assistant", "other"))),
        observed((Message("user", "Item 1"),), (Message("user", "Item 2"),)),  # another conversation
    ],
)
def test_nothing_is_proposed_where_no_rule_applies(seen: Observed) -> None:
    assert changing_texts(seen) == []


@pytest.mark.parametrize(
    ("clients", "imported", "said"),
    [
        ((), {"smolagents", "openai"}, 'smolagents: give the model tool_choice="auto"'),
        (
            ("pydantic-ai/2.68.0",),
            set(),
            "give the model profile={'supports_forced_tool_choice': False}",
        ),
        ((), {"langchain_openai"}, 'langchain-openai: with_structured_output(…, method="function_calling"'),
        ((), {"instructor"}, "instructor: mode=instructor.Mode.MD_JSON"),
        (("OpenAI/Python 3.57.0",), {"openai"}, "Let the model answer freely"),
    ],
)
def test_the_setting_that_lifts_a_constraint_is_named(
    clients: tuple[str, ...], imported: set[str], said: str
) -> None:
    assert said in lifting(clients, imported)
