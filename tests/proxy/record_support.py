"""An engine that fails or waits on request, awkward replies, and a check of the recorded turns."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from proxy_support import RunningProxy, tool_call
from scripted_sampler import EngineCall, ScriptedSampler

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.core.trajectory import Trajectory
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store


@dataclass
class ObservedEngine(ScriptedSampler):
    """Fails or waits in the middle of a reply, and records generations that are cancelled there.

    Attributes:
        fail_after: number of pieces after which `failure` is raised; None for never.
        hold_after: number of pieces after which it waits until it is cancelled or `go_on` is set; None for
            never.
    """

    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("unset"))
    hold_after: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: Callable[[TokenChunk], None] | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        try:
            return await super().generate(
                rid, input_ids, sampling, on_tokens, affinity=affinity, stream_interval=stream_interval
            )
        except asyncio.CancelledError:
            if rid not in self.cancelled:
                self.cancelled.append(rid)
            raise

    async def _stream(
        self, completion: Completion, on_tokens: Callable[[TokenChunk], None], interval: int
    ) -> None:
        pieces = 0

        def count(chunk: TokenChunk) -> None:
            nonlocal pieces
            if self.fail_after is not None and pieces >= self.fail_after:
                raise self.failure
            pieces += 1
            on_tokens(chunk)

        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        size = max(interval, 2)
        for start in range(0, len(ids), size):
            if self.hold_after is not None and pieces >= self.hold_after:
                async with asyncio.timeout(60):
                    while not self.go_on.is_set():
                        await asyncio.sleep(0.005)
            count(TokenChunk(tuple(ids[start : start + size]), tuple(logprobs[start : start + size])))
            await asyncio.sleep(0)

    def reset(self) -> None:
        """Restore the initial state."""
        self.script = lambda call: "ok"
        self.delay_s, self.version, self.max_context = 0.0, 0, 4096
        self.fail_after = self.hold_after = None
        self.go_on.clear()
        self.hurry.clear()
        self.calls.clear()
        self.cancelled.clear()


def awkward_replies(rng: random.Random, renderer: ChatRenderer) -> Callable[[EngineCall], str | list[int]]:
    """Return a script of awkward replies: odd JSON, random ids, cut-off markup, reasoning, parallel calls."""
    texts = [
        lambda: "plain answer",
        lambda: "  padded \n answer\n\n",
        lambda: "",
        lambda: "naïve – ünïcode 日本 \U0001f600",
        lambda: "<think>\nlet me see\n</think>\n\nthe answer",
        lambda: "<think>\nnever closed",
        lambda: tool_call(query="Lyon"),
        lambda: "<think>\nhm\n</think>\n\n" + tool_call(query="Lyon", limit=2.0, z=1, a=[1, 2]),
        lambda: tool_call(query="a") + "\n" + tool_call(query="b"),
        lambda: "Let me look.\n" + tool_call(query="日本"),
        lambda: '<tool_call>\n{"name":"search","arguments":{ "query" :"caf\\u00e9"}}\n</tool_call>',
        lambda: '<tool_call>\n{"name": "search", "arguments": {"query": \n</tool_call>',
        lambda: '<tool_call>\n{"name": "search"',
        lambda: "text with a <tool marker, a </think> and a STOP word",
    ]

    def script(call: EngineCall) -> str | list[int]:
        kind = rng.random()
        if kind < 0.2:  # random ids, also special ones, with or without a stop token
            return [rng.randrange(renderer.vocab_size) for _ in range(rng.randrange(1, 30))]
        text = rng.choice(texts)()
        return renderer.tokenizer.encode(text) if kind < 0.3 and text else text  # 10%: no stop token

    return script


def replies_by_prompt(seed: int, engine: ScriptedSampler) -> Callable[[EngineCall], Any]:
    """Return a script of awkward replies that depend only on the prompt and on how often it was sent.

    The versions rise within a reply, as if the weights were updated while it was sampled.
    """
    asked: Counter[bytes] = Counter()

    def script(call: EngineCall) -> Any:
        prompt = call.input_ids.tobytes()
        asked[prompt] += 1
        digest = hashlib.blake2b(prompt + f"{seed}/{asked[prompt]}".encode(), digest_size=8).digest()
        rng = random.Random(digest)
        reply = awkward_replies(rng, engine.renderer)(call)
        whole = engine.completion_of(reply, call.sampling)
        versions = sorted(rng.randrange(9) for _ in range(len(whole)))
        logprobs = [-rng.random() * 5 for _ in range(len(whole))]
        return Completion(whole.token_ids, logprobs, versions, whole.finish_reason)

    return script


def check_invariant(
    store: Store, episode_id: str, engine_calls: Sequence[EngineCall], received: Sequence[str] = ()
) -> int:
    """Compare the recorded turns with the engine's calls, and return how many turns continue another one.

    `received` has the ids of turns whose replies a client received; all of them must be recorded.
    """
    episode = store.load_episode(episode_id)
    recorded = {turn.id: turn for turn in episode.turns}
    place = {turn.id: index for index, turn in enumerate(episode.turns)}
    for turn in episode.turns:  # a parent was recorded when its child began, and the child was not
        assert turn.recorded_before is not None and turn.recorded_before <= place[turn.id]
        assert turn.parent is None or place[turn.parent] < turn.recorded_before
    assert len(recorded) == len(episode.turns)
    assert {turn for turn in received if turn} <= set(recorded)
    sent = {call.rid: call for call in engine_calls if call.rid in recorded}
    assert len(sent) == len(recorded)
    for turn_id, call in sent.items():
        turn, completion = recorded[turn_id], call.completion
        assert completion is not None
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(turn.completion, name), getattr(completion, name))
        assert turn.completion.finish_reason == completion.finish_reason
        assert turn.sampling == call.sampling
        np.testing.assert_array_equal(episode.forest.prompt_ids(turn_id), call.input_ids)
    for trajectory in episode.forest.trajectories():
        check_trajectory(trajectory, sent[trajectory.turns[-1].id])
    # The forest has each turn's own tokens once, however many paths include them.
    assert sum(len(turn.completion) for turn in episode.turns) == sum(
        len(call.completion) for call in sent.values() if call.completion is not None
    )
    return sum(turn.parent is not None for turn in episode.turns)


def check_trajectory(trajectory: Trajectory, last: EngineCall) -> None:
    """Check that a path is the last prompt and completion, and that its mask marks the sampled tokens."""
    assert last.completion is not None
    whole = np.concatenate([last.input_ids, last.completion.token_ids])
    np.testing.assert_array_equal(trajectory.token_ids, whole)
    sampled = np.concatenate([turn.completion.token_ids for turn in trajectory.turns])
    np.testing.assert_array_equal(whole[trajectory.sampled_mask], sampled)
    logprobs = np.concatenate([turn.completion.logprobs for turn in trajectory.turns])
    np.testing.assert_array_equal(trajectory.behavior_logprobs[trajectory.sampled_mask], logprobs)


def joined_replies(monkeypatch: pytest.MonkeyPatch) -> list[SharedReply]:
    """Return a list that gets, for each model call that a proxy has read, the reply that it waits for."""
    joined: list[SharedReply] = []
    join = SharedReply.join

    def counted(reply: SharedReply) -> None:
        join(reply)
        joined.append(reply)

    monkeypatch.setattr(SharedReply, "join", counted)
    return joined


def until(condition: Callable[[], Any]) -> None:
    """Wait until another thread makes a condition true; fail after 60 seconds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def burst(
    proxy: RunningProxy, requests: Sequence[tuple[str, dict[str, Any]]], *, refused: int
) -> list[httpx.Response]:
    """Send requests concurrently, and return the responses; the engine replies once `refused` have ended."""
    async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as http:
        calls = [asyncio.create_task(http.post(path, json=body)) for path, body in requests]
        await asyncio.to_thread(until, lambda: sum(call.done() for call in calls) >= refused)
        proxy.engine.hurry.set()
        return await asyncio.gather(*calls)
