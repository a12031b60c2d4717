"""Canonical conversation messages: the form into which each dialect converts its requests.

Two messages are *the same* when `canonical_key` agrees, not when their wire forms do: frameworks
replay an assistant message with other whitespace, re-serialised tool arguments, or without its
reasoning. Tool-call ids are minted by us and compared apart from the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import orjson

Role = Literal["system", "user", "assistant", "tool"]
_ROLES = frozenset(get_args(Role))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is the text that was sampled, normally a JSON object."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tool call needs the name of the tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Absent text is "", never None; `tool_call_id` belongs to role "tool".

    `handle` is the id of the recorded turn that the client says this assistant message is; it is how a
    request points at its past, and is not kept.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    handle: str = field(default="", compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)  # of the canonical key

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role must be one of {get_args(Role)}, got {self.role!r}")
        if self.role != "assistant" and (self.tool_calls or self.reasoning):
            raise ValueError(f"only an assistant message has tool calls or reasoning, got role {self.role!r}")
        object.__setattr__(self, "digest", _digest(self))

    def to_dict(self) -> dict[str, Any]:
        """A plain JSON-serialisable form without the empty fields; `from_dict` reverses it."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "name": c.name, "arguments": c.arguments} for c in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """The message that `to_dict` wrote."""
        return cls(
            role=data["role"],
            content=data["content"],
            reasoning=data.get("reasoning", ""),
            tool_calls=tuple(ToolCall(**call) for call in data.get("tool_calls", ())),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
        )


def canonical_key(message: Message) -> str:
    """A string that is equal for two messages with the same meaning.

    Content is stripped; tool arguments are compared as parsed JSON with sorted keys and integral
    floats as integers; reasoning and ids are left out (see `reasoning_conflicts`, and the forest,
    which uses ids to choose between siblings).
    """
    if not message.tool_calls:  # nearly all messages, and every one of a conversation at every call
        return f"{message.role}\0{message.content.strip()}"
    calls = [(call.name, _canonical_arguments(call.arguments)) for call in message.tool_calls]
    return _to_json([message.role, message.content.strip(), calls])


def _digest(message: Message) -> bytes:
    """Of the canonical key, [16]."""
    if message.tool_calls:
        key = canonical_key(message).encode(errors="surrogatepass")
        return hashlib.blake2b(key, digest_size=16).digest()
    digest = hashlib.blake2b(f"{message.role}\0".encode(), digest_size=16)  # by parts: content may be long
    digest.update(message.content.strip().encode(errors="surrogatepass"))
    return digest.digest()


def reasoning_conflicts(replayed: Message, recorded: Message) -> bool:
    """Whether the client replays reasoning that differs from what was recorded.

    Reasoning that the client leaves out is no conflict: most frameworks drop it. Nor is the end of it
    alone: a streaming client keeps only the last piece of a field that it does not know.
    """
    if not replayed.reasoning or replayed.reasoning == recorded.reasoning:
        return False
    return not recorded.reasoning.strip().endswith(replayed.reasoning.strip())


def history_digests(messages: Sequence[Message], tools_id: str) -> list[bytes]:
    """Digest of each prefix of the conversation: entry i covers messages[: i + 1] and the tools."""
    digest = empty_history(tools_id)
    out = []
    for message in messages:
        digest = extend_digest(digest, message)
        out.append(digest)
    return out


def empty_history(tools_id: str) -> bytes:
    """The digest of a conversation without messages, in the presence of these tools."""
    return hashlib.blake2b(tools_id.encode(), digest_size=16).digest()


def extend_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation that `message` is appended to."""
    return hashlib.blake2b(digest + message.digest, digest_size=16).digest()


def extend_prompt(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation that a message which is no recorded reply is appended to.

    Its reasoning counts: a reply whose reasoning was edited is another one, and so is all that follows it.
    """
    digest = extend_digest(digest, message)
    if not message.reasoning.strip():
        return digest
    thought = message.reasoning.strip().encode(errors="surrogatepass")
    return hashlib.blake2b(digest + thought, digest_size=16).digest()


def tools_digest(tools: Iterable[Mapping[str, Any]]) -> str:
    """A stable id of a list of tool specifications; "" for none. Order counts, key order does not."""
    specs = list(tools)
    if not specs:
        return ""
    return hashlib.blake2b(_to_json(specs).encode(), digest_size=16).hexdigest()


def _to_json(value: Any) -> str:
    """JSON with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # beyond 64 bits, or nested deeply: slower, and no less definite
        return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _canonical_arguments(arguments: str) -> Any:
    try:
        return _integral(json.loads(arguments))
    except (ValueError, RecursionError, OverflowError):  # no JSON that others read: compared as text
        return arguments.strip()


def _integral(value: Any) -> Any:
    """Numbers as every JSON reader has them: 2.0 is 2, and beyond 64 bits there are only floats."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)  # OverflowError beyond a float's range
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, dict):
        return {key: _integral(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return value
