"""Random conversations in every dialect, several at a time in one episode, are recorded exactly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agents_support import AGENTS, Agent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation_support import ARGUMENT_FORMS, Mutation
from proxy_support import RunningProxy, running_proxy
from record_support import ObservedEngine, check_invariant, replies_by_prompt

from areal_agents.rendering import ChatRenderer

# The same examples in every run, so that a test fails only because of a change of the code.
STEADY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(STEADY, max_examples=400)


@dataclass(frozen=True)
class Step:
    """One call of an agent, and what the agent does next."""

    streamed: bool
    max_tokens: int | None
    stop: Any
    n: int
    again: str  # how the request is repeated; "" if it is not
    follow: str
    mutation: Mutation
    label: str


mutations = st.builds(
    Mutation,
    arguments=st.sampled_from(ARGUMENT_FORMS),
    reasoning=st.sampled_from(["keep", "drop"]),
    content=st.sampled_from(["as is", "parts", "padded", "stripped", "dropped"]),
    absent=st.sampled_from(["missing", "none", "empty"]),
    extras=st.booleans(),
    item_ids=st.booleans(),
)
steps = st.builds(
    Step,
    streamed=st.booleans(),
    max_tokens=st.none() | st.none() | st.integers(1, 20),
    stop=st.none() | st.none() | st.sampled_from(["STOP", [" a", "an"], ["\n"], ["wer", "answer"]]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    again=st.sampled_from(["", "", "", "count", "idempotency", "hang-up"]),
    follow=st.sampled_from(["results", "results", "user", "resample", "edit", "compact"]),
    mutation=mutations,
    label=st.sampled_from(["", "", "scout"]),
)
plans = st.lists(
    st.tuples(
        st.sampled_from(sorted(AGENTS)),
        st.none() | st.just("Answer."),
        st.lists(steps, min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("properties") / "store.db"
    with running_proxy(path, ObservedEngine(renderer), max_concurrent=64) as proxy:
        yield proxy


def converse(agent: Agent, plan: list[Step]) -> None:
    """Play the steps of one conversation."""
    has_hung_up = False
    for number, step in enumerate(plan):
        options = {"max_tokens": step.max_tokens, "stop": step.stop, "n": step.n if agent.many else None}
        options = {name: value for name, value in options.items() if value is not None}
        headers = {"x-episode-label": step.label} if step.label else {}
        if step.again == "idempotency":
            headers["idempotency-key"] = f"{id(agent)}/{number}"
        if step.again == "hang-up":
            agent.hang_up(**options)
            has_hung_up = True
        replies = agent.ask(streamed=step.streamed, headers=headers, **options)
        if step.again in ("count", "idempotency"):
            headers["x-stainless-retry-count"] = "1"
            repeated = agent.ask(streamed=not step.streamed, headers=headers, **options)
            # After a hang-up, a retry by count may get the sample that the client never received.
            assert repeated == replies or (has_hung_up and step.again == "count")
        reply = replies[-1]
        if step.follow == "resample":
            continue
        agent.take(reply, step.mutation)
        if reply.calls:
            agent.results(reply, f"result {number}")
        if step.follow == "user" or not reply.calls:
            agent.say(f"and {number}?")
        if step.follow == "edit":
            agent.edit(number % len(agent.history), f"edited {number}")
        if step.follow == "compact" and len(agent.history) > 4:
            agent.history[1:-1] = []
            agent.edit(0, "summary of all that was said")


def play(proxy: RunningProxy, seed: int, plan: list[tuple[str, str | None, list[Step]]]) -> None:
    engine = proxy.engine
    engine.reset()
    engine.script = replies_by_prompt(seed, engine)
    episode = proxy.open_episode(split="eval")
    agents = [
        AGENTS[dialect](proxy, episode, f"question {index}", system)
        for index, (dialect, system, _) in enumerate(plan)
    ]
    try:
        with ThreadPoolExecutor(len(agents)) as threads:
            list(threads.map(converse, agents, [steps for _, _, steps in plan]))
    finally:
        for agent in agents:
            agent.close()
    received = [turn for agent in agents for turn in agent.received]
    check_invariant(proxy.store, episode["id"], engine.calls, received)


@STEADY
@given(seed=st.integers(0, 999), plan=plans)
def test_every_conversation_is_recorded_exactly(
    running: RunningProxy, seed: int, plan: list[tuple[str, str | None, list[Step]]]
) -> None:
    play(running, seed, plan)


@pytest.mark.slow
@LONG
@given(seed=st.integers(0, 999), plan=plans)
def test_very_many_conversations_are_recorded_exactly(
    running: RunningProxy, seed: int, plan: list[tuple[str, str | None, list[Step]]]
) -> None:
    play(running, seed, plan)
