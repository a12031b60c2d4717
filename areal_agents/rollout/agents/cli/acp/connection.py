"""A connection to an agent in the Agent Client Protocol: JSON-RPC on its standard streams, a message a line.

What an agent sends is checked here before the protocol's package sees it, and a line that is no message ends
the connection. Updates of an unknown kind are left out. Permission requests are answered by the policy that
the user stated; whatever else an agent can ask of its client, such as files, is refused: it has its folder
itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from acp import PROTOCOL_VERSION
from acp.connection import Connection
from acp.exceptions import RequestError
from acp.meta import AGENT_METHODS, CLIENT_METHODS
from acp.schema import (
    ClientCapabilities,
    Implementation,
    InitializeRequest,
    InitializeResponse,
    NewSessionRequest,
    NewSessionResponse,
    PromptRequest,
    PromptResponse,
    RequestPermissionRequest,
    SessionNotification,
    TextContentBlock,
)
from pydantic import BaseModel, ValidationError

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.acp.reply import AcpReply, AcpToolCall, Permissions

MOST_BYTES = 1 << 27  # that an agent may send in one turn
EXIT_S = 5.0  # longest wait for the exit of a program that has closed its standard output
_TAIL = 2000  # characters of the end of its standard error in an error
_SHOWN = 200  # characters of a line, or of an agent's error, in an error
_CLIENT = Implementation(name="areal-agents", version="1")

Answer = TypeVar("Answer", bound=BaseModel)


class Conversation(Protocol):
    """A running program that is talked with: a `ChildProcess`, or a program in a sandbox."""

    def send(self, data: bytes) -> None:
        """Write to its standard input, without waiting until it reads."""
        ...

    async def line(self) -> bytes:
        """Return the next line of its output; b"" at its end. Raises ValueError if it is too long."""
        ...

    async def wait(self) -> int:
        """Wait until it exits, and return its exit status."""
        ...

    def tail(self) -> str:
        """Return the end of its standard error, after `end`."""
        ...

    async def end(self) -> None:
        """End it with everything that it started."""
        ...


class AcpConnection:
    """The connection to one agent, with one session. The caller ends the program after `close`.

    Every method raises AgentError if the agent answers with an error, breaks the protocol, or has ended.
    """

    def __init__(self, program: Conversation, name: str, permissions: Permissions) -> None:
        """Args:
        name: of the program, for errors.
        permissions: how permission requests are answered.
        """
        self._program = program
        self._name = name
        self._messages = _Messages(program)
        self._user = _User(permissions)
        self._connection = Connection(self._user.answer, self._messages)
        self._session = ""

    async def open(self, workdir: Path) -> None:
        """Begin the session, in a folder as the agent sees it."""
        about = InitializeRequest(
            protocol_version=PROTOCOL_VERSION,
            client_capabilities=ClientCapabilities(),
            client_info=_CLIENT,
        )
        agreed = await self._request("initialize", about, InitializeResponse)
        if agreed.protocol_version != PROTOCOL_VERSION:
            raise AgentError(
                f"{self._name} speaks version {agreed.protocol_version} of the Agent Client Protocol, and "
                f"version {PROTOCOL_VERSION} is needed"
            )
        new = NewSessionRequest(cwd=str(workdir), mcp_servers=[])
        self._session = (await self._request("session_new", new, NewSessionResponse)).session_id

    async def prompt(self, text: str) -> AcpReply:
        """Send a prompt, and return what the agent did until it ended its turn."""
        self._messages.received = 0
        self._user.begin_turn()
        said = PromptRequest(session_id=self._session, prompt=[TextContentBlock(type="text", text=text)])
        ended = await self._request("session_prompt", said, PromptResponse)
        return self._user.reply(ended.stop_reason)

    async def close(self) -> None:
        """Stop reading what the agent sends."""
        await self._connection.close()

    async def _request(self, method: str, params: BaseModel, answer: type[Answer]) -> Answer:
        """Send a request, and return its answer; the names are those of the protocol's package."""
        method = AGENT_METHODS[method]
        fields = params.model_dump(mode="json", by_alias=True, exclude_none=True)
        try:
            return answer.model_validate(await self._connection.send_request(method, fields))
        except RequestError as refused:
            detail = f"{refused} {json.dumps(refused.data) if refused.data is not None else ''}".strip()
            raise AgentError(f"{self._name} answered {method} with an error: {detail[:_TAIL]}") from refused
        except ValidationError as wrong:
            fault = wrong.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise AgentError(
                f"{self._name} answered {method} against the protocol: {where}: {fault['msg']}"
            ) from wrong
        except ConnectionError:
            raise AgentError(await self._why_closed()) from None

    async def _why_closed(self) -> str:
        """Say why the agent is not heard of any more, and end it."""
        status: int | None = None
        if self._messages.fault is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    status = await self._program.wait()
        await self._program.end()  # then its last words are complete
        why = self._messages.fault or (
            "closed its standard output" if status is None else f"exited with status {status}"
        )
        tail = self._program.tail()[-_TAIL:]
        return f"{self._name} {why}{': ' if tail else ''}{tail}"


class _Messages:
    """The transport of the protocol's package: the messages of a program.

    Attributes:
        received: bytes that it has sent in this turn.
        fault: why it is not read any more; None while it is, and if it has ended.
    """

    def __init__(self, program: Conversation) -> None:
        self._program = program
        self.received = 0
        self.fault: str | None = None

    async def send(self, message: Mapping[str, Any]) -> None:
        self._program.send(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None when the program has ended, or sent something else."""
        while True:
            await asyncio.sleep(0)  # an agent that never pauses must not keep the event loop for itself
            try:
                line = await self._program.line()
            except ValueError as too_long:
                self.fault = f"sent a line that is too long ({too_long})"
                return None
            if not line:
                return None
            self.received += len(line)
            if self.received > MOST_BYTES:
                self.fault = f"sent more than {MOST_BYTES >> 20} MiB in one turn"
                return None
            if line.isspace():
                continue
            message = _message(line)
            if message is None:
                shown = line[:_SHOWN].decode(errors="replace").strip()
                self.fault = f"sent a line that is not a message of the Agent Client Protocol ({shown!r})"
            return message

    async def close(self) -> None:
        """Do nothing: the program is ended by its owner."""


def _message(line: bytes) -> dict[str, Any] | None:
    """Return the message that a line is; None if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    is_one = (
        isinstance(message.get("method", ""), str)
        and isinstance(message.get("id"), int | str | None)
        and isinstance(message.get("error"), dict | None)
        and ("method" in message or "id" in message)
    )
    return message if is_one else None


class _User:
    """Answers what an agent asks its user for, and keeps what it tells of the turn."""

    def __init__(self, permissions: Permissions) -> None:
        self._permissions = permissions
        self._raised: Exception | None = None
        self.begin_turn()

    def begin_turn(self) -> None:
        """Forget the turn before."""
        self._text: list[str] = []
        self._calls: dict[str, AcpToolCall] = {}
        self._updates: list[Any] = []

    def reply(self, stop_reason: str) -> AcpReply:
        """Return the turn. Raises what the user's function for permissions raised."""
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return AcpReply("".join(self._text), stop_reason, tuple(self._calls.values()), tuple(self._updates))

    async def answer(self, method: str, params: Any, is_notification: bool) -> dict[str, Any] | None:
        """Take a message of the agent; return the answer to a request."""
        if method == CLIENT_METHODS["session_update"] and is_notification:
            with suppress(ValidationError):  # of a kind that a later version of the protocol has
                self._note(SessionNotification.model_validate(params).update)
            return None
        if method == CLIENT_METHODS["session_request_permission"]:
            return self._permit(RequestPermissionRequest.model_validate(params))
        if is_notification:
            return None
        raise RequestError.method_not_found(method)

    def _note(self, update: Any) -> None:
        self._updates.append(update)
        kind = update.session_update
        if kind == "agent_message_chunk" and isinstance(update.content, TextContentBlock):
            self._text.append(update.content.text)
        elif kind in ("tool_call", "tool_call_update"):
            self._call(update)

    def _call(self, told: Any) -> AcpToolCall:
        """Keep what is told of a tool call, and return what is known of it."""
        known = self._calls.get(told.tool_call_id, AcpToolCall(told.tool_call_id))
        known = self._calls[known.id] = AcpToolCall(
            known.id,
            told.title or known.title,
            told.kind or known.kind,
            told.status or known.status,
            told.raw_input if told.raw_input is not None else known.input,
            known.allowed,
        )
        return known

    def _permit(self, asked: RequestPermissionRequest) -> dict[str, Any]:
        call = self._call(asked.tool_call)
        try:
            allowed = (
                self._permissions == "allow"
                if isinstance(self._permissions, str)
                else bool(self._permissions(call))
            )
        except Exception as raised:
            self._raised = self._raised or raised
            allowed = False
        self._calls[call.id] = dataclasses.replace(call, allowed=allowed)
        # Once is preferred: then the agent asks about the next one too.
        wanted = ("allow_once", "allow_always") if allowed else ("reject_once", "reject_always")
        offered = {option.kind: option.option_id for option in reversed(asked.options)}
        for kind in wanted:
            if kind in offered:
                return {"outcome": {"outcome": "selected", "optionId": offered[kind]}}
        return {"outcome": {"outcome": "cancelled"}}
