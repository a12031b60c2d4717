"""Constrained decoding: the tokens that may follow an output, computed by xgrammar.

A grammar is compiled once, beside generation; each request has a matcher of its own, which lasts as long as
the request does, across pauses and retractions.

Limits on the size of a grammar, which are checked before it is compiled.

The compiler is written in C++ and cannot be interrupted, and it recurses: a deeply nested pattern overflows
its stack and ends the process, and thousands of alternatives take minutes. So each grammar is measured first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from areal_agents.core.completion import Grammar
from areal_agents.core.patterns import unenforced_pattern
from areal_agents.core.schemas import unenforced
from areal_agents.errors import RequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher


CACHE_BYTES = 256 * 1024 * 1024
COMPILE_THREADS = 2
MAX_WHITESPACE = 64  # limits whitespace between parts of JSON, which a small model could repeat endlessly
ANY_JSON = "$$ANY$$"  # SGLang's schema for any JSON value
MESSAGE_LIMIT = 300  # characters of the compiler's message that are kept


class Grammars:
    """Compiles grammars for one vocabulary. `matcher` may be called in any thread.

    Args:
        tokenizer: the model's tokenizer, or None: then every grammar is refused.
        vocab_size: the width of the logits; ids beyond the tokenizer's vocabulary are never allowed.
        eos_ids: tokens that may end any constrained output.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiler: GrammarCompiler | None = None
        self._controls: np.ndarray | None = None  # [V] tokens with a control character other than a newline
        self._loading = Lock()

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> TokenMatcher:
        """Return a new matcher at the start of `grammar`; stop tokens may end the output once it is complete.

        RequestError if the grammar is malformed or too large, has a part that would not be enforced, or if no
        token can begin it.
        """
        stop_ids = sorted({*self._eos_ids, *stop_token_ids})
        if not stop_ids:
            raise RequestError(
                f"{grammar.kind} needs a token that ends the output, and the model has none: give "
                "stop_token_ids"
            )
        if stop_ids[-1] >= self._vocab_size:
            raise RequestError(f"stop token {stop_ids[-1]} is outside the vocabulary of {self._vocab_size}")
        with self._loading:
            compiler = self._loaded(grammar.kind, stop_ids)
        try:
            if not _is_any_json(grammar):
                refuse_too_large(grammar)
                _refuse_ignored(grammar)
            compiled = _compile(compiler, grammar)
            refuse_compiled(compiled.memory_size_bytes)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"{grammar.kind} cannot be compiled: {_first_line(error)}") from error
        from xgrammar import GrammarMatcher

        excluded = self._controls if grammar.kind == "json_schema" else None
        matcher = TokenMatcher(
            GrammarMatcher(compiled, override_stop_tokens=stop_ids), self._vocab_size, excluded=excluded
        )
        if not matcher.allowed().any():
            raise RequestError(f"no token of the vocabulary begins what the {grammar.kind} describes")
        return matcher

    def _loaded(self, kind: str, stop_ids: list[int]) -> GrammarCompiler:
        """Return the compiler, created on first use because it reads the whole vocabulary.

        The vocabulary must have stop tokens; every matcher replaces them by those of its request.
        """
        if self._compiler is None:
            if self._tokenizer is None:
                raise RequestError(f"{kind} needs a tokenizer.json in the model folder")
            try:
                from xgrammar import GrammarCompiler, TokenizerInfo
            except ImportError as error:
                raise RequestError(
                    f"{kind} needs xgrammar, which is not installed: pip install xgrammar"
                ) from error
            from transformers import PreTrainedTokenizerFast

            vocabulary = TokenizerInfo.from_huggingface(
                PreTrainedTokenizerFast(tokenizer_object=self._tokenizer),
                vocab_size=self._vocab_size,
                stop_token_ids=list(self._eos_ids) or stop_ids,
            )
            # xgrammar allows control characters, unescaped, in a string whose length is bounded.
            texts = vocabulary.decoded_vocab
            self._controls = np.array([any(byte < 32 and byte != 10 for byte in text) for text in texts])
            self._compiler = GrammarCompiler(
                vocabulary, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES
            )
        return self._compiler


class TokenMatcher:
    """The state of one output in its grammar. Once submitted, only the scheduler's thread uses it.

    Args:
        matcher: the matcher of xgrammar.
        vocab_size: V, the width of the logits.
        excluded: [V] tokens that are not allowed anywhere, or None.
    """

    def __init__(
        self, matcher: GrammarMatcher, vocab_size: int, *, excluded: np.ndarray | None = None
    ) -> None:
        self._matcher = matcher
        self._excluded = excluded
        self._vocab_size = vocab_size
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self.stuck = False  # whether the output cannot continue

    def allowed(self) -> np.ndarray:
        """Return [V] whether each token may come next; stop tokens may if the grammar is complete."""
        self._matcher.fill_next_token_bitmask(self._mask)
        mask = np.unpackbits(self._mask.view(np.uint8)[0], count=self._vocab_size, bitorder="little") != 0
        return mask if self._excluded is None else mask & ~self._excluded

    def exclude(self, logits: Tensor) -> None:
        """Set the logits [V] of all other tokens to minus infinity, or to NaN where no token is left."""
        allowed = self.allowed()
        self.stuck = not allowed.any()
        with torch.inference_mode():
            if self.stuck:
                logits.fill_(float("nan"))
            else:
                logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Append `token`. After an excluded token, which sampling can return once in 10^16 times, no token
        fits."""
        self.stuck = not self._matcher.accept_token(token)

    @property
    def ended(self) -> bool:
        """Whether a stop token has ended the output."""
        return self._matcher.is_terminated()


def _is_any_json(grammar: Grammar) -> bool:
    return grammar.kind == "json_schema" and grammar.text == ANY_JSON


def _refuse_ignored(grammar: Grammar) -> None:
    """ValueError if the grammar has a part that the compiler silently ignores.

    The schemas within a structural tag are not checked: they belong to tools, whose arguments are not
    guaranteed to be valid.
    """
    reason = None
    if grammar.kind == "json_schema":
        reason = unenforced(json.loads(grammar.text))
    elif grammar.kind == "regex":
        reason = unenforced_pattern(grammar.text, in_json=False)
    elif grammar.kind == "structural_tag":
        patterns = [node.get("pattern") for node in objects_of(json.loads(grammar.text)) if _is_regex(node)]
        reasons = (unenforced_pattern(text, in_json=False) for text in patterns if isinstance(text, str))
        reason = next(filter(None, reasons), None)
    if reason is not None:
        raise ValueError(reason)


def _is_regex(node: dict[str, Any]) -> bool:
    return node.get("type") == "regex"


def _compile(compiler: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    if _is_any_json(grammar):
        return compiler.compile_builtin_json_grammar()
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    if grammar.kind == "ebnf":
        return compiler.compile_grammar(grammar.text)
    return compiler.compile_structural_tag(grammar.text)


def _first_line(error: Exception) -> str:
    """Return the compiler's message without its source location."""
    line = " ".join(str(error).split())
    line = line.split(": ", 1)[-1] if line.startswith("[") else line
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 1] + "…"


MOST_CHARACTERS = 256 * 1024  # length of the grammar in characters
MOST_DEPTH = 128  # nesting depth of JSON values
MOST_VALUES = 5_000  # total number of enum values
MOST_SCHEMAS = 5_000  # total number of properties, prefixItems and branches
MOST_GROUPS = 2_000  # groups of one pattern, nested or not
MOST_REPEATS = 1_000  # a repetition count
MOST_OF = {  # by keyword
    **dict.fromkeys(("maxLength", "minLength"), 10_000),
    **dict.fromkeys(("maxItems", "maxProperties", "minItems", "minProperties"), 1_000),
}
MOST_COMPILED_BYTES = 64 * 1024 * 1024
_DATA = ("const", "default", "enum", "examples")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def refuse_too_large(grammar: Grammar) -> None:
    """Raise ValueError, naming the limit, if a grammar could take too long to compile."""
    if len(grammar.text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(grammar.text)} characters, at most {MOST_CHARACTERS} are supported")
    if grammar.kind in ("regex", "ebnf"):
        _refuse_pattern(grammar.text)
        return
    if _depth(grammar.text) > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")
    values = schemas = 0
    for node in objects_of(json.loads(grammar.text)):
        values += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        for name in ("allOf", "anyOf", "oneOf", "patternProperties", "prefixItems", "properties"):
            schemas += len(node[name]) if isinstance(node.get(name), list | dict) else 0
        for name, most in MOST_OF.items():
            bound = node.get(name)
            if isinstance(bound, int | float) and bound > most:
                raise ValueError(f"{name} is {bound}, at most {most} is supported")
        if isinstance(node.get("pattern"), str):
            _refuse_pattern(node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            for pattern in node["patternProperties"]:
                _refuse_pattern(pattern)
    if values > MOST_VALUES:
        raise ValueError(f"its enums have {values} values, at most {MOST_VALUES} are supported")
    if schemas > MOST_SCHEMAS:
        raise ValueError(f"it has {schemas} properties and branches, at most {MOST_SCHEMAS} are supported")


def refuse_compiled(size_bytes: int) -> None:
    """Raise ValueError if a compiled grammar takes too much memory."""
    if size_bytes > MOST_COMPILED_BYTES:
        raise ValueError(f"it takes {size_bytes} bytes compiled, at most {MOST_COMPILED_BYTES} are supported")


def _refuse_pattern(pattern: str) -> None:
    if pattern.count("(") > MOST_GROUPS:
        raise ValueError(f"a pattern has more than {MOST_GROUPS} groups")
    for counts in _REPEATS.findall(pattern):
        if any(count and int(count[:6]) > MOST_REPEATS for count in counts):
            raise ValueError(f"a pattern has a repetition count above {MOST_REPEATS}")


def _depth(text: str) -> int:
    """Return the maximum nesting depth of arrays and objects in a JSON string."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def objects_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value except those within the data of a schema, such as `enum`."""
    left = [tree]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield found
            left += [value for name, value in found.items() if name not in _DATA]
        elif isinstance(found, list):
            left += found
