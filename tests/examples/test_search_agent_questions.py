"""The task is as the README describes it: a clean split, answerable by searching, not by guessing."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict

import pytest
from corpus import encyclopedia
from questions import (
    MIXTURE,
    WORDINGS,
    Question,
    QuestionBank,
    heldout_tasks,
    is_held_out,
    question_bank,
    train_tasks,
)
from search import NO_RESULTS, SearchIndex, search


def test_corpus_has_the_documented_size_and_unique_names() -> None:
    entities = encyclopedia()
    assert Counter(entity.kind for entity in entities) == {"country": 243, "city": 3000, "element": 118}
    assert len({entity.name.lower() for entity in entities}) == len(entities)
    assert all(entity.passage.isascii() for entity in entities)


def test_every_passage_states_every_fact_that_is_requested() -> None:
    for question in question_bank("train").all_questions():
        assert question.answer in question.path[-1].passage
    for question in question_bank("heldout").all_questions():
        assert question.answer in question.path[-1].passage


def test_a_fifth_of_each_kind_is_held_out() -> None:
    entities = encyclopedia()
    for kind in ("country", "city", "element"):
        members = [entity for entity in entities if entity.kind == kind]
        assert 0.18 < sum(map(is_held_out, members)) / len(members) < 0.23


def test_no_training_question_touches_a_held_out_entity() -> None:
    train = list(question_bank("train").all_questions())
    assert not any(is_held_out(entity) for question in train for entity in question.path)
    countries = {entity.name: entity for entity in encyclopedia() if entity.kind == "country"}
    named = [countries[q.answer] for q in train if q.field == "country"]
    assert not any(map(is_held_out, named))


def test_every_held_out_question_is_about_a_held_out_entity_and_in_no_training_task() -> None:
    heldout = list(question_bank("heldout").all_questions())
    assert all(is_held_out(question.path[0]) for question in heldout)
    train_ids = {question.id for question in question_bank("train").all_questions()}
    assert not train_ids & {question.id for question in heldout}
    train_texts = {task["question"] for task in train_tasks(seed=5, count=2000)}
    assert not train_texts & {task["question"] for task in heldout_tasks(seed=5, count=256)}


@pytest.mark.parametrize("make", [train_tasks, heldout_tasks])
def test_tasks_are_deterministic_distinct_and_plain_json(make) -> None:
    tasks = make(seed=3, count=200)
    assert json.loads(json.dumps(tasks)) == tasks == make(seed=3, count=200)
    assert tasks != make(seed=4, count=200)
    assert len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) == 200
    assert all(set(task) == {"id", "question", "answer"} for task in tasks)


def test_the_mixture_of_kinds_is_as_configured() -> None:
    tasks = train_tasks(seed=1, count=1024)
    two_hop = sum("the country where" in task["question"] for task in tasks)
    assert two_hop / 1024 == pytest.approx(MIXTURE["city", 2], abs=0.05)


def test_too_many_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few questions for 6000 tasks"):
        heldout_tasks(count=6000)


def test_searching_the_path_finds_the_answer() -> None:
    rng = random.Random(0)
    questions = [question_bank("heldout").sample(rng) for _ in range(2000)]
    assert sum(map(_found_by_searching, questions)) / 2000 >= 0.99


def _found_by_searching(question: Question) -> bool:
    wanted = [entity.name for entity in question.path[1:]] + [question.answer]
    return all(want in search(entity.name) for entity, want in zip(question.path, wanted, strict=True))


def test_the_best_blind_guesser_is_right_in_less_than_five_percent() -> None:
    """The guesser knows a question's wording but not its subject, and how often training answers occur."""
    rng = random.Random(0)
    seen: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for _ in range(20000):
        question = question_bank("train").sample(rng)
        seen[question.field, len(question.path)][question.answer] += 1
    guess = {shape: answers.most_common(1)[0][0] for shape, answers in seen.items()}
    asked = [question_bank("heldout").sample(rng) for _ in range(5000)]
    assert sum(q.answer == guess[q.field, len(q.path)] for q in asked) / 5000 < 0.05


def test_there_are_no_yes_no_and_no_continent_questions() -> None:
    assert "continent" not in WORDINGS
    assert all(
        re.match(r"(What|Which|Name|In which|When|Since when|How) ", w)
        for ws in WORDINGS.values()
        for w in ws
    )


def test_search_is_deterministic_and_reports_when_it_finds_nothing() -> None:
    assert search("France").startswith("[1] France is a country in Europe. Capital: Paris.")
    assert search("FRANCE?") == search("France") == SearchIndex(encyclopedia()).search("France")
    assert len(search("San Jose").split("\n")) == 2
    assert search("qwertyuiop") == search("") == search("?!") == NO_RESULTS


def test_a_bank_of_both_splits_contains_every_question_of_the_splits() -> None:
    ids = {question.id for question in QuestionBank(encyclopedia()).all_questions()}
    for split in ("train", "heldout"):
        assert {question.id for question in question_bank(split).all_questions()} < ids
