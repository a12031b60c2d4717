"""Patterns of bounded work: their matches, compared with those of `re`, and the refused patterns."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.bounded_patterns import LONGEST, BoundedPattern

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=200)
ACCEPTED = [
    r"x-anthropic-billing-header:[^\n]*",
    r"date: \d{4}-\d\d-\d\d",
    r"time: \d{1,2}:\d\d(?::\d\d)?",
    r"date: (?:Mon|Tues|Wednes)day",
    r"uid=[^;]*+; cch=[^;]*+;",
    r"name(?:a*+)*+",
    r"date: .*?d",
    r"time: (?:[a-d]{2}:){3}[a-d]",
    r"time: (?>aa?)b",
    r"time\b",
]


@STEADY
@given(
    st.sampled_from(ACCEPTED), st.lists(st.sampled_from(["date: ", "time: ", "uid=", "; cch=", *"ab1:-;d\n"]))
)
def test_the_matches_are_those_of_re(pattern: str, pieces: list[str]) -> None:
    text = "".join(pieces)[:LONGEST]
    literal = re.match(r"[a-z-]+(?:: |:|=)?", pattern)
    assert literal is not None
    start = len(literal.group())
    expected = [(found.start() + start, found.end()) for found in re.finditer(pattern, text)]
    assert list(BoundedPattern(pattern).spans(text)) == expected


def test_the_length_and_the_number_of_matches_are_limited() -> None:
    text = "x-anthropic-billing-header: " + "a" * 2 * LONGEST
    ((start, end),) = BoundedPattern(ACCEPTED[0]).spans(text)
    assert (start, end - start) == (len("x-anthropic-billing-header:"), LONGEST)
    assert len(list(BoundedPattern(r"time\d").spans("time1 " * 1000))) == 64


@pytest.mark.parametrize("pattern", ACCEPTED)
@pytest.mark.parametrize("unit", ["a", "date: a", "time: aa:", "uid=; cch", "name"])
def test_an_accepted_pattern_takes_bounded_time_on_any_string(pattern: str, unit: str) -> None:
    """A pattern that backtracks without a bound would never end here."""
    assert len(list(BoundedPattern(pattern).spans(unit * 200_000))) <= 64


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("name[", "is not a regular expression: unterminated character set"),
        ("[0-9]+", "must begin with at least 4 literal characters"),
        ("abc[0-9]", "it begins with 'abc'"),
        ("name{5}", "it begins with 'nam'"),
        ("(?i)name", "has flags"),
        ("name(?i:x)", "flags are not supported"),
        (r"name(x)\1", "no groupref"),
        ("name(?=x)", "no assert"),
        ("name(a+)+$", "in too many ways"),
        ("name(?:a|aa){20}", "in too many ways"),
        ("name.*.*", "in too many ways"),
        ("name(a?){600}", "in too many ways"),
        ("name(?:a{1,2}){9999999}", "in too many ways"),
        ("name(?:ab*)*+x", "in too many ways"),
        ("name(?>(?:a+)+)b", "in too many ways"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        BoundedPattern(pattern)
