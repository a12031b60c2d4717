"""Reads the conversations in files: OpenAI's messages for fine-tuning, ATIF, and what this project keeps.

The latter are rows of an export, and the journal of what the model of an endpoint has played.

Every message of a file is in the result, or the document is refused with the place of what cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from areal_agents.errors import DataError, shown
from areal_agents.evaluation.endpoint.journal import JOURNAL, read_journal

ImportFormat = Literal["messages", "atif", "collection"]
Tools = Sequence[Mapping[str, Any]]
_IMPORTABLE = "export with --format messages or --format atif, both of which can be"
_OF_REPLIES = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to learn from. A message has the same index in all lists.

    Attributes:
        messages: in the form of chat completions.
        untrained: why a reply is not learned, "" if it is; "" for messages that are not replies.
        places: where a message is in its document, for errors.
        recorded: of a reply the ids of its prompt and its own, if the document has them.
        tools: function tools in the form of chat completions.
    """

    messages: list[dict[str, Any]]
    untrained: list[str]
    places: list[str]
    recorded: list[tuple[list[int], list[int]] | None]
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadEpisode:
    """The conversations that belong together.

    Attributes:
        conversations: those of one episode; what two of them begin with was said once.
        score: the score that the document names, None if it names none.
        id: of the episode that the document was made of, "" if it does not say.
        is_held_out: whether the document says that it is of split eval.
    """

    conversations: Sequence[Conversation]
    score: float | None = None
    id: str = ""
    is_held_out: bool = False


def format_of(path: Path) -> ImportFormat:
    """Return the format that the name of a file implies. Raises DataError if it implies none."""
    _refuse_data_set(path)
    if path.name == JOURNAL or (path / JOURNAL).is_file():
        return "collection"
    if path.is_dir() or path.suffix == ".json":
        return "atif"
    if path.suffix == ".jsonl":
        return "messages"
    raise DataError(f"{path} ends in neither .jsonl nor .json; give the format with --format")


def _refuse_data_set(path: Path) -> None:
    """Raise DataError for a data set, which other trainers read, and for Parquet."""
    if (path / "dataset_info.json").is_file():
        what = f"{path} is a data set, as export --format sft and pairs write it"
    elif (path / "store.db").is_file():
        raise DataError(f"{path} has episodes that can be trained on as they are: data.episodes={path}")
    elif path.suffix == ".parquet":
        what = f"{path} is Parquet, as export --format parquet writes it"
    else:
        return
    raise DataError(f"{what}, which cannot be imported; {_IMPORTABLE}")


def documents(path: Path, form: ImportFormat) -> Iterator[tuple[str, str]]:
    """Yield the JSON documents of a file, or of the .json files of a folder: where each is, and its text.

    A file of ATIF that ends in .jsonl, and every file of messages, has one on each line that is not empty. A
    collection has one for each attempt that has not failed, the last one of each.

    Raises:
        DataError: the file cannot be read, or has no document.
    """
    _refuse_data_set(path)
    if form == "collection":
        yield from _attempts(path)
        return
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


def _attempts(path: Path) -> Iterator[tuple[str, str]]:
    file = path / JOURNAL if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} cannot be read: there is no such file")
    try:
        entries = read_journal(file).values()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not what an endpoint has played: {error}") from None
    played = [entry for entry in entries if entry.result.status != "failed"]
    if not played:
        raise DataError(f"{file} has no attempt that has not failed")
    for entry in played:
        task, attempt = entry.key
        yield f"{file}: task {task}, attempt {attempt}", json.dumps(asdict(entry))


def episodes_in(text: str, form: ImportFormat, tools: Tools) -> list[ReadEpisode]:
    """Return what a document has to learn from; an ATIF trajectory may contain those of sub-agents.

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
    if form == "atif":
        return list(_of_atif(document, tools))
    if form == "collection":
        return [_of_attempt(document, tools)]
    if "branches" in document:
        return [_of_row(document, tools)]
    return [ReadEpisode([_of_openai(document, tools)])]


# What this project has kept


def _of_row(document: Mapping[str, Any], tools: Tools) -> ReadEpisode:
    """Return an episode of export --format jsonl. Which of its replies were sampled is not in the row."""
    branches = document["branches"]
    if not isinstance(branches, list) or not branches:
        raise DataError(f"branches must be a list with at least one conversation, got {shown(branches)}")
    conversations = [
        _conversation(_list(branch, f"branches[{number}]"), tools, f"branches[{number}]")
        for number, branch in enumerate(branches)
    ]
    return ReadEpisode(
        conversations,
        score=_score(document.get("score")),
        id=str(document.get("id") or ""),
        is_held_out=document.get("split") == "eval",
    )


def _of_attempt(entry: Mapping[str, Any], tools: Tools) -> ReadEpisode:
    """Return an attempt with the model of an endpoint: a conversation for each turn that none continues."""
    turns = {turn["id"]: turn for turn in entry["turns"]}
    parents = {turn["parent"] for turn in entry["turns"]}
    conversations = []
    for leaf in entry["turns"]:
        if leaf["id"] in parents:
            continue
        path = [leaf]
        while path[-1]["parent"] is not None:
            path.append(turns[path[-1]["parent"]])
        made = Conversation([], [], [], [], path[-1].get("tools") or tools)
        for turn in reversed(path):
            for message in turn["new_messages"]:
                place = f"{turn['id']}, message {len(made.messages)}"
                is_reply = isinstance(message, dict) and message.get("role") == "assistant"
                _add(made, message, place, "a message of the request" if is_reply else "")
            reply = {name: turn["reply"][name] for name in _OF_REPLIES if turn["reply"].get(name)}
            _refuse_fields(reply, f"{turn['id']}, reply")
            _add(made, {**reply, "role": "assistant"}, f"{turn['id']}, reply")
        conversations.append(made)
    result = entry["result"]
    return ReadEpisode(
        conversations,
        score=_score(result["score"]),
        id=result["episode"],
        is_held_out=entry["split"] == "eval",
    )


def _score(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# OpenAI


def _of_openai(document: Mapping[str, Any], tools: Tools) -> Conversation:
    """Return a line of a file for fine-tuning. Raises DataError."""
    if "preferred_output" in document:
        raise DataError("it has preferred_output: a preference, and not a conversation to imitate")
    if document.get("functions"):
        raise DataError("functions is not supported; use tools")
    if "messages" not in document and isinstance(document.get("turns"), list):
        raise DataError(
            f"it is a trace, as export --format openenv writes it, which cannot be imported; {_IMPORTABLE}"
        )
    given = document.get("tools")
    messages = _list(document.get("messages"), "messages")
    return _conversation(messages, tools if given is None else _list(given, "tools"), "messages")


def _conversation(messages: list[dict[str, Any]], tools: Tools, where_all: str) -> Conversation:
    untrained = []
    for index, message in enumerate(messages):
        where = f"{where_all}[{index}]"
        _refuse_fields(message, where)
        weight = message.get("weight")
        if weight is not None and (weight not in (0, 1) or message.get("role") != "assistant"):
            raise DataError(f"{where}.weight must be 0 or 1, in a message of the assistant only")
        untrained.append("weight 0" if weight == 0 else "")
    return Conversation(
        messages=messages,
        untrained=untrained,
        places=[f"{where_all}[{index}]" for index in range(len(messages))],
        recorded=[None] * len(messages),
        tools=tools,
    )


def _refuse_fields(message: Mapping[str, Any], where: str) -> None:
    """Raise DataError for what would be lost."""
    for name in ("function_call", "audio", "refusal"):
        if message.get(name):
            raise DataError(f"{where}.{name} is not supported")


# ATIF


def _of_atif(
    document: Mapping[str, Any], tools: Tools, where: str = "", *, in_held_out: bool = False
) -> Iterator[ReadEpisode]:
    version = document.get("schema_version")
    if not isinstance(version, str) or not version.startswith("ATIF-v1."):
        raise DataError(f"{where}schema_version must be ATIF-v1.x, got {shown(version)}")
    agent = document.get("agent")
    given = agent.get("tool_definitions") if isinstance(agent, dict) else None
    offered = tools if given is None else _list(given, f"{where}agent.tool_definitions")
    extra = document.get("extra")
    is_held_out = in_held_out or (isinstance(extra, dict) and extra.get("split") == "eval")
    made = Conversation([], [], [], [], offered)
    for number, step in enumerate(_list(document.get("steps"), f"{where}steps"), start=1):
        _add_step(made, step, f"{where}step {number}")
    score = _score(extra.get("score")) if isinstance(extra, dict) else None
    yield ReadEpisode([made], score, is_held_out=is_held_out)
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
