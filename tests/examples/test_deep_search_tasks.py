"""The multi-hop questions can be answered from the corpus, and answers are scored."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import hub_tasks
import laptop
import multihop
import pytest
import scoring
from corpus import encyclopedia
from questions import is_held_out
from retrieval import Columns, Index, build_index, read_corpus

from areal_agents.rewards import FinishedEpisode


def test_the_shipped_files_equal_the_generated_ones() -> None:
    for name, content in multihop.files().items():
        assert (multihop.DATA / name).read_text() == content, name


@pytest.mark.parametrize("held_out", [False, True])
def test_each_hop_is_needed_and_the_last_page_has_the_answer(held_out: bool) -> None:
    questions = multihop.Questions(encyclopedia(), held_out=held_out)
    for hops in (1, 2, 3):
        paths = questions.paths(hops)
        assert len(paths) > 50
        for path, field in paths:
            assert len(path) == hops and path[-1].facts[field] in path[-1].passage
            for here, onward in zip(path, path[1:], strict=False):
                assert onward.name in here.passage and here.facts.get(field) != path[-1].facts[field]
            assert is_held_out(path[0]) if held_out else not any(map(is_held_out, path))


def test_a_search_for_a_name_finds_its_page(tmp_path: Path) -> None:
    build_index(read_corpus(multihop.DATA / "corpus.jsonl", Columns()), tmp_path / "index")
    index = Index(tmp_path / "index")
    names = [entity.name for entity in encyclopedia()]
    found = index.search(names, k=laptop.LIMITS.results)
    index.close()
    missed = [n for n, hits in zip(names, found, strict=True) if n not in {hit.passage.title for hit in hits}]
    assert len(missed) / len(names) < 0.005, missed


def test_a_third_of_the_tasks_has_each_number_of_hops() -> None:
    for split, count in (("train", multihop.TRAIN), ("heldout", multihop.HELD_OUT)):
        tasks = [json.loads(line) for line in (multihop.DATA / f"{split}.jsonl").read_text().splitlines()]
        assert len({task["id"] for task in tasks}) == count
        assert Counter(task["hops"] for task in tasks) == {1: count // 3, 2: count // 3, 3: count // 3}
        assert Counter(task["answer"] for task in tasks).most_common(1)[0][1] / count < 0.03


def ended(reply: str, answer: Any = "Lyon", **task: Any) -> FinishedEpisode:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": reply})
    return FinishedEpisode("e", {"answer": answer, **task}, (messages,), "finished", {})


@pytest.mark.parametrize(
    ("reply", "exact", "f1", "form"),
    [
        ("<answer>lyon.</answer>", 1, 1, 1),
        ("I think so. <answer>\nLyon\n</answer>", 1, 1, 1),
        ("Lyon", 1, 1, 0),
        ("<answer>Lyon Lyon Lyon</answer>", 0, 0.5, 1),
        ("<answer>Paris</answer> or <answer>Lyon</answer>", 1, 1, 0),
        ("<answer></answer>", 0, 0, 1),
        ("", 0, 0, 0),
    ],
)
def test_the_rewards_of_a_reply(reply: str, exact: float, f1: float, form: float) -> None:
    episode = ended(reply)
    assert (scoring.exact(episode), scoring.f1(episode), scoring.form(episode)) == (exact, f1, form)
    gated = asyncio.run(scoring.f1_in_form(episode)), asyncio.run(scoring.exact_in_form(episode))
    assert gated == (f1 * form, exact * form)


def test_any_of_the_expected_answers_counts() -> None:
    assert scoring.exact(ended("USA", ["America", "USA"])) == 1
    assert scoring.exact(ended("USA", "America", answer_aliases=["USA"])) == 1
    assert scoring.answer(ended("<answer> USA </answer>")) == "USA" and scoring.answer(ended("  ")) is None


def test_the_judge_is_called_only_for_answers_in_the_right_form() -> None:
    assert asyncio.run(scoring.judged(ended("Lyon"))) == 0


def test_published_data_sets_become_tasks(tmp_path: Path) -> None:
    def folder(name: str, row: dict[str, Any]) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(row))
        return str(tmp_path / name)

    step = {"id": 1, "question": "q", "answer": "a", "paragraph_support_idx": 0}
    musique = {
        "id": "2hop__1_2", "paragraphs": [{"idx": 0, "title": "t", "paragraph_text": "p"}],
        "question": "Who?", "question_decomposition": [step, step], "answer": "A", "answer_aliases": ["B"],
        "answerable": True,
    }  # fmt: skip
    assert hub_tasks.musique(source=folder("musique", musique)) == [
        {"id": "2hop__1_2", "question": "Who?", "answer": "A", "answer_aliases": ["B"], "hops": 2}
    ]
    hotpot = {"id": "5a", "question": "Who?", "answer": "A", "type": "bridge", "level": "hard"}
    assert hub_tasks.hotpot(source=folder("hotpot", hotpot), subset=None) == [
        {"id": "5a", "question": "Who?", "answer": "A", "hops": 2, "kind": "bridge"}
    ]
    base = {"question": "Who?", "answer": ["A"], "aug_answer": ["B"], "source": "hotpotqa"}
    file = f"{folder('asearcher', base)}/train.jsonl"
    assert hub_tasks.asearcher(source=file) == [
        {
            "id": "asearcher-0",
            "question": "Who?",
            "answer": ["A"],
            "answer_aliases": ["B"],
            "kind": "hotpotqa",
        }
    ]
