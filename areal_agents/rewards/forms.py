"""Rewards for the form of an answer: its pattern, JSON schema, length and citations."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.rewards.finished import FinishedEpisode

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"```(?:\w+)?[ \t]*\n(.*?)```", re.DOTALL)


def matches(pattern: str, answer: str | None, *, timeout_s: float = 1.0) -> float:
    """Return 1.0 if a regular expression matches the whole answer, else 0.0; "." matches line ends too.

    A pattern that backtracks may take exponential time with an answer that the policy wrote. After
    `timeout_s` the answer counts as one that does not match, and a warning says so. It needs the package
    regex (extra `rewards`).

    Raises regex.error if the pattern is not valid.
    """
    import regex  # imported late: it is `re` with a time limit, and most rewards do not need it

    if answer is None:
        return 0.0
    try:
        found = regex.fullmatch(pattern, answer.strip(), regex.DOTALL, timeout=timeout_s)
    except TimeoutError:
        logger.warning(
            "matches: the pattern %r was not done with an answer of %d characters within %g s, which counts "
            "as no match; write the pattern so that it does not backtrack",
            pattern, len(answer), timeout_s,
        )  # fmt: skip
        return 0.0
    return float(found is not None)


def fenced(answer: str | None) -> str | None:
    """Return the content of the last block between ``` fences, or None if there is none."""
    found = _FENCE.findall(answer or "")
    return found[-1] if found else None


def json_answer(answer: str | None) -> Any:
    """Return the JSON value that is the answer, or is in its last fenced block.

    Raises ValueError if it is not JSON.
    """
    block = fenced(answer)
    try:
        return json.loads(block if block is not None else answer or "", parse_constant=_refuse)
    except RecursionError:
        raise ValueError("the answer is JSON that is nested too deeply") from None


def follows_schema(schema: Mapping[str, Any], answer: str | None) -> float:
    """Return 1.0 if the answer (see `json_answer`) is JSON that follows a JSON schema, else 0.0.

    It needs the package jsonschema (extra `rewards`). Raises jsonschema.SchemaError if the schema is invalid.
    """
    import jsonschema  # imported late: most rewards do not need it

    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    try:
        return float(validator(schema).is_valid(json_answer(answer)))
    # No JSON, JSON that is nested too deeply, or a number that `multipleOf` cannot divide, such as 1e400.
    except (ValueError, RecursionError, OverflowError):
        return 0.0


def overlong(length: float, *, limit: float, buffer: float) -> float:
    """Return the penalty of a length: 0 up to `limit` - `buffer`, then linear, and -1 from `limit` on.

    It is the soft punishment of DAPO (arXiv 2503.14476, eq. 13). The unit is the caller's, such as characters
    of the answer, or turns; `algorithm.rewards.length_penalty` does the same for sampled tokens.

    Raises ValueError unless 0 < `buffer` <= `limit`.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer must be above 0 and at most limit, got {buffer} and {limit}")
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def cited(answer: str | None, pattern: str = r"\[([^\[\]\s]+)\]") -> list[str]:
    """Return the names of the sources that an answer cites, each once, in the order of their first citations.

    Args:
        pattern: a regular expression whose only group is the name of a source; default: a name in brackets.
    """
    return list(dict.fromkeys(re.findall(pattern, answer or "")))


def citation_f1(citations: Sequence[str], expected: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of citations, from 0 to 1; 1.0 if both are empty."""
    given, wanted = set(citations), set(expected)
    if not given and not wanted:
        return 1.0
    return 2 * len(given & wanted) / (len(given) + len(wanted))


def grounded(citations: Sequence[str], episode: FinishedEpisode) -> float:
    """Return the share of citations that occur in a tool result of `episode.messages`; 0.0 without any.

    A citation occurs as a whole: "doc-1" and "d" do not occur in "doc-12". Any word of a result does occur,
    so let the pattern of `cited` take nothing but the names of sources.
    """
    results = [
        message["content"]
        if isinstance(message.get("content"), str)
        else json.dumps(message.get("content"), ensure_ascii=False)
        for message in episode.messages
        if message.get("role") == "tool"
    ]
    if not citations:
        return 0.0
    return sum(any(_occurs(name, result) for result in results) for name in citations) / len(citations)


def _occurs(name: str, text: str) -> bool:
    found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    return found is not None and re.search(r"\w", name) is not None


def _refuse(constant: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
