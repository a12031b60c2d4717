"""A small run as `areal-agents train` leaves it, written through the store, and a server for the page."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Fork, Turn
from areal_agents.rendering import Tokenizer
from areal_agents.sockets import listen, url_of
from areal_agents.store import NewEpisode, Store
from areal_agents.training.records.files import CLIPPED, STATES, StepRows, step_folder, write_rows
from areal_agents.view.runs import Runs
from areal_agents.view.server import make_server

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
ATTACK = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>'
STEPS = 3


class Writer:
    """Writes the episodes of a run, with the tokens of a real tokenizer."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._tokenizer = Tokenizer.from_folder(MODEL)

    def turn(
        self,
        turn_id: str,
        asked: list[Message],
        reply: Message,
        *,
        parent: str | None = None,
        fork: Fork | None = None,
        versions: tuple[int, int] = (0, 0),
    ) -> Turn:
        """A turn whose first half was sampled by the first of `versions`, and its second by the other."""
        prompt = self._tokenizer.encode("\n".join(message.content for message in asked) + "\n")
        calls = "".join(call.name + call.arguments for call in reply.tool_calls)
        sampled = self._tokenizer.encode((reply.content or calls) + " é🎉")
        half = len(sampled) // 2
        return Turn(
            id=turn_id,
            parent=parent,
            new_messages=tuple(asked),
            new_prompt_ids=prompt,
            completion=Completion(
                sampled,
                -np.linspace(0.0, 3.0, len(sampled)).astype(np.float32),
                [versions[0]] * half + [versions[1]] * (len(sampled) - half),
                "stop",
            ),
            reply=reply,
            sampling=SamplingParams(max_new_tokens=64),
            forked_from=fork,
        )

    def episode(
        self, episode_id: str, task: Task, turns: list[Turn], score: float | None, **fields: Any
    ) -> None:
        """Open an episode, record its turns, and end it with a score, or as failed without one."""
        group = fields.pop("group", None)
        error = fields.pop("error", None)
        new = NewEpisode(
            episode_id,
            f"hash of {episode_id}",
            task,
            group,
            fields.pop("size", 2) if group else None,
            **fields,
        )
        self.store.open_episode(new).result()
        for turn in turns:
            self.store.add_turn(episode_id, turn).result()
        if score is None:
            self.store.seal(episode_id, "failed", error=error).result()
        else:
            self.store.set_rewards(episode_id, [Reward("episode", "", "return", score)]).result()
            self.store.seal(episode_id, "finished").result()


def make_run(root: Path, *, name: str = "run") -> Path:
    """Write the folder of a finished run: three steps of two groups, two evaluations, and an attack."""
    folder = root / name
    (folder / "logs").mkdir(parents=True)
    (folder / "lock").touch()
    config = {
        "model": str(MODEL), "trainer": {"steps": STEPS}, "rollout": {"max_staleness": 0}, "agent": ATTACK,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with Store.open(folder / "store.db") as store:
        began = time.time()
        _fill(Writer(store))
        rows = [_metrics(step, began) for step in range(1, STEPS + 1)]
        first = store.turns_of("lyon-1-1")[0]
        left = store.turns_of("nice-1-0")
    _record_tokens(folder, first)
    _fork(folder, left)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(
        json.dumps({"heldout_before": 0.0, "heldout_after": 1.0, "wall_s": 12.5})
    )
    return folder


def _fork(folder: Path, turns: list[Turn]) -> None:
    """Write forks of an episode's second turn: one answers, one is an attack, and one was stopped."""
    (folder / "forks").mkdir()
    with Store.open(folder / "forks" / "store.db") as store:
        writer = Writer(store)
        for number, text in enumerate(("It is in France", ATTACK, ""), 1):
            name = f"fork-{number}"
            given = replace(turns[0], id=f"{name}/1")
            again = [
                writer.turn(
                    f"{name}/2", list(turns[1].new_messages), Message("assistant", text), parent=given.id
                )
            ]
            metadata = {
                "forked_from": "nice-1-0", "turn": 2, "turn_id": turns[1].id, "given": 1, "fork": number,
                "policy": "run@final", "seed": 0,
            }  # fmt: skip
            writer.episode(
                name,
                Task("nice", {"question": "Where is nice?"}),
                [given, *(again if text else [])],
                float(number == 1) if text else None,
                split="eval",
                metadata=metadata,
            )


def _fill(writer: Writer) -> None:
    store = writer.store
    ask = [Message("system", "Answer."), Message("user", "Where is Lyon?")]
    search = Message("assistant", "", tool_calls=(ToolCall("c1", "search", '{"query": "Lyon"}'),))
    found = Message("tool", "Lyon is in France.", tool_call_id="c1", name="search")
    for label, score in (("before", 0.0), ("after", 1.0)):
        metadata = {"source": "rollout", "eval": label, "step": 0 if label == "before" else STEPS}
        turn = writer.turn(f"{label}/1", ask, Message("assistant", f"held out {label}"))
        writer.episode(
            f"{label}", Task("held-out", {"question": "?"}), [turn], score, split="eval", metadata=metadata
        )
        if label == "before":
            _train(writer, ask, search, found)
    evil = writer.turn(
        "evil/1",
        [Message("system", ATTACK), Message("user", "javascript:alert(1)")],
        Message("assistant", ATTACK, tool_calls=(ToolCall("c2", ATTACK, ATTACK),)),
    )
    writer.episode("evil", Task(ATTACK, {"question": ATTACK}), [evil], None, error=ATTACK)
    store.publish_version(STEPS + 1, step=STEPS, path="weights/v4")


def _train(writer: Writer, ask: list[Message], search: Message, found: Message) -> None:
    store = writer.store
    store.publish_version(0, step=0, path="weights/v0")
    store.become_trainer()
    for step in range(1, STEPS + 1):
        for task in ("lyon", "nice"):
            for index in range(2):
                name = f"{task}-{step}-{index}"
                first = writer.turn(f"{name}/1", ask, search, versions=(max(0, step - 2), step - 1))
                answer = Message("assistant", "France" if index else f"Spain, says {name}")
                turns = [
                    first,
                    writer.turn(f"{name}/2", [found], answer, parent=first.id, versions=(step - 1, step - 1)),
                ]
                if name == "lyon-1-0":  # a sub-agent begins a new root; one call was sampled twice
                    fork = Fork(turns[1].id, "context compacted", 1)
                    turns.append(
                        writer.turn(
                            f"{name}/3",
                            [Message("user", "Sum it up.")],
                            Message("assistant", "short"),
                            fork=fork,
                        )
                    )
                    turns.append(
                        writer.turn(f"{name}/4", [found], Message("assistant", "Portugal"), parent=first.id)
                    )
                writer.episode(
                    name,
                    Task(task, {"question": f"Where is {task}?"}),
                    turns,
                    float(index),
                    group=f"{task}@{step}",
                )
        ids = store.lease_group_ids(2, step=step)
        store.publish_version(step, step=step, path=f"weights/v{step}")
        store.mark_trained(ids, step=step, version=step)


def _record_tokens(folder: Path, turn: Turn) -> None:
    """Record what step 1 did with one turn: its first token is clipped, its last one was rejected."""
    count = len(turn.completion)
    row = {
        "step": 1, "version": 0, "use": 0, "minibatch": 0, "tokens": count, "group_id": "lyon@1",
        "episode_id": "lyon-1-1", "turn_id": turn.id, "untrained": None,
    }  # fmt: skip
    codes = np.zeros(count, np.int8)
    states, clipped = codes.copy(), codes.copy()
    states[-1], clipped[0] = STATES.index("rejected"), CLIPPED.index("high")
    values = {
        "advantage": np.full(count, 0.5, np.float32),
        "proximal": turn.completion.logprobs - np.float32(0.25),
        "ratio": np.full(count, 1.5, np.float32),
    }
    rows = StepRows([row], np.array([count]), states, clipped, values)
    write_rows(step_folder(folder, 1) / "rank-0.parquet", rows)


def _metrics(step: int, began: float) -> dict[str, Any]:
    return {
        "step": step, "version": step, "time": began + 10 * step,
        "reward_mean": 0.25 * step, "rewards_by_name": {"return": 0.25 * step}, "entropy": 1.0 / step,
        "step_s": 10.0, "wait_s": 4.0, "train_s": 5.0, "publish_s": 1.0, "pause_s": 0.25, "rollout_idle": 0.5,
        "tokens": 100, "sampled_tokens": 120, "sampled_tokens_per_s": 12.0, "staleness_mean": 0.5,
        "forks": {}, "mfu": None,
    }  # fmt: skip


@contextmanager
def serving(place: Path, *, key: str | None = None) -> Iterator[str]:
    """Serve the page of a run, a store or a folder of runs in a thread; yield the URL."""
    server = make_server(Runs(place), key=key, host="127.0.0.1")
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
