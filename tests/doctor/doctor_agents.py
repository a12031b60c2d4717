"""Agents with real clients, as users write them: correct ones, and one for each kind of mistake.

Run as a command with the argument openai or anthropic, a client finds the proxy through the environment.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Literal

from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI, OpenAIError
from pydantic import BaseModel

from areal_agents.episode import Episode

MODEL = "any"
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 3}},
    "required": ["query", "limit"],
}
SEARCH = {"type": "function", "function": {"name": "search", "description": "", "parameters": PARAMETERS}}
CLAUDE_SEARCH: Any = {"name": "search", "description": "", "input_schema": PARAMETERS}
PLACE: Any = {
    "name": "place",
    "schema": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]},
}
ELSEWHERE = "https://models.example.invalid/v1"


def _client(ep: Episode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)


def _begin(task: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": task.get("question", "Where is Lyon?")}]


async def good(task: dict[str, Any], ep: Episode) -> float:
    """Calls tools until the model answers in text, and asserts that the arguments follow the schema."""
    messages = _begin(task)
    async with _client(ep) as client:
        while True:
            answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[SEARCH])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(bool(message.content))
            for call in message.tool_calls:
                assert call.function.arguments == '{"query": "example", "limit": 3}'
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "In France."})


async def streaming(task: dict[str, Any], ep: Episode) -> float:
    """Streams its only response, and sends parameters that have no effect."""
    async with _client(ep) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=_begin(task), stream=True, temperature=0.1, user="somebody"
        )
        text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
    return float(bool(text))


async def editing(task: dict[str, Any], ep: Episode) -> float:
    """Shortens the model's answer before it continues."""
    messages = _begin(task)
    async with _client(ep) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text[:4]}, {"role": "user", "content": "And?"}]
    return 1.0


def _noisy_system(call: int) -> str:
    """Return a system message that differs at every call, but not between runs of a test."""
    return (
        "You are a helpful agent.\n"
        f"<env>\nToday's date: 2026-11-{10 + call}\nTime is {9 + call}:0{call}:1{call} UTC.\n</env>\n"
        f'Keep {{"trace": "{7 * call + 1:x}f-{call}"}} to yourself. Call tools.\n'
    )


async def noisy(task: dict[str, Any], ep: Episode) -> float:
    """Writes a new date, time and trace id into its system message at every call."""
    messages = _begin(task)
    async with _client(ep) as client:
        for call in range(3):
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "system", "content": _noisy_system(call)}, *messages],
                tools=[SEARCH],
            )
            messages.append(answer.choices[0].message)
            for tool_call in answer.choices[0].message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": "In France."})
    return 1.0


async def typed_pydantic_ai(task: dict[str, Any], ep: Episode) -> float:
    """Declares the type of the answer; for a task with "free", in the way that the doctor advises."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=ep.base_url, api_key=ep.api_key)
    profile: Any = {"supports_forced_tool_choice": False} if task.get("free") else None
    agent = Agent(OpenAIChatModel(MODEL, provider=provider, profile=profile), output_type=Place)
    return float((await agent.run("Where?")).output.x == "a")


async def typed_langchain(task: dict[str, Any], ep: Episode) -> float:
    """Declares the type of the answer; for a task with "free", in the way that the doctor advises."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=ep.base_url, api_key=lambda: ep.api_key, max_retries=0)
    free: dict[str, Any] = {"method": "function_calling", "tool_choice": "auto"} if task.get("free") else {}
    answer = await model.with_structured_output(Place, **free).ainvoke("Where?")
    return float(answer is not None)


class Place(BaseModel):
    """A place."""

    x: Literal["a", "b"]


async def conversing(task: dict[str, Any], ep: Episode) -> float:
    """Asks a second question after the answer, which it sends back unchanged."""
    messages = _begin(task)
    async with _client(ep) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
    return 1.0


async def blocks(task: dict[str, Any], ep: Episode) -> float:
    """Blocks the event loop."""
    await good(task, ep)
    time.sleep(600)  # noqa: ASYNC251 (what an agent should not do)
    return 1.0


async def gives_nothing(task: dict[str, Any], ep: Episode) -> None:
    """Calls the model, and returns no reward."""
    await good(task, ep)


async def idle(task: dict[str, Any], ep: Episode) -> float:
    """Never calls the model."""
    return 1.0


async def elsewhere(task: dict[str, Any], ep: Episode) -> float:
    """Calls a server whose address is in its source code, and catches the failure."""
    async with AsyncOpenAI(base_url=ELSEWHERE, api_key="its own", max_retries=0) as client:
        try:
            await client.chat.completions.create(model=MODEL, messages=_begin(task))
        except OpenAIError:
            return 0.0
    return 1.0


async def unsupported(task: dict[str, Any], ep: Episode) -> float:
    """Requests audio output."""
    async with _client(ep) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=_begin(task),
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
        )
    return 1.0


async def own_key(task: dict[str, Any], ep: Episode) -> float:
    """Uses the episode's base_url with another key."""
    async with AsyncOpenAI(base_url=ep.base_url, api_key="sk-mine", max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=_begin(task))
    return 1.0


async def bare(task: dict[str, Any], ep: Episode) -> float:
    """Uses the proxy's base_url without the episode."""
    origin = ep.base_url.partition("/e/")[0]
    async with AsyncOpenAI(base_url=f"{origin}/v1", api_key="any", max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=_begin(task))
    return 1.0


async def forced(task: dict[str, Any], ep: Episode) -> float:
    """Constrains every response with a JSON schema."""
    async with _client(ep) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=_begin(task),
            response_format={"type": "json_schema", "json_schema": PLACE},
        )
    assert answer.choices[0].message.content == '{"x": "a"}'
    return 1.0


async def choosing(task: dict[str, Any], ep: Episode) -> float:
    """Forces a call of one of two tools, then requests a call or JSON until the model writes JSON."""
    messages = _begin(task)
    other = {"type": "function", "function": {"name": "other", "parameters": PARAMETERS}}
    options: dict[str, Any] = {"model": MODEL, "tools": [SEARCH, other]}
    choice = {"type": "function", "function": {"name": "other"}}
    async with _client(ep) as client:
        answer = await client.chat.completions.create(**options, messages=messages, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.name == "other"
        for _ in range(4):
            answer = await client.chat.completions.create(
                **options, messages=messages, response_format={"type": "json_schema", "json_schema": PLACE}
            )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "In France."})
            if not message.tool_calls:
                assert message.content == '{"x": "a"}'
                return 1.0
    return 0.0


async def claude(task: dict[str, Any], ep: Episode) -> float:
    """Uses an Anthropic client with tools."""
    messages = _begin(task)
    async with AsyncAnthropic(base_url=ep.base_url.removesuffix("/v1"), api_key=ep.api_key) as client:
        while True:
            answer = await client.messages.create(
                model=MODEL, max_tokens=2048, messages=messages, tools=[CLAUDE_SEARCH]
            )
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                return 1.0
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": "In France."} for use in uses
            ]
            messages.append({"role": "user", "content": results})


async def claude_with_v1(task: dict[str, Any], ep: Episode) -> float:
    """Uses an Anthropic client with the base_url of an OpenAI client."""
    async with AsyncAnthropic(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        await client.messages.create(model=MODEL, max_tokens=64, messages=_begin(task))
    return 1.0


async def telling(task: dict[str, Any], ep: Episode) -> float:
    """Fails with a message that contains its key."""
    async with _client(ep) as client:
        await client.chat.completions.create(model=MODEL, messages=_begin(task))
    raise RuntimeError(f"nothing works at {ep.base_url}")


async def endless(task: dict[str, Any], ep: Episode) -> float:
    """Creates the file `mark` after a response, and then never ends."""
    async with _client(ep) as client:
        await client.chat.completions.create(model=MODEL, messages=_begin(task))
    Path(task["mark"]).touch()
    await asyncio.Event().wait()
    return 1.0


async def asks_its_question(task: dict[str, Any], ep: Episode) -> float:
    """Needs a task with a question."""
    messages = [{"role": "user", "content": task["question"]}]
    async with _client(ep) as client:
        await client.chat.completions.create(model=MODEL, messages=messages)
    return 1.0


def synchronous(task: dict[str, Any], ep: Episode) -> float:
    """Is not async, so it runs in a separate process."""
    with OpenAI(base_url=ep.base_url, api_key=ep.api_key) as client:
        answer = client.responses.create(model=MODEL, input="Where is Lyon?")
    return float(bool(answer.output_text))


def main(name: str) -> None:
    """Run one of the clients as a command."""
    if name == "openai":
        OpenAI().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    elif name == "anthropic":
        Anthropic().messages.create(
            model=MODEL, max_tokens=512, messages=[{"role": "user", "content": "Hello"}]
        )
    else:
        sys.exit(f"no agent has the name {name!r}")


if __name__ == "__main__":
    main(sys.argv[1])
