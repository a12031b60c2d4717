from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.rewards import exact_match, normalise


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", "Paris"),
        ("paris.", "Paris"),
        ("  “Paris” ", "Paris"),
        ("São Paulo", "Sao Paulo"),
        ("SAO  PAULO\n", "São Paulo"),
        ("Straße", "STRASSE"),
        ("fr", ".fr"),
        ("America/Sao_Paulo", "america/sao_paulo"),
        ("+44-1624", "+44-1624"),
        ("ﬁn", "fin"),  # compatibility form
    ],
)
def test_equal_up_to_case_accents_spacing_and_outer_punctuation(answer: str, expected: str) -> None:
    assert exact_match(answer, expected) == 1.0
    assert exact_match(expected, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", "Paris"),
        (None, "Paris"),
        ("Paris, France", "Paris"),
        ("the Euro", "Euro"),
        ("1.01", "1.008"),
        ("33", "+33"),
        ("New York", "NewYork"),
        ("Europe/Paris", "Europe Paris"),
    ],
)
def test_anything_else_differs(answer: str | None, expected: str) -> None:
    assert exact_match(answer, expected) == 0.0


@pytest.mark.parametrize("expected", ["", "  ", "?!"])
def test_an_expected_answer_must_have_content(expected: str) -> None:
    with pytest.raises(ValueError, match="the expected answer must contain"):
        exact_match("anything", expected)


def test_normalise_keeps_inner_punctuation_and_symbols() -> None:
    assert normalise("(+1-809)") == "+1-809"
    assert normalise("$5.") == "$5"
    assert normalise("...") == ""


@given(st.text(max_size=30))
def test_normalise_is_idempotent_and_blind_to_case(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert normalise(text.upper().lower()) == normalise(text.upper())
