"""Demonstrations of searching, perfect or flawed, and reading drills, as examples for imitation."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from conversation import SEARCH_TOOL, SYSTEM_PROMPT, opening
from corpus import Entity
from questions import FIELDS, Question, ask
from warmup.transcripts import Example, Transcriber, as_messages, call_text

from areal_agents.core.messages import Message

Search = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Habits:
    """How a demonstrator behaves; the numbers are probabilities."""

    guess: float = 0.0  # answers at once, with another question's answer
    vague_query: float = 0.0  # searches for a general word
    whole_query: float = 0.0  # searches for the question itself
    broken_call: float = 0.0  # leaves out a brace, which ends the episode
    stop_early: float = 0.0  # answers a two-hop question from the first passage
    repeat: float = 0.0  # searches for the same thing twice
    wrong_field: float = 0.0  # answers with any field of the passage


PERFECT = Habits()
FLAWED = Habits(
    guess=0.3,
    vague_query=0.2,
    whole_query=0.15,
    broken_call=0.05,
    stop_early=0.45,
    repeat=0.1,
    wrong_field=0.35,
)
DRILL_KINDS = ("country", "country", "city", "element")  # countries have the longest passages
VAGUE = ("capital", "currency", "country", "domain", "time zone", "element", "city")


def search_call(query: str) -> str:
    """How the model writes a search."""
    return call_text(SEARCH_TOOL["function"]["name"], {"query": query})


class SearchTranscriber:
    """Turns questions, searches and drills into examples."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._episodes = Transcriber(tokenizer, [SEARCH_TOOL])
        # A drill asks several questions in one conversation; only a template that keeps history bridges that.
        self._drills = Transcriber(tokenizer, [SEARCH_TOOL], keeps_history=True)

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: system prompt and tool."""
        return self._episodes.prefix(as_messages(opening("a")), as_messages(opening("b")))

    def trace(self, question: str, replies: Sequence[str], results: Sequence[str]) -> Example:
        """An episode: after each reply but the last comes the next tool result."""
        turns = [Message("tool", result) for result in results]
        return self._episodes.transcribe(as_messages(opening(question)), replies, turns)

    def drill(self, passages: str, questions: Sequence[Question]) -> Example:
        """A search result, then questions about it, answered one after the other."""
        asked = [Message("user", question.text) for question in questions]
        first = [Message("system", SYSTEM_PROMPT), Message("tool", passages), asked[0]]
        return self._drills.transcribe(first, [q.answer for q in questions], asked[1:])


class Demonstrator:
    """Answers questions by searching, with the given habits."""

    def __init__(
        self, transcriber: SearchTranscriber, habits: Habits, guesses: Mapping[str, Sequence[str]]
    ) -> None:
        self._transcriber = transcriber
        self._habits = habits
        self._guesses = guesses  # field → answers to guess from

    def demonstrate(self, question: Question, search: Search, rng: random.Random) -> Example:
        """One episode about `question`."""
        habits = self._habits
        if rng.random() < habits.guess:
            return self._transcriber.trace(question.text, [rng.choice(self._guesses[question.field])], [])
        queries = [self._query(question, question.path[0], rng)]
        seen = question.path[0]
        if len(question.path) == 2 and rng.random() >= habits.stop_early:
            queries.append(self._query(question, question.path[1], rng))
            seen = question.path[1]
        elif rng.random() < habits.repeat:
            queries.append(question.path[0].name)
        replies = []
        for query in queries:
            broken = rng.random() < habits.broken_call
            replies.append(search_call(query).replace('"}}', '"}') if broken else search_call(query))
            if broken:
                break
        else:
            replies.append(self._answer(question, seen, rng))
        results = [search(query) for query in queries[: len(replies) - 1]]
        return self._transcriber.trace(question.text, replies, results)

    def _query(self, question: Question, entity: Entity, rng: random.Random) -> str:
        chance = rng.random()
        if chance < self._habits.vague_query:
            return rng.choice(VAGUE)
        if chance < self._habits.vague_query + self._habits.whole_query:
            return question.text
        return entity.name

    def _answer(self, question: Question, seen: Entity, rng: random.Random) -> str:
        if question.field in seen.facts and rng.random() >= self._habits.wrong_field:
            return seen.facts[question.field]
        return rng.choice([seen.facts[field] for field in FIELDS[seen.kind]])


def reading_drill(
    entities: Sequence[Entity], transcriber: SearchTranscriber, rng: random.Random, *, questions: int = 8
) -> Example:
    """Two passages and up to `questions` different one-hop questions about them."""
    by_kind = {kind: [entity for entity in entities if entity.kind == kind] for kind in FIELDS}
    pair = [rng.choice(by_kind[rng.choice(DRILL_KINDS)]) for _ in range(2)]
    passages = "\n".join(f"[{rank}] {entity.passage}" for rank, entity in enumerate(pair, start=1))
    askable = sorted({(rank, field) for rank, entity in enumerate(pair) for field in FIELDS[entity.kind]})
    chosen = rng.sample(askable, min(questions, len(askable)))
    asked = [ask((pair[rank],), field, rng.randrange(2)) for rank, field in chosen]
    return transcriber.drill(passages, asked)
