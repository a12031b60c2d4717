"""Rewards for the form of an answer."""

from __future__ import annotations

import pytest

from areal_agents.rewards import (
    FinishedEpisode,
    citation_f1,
    cited,
    fenced,
    follows_schema,
    grounded,
    json_answer,
    matches,
    overlong,
)


def episode(*messages: dict[str, object]) -> FinishedEpisode:
    return FinishedEpisode("e", {}, [messages], "finished", {})


@pytest.mark.parametrize(
    ("pattern", "answer", "score"),
    [
        (r"<think>.*</think>\s*<answer>.+</answer>", "<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (r"<think>.*</think>\s*<answer>.+</answer>", "<think>a</think> 4", 0.0),
        (r"\d+", " 42 \n", 1.0),
        (r"\d+", "42 apples", 0.0),
        (r"\d+", None, 0.0),
    ],
)
def test_a_pattern_matches_the_whole_answer(pattern: str, answer: str | None, score: float) -> None:
    assert matches(pattern, answer) == score


def test_a_pattern_that_backtracks_ends_at_its_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    # Without the limit it would not end.
    assert matches(r"(a|aa)+b", "a" * 200, timeout_s=0.2) == 0.0
    assert "does not backtrack" in caplog.text and "(a|aa)+b" in caplog.text


def test_the_last_fenced_block_is_taken() -> None:
    answer = 'First\n```python\nx = 1\n```\nor\n```json\n{"a": 1}\n```\nDone.'
    assert fenced(answer) == '{"a": 1}\n' and json_answer(answer) == {"a": 1}
    assert fenced("none") is None and fenced(None) is None
    assert json_answer(" [1, 2] ") == [1, 2]
    with pytest.raises(ValueError):
        json_answer("```\nno json\n```")
    with pytest.raises(ValueError, match="nested too deeply"):
        json_answer("[" * 100_000)


def test_json_follows_a_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    assert (
        follows_schema(schema, '{"n": 3}') == follows_schema(schema, 'It is\n```json\n{"n": 3}\n```') == 1.0
    )
    for wrong in ('{"n": 0}', "{}", "[]", "3 apples", "", None, "[" * 100_000):
        assert follows_schema(schema, wrong) == 0.0
    with pytest.raises(Exception, match="'none' is not valid"):
        follows_schema({"type": "none"}, "{}")
    of_itself = {"type": "array", "items": {"$ref": "#"}}
    assert follows_schema(of_itself, "[[[]]]") == 1.0
    assert follows_schema(of_itself, "[" * 900 + "]" * 900) == 0.0  # nested too deeply for the validator
    assert follows_schema({"type": "number"}, "NaN") == 0.0  # Python accepts it, but it is not JSON
    for number in ("1e400", "9" * 400):  # neither can be divided by a float
        assert follows_schema({"type": "number", "multipleOf": 0.01}, number) == 0.0


def test_the_length_penalty_equals_that_of_dapo() -> None:
    lengths = (0, 80, 85, 90, 100, 500)
    assert [overlong(length, limit=100, buffer=20) for length in lengths] == [0, 0, -0.25, -0.5, -1, -1]
    for limit, buffer in ((100, 0), (10, 20)):
        with pytest.raises(ValueError, match="buffer must be above 0 and at most limit"):
            overlong(1, limit=limit, buffer=buffer)


def test_citations_are_found_and_scored() -> None:
    answer = "Lyon is in France [geo-7], which uses the euro [fin.2][geo-7]. [not cited] []"
    assert cited(answer) == ["geo-7", "fin.2"] and cited(None) == []
    assert cited("see (Smith 2020)", r"\((\w+ \d{4})\)") == ["Smith 2020"]
    assert citation_f1(["a", "b"], ["b", "c", "d"]) == pytest.approx(2 * 1 / (2 + 3))
    assert citation_f1([], []) == 1.0 and citation_f1(["a"], []) == 0.0
    played = episode(
        {"role": "user", "content": "[fin.2]"},
        {"role": "tool", "content": "[geo-7] Lyon is in France."},
        {"role": "tool", "content": [{"type": "text", "text": "x-1"}]},
    )
    assert grounded(["geo-7", "fin.2"], played) == 0.5
    assert grounded(["x-1"], played) == 1.0 and grounded([], played) == 0.0
    assert grounded(["g", "geo", "7", "]", "geo-"], played) == 2 / 5  # "geo" and "7" are words of the result
    assert grounded(["geo-7"], episode({"role": "tool", "content": "geo-77"})) == 0.0
