"""Agents that call the proxy in every dialect, most of them with the real SDKs.

An agent keeps its conversation as a list of units in the wire form of its API. A unit is a user message, a
reply in the form in which a framework would send it back, or the results of a reply's tool calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
from anthropic import Anthropic
from google import genai
from google.genai import types
from mutation_support import Mutation, mutated_text, rewritten
from proxy_support import SEARCH, RunningProxy

from areal_agents.core.messages import ToolCall
from areal_agents.proxy.dialects.turn_ids import turn_id_of

FUNCTION = SEARCH["function"]
RESPONSES_SEARCH = {"type": "function", "strict": False, **FUNCTION}
MESSAGES_SEARCH = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
GEMINI_SEARCH = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "parametersJsonSchema": FUNCTION["parameters"],
}


@dataclass(frozen=True)
class Reply:
    """A reply as the client parsed it."""

    turn_id: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    wire_id: str = ""


class Agent:
    """One conversation in one dialect. `received` has the ids of all turns that the agent received."""

    dialect = ""
    many = False  # whether a request may ask for several replies

    def __init__(
        self, proxy: RunningProxy, episode: dict[str, Any], question: str, system: str | None = None
    ) -> None:
        self.episode = episode
        self.system = system
        self.received: list[str] = []
        self.history: list[list[Any]] = []
        self.client = self.connect(proxy)
        self.say(question)

    def connect(self, proxy: RunningProxy) -> Any:
        return proxy.openai(self.episode)

    def close(self) -> None:
        self.client.close()

    def ask(
        self, *, streamed: bool = False, headers: dict[str, str] | None = None, **options: Any
    ) -> list[Reply]:
        """Return the replies to the conversation; `options` may have max_tokens, stop and n."""
        replies = self.send(streamed, headers or {}, options)
        self.received += [reply.turn_id for reply in replies]
        return replies

    def hang_up(self, **options: Any) -> None:
        """Start to read a streamed response, and close the connection."""
        raise NotImplementedError

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        raise NotImplementedError

    def take(self, reply: Reply, mutation: Mutation = Mutation()) -> None:  # noqa: B008
        """Append a reply to the conversation in the form in which a framework would send it back."""
        self.history.append(self.replayed(reply, mutation))

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        raise NotImplementedError

    def say(self, text: str) -> None:
        self.history.append([{"role": "user", "content": text}])

    def results(self, reply: Reply, text: str) -> None:
        """Append a result for every tool call of a reply."""
        self.history.append(self.result_items(reply, text))

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        raise NotImplementedError

    def edit(self, index: int, text: str) -> None:
        """Replace a unit of the conversation with other text, and remove the results of its tool calls."""
        self.history[index] = [{"role": "user", "content": text}]
        if any(is_result(item) for unit in self.history[index + 1 : index + 2] for item in unit):
            del self.history[index + 1]

    @property
    def items(self) -> list[Any]:
        return [item for unit in self.history for item in unit]


def is_result(item: Any) -> bool:
    """Whether an item of any dialect has results of tool calls."""
    if item.get("role") == "tool" or str(item.get("type")).endswith("_output"):
        return True
    if any("functionResponse" in part for part in item.get("parts", ())):
        return True
    content = item.get("content")
    return isinstance(content, list) and any(block.get("type") == "tool_result" for block in content)


class ChatAgent(Agent):
    """An agent that calls /v1/chat/completions with the `openai` client."""

    dialect, many = "chat", True

    def body(self, options: dict[str, Any]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": "policy", "messages": [*system, *self.items], "tools": [SEARCH], **options}

    def hang_up(self, **options: Any) -> None:
        with self.client.chat.completions.create(stream=True, **self.body(options)) as stream:
            next(iter(stream), None)

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        create, body = self.client.chat.completions.create, self.body(options)
        if streamed:
            return joined_chunks(list(create(stream=True, extra_headers=headers, **body)))
        answer = create(extra_headers=headers, **body)
        turns = sibling_ids(answer.id, len(answer.choices))
        return [
            Reply(
                turn,
                choice.message.content or "",
                getattr(choice.message, "reasoning_content", None) or "",
                tuple(
                    ToolCall(c.id, c.function.name, c.function.arguments)
                    for c in choice.message.tool_calls or ()
                ),
                choice.finish_reason,
                answer.id,
            )
            for turn, choice in zip(turns, answer.choices, strict=True)
        ]

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        text = mutated_text(reply.content, mutation, bool(reply.calls))
        content: Any = text
        if mutation.content == "parts":
            middle = len(text) // 2
            content = [{"type": "text", "text": part} for part in (text[:middle], text[middle:])]
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": rewritten(call.arguments, mutation.arguments)},
            }
            for call in reply.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        for name, value in (("tool_calls", calls), ("reasoning_content", reply.reasoning)):
            if value and not (name == "reasoning_content" and mutation.reasoning == "drop"):
                message[name] = value
            elif mutation.absent == "none":
                message[name] = None
            elif mutation.absent == "empty":
                message[name] = value[:0]
        if not text and mutation.content != "parts":
            message["content"] = {"none": None, "empty": ""}.get(mutation.absent)
            if mutation.absent == "missing":
                del message["content"]
        if mutation.extras:
            message |= {"annotations": [], "audio": None, "refusal": None, "index": 0, "parsed": None}
        return [message]

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call.id, "content": f"{text} {index}"}
            for index, call in enumerate(reply.calls)
        ]


def sibling_ids(wire_id: str, count: int) -> list[str]:
    """Return the turn ids of the choices of a response, which has only the first; the others are empty."""
    return [turn_id_of(wire_id) or ""] + [""] * (count - 1)


def joined_chunks(chunks: list[Any]) -> list[Reply]:
    """Join the chunks of a chat stream into replies; no chunk may have both content and a tool call."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            mine = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": {}, "finish": ""}
            )
            assert not (delta.content and delta.tool_calls)
            mine["content"] += delta.content or ""
            mine["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            mine["finish"] = choice.finish_reason or mine["finish"]
            for call in delta.tool_calls or ():
                parts = mine["calls"].setdefault(call.index, ["", "", ""])
                for place, text in enumerate((call.id, call.function.name, call.function.arguments)):
                    parts[place] += text or ""
    turns = sibling_ids(chunks[0].id, len(choices))
    return [
        Reply(
            turn,
            mine["content"],
            mine["reasoning"],
            tuple(ToolCall(*parts) for _, parts in sorted(mine["calls"].items())),
            mine["finish"],
            chunks[0].id,
        )
        for turn, (_, mine) in zip(turns, sorted(choices.items()), strict=True)
    ]


class ResponsesAgent(Agent):
    """An agent that calls /v1/responses with the `openai` client; `style` is how it sends earlier turns."""

    dialect = "responses"
    style = "items"
    _previous: str | None = None
    _sent = 0

    def body(self, options: dict[str, Any]) -> dict[str, Any]:
        options = {**options}
        if (limit := options.pop("max_tokens", None)) is not None:
            options["max_output_tokens"] = limit
        if (stop := options.pop("stop", None)) is not None:
            options["extra_body"] = {"stop": stop}
        items = self.items
        if self._previous is not None:
            options["previous_response_id"] = self._previous
            items = [item for unit in self.history[self._sent :] for item in unit]
        system = {"instructions": self.system} if self.system else {}
        return {"model": "policy", "input": items, "tools": [RESPONSES_SEARCH], **system, **options}

    def hang_up(self, **options: Any) -> None:
        with self.client.responses.create(stream=True, **self.body(options)) as stream:
            next(iter(stream), None)

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        create, body = self.client.responses.create, self.body(options)
        if streamed:
            events = list(create(stream=True, extra_headers=headers, **body))
            answer = events[-1].response
            said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            thought = "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta")
            assert [e.sequence_number for e in events] == list(range(len(events)))
        else:
            answer = create(extra_headers=headers, **body)
            said = thought = None
        items = answer.output
        reasoning = "".join(s.text for item in items if item.type == "reasoning" for s in item.summary)
        assert said in (None, answer.output_text) and thought in (None, reasoning)
        calls = [item for item in items if item.type == "function_call"]
        reply = Reply(
            turn_id_of(answer.id) or "",
            answer.output_text,
            reasoning,
            tuple(ToolCall(call.call_id, call.name, call.arguments) for call in calls),
            answer.status,
            answer.id,
        )
        self._output = [item.to_dict() for item in items]
        return [reply]

    def take(self, reply: Reply, mutation: Mutation = Mutation()) -> None:  # noqa: B008
        super().take(reply, mutation)
        if self.style == "previous":
            self._previous, self._sent = reply.wire_id, len(self.history)

    def edit(self, index: int, text: str) -> None:
        super().edit(index, text)
        self._previous, self._sent = None, 0

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        if self.style == "references":
            return [{"type": "item_reference", "id": item["id"]} for item in self._output]
        out = []
        for raw in self._output:
            item = {**raw}
            if not mutation.item_ids:
                item.pop("id", None)
            if item["type"] == "reasoning" and mutation.reasoning == "drop":
                continue
            if item["type"] == "function_call":
                item["arguments"] = rewritten(item["arguments"], mutation.arguments)
            if item["type"] == "message":
                text = mutated_text(reply.content, mutation, bool(reply.calls))
                if not text and mutation.content == "dropped":
                    continue
                item["content"] = [{"type": "output_text", "text": text, "annotations": []}]
                if mutation.extras:
                    item = {"role": "assistant", "content": text, "id": item.get("id")}
            out.append(item)
        return out

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": f"{text} {index}"}
            for index, call in enumerate(reply.calls)
        ]


class PreviousAgent(ResponsesAgent):
    """Sends previous_response_id instead of the earlier turns."""

    dialect, style = "responses/previous", "previous"


class ReferencesAgent(ResponsesAgent):
    """Sends references to the items of earlier replies."""

    dialect, style = "responses/references", "references"


class MessagesAgent(Agent):
    """An agent that calls /v1/messages with the `anthropic` client."""

    dialect = "messages"

    def connect(self, proxy: RunningProxy) -> Any:
        key = self.episode["key"]
        return Anthropic(base_url=f"{proxy.url}/e/{key}", api_key=key, max_retries=0)

    def body(self, options: dict[str, Any]) -> dict[str, Any]:
        options = {**options, "max_tokens": options.get("max_tokens") or 300}
        if (stop := options.pop("stop", None)) is not None:
            options["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        system = {"system": self.system} if self.system else {}
        return {"model": "policy", "messages": self.items, "tools": [MESSAGES_SEARCH], **system, **options}

    def hang_up(self, **options: Any) -> None:
        with self.client.messages.create(stream=True, **self.body(options)) as stream:
            next(iter(stream), None)

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        body = self.body(options)
        if streamed:
            with self.client.messages.stream(extra_headers=headers, **body) as stream:
                message = stream.get_final_message()
        else:
            message = self.client.messages.create(extra_headers=headers, **body)
        blocks = message.content
        uses = [block for block in blocks if block.type == "tool_use"]
        reply = Reply(
            turn_id_of(message.id) or "",
            "".join(block.text for block in blocks if block.type == "text"),
            "".join(block.thinking for block in blocks if block.type == "thinking"),
            tuple(ToolCall(use.id, use.name, json.dumps(use.input)) for use in uses),
            message.stop_reason or "",
            message.id,
        )
        self._content = [block.model_dump(exclude_none=True) for block in blocks]
        return [reply]

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        out = []
        for raw in self._content:
            block = {**raw}
            if block["type"] == "thinking" and mutation.reasoning == "drop":
                continue
            if block["type"] == "tool_use":
                text = rewritten(json.dumps(block["input"]), mutation.arguments)
                block["input"] = json.loads(text)
            if block["type"] == "text":
                block["text"] = mutated_text(block["text"], mutation, bool(reply.calls))
                if not block["text"]:
                    continue
            out.append(block)
        if mutation.extras and out:
            out[-1]["cache_control"] = {"type": "ephemeral"}
        plain = mutation.content == "parts" and len(out) == 1 and out[0]["type"] == "text"
        return [{"role": "assistant", "content": out[0]["text"] if plain else out}]

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"{text} {index}"}
            for index, call in enumerate(reply.calls)
        ]
        return [{"role": "user", "content": results}]


class GeminiAgent(Agent):
    """An agent that calls generateContent with the `google-genai` client."""

    dialect, many = "gemini", True

    def connect(self, proxy: RunningProxy) -> Any:
        self.key = self.episode["key"]
        self.base_url = f"{proxy.url}/e/{self.key}"
        return genai.Client(api_key=self.key, http_options=types.HttpOptions(base_url=self.base_url))

    def call(self, options: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        names = {"max_tokens": "max_output_tokens", "stop": "stop_sequences", "n": "candidate_count"}
        config = {names[name]: value for name, value in options.items()}
        if isinstance(config.get("stop_sequences"), str):
            config["stop_sequences"] = [config["stop_sequences"]]
        return {
            "model": "policy",
            "contents": [types.Content.model_validate(item) for item in self.items],
            "config": types.GenerateContentConfig(
                tools=[types.Tool.model_validate({"functionDeclarations": [GEMINI_SEARCH]})],
                system_instruction=self.system,
                thinking_config=types.ThinkingConfig(include_thoughts=True),
                http_options=types.HttpOptions(headers=headers),
                **config,
            ),
        }

    def hang_up(self, **options: Any) -> None:
        url = f"{self.base_url}/v1beta/models/policy:streamGenerateContent?alt=sse"
        with httpx.stream("POST", url, json=self.body(options), timeout=30) as stream:
            next(stream.iter_bytes(), None)

    def body(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the body that the client would send."""
        names = {"max_tokens": "maxOutputTokens", "stop": "stopSequences", "n": "candidateCount"}
        config = {"generationConfig": {names[name]: value for name, value in options.items()}}
        system = {"systemInstruction": {"parts": [{"text": self.system}]}} if self.system else {}
        return {
            "contents": self.items,
            "tools": [{"functionDeclarations": [GEMINI_SEARCH]}],
            **system,
            **config,
        }

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        call = self.call(options, headers)
        if streamed:
            answers = list(self.client.models.generate_content_stream(**call))
        else:
            answers = [self.client.models.generate_content(**call)]
        found: dict[int, list[types.Part]] = {}
        finish: dict[int, str] = {}
        for candidate in (candidate for answer in answers for candidate in answer.candidates):
            found.setdefault(candidate.index or 0, []).extend(candidate.content.parts)
            if candidate.finish_reason:
                finish[candidate.index or 0] = candidate.finish_reason.value
        parts = [each for _, each in sorted(found.items())]
        turns = sibling_ids(answers[0].response_id, len(parts))
        replies = [
            Reply(
                turn,
                "".join(part.text or "" for part in each if not part.thought),
                "".join(part.text or "" for part in each if part.thought),
                tuple(
                    ToolCall(made.id or "", made.name or "", json.dumps(made.args))
                    for made in (part.function_call for part in each)
                    if made
                ),
                finish[index],
                answers[0].response_id,
            )
            for index, (turn, each) in enumerate(zip(turns, parts, strict=True))
        ]
        self._answered = [
            (reply, [_json_of(part) for part in each]) for reply, each in zip(replies, parts, strict=True)
        ]
        return replies

    def say(self, text: str) -> None:
        self.history.append([{"role": "user", "parts": [{"text": text}]}])

    def edit(self, index: int, text: str) -> None:
        super().edit(index, text)
        self.history[index] = [{"role": "user", "parts": [{"text": text}]}]

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        out = []
        said = False
        for raw in next(parts for known, parts in reversed(self._answered) if known == reply):
            part = {**raw}
            if not mutation.item_ids:
                part.pop("thoughtSignature", None)
            if part.get("thought"):
                if mutation.reasoning == "drop":
                    continue
            elif "functionCall" in part:
                call = part["functionCall"]
                args = json.loads(rewritten(json.dumps(call["args"]), mutation.arguments))
                part["functionCall"] = {**call, "args": args}
            elif said:
                continue  # the first text part has the text of all parts
            else:
                said = True
                part["text"] = mutated_text(reply.content, mutation, bool(reply.calls))
                if not part["text"] and "thoughtSignature" not in part:
                    continue
                if mutation.content == "parts" and len(reply.content) > 1:
                    middle = len(reply.content) // 2
                    out.append({**part, "text": reply.content[:middle]})
                    part = {"text": reply.content[middle:]}
            out.append(part)
        if mutation.extras:  # a streaming client sends each piece as a separate content
            return [{"role": "model", "parts": [part]} for part in out]
        return [{"role": "model", "parts": out}]

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        results = [
            {
                "functionResponse": {
                    "id": call.id,
                    "name": call.name,
                    "response": {"output": f"{text} {index}"},
                }
            }
            for index, call in enumerate(reply.calls)
        ]
        return [{"role": "user", "parts": results}]


def _json_of(part: types.Part) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


class CompletionsAgent(Agent):
    """An agent that calls /v1/completions; its conversation is one string."""

    dialect, many = "completions", True
    limit = 300

    def body(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": "policy",
            "prompt": (self.system or "") + "".join(self.items),
            "max_tokens": self.limit,
        } | options

    def hang_up(self, **options: Any) -> None:
        with self.client.completions.create(stream=True, **self.body(options)) as stream:
            next(iter(stream), None)

    def send(self, streamed: bool, headers: dict[str, str], options: dict[str, Any]) -> list[Reply]:
        create, body = self.client.completions.create, self.body(options)
        texts: dict[int, str] = {}
        finish: dict[int, str] = {}
        chunks = list(create(stream=True, extra_headers=headers, **body)) if streamed else None
        for part in chunks or [create(extra_headers=headers, **body)]:
            wire_id = part.id
            for choice in part.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                finish[choice.index] = choice.finish_reason or finish.get(choice.index, "")
        turns = sibling_ids(wire_id, len(texts))
        return [
            Reply(turn, text, finish=finish[index], wire_id=wire_id)
            for turn, (index, text) in zip(turns, sorted(texts.items()), strict=True)
        ]

    def say(self, text: str) -> None:
        self.history.append([f"\nQ: {text}\nA:"])

    def edit(self, index: int, text: str) -> None:
        self.history[index] = [text]

    def replayed(self, reply: Reply, mutation: Mutation) -> list[Any]:
        return [reply.content]

    def result_items(self, reply: Reply, text: str) -> list[Any]:
        return [text]


AGENTS: dict[str, type[Agent]] = {
    kind.dialect: kind
    for kind in (
        ChatAgent, ResponsesAgent, PreviousAgent, ReferencesAgent, MessagesAgent, GeminiAgent,
        CompletionsAgent,
    )
}  # fmt: skip
TOOL_AGENTS = {name: kind for name, kind in AGENTS.items() if kind is not CompletionsAgent}
