from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.rewards import best_of, exact_match, f1, normalise


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
        ("ﬁn", "fin"),  # a compatibility character
        ("−5", "-5"),  # a typographic minus sign
        ("(-5).", "-5"),
        ("…5", "5"),
    ],
)
def test_case_accents_spacing_and_outer_punctuation_do_not_matter(answer: str, expected: str) -> None:
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
        ("5", "-5"),
        ("5", ".5"),
        ("-.5", "-5"),
        ("New York", "NewYork"),
        ("Europe/Paris", "Europe Paris"),
    ],
)
def test_other_differences_matter(answer: str | None, expected: str) -> None:
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
def test_normalise_is_idempotent_and_ignores_case(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert normalise(text.upper().lower()) == normalise(text.upper())


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("the Eiffel Tower", "Eiffel tower", 2 * 2 / (3 + 2)),
        ("Eiffel Tower.", "the eiffel tower", 2 * 2 / (2 + 3)),
        ("a a a", "a b", 2 * 1 / (3 + 2)),
        ("Zürich", "zurich", 1.0),
        ("none of it", "Paris", 0.0),
        (", ;", "Paris", 0.0),
        (None, "Paris", 0.0),
    ],
)
def test_f1_counts_common_words(answer: str | None, expected: str, score: float) -> None:
    assert f1(answer, expected) == pytest.approx(score)


def test_the_best_of_several_expected_answers_counts() -> None:
    assert best_of(exact_match, "USA", ["United States", "U.S.A.", "usa"]) == 1.0
    assert best_of(f1, "New York", ["York", "NYC"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="at least one"):
        best_of(f1, "x", [])
    with pytest.raises(ValueError, match="must be a list of answers, got the string 'Paris'"):
        best_of(exact_match, "p", "Paris")
    with pytest.raises(ValueError, match="must contain a letter"):
        f1("x", " . ")
