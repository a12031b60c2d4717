"""Constrained decoding: which tokens an output may go on with, told by xgrammar.

A grammar is compiled once, beside generation; each request has a matcher of its own, which lives as long as
the request does, across pauses and retractions.
"""

from __future__ import annotations

import json
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from areal_agents.core.completion import Grammar
from areal_agents.core.schemas import unenforced
from areal_agents.errors import RequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

CACHE_BYTES = 256 * 1024 * 1024
COMPILE_THREADS = 2
MAX_WHITESPACE = 64  # between two parts of a JSON text, lest a small model writes nothing else
ANY_JSON = "$$ANY$$"  # SGLang's word for any JSON value
MESSAGE_LIMIT = 300  # characters of the compiler's text that are passed on


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
        self._loading = Lock()

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> TokenMatcher:
        """A fresh matcher, at the start of `grammar`; the stop tokens end the output where it is complete.

        RequestError if the grammar is malformed, has a keyword that would be ignored, or not one token can
        begin it.
        """
        stop_ids = sorted({*self._eos_ids, *stop_token_ids})
        if not stop_ids:
            raise RequestError(
                f"{grammar.kind} needs a token that ends the output: the model has none, give stop_token_ids"
            )
        if stop_ids[-1] >= self._vocab_size:
            raise RequestError(f"stop token {stop_ids[-1]} is outside the vocabulary of {self._vocab_size}")
        with self._loading:
            compiler = self._loaded(grammar.kind, stop_ids)
        try:
            _refuse_ignored(grammar)
            compiled = _compile(compiler, grammar)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"{grammar.kind} cannot be compiled: {_first_line(error)}") from error
        from xgrammar import GrammarMatcher

        matcher = TokenMatcher(GrammarMatcher(compiled, override_stop_tokens=stop_ids), self._vocab_size)
        if not matcher.allowed().any():
            raise RequestError(f"no token of the vocabulary begins what the {grammar.kind} describes")
        return matcher

    def _loaded(self, kind: str, stop_ids: list[int]) -> GrammarCompiler:
        """The compiler, made when it is first needed: it reads the whole vocabulary.

        The vocabulary must name stop tokens of its own; every matcher sets its request's in their place.
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
            self._compiler = GrammarCompiler(
                vocabulary, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES
            )
        return self._compiler


class TokenMatcher:
    """How far one output has come in its grammar. Once submitted, it is the scheduler's thread's alone."""

    def __init__(self, matcher: GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self.stuck = False  # whether the output cannot go on

    def allowed(self) -> np.ndarray:
        """[V] whether each token may come next; stop tokens may where the grammar is complete."""
        self._matcher.fill_next_token_bitmask(self._mask)
        return np.unpackbits(self._mask.view(np.uint8)[0], count=self._vocab_size, bitorder="little") != 0

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
        """Go on by `token`; an excluded one, which a draw can hit once in 10^16 times, leaves it stuck."""
        self.stuck = not self._matcher.accept_token(token)

    @property
    def ended(self) -> bool:
        """Whether a stop token has ended the output."""
        return self._matcher.is_terminated()


def _refuse_ignored(grammar: Grammar) -> None:
    """ValueError if the schema, as JSON text, has a keyword that the compiler drops without a word."""
    if grammar.kind != "json_schema" or grammar.text == ANY_JSON:
        return
    reason = unenforced(json.loads(grammar.text))
    if reason is not None:
        raise ValueError(reason)


def _compile(compiler: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    if grammar.kind == "json_schema" and grammar.text == ANY_JSON:
        return compiler.compile_builtin_json_grammar()
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    if grammar.kind == "ebnf":
        return compiler.compile_grammar(grammar.text)
    return compiler.compile_structural_tag(grammar.text)


def _first_line(error: Exception) -> str:
    """The compiler's message without the place in its source code."""
    line = " ".join(str(error).split())
    line = line.split(": ", 1)[-1] if line.startswith("[") else line
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 1] + "…"
