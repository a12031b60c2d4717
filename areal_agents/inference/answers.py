"""Checks an engine's answer against its request: tokens, logprobs, versions and finish reason.

An answer that contradicts itself or the request is refused with EngineError before anything of it is
recorded. The checks accept everything that SGLang 0.5 and the embedded engine do by design; docs/engines.md
lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

from areal_agents.core.completion import FinishReason, SamplingParams
from areal_agents.errors import EngineError, shown
from areal_agents.inference.engine import MOST_LOGPROB, version_from_wire

# exp(-1000) is 0 in float64, so no sampler can sample a less likely token. For an excluded token, servers
# write about -1e30 or the lowest float32.
LEAST_LOGPROB = -1000.0
_EOS_FILES = ("config.json", "generation_config.json")
_MESSAGE_END = "<|eom_id|>"  # SGLang ends a completion at this token wherever a tokenizer has it


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The request that an answer is checked against.

    Attributes:
        sampling: the sampling parameters as they were sent.
        vocab_size: the exclusive upper bound of token ids.
        prompt_tokens: P, the length of the prompt; None: not checked.
        rid: the request id that the answer must have if it has one; "" accepts any.
        most_tokens: the length of prompt and completion together at which the server may end a completion
            with "length" before `max_new_tokens` were sampled; None if it is not known.
        end_ids: the tokens that end a completion of the served model regardless of the request; None if not
            known.
        decode: decodes token ids, to check a reported stop string; None: the report is accepted.
    """

    sampling: SamplingParams
    vocab_size: int
    prompt_tokens: int | None = None
    rid: str = ""
    most_tokens: int | None = None
    end_ids: frozenset[int] | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def check_meta(self, meta: Mapping[str, Any], reason: FinishReason | None) -> None:
        """Raise EngineError if an answer belongs to another request. `reason` is None before the last
        chunk."""
        if self.rid and meta.get("id", self.rid) != self.rid:
            raise EngineError(f"/generate answered request {shown(meta['id'])}, expected {self.rid!r}")
        if meta.get("index", 0) != 0:
            raise EngineError(
                f"/generate answered with choice {shown(meta['index'])} of a request for one choice"
            )
        # SGLang replaces the prompt of a request that it aborts because it does not fit.
        counted = meta.get("prompt_tokens", self.prompt_tokens)
        if reason != "abort" and self.prompt_tokens is not None and counted != self.prompt_tokens:
            raise EngineError(
                f"/generate counts {shown(counted)} prompt tokens, expected {self.prompt_tokens}"
            )

    def check_tokens(self, before: int | None, ids: Sequence[int], total: int) -> None:
        """Raise EngineError unless `ids`, the last of `total` tokens, may follow the token `before`."""
        if total > self.sampling.max_new_tokens:
            raise EngineError(
                f"/generate sampled {total} tokens where {self.sampling.max_new_tokens} were requested"
            )
        if not ids:
            return
        if not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise EngineError(
                f"/generate sampled the token {wrong}, outside its vocabulary of {self.vocab_size}"
            )
        if self.sampling.ignore_eos:
            return
        for end in self.sampling.stop_token_ids:
            if end == before or end in ids[:-1]:
                raise EngineError(f"/generate sampled tokens after {end}, which ends the completion")

    def check_end(self, ids: Sequence[int], reason: FinishReason, matched: Any) -> None:
        """Raise EngineError unless `ids` may end for `reason`; `matched` is the stop that SGLang reports."""
        if reason == "length":
            self._check_length(len(ids))
        elif reason == "stop" and not self._may_stop(ids, matched):
            last = f"the token {ids[-1]}" if ids else "nothing"
            raise EngineError(
                f"/generate stopped at {shown(matched)} after {len(ids)} tokens, the last being {last}: "
                "that is neither a stop token nor a stop string of the request"
            )

    def _check_length(self, count: int) -> None:
        if count == self.sampling.max_new_tokens or self.most_tokens is None or self.prompt_tokens is None:
            return
        if self.prompt_tokens + count < self.most_tokens:
            raise EngineError(
                f"/generate ended with length after {count} tokens, although {self.sampling.max_new_tokens} "
                f"were requested, and {self.most_tokens} fit, {self.prompt_tokens} of the prompt included"
            )

    def _may_stop(self, ids: Sequence[int], matched: Any) -> bool:
        if not ids:
            return False
        if isinstance(matched, int) and matched != ids[-1]:
            return False
        sampling = self.sampling
        if sampling.grammar is not None and not isinstance(matched, str):
            return True  # SGLang stops at the token with which the grammar is complete
        if not sampling.ignore_eos:
            if ids[-1] in sampling.stop_token_ids or ids[-1] in (self.end_ids or ()):
                return True
            if self.end_ids is None and matched == ids[-1]:
                return True
        if not sampling.stop or not isinstance(matched, str | None):
            return False
        found = sampling.stop if matched is None else [text for text in sampling.stop if text == matched]
        if self.decode is None:
            return bool(found)
        text = self.decode(ids)
        return any(stop in text for stop in found)


def check_logprobs(values: Iterable[Any]) -> None:
    """Raise EngineError unless all values are logprobs of sampled tokens, from LEAST_LOGPROB to 0."""
    for value in values:
        if type(value) is float and LEAST_LOGPROB <= value <= MOST_LOGPROB:
            continue
        if type(value) not in (float, int) or not isfinite(value):
            raise EngineError(f"/generate answered with {shown(value)}, which is not a logprob")
        if not LEAST_LOGPROB <= value <= MOST_LOGPROB:
            raise EngineError(
                f"/generate answered with {shown(value)} as the logprob of a token that it sampled; "
                f"expected one from {LEAST_LOGPROB:g} to 0"
            )


def checked_spans(spans: Any, count: int, *, aborted: bool = False) -> list[tuple[int, int]]:
    """Convert SGLang's spans [{"version", "start", "end"}] over `count` tokens to [(version, end), ...].

    Raises EngineError unless they follow each other from 0 to `count` without a gap, and their versions never
    decrease: weights are never swapped back. If the request was `aborted`, they may count more tokens than
    the server sent.
    """
    if not isinstance(spans, list):
        raise _wrong_spans(spans, "are not a list")
    found: list[tuple[int, int]] = []
    before = 0
    for span in spans:
        start, end, version = span["start"], span["end"], version_from_wire(span["version"])
        if type(start) is not int or type(end) is not int or start != before or end < start:
            raise _wrong_spans(spans, "do not follow each other from 0")
        if found and version < found[-1][0]:
            raise _wrong_spans(spans, f"go back from {found[-1][0]} to {version}")
        if end == start and count:
            raise _wrong_spans(spans, "have an empty span")
        if end > count:
            if not aborted:
                raise _wrong_spans(spans, f"go beyond the {count} tokens sampled")
            end = count
        found.append((version, end))
        before = end
    if before != count:
        raise _wrong_spans(spans, f"do not cover the {count} tokens sampled")
    return found


def _wrong_spans(spans: Any, why: str) -> EngineError:
    return EngineError(f"/generate answered with weight_versions {shown(spans)}, which {why}")


def end_ids_of(folder: str | Path) -> frozenset[int] | None:
    """Return the tokens at which servers end a completion of the model in `folder`, whatever the request
    says.

    These are the end-of-sequence ids of config.json and generation_config.json, and the tokenizer's
    end-of-sequence token. None if the folder is not readable from here, or does not name them all.
    """
    root, found = Path(folder), set[int]()
    if not all((root / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        return None
    try:
        for name in _EOS_FILES:
            if (root / name).is_file():
                found |= _ids_in(json.loads((root / name).read_text()))
        settings = json.loads((root / "tokenizer_config.json").read_text())
        added = _added_tokens(root, settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None:
        if eos not in added:
            return None
        found.add(added[eos])
    if _MESSAGE_END in added:
        found.add(added[_MESSAGE_END])
    return frozenset(found)


def _ids_in(config: Any) -> set[int]:
    values = [config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")]
    return {
        id for value in values for id in (value if isinstance(value, list) else [value]) if id is not None
    }


def _added_tokens(root: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    known = {str(entry["content"]): int(id) for id, entry in settings.get("added_tokens_decoder", {}).items()}
    if known or not (root / "tokenizer.json").is_file():
        return known
    tokenizer = orjson.loads((root / "tokenizer.json").read_bytes())
    return {str(entry["content"]): int(entry["id"]) for entry in tokenizer["added_tokens"]}
