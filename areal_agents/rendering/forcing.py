"""Builds the grammars that force a reply: tool calls in the markup of the model's family, JSON, or either.

A marker that is one token of the vocabulary is required as that token, because the parser would read several
tokens that spell it as text. Reasoning may come first if the template's prompt lets the model think.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

from areal_agents.core.completion import Grammar
from areal_agents.core.schemas import unenforced
from areal_agents.errors import RenderingError
from areal_agents.rendering.replies import ReplyReader
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

Node = dict[str, Any]  # one format of xgrammar's structural tag

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_PLAIN = {"qj": 1}  # an answer that no format reads as markup
# Tokens that parsers look for. The other added tokens are not excluded: each costs a second of compiling.
_MARKUP = re.compile("think|header|tool.(calls?|sep)")
_MAX_WHITESPACE = 64  # characters between two JSON tokens, so that a small model cannot write only whitespace
_HERMES = frozenset({"qwen3", "qwen3-vl"})
_QWEN_XML = frozenset(
    {"nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"}
)
_DEEPSEEK = "deepseek-v3"  # deepseek-r1 always reasons first, with markers that are plain text
_KIMI = frozenset({"kimi-k2", "kimi-k2.5"})


class Forcing:
    """Builds the grammars of one chat format. Caches facts about the format and is otherwise stateless."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._format = reader.format
        self._tokenizer = reader.tokenizer
        self._family = reader.family

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        calls: Literal["auto", "none", "required"],
        callable_tools: Sequence[str],
        parallel: bool,
        output: Grammar | None,
    ) -> Grammar | None:
        """See `ChatRenderer.reply_grammar`."""
        if calls == "required":
            return self._tag(self._calls(tools, callable_tools, parallel=parallel))
        if output is None:
            return None
        answer = self._answer(output)
        if not tools or calls == "none":
            return self._tag(answer)
        return self._tag(_one_of([answer, self._calls(tools, (), parallel=parallel, beside_json=True)]))

    def _tag(self, reply: Node) -> Grammar:
        root = _sequence(*self._reasoning, reply)
        return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": root}))

    def _calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        callable_tools: Sequence[str],
        *,
        parallel: bool,
        beside_json: bool = False,
    ) -> Node:
        functions = [tool["function"] for tool in tools]
        names = [function["name"] for function in functions]
        if not names or not set(callable_tools) <= set(names):
            got = ", ".join(map(repr, callable_tools)) or None
            raise ValueError(f"a required tool call must name one of the tools {names}, got {got}")
        chosen = [f for f in functions if not callable_tools or f["name"] in callable_tools]
        markup = getattr(self._format, "markup", None)
        # The calls of a model's own template are Hermes calls.
        family = next(iter(_HERMES)) if getattr(markup, "calls", False) else self._family
        calls = _calls(family, self._words, chosen, parallel=parallel)
        if calls is None and beside_json:
            raise RenderingError(
                f"replies of the chat format {self._family} cannot be constrained to JSON or tool calls: "
                "leave out response_format or tools, or set tool_choice none"
            )
        if calls is None:
            raise RenderingError(
                f"tool calls of the chat format {self._family} cannot be forced: use tool_choice auto"
            )
        return calls

    def _answer(self, output: Grammar) -> Node:
        """The node of JSON content that matches the schema. RenderingError if it cannot be forced."""
        if output.kind != "json_schema":
            raise ValueError(f"the output of a chat reply must be a json_schema grammar, got {output.kind!r}")
        schema = json.loads(output.text)
        if (reason := unenforced(schema)) is not None:
            raise RenderingError(f"the JSON schema cannot be enforced: {reason}")
        if not self._is_content(_PLAIN, self._lead):
            self._refuse("JSON")
        if _may_have(schema, "name") and not self._is_content({"name": "qj"}, self._lead):
            self._refuse("an object with a name")
        return self._words.json(schema)

    def _refuse(self, answer: str) -> NoReturn:
        raise RenderingError(
            f"the chat format {self._family} does not read {answer} as the content of a reply, so "
            "response_format is not supported for it; leave out response_format"
        )

    def _is_content(self, value: Any, lead: str) -> bool:
        """Whether a reply that is `lead` followed by this JSON is read as content."""
        text = json.dumps(value)
        ids = [*self._tokenizer.encode(lead + text), *self._format.get_stop_token_ids()[:1]]
        reply, _ = self._reader.read_calls(self._prompt, ids)
        return reply.content == text and not reply.calls

    @cached_property
    def _words(self) -> _Words:
        return _Words(self._tokenizer)

    @cached_property
    def _prompt(self) -> list[int]:
        question = [{"role": "user", "content": "x"}]
        return self._format.render_ids(question, tools=None, add_generation_prompt=True)

    @cached_property
    def _thinking(self) -> tuple[int, int] | None:
        """The tokens around reasoning, if the vocabulary has them."""
        start, end = (self._tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "</think>"))
        return (start, end) if {start, end} <= self._tokenizer.added_token_ids else None

    @cached_property
    def _lead(self) -> str:
        """The shortest reasoning that must precede content."""
        if self._thinking is None:
            return ""
        opened, closed = (_last(self._prompt, token) for token in self._thinking)
        if opened > closed:
            return "x</think>\n\n"
        # Some formats read all text as reasoning until it is closed.
        may_think = closed < 0 and not self._is_content(_PLAIN, "")
        return "<think>x</think>\n\n" if may_think else ""

    @cached_property
    def _reasoning(self) -> list[Node]:
        """The nodes before the reply: reasoning, if the prompt opened it or leaves it to the model."""
        if self._thinking is None:
            return []
        start, close = self._thinking
        thought = {"type": "any_tokens", "exclude_tokens": sorted(self._tokenizer.added_token_ids)}
        end = _sequence(thought, {"type": "token", "token": close}, _text("\n\n"))
        whole = _sequence({"type": "token", "token": start}, end)
        if self._lead:
            return [whole if self._lead.startswith("<think>") else end]
        return [] if close in self._prompt else [{"type": "optional", "content": whole}]


class _Words:
    """Builds the nodes of call markup for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The parser would read these tokens as markup inside a string.
        texts = map(tokenizer.token_text, sorted(tokenizer.added_token_ids))
        self._excluded = [text for text in texts if _MARKUP.search(text)]

    def token(self, text: str) -> Node | None:
        """The node of exactly this added token; None if the vocabulary does not have it."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        return {"type": "token", "token": token} if token in self._tokenizer.added_token_ids else None

    def has(self, *texts: str) -> bool:
        return all(self.token(text) is not None for text in texts)

    def arguments(self, function: Mapping[str, Any], style: str = "json") -> Node:
        """The node of an object that matches the function's parameters."""
        return self.json(function.get("parameters") or _ANY_OBJECT, style)

    def json(self, schema: Mapping[str, Any], style: str = "json") -> Node:
        """The node of a value that matches the schema."""
        node: Node = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}
        if not _bounds_strings(schema):  # xgrammar would drop the bounds for the exclusion
            node["excludes"] = self._excluded
        return node if style == "json" else {**node, "style": style}


def _calls(
    family: str, words: _Words, functions: Sequence[Mapping[str, Any]], *, parallel: bool
) -> Node | None:
    if family in _HERMES and words.has("<tool_call>", "</tool_call>"):
        return _tagged(words, functions, _hermes, parallel=parallel)
    if family in _QWEN_XML and words.has("<tool_call>", "</tool_call>"):
        return _tagged(words, functions, _qwen_xml, parallel=parallel)
    if family == _DEEPSEEK:
        return _deepseek(words, functions, parallel=parallel)
    if family in _KIMI:
        return _kimi(words, functions, parallel=parallel)
    if family == "llama-3":
        return _one_of([_llama(words, function) for function in functions])
    return None


def _tagged(
    words: _Words,
    functions: Sequence[Mapping[str, Any]],
    body: Callable[[_Words, Mapping[str, Any]], Node],
    *,
    parallel: bool,
) -> Node:
    """Calls as <tool_call>…</tool_call>, separated by newlines."""
    tags = [
        {
            "type": "tag",
            "begin": words.token("<tool_call>"),
            "content": body(words, function),
            "end": words.token("</tool_call>"),
        }
        for function in functions
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _hermes(words: _Words, function: Mapping[str, Any]) -> Node:
    name = json.dumps(function["name"], ensure_ascii=False)
    return _sequence(_text(f'\n{{"name": {name}, "arguments": '), words.arguments(function), _text("}\n"))


def _qwen_xml(words: _Words, function: Mapping[str, Any]) -> Node:
    return _sequence(
        _text(f"\n<function={function['name']}>\n"),
        words.arguments(function, "qwen_xml"),
        _text("\n</function>\n"),
    )


def _llama(words: _Words, function: Mapping[str, Any]) -> Node:
    name = json.dumps(function["name"], ensure_ascii=False)
    return _sequence(_text(f'{{"name": {name}, "parameters": '), words.arguments(function), _text("}"))


def _deepseek(words: _Words, functions: Sequence[Mapping[str, Any]], *, parallel: bool) -> Node:
    def token(name: str) -> Node:
        node = words.token(f"<｜tool▁{name}｜>")
        assert node is not None  # the family asserts these tokens
        return node

    calls = [
        _sequence(
            token("call▁begin"),
            _text("function"),
            token("sep"),
            _text(f"{function['name']}\n```json\n"),
            words.arguments(function),
            _text("\n```"),
            token("call▁end"),
        )
        for function in functions
    ]
    more = [_star(_sequence(_text("\n"), _one_of(calls)))] if parallel else []
    return _sequence(token("calls▁begin"), _one_of(calls), *more, token("calls▁end"))


def _kimi(words: _Words, functions: Sequence[Mapping[str, Any]], *, parallel: bool) -> Node:
    def token(name: str) -> Node:
        node = words.token(f"<|tool_call{name}|>")
        assert node is not None  # the family asserts these tokens
        return node

    def call(function: Mapping[str, Any], index: Node) -> Node:
        name = _text(f"functions.{function['name']}:")
        opening, inside = token("_begin"), token("_argument_begin")
        return _sequence(opening, name, index, inside, words.arguments(function), token("_end"))

    first = _one_of([call(function, _text("0")) for function in functions])
    later: Node = {"type": "regex", "pattern": "[1-9][0-9]?"}
    more = [_star(_one_of([call(function, later) for function in functions]))] if parallel else []
    return _sequence(token("s_section_begin"), first, *more, token("s_section_end"))


def _may_have(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an object that matches the schema may have this key; True if that is hard to decide."""
    properties, kind = schema.get("properties"), schema.get("type")
    if not isinstance(kind, str) or (isinstance(properties, Mapping) and key in properties):
        return True
    # Engines reject keys that a schema with properties does not name, unless additionalProperties says so.
    more = schema.get("additionalProperties", properties is None)
    return kind == "object" and more is not False


def _bounds_strings(schema: Any) -> bool:
    """Whether the schema bounds the length of any string."""
    return any("minLength" in inner or "maxLength" in inner for inner in _objects(schema))


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            yield found
            left += found.values()
        elif isinstance(found, list):
            left += found


def _last(ids: Sequence[int], token: int) -> int:
    return max((index for index, other in enumerate(ids) if other == token), default=-1)


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Node) -> Node:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _one_of(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": list(nodes)}


def _star(node: Node) -> Node:
    return {"type": "star", "content": node}
