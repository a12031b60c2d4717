"""Reads the conversations in files of other programs: OpenAI's messages for fine-tuning, and ATIF.

Every message of a file is in the result, or the document is refused with the place of what cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from areal_agents.errors import DataError, shown

ImportFormat = Literal["messages", "atif"]
Tools = Sequence[Mapping[str, Any]]
_IMPORTABLE = "export with --format messages or --format atif, both of which can be"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to learn from. A message has the same index in all lists.

    Attributes:
        messages: in the form of chat completions.
        untrained: why a reply is not learned, "" if it is; "" for messages that are not replies.
        places: where a message is in its document, for errors.
        recorded: of a reply the ids of its prompt and its own, if the document has them.
        tools: function tools in the form of chat completions.
        is_held_out: whether an export of this project says that it is of split eval.
    """

    messages: list[dict[str, Any]]
    untrained: list[str]
    places: list[str]
    recorded: list[tuple[list[int], list[int]] | None]
    tools: Sequence[Mapping[str, Any]]
    is_held_out: bool = False


def format_of(path: Path) -> ImportFormat:
    """Return the format that the name of a file implies. Raises DataError if it implies none."""
    _refuse_data_set(path)
    if path.is_dir() or path.suffix == ".json":
        return "atif"
    if path.suffix == ".jsonl":
        return "messages"
    raise DataError(f"{path} ends in neither .jsonl nor .json; give the format with --format")


def _refuse_data_set(path: Path) -> None:
    """Raise DataError for a data set, which other trainers read, and for Parquet."""
    if (path / "dataset_info.json").is_file():
        what = f"{path} is a data set, as export --format sft and pairs write it"
    elif path.suffix == ".parquet":
        what = f"{path} is Parquet, as export --format parquet writes it"
    else:
        return
    raise DataError(f"{what}, which cannot be imported; {_IMPORTABLE}")


def documents(path: Path, form: ImportFormat) -> Iterator[tuple[str, str]]:
    """Yield the JSON documents of a file, or of the .json files of a folder: where each is, and its text.

    A file of ATIF that ends in .jsonl, and every file of messages, has one on each line that is not empty.

    Raises:
        DataError: the file cannot be read, or has no document.
    """
    _refuse_data_set(path)
    files = sorted(path.glob("*.json")) if path.is_dir() and form == "atif" else [path]
    if not files:
        raise DataError(f"{path} has no .json file")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read: {error}") from None
        if form == "atif" and file.suffix != ".jsonl":
            yield str(file), text
            continue
        lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if not lines:
            raise DataError(f"{file} is empty")
        yield from ((f"{file}:{number}", line) for number, line in lines)


def conversations_in(text: str, form: ImportFormat, tools: Tools) -> list[Conversation]:
    """Return the conversations of a document; an ATIF trajectory may contain those of sub-agents.

    Args:
        tools: the tools of a document that names none.

    Raises:
        DataError: the text is not such a document; the message names the place in it.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not valid JSON: {error}") from None
    document = _object(document, "a document")
    return [_of_openai(document, tools)] if form == "messages" else list(_of_atif(document, tools))


# OpenAI


def _of_openai(document: Mapping[str, Any], tools: Tools) -> Conversation:
    if "preferred_output" in document:
        raise DataError("it has preferred_output: a preference, and not a conversation to imitate")
    if document.get("functions"):
        raise DataError("functions is not supported; use tools")
    if "messages" not in document and isinstance(document.get("turns"), list):
        raise DataError(
            f"it is a trace, as export --format openenv writes it, which cannot be imported; {_IMPORTABLE}"
        )
    messages = _list(document.get("messages"), "messages")
    untrained = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        for name in ("function_call", "audio", "refusal"):  # none of them may be dropped silently
            if message.get(name):
                raise DataError(f"{where}.{name} is not supported")
        weight = message.get("weight")
        if weight is not None and (weight not in (0, 1) or message.get("role") != "assistant"):
            raise DataError(f"{where}.weight must be 0 or 1, in a message of the assistant only")
        untrained.append("weight 0" if weight == 0 else "")
    given = document.get("tools")
    return Conversation(
        messages=messages,
        untrained=untrained,
        places=[f"messages[{index}]" for index in range(len(messages))],
        recorded=[None] * len(messages),
        tools=tools if given is None else _list(given, "tools"),
        is_held_out="branches" in document and document.get("split") == "eval",  # export --format jsonl
    )


# ATIF


def _of_atif(
    document: Mapping[str, Any], tools: Tools, where: str = "", *, in_held_out: bool = False
) -> Iterator[Conversation]:
    version = document.get("schema_version")
    if not isinstance(version, str) or not version.startswith("ATIF-v1."):
        raise DataError(f"{where}schema_version must be ATIF-v1.x, got {shown(version)}")
    agent = document.get("agent")
    given = agent.get("tool_definitions") if isinstance(agent, dict) else None
    offered = tools if given is None else _list(given, f"{where}agent.tool_definitions")
    extra = document.get("extra")
    is_held_out = in_held_out or (isinstance(extra, dict) and extra.get("split") == "eval")
    made = Conversation([], [], [], [], offered, is_held_out)
    for number, step in enumerate(_list(document.get("steps"), f"{where}steps"), start=1):
        _add_step(made, step, f"{where}step {number}")
    yield made
    agents = _list(document.get("subagent_trajectories") or [], f"{where}subagent_trajectories")
    for number, one in enumerate(agents, start=1):
        yield from _of_atif(one, tools, f"{where}sub-agent {number}, ", in_held_out=is_held_out)


def _add_step(made: Conversation, step: Mapping[str, Any], where: str) -> None:
    source = step.get("source")
    if source not in ("system", "user", "agent"):
        raise DataError(f"{where}: source must be system, user or agent, got {shown(source)}")
    message = {"role": "assistant" if source == "agent" else source, "content": step.get("message")}
    calls = [_call(call, where) for call in _list(step.get("tool_calls") or [], f"{where}: tool_calls")]
    if source != "agent" and (calls or step.get("reasoning_content")):
        raise DataError(f"{where}: only a step of the agent can have tool calls or reasoning")
    if calls:
        message["tool_calls"] = calls
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    observation = _object(step.get("observation") or {}, f"{where}: observation")
    results = _list(observation.get("results") or [], f"{where}: observation.results")
    if source == "agent" or message["content"] or not results:  # results may come without a message
        is_reply = source == "agent"
        _add(made, message, where, _why_untrained(step, where) if is_reply else "", _ids(step))
    for result in results:
        _add(made, _result(result), f"{where}, observation")


def _add(
    made: Conversation,
    message: dict[str, Any],
    place: str,
    untrained: str = "",
    recorded: tuple[list[int], list[int]] | None = None,
) -> None:
    made.messages.append(message)
    made.untrained.append(untrained)
    made.places.append(place)
    made.recorded.append(recorded)


def _ids(step: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Return the ids of the prompt and of the reply of a step; None if it does not have both."""
    metrics = step.get("metrics")
    if not isinstance(metrics, dict):
        return None
    prompt, reply = (metrics.get(f"{name}_token_ids") for name in ("prompt", "completion"))
    return (prompt, reply) if _is_ids(prompt) and _is_ids(reply) else None


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value) and bool(value)


def _why_untrained(step: Mapping[str, Any], where: str) -> str:
    """Return why a step of the agent is not learned; "" if it is one reply of a model."""
    count = step.get("llm_call_count")
    if isinstance(count, int) and count > 1:
        raise DataError(f"{where}: it stands for {count} model calls (llm_call_count), and not for one reply")
    if count == 0:
        return "no reply of a model"
    return "copied context" if step.get("is_copied_context") else ""


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call; what the export of this project kept of odd arguments is restored."""
    extra = call.get("extra")
    written = extra.get("arguments_as_written") if isinstance(extra, dict) else None
    if not isinstance(call.get("arguments"), dict):
        raise DataError(f"{where}: arguments of a tool call must be an object")
    if not isinstance(written, str):
        written = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call.get("function_name"), "arguments": written}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function}


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an agent observed: the result of a call, else a message of the user."""
    content = result.get("content")
    if result.get("source_call_id") is None:
        return {"role": "user", "content": content}
    return {"role": "tool", "tool_call_id": result["source_call_id"], "content": content}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object, got {shown(value)}")
    return value


def _list(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects. Raises DataError if it is none."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{where} must be a list of objects, got {shown(value)}")
    return value
