"""Which patterns are enforced; tests/inference/test_schema_outputs.py compares outputs with them."""

from __future__ import annotations

import pytest

from areal_agents.core.patterns import unenforced_pattern


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        ("^(?=.*a)b+$", "a lookahead '(?=.' at 1"),
        ("^(?!b)[bc]$", "a lookahead '(?!b' at 1"),
        ("^(?<=a)b$", "a lookbehind"),
        ("^(?<!a)b$", "a lookbehind"),
        ("^(?i)abc$", "a group of the kind '(?i)'"),
        ("^(?>a)$", "a group of the kind"),
        (r"^(a)\1$", r"the escape '\1' at 4"),
        (r"^\bfoo$", r"the escape '\b' at 1"),
        (r"^a\Z", r"the escape '\Z'"),
        (r"^\p{L}$", r"the escape '\p'"),
        (r"^\cJ$", r"the escape '\c'"),
        (r"^\0$", r"the escape '\0'"),
        ("a\\", "the escape"),
        ("^a^b$", "the anchor '^' at 2"),
        ("^a$b$", "the anchor '$' at 2"),
        ("(^a|b)c", "the anchor '^' at 1"),
        ("(a$)", "the anchor '$' at 2"),
        ('^a"b$', "'\"' at 2, which a JSON string escapes,"),
        (r"^a\\b$", "which a JSON string escapes,"),
        (r"^\n$", "which a JSON string escapes,"),
        (r"^\x22$", "which a JSON string escapes,"),
        (r"^\u000a$", "which a JSON string escapes,"),
        (r"^\S+$", "Unicode white space"),
        (r"^[^\s]$", "Unicode white space"),
        ("^a*+$", "a quantifier of a quantifier at 3"),
        ("^a{2}{3}$", "a quantifier of a quantifier"),
        ("^a{129}$", "a count above 128"),
        ("^a{1,1000}$", "a count above 128"),
        ("^a{,3}$", "'{' at 2"),
        ("*a", "'*' at 0"),
        ("[]", "an empty class"),
        ("(" * 33 + ")" * 33, "more than 32 groups"),
        ("((.{1,100}){1,9}){1,9}", "a length of more than 2000 characters"),
        ("a" * 2001, "a length of more than 2000 characters"),
        (r"\ud83d", "a code that is not a character"),
    ],
)
def test_a_construct_that_is_not_enforced_is_named(pattern: str, construct: str) -> None:
    reason = unenforced_pattern(pattern)
    assert reason is not None and construct in reason and reason.endswith("is not supported")


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^$",
        "a|b",
        "^a|^b$|c$",
        "^(?:ab|[c-e]){2,3}?(?P<x>f)(?<y>g)*$",
        r"^\d{4}-\d{2}-\d{2}$",
        r"^[\w.+-]+@\w+\.com$",
        r'^[^a\d\]\\"]+$',
        "^[ -~é日]*$",
        r"^\u00e9\x41\/\$\^$",
        "^.\\s\\W\\D$",
        "a{0,128}",
    ],
)
def test_patterns_that_are_enforced_are_accepted(pattern: str) -> None:
    assert unenforced_pattern(pattern) is None


@pytest.mark.parametrize("pattern", ['^a"b$', r"^a\\b$", r"\n", "\n"])
def test_a_pattern_outside_json_may_have_any_character(pattern: str) -> None:
    assert unenforced_pattern(pattern, in_json=False) is None


def test_a_long_pattern_is_shortened_in_the_reason() -> None:
    assert len(str(unenforced_pattern("a" * 900 + "(?=b)"))) < 250
