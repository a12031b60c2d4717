"""Invalid answers, as a broken or hostile engine may send them; the client or the pool must refuse each.

A `Lie` falsifies an answer in place: a whole one, or each chunk of a stream. It works on replies of at least
four tokens that end with the stop token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["whole", "cumulative", "incremental"]
EVERY_FORM: frozenset[Form] = frozenset(("whole", "cumulative", "incremental"))
_CUMULATIVE: frozenset[Form] = frozenset(("cumulative",))


@dataclass(frozen=True, slots=True)
class Lie:
    """One way to falsify an answer.

    Attributes:
        falsify: changes an answer in place.
        forms: the forms of an answer that it applies to.
    """

    falsify: Callable[[dict[str, Any]], None]
    forms: frozenset[Form] = EVERY_FORM


def _at_the_end(falsify: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Apply `falsify` only to an answer, or to the chunk of a stream, that has a finish reason."""

    def falsify_last(answer: dict[str, Any]) -> None:
        if answer["meta_info"]["finish_reason"] is not None:
            falsify(answer)

    return falsify_last


def _spans(*spans: tuple[str, int | float, int | float]) -> Lie:
    """Replace the version spans (version, start, end) of a completion; the end _END is its length."""

    def falsify(answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        count = meta["completion_tokens"]
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": count if end == _END else end}
            for version, start, end in spans
        ]
        meta["weight_version"] = spans[-1][0]

    return Lie(_at_the_end(falsify))


def _meta(**changed: Any) -> Lie:
    return Lie(_at_the_end(lambda answer: answer["meta_info"].update(changed)))


def _counted(name: str, by: int) -> Lie:
    def falsify(answer: dict[str, Any]) -> None:
        answer["meta_info"][name] += by

    return Lie(_at_the_end(falsify))


def _logprob(value: Any) -> Lie:
    def falsify(answer: dict[str, Any]) -> None:
        triples = answer["meta_info"]["output_token_logprobs"]
        triples[-1] = (value, *triples[-1][1:])

    return Lie(_at_the_end(falsify))


def _last(token: Any, matched: Any, kind: str = "stop") -> Lie:
    """Replace the last token and the finish reason of a completion."""

    def falsify(answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        answer["output_ids"] = [*answer["output_ids"][:-1], token]
        last = meta["output_token_logprobs"][-1]
        meta["output_token_logprobs"] = [*meta["output_token_logprobs"][:-1], (last[0], token, None)]
        details = {"length": meta["completion_tokens"]} if kind == "length" else {"matched": matched}
        meta["finish_reason"] = {"type": kind, **details}

    return Lie(_at_the_end(falsify))


def _tokens_after_the_end(answer: dict[str, Any]) -> None:
    meta = answer["meta_info"]
    answer["output_ids"] = [*answer["output_ids"], _WORD, answer["output_ids"][-1]]
    first, last = (-1.0, _WORD, None), meta["output_token_logprobs"][-1]
    meta["output_token_logprobs"] = [*meta["output_token_logprobs"], first, last]
    meta["completion_tokens"] += 2
    meta["weight_versions"][-1]["end"] += 2


def _other_ids(answer: dict[str, Any]) -> None:
    answer["output_ids"] = [*answer["output_ids"][:-1], _WORD]


def _one_logprob_less(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][:-1]


def _rewritten_token(answer: dict[str, Any]) -> None:
    triples = answer["meta_info"]["output_token_logprobs"]
    if len(triples) >= 3:
        answer["output_ids"] = [_WORD, *answer["output_ids"][1:]]
        answer["meta_info"]["output_token_logprobs"] = [(triples[0][0], _WORD, None), *triples[1:]]


def _rewritten_logprob(answer: dict[str, Any]) -> None:
    triples = answer["meta_info"]["output_token_logprobs"]
    if len(triples) >= 3:
        answer["meta_info"]["output_token_logprobs"] = [(-3.75, *triples[0][1:]), *triples[1:]]


def _shrunk(answer: dict[str, Any]) -> None:
    meta = answer["meta_info"]
    answer["output_ids"], meta["completion_tokens"] = answer["output_ids"][:1], 1
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:1]
    meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": 1}]


_END = 1 << 40  # replaced by the number of tokens
_WORD = 300  # a token of text in the vocabularies of the tests and the examples

LIES: Mapping[str, Lie] = {
    "a version that was never published": _spans(("default", 0, 2), ("9", 2, _END)),
    "a version in the middle that was never published": _spans(
        ("default", 0, 1), ("9", 1, 2), ("default", 2, _END)
    ),
    "versions that go back": _spans(("1", 0, 1), ("default", 1, 2), ("1", 2, _END)),
    "a span with negative ends": _spans(("default", 0, _END), ("1", -2, -1)),
    "spans that begin late": _spans(("default", 1, _END)),
    "spans with a gap": _spans(("default", 0, 1), ("default", 2, _END)),
    "spans that overlap": _spans(("default", 0, 3), ("default", 2, _END)),
    "spans out of order": _spans(("default", 2, _END), ("default", 0, 2)),
    "spans that do not cover": _spans(("default", 0, 2)),
    "spans beyond the end": _spans(("default", 0, 1_000_000)),
    "a span without tokens": _spans(("default", 0, 0), ("default", 0, _END)),
    "a span between tokens": _spans(("default", 0, 1.5), ("default", 1.5, _END)),
    "a version that is none": _spans(("latest", 0, _END)),
    "tokens after the stop token": Lie(_at_the_end(_tokens_after_the_end)),
    "a stop without a stop token": _last(_WORD, _WORD),
    "a stop at another token than the last": _last(_WORD, 2),
    "a stop string that nobody requested": _last(_WORD, "END"),
    "a stop after logits that are not finite": _last(_WORD, "NaN happened"),
    "a length short of the limit": _last(_WORD, None, "length"),
    "a logprob as a string": _logprob("-0.5"),
    "a logprob that is null": _logprob(None),
    "a logprob that is true": _logprob(True),
    "a logprob above 0": _logprob(0.5),
    "the logprob of an excluded token": _logprob(-1e30),
    "one logprob less": Lie(_at_the_end(_one_logprob_less)),
    "other ids than logprobs": Lie(_at_the_end(_other_ids)),
    "a token outside the vocabulary": _last(1 << 20, 1 << 20),
    "a token that is no integer": _last(300.0, 300.0),
    "another count of prompt tokens": _counted("prompt_tokens", 1),
    "another count of sampled tokens": _counted("completion_tokens", 1),
    "another request's answer": _meta(id="somebody-else$"),
    "another choice": _meta(index=1),
    "an earlier token rewritten": Lie(_rewritten_token, _CUMULATIVE),
    "an earlier logprob rewritten": Lie(_rewritten_logprob, _CUMULATIVE),
    "tokens taken back": Lie(_at_the_end(_shrunk), _CUMULATIVE),
}
