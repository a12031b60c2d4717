"""Draws episodes and runs for a terminal.

The text of episodes comes from a model and from tools; control characters in it are replaced, so that it
cannot write to the terminal by itself.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from areal_agents.doctor.replay import Replay
    from areal_agents.inspection.tasks import TaskStatistics

from areal_agents.evaluation.reference import CONFIDENCE, OF_USERS, Curve, Point, rewards_at

LONGEST = 600  # characters of a message, unless all of it is wanted
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text with a visible sign for each lone surrogate and control character but line feed and tab."""
    return _UNPRINTABLE.sub("\ufffd", text)


def episodes_table(episodes: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each summary."""
    table = Table(
        "episode", "task", "group", "split", "status", "score", "turns", "tokens", "versions", "error"
    )
    for e in episodes:
        versions = "" if e["version_min"] is None else f"{e['version_min']}–{e['version_max']}"
        table.add_row(
            Text(e["id"]), _text(e["task_id"]), _text(e["group_id"]), e["split"], e["status"],
            _number(e["score"]), str(e["turns"]), str(e["sampled_tokens"]), versions,
            Text(printable(e["error"] or "")[:80]),
        )  # fmt: skip
    return table


def draw_comparison(
    run: Curve, references: Sequence[Curve], points: Sequence[Point], console: Console
) -> None:
    """Print a run beside its references: the points of their curves, training rewards, and seconds."""
    ends = f"{len(references)} reference run{'s' if len(references) > 1 else ''}"
    at = "conversation" if run.measured == OF_USERS else "step"
    table = Table(at, run.name, ends, f"{CONFIDENCE:.0%} of further runs", "verdict", title=run.measured)
    styles = {"below": "bold red", "above": "bold green", "within": ""}
    for point in points:
        bounds = f"{point.low:.3f} to {point.high:.3f}"
        verdict = Text(point.verdict, styles[point.verdict])
        table.add_row(str(point.step), f"{point.reward:.3f}", f"{point.reference:.3f}", bounds, verdict)
    console.print(table)
    table = Table("of the steps", run.name, *(curve.name for curve in references), title="training reward")
    shares = (0.25, 0.5, 0.75, 1.0)
    columns = [rewards_at(curve, shares) for curve in (run, *references)]
    for index, share in enumerate(shares):
        table.add_row(f"{share:.0%}", *(_number(column[index]) for column in columns))
    table.add_row("seconds", *(f"{curve.wall_s:.0f}" for curve in (run, *references)))
    console.print(table)


def draw_episode(episode: Mapping[str, Any], console: Console, *, full: bool = False) -> None:
    """Print an episode: its state, its rewards, and its turns as a tree, each below the turn it continues."""
    head = Table.grid(padding=(0, 2))
    for name in ("id", "status", "split", "group", "score", "limit_reached", "error"):
        value = episode[name]
        if value is not None:
            head.add_row(Text(name, "dim"), Text(printable(str(value))))
    task = json.dumps(episode["task"]["input"], ensure_ascii=False)
    head.add_row(Text("task", "dim"), _text(f"{episode['task']['id']} {_cut(task, full)}"))
    console.print(head)
    for reward in episode["rewards"]:
        target = f" of {reward['target']}" if reward["target"] else ""
        console.print(
            Text(
                f"reward {printable(reward['name'])} ({reward['scope']}{target}): {reward['value']:g}",
                "green",
            )
        )
    tree = Tree(Text(f"turns: {len(episode['turns'])}"), guide_style="dim")
    nodes: dict[str | None, Tree] = {None: tree}
    for number, turn in enumerate(episode["turns"], start=1):
        node = nodes[turn["parent"]].add(_turn_head(number, turn))
        for message in turn["new_messages"]:
            node.add(_message(message, full))
        node.add(_message(turn["reply"], full, "bold"))
        nodes[turn["id"]] = node
    console.print(tree)


def show_replay(found: Replay, console: Console) -> None:
    """Print the result of a replay: the first request that differs, and the rewards."""
    calls = f"{found.replayed_calls} calls, recorded {found.recorded_calls}"
    cut_off = {"aborted": "was aborted", "failed": "failed", "open": "is still open"}
    if found.was_cut_off:
        console.print(
            f"the recorded episode {cut_off[found.recorded_status]}, so only its calls are compared, and not "
            "how it ended",
            soft_wrap=True,
        )
    if found.is_same and found.was_cut_off:
        console.print(f"the same as far as it was recorded: {calls}")
        return
    if found.is_same:
        console.print(f"the same: {calls}, rewards {_rewards(found.replayed_rewards)}")
        return
    console.print(f"different: {calls}")
    if (first := found.difference) is not None and first.message is None:
        console.print(f"call {first.call} is the first that differs: in the tools that it offers")
    elif first is not None:
        console.print(f"call {first.call} is the first that differs, from message {first.message} on")
        for name, message in (("recorded", first.recorded), ("now", first.replayed)):
            text = "there is no such message" if message is None else _message(message.to_chat(), full=False)
            console.print(Text(f"{name}: ", "cyan").append_text(Text(str(text))))
    if found.recorded_rewards != found.replayed_rewards and not found.was_cut_off:
        console.print(
            f"rewards: recorded {_rewards(found.recorded_rewards)}, now {_rewards(found.replayed_rewards)}",
            markup=False,
        )
    if found.error is not None:
        console.print(Text(f"the replayed episode failed: {printable(found.error)}", "red"))


def _rewards(rewards: Mapping[str, float]) -> str:
    return ", ".join(f"{printable(name)} {value:g}" for name, value in rewards.items()) or "none"


def runs_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each run."""
    table = Table("run", "started", "state", "step", "held out", "model")
    for run in runs:
        changed = " (agent changed)" if run["agent_changed"] else ""
        table.add_row(
            Text(run["name"]), time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"])), run["state"],
            f"{run['step']}/{run['steps']}",
            f"{_number(run['before'])} → {_number(run['after'])}{changed}",
            Text(run["model"]),
        )  # fmt: skip
    return table


def tasks_table(tasks: Iterable[TaskStatistics]) -> Table:
    """Return a table with a row for each task."""
    table = Table("task", "pool", "groups", "attempts", "reward", "last group", "solved", "version")
    for task in tasks:
        solved = "–" if task.solved is None else f"{task.solved:.0%}"
        table.add_row(
            _text(task.task), task.pool, str(task.groups), str(task.attempts), _number(task.reward),
            _number(task.last_reward), solved, "–" if task.version is None else str(task.version),
        )  # fmt: skip
    return table


def _turn_head(number: int, turn: Mapping[str, Any]) -> RenderableType:
    given = turn.get("versions")  # absent without tokens, None for an imported turn
    seen = [] if given is None else sorted({int(version) for version in given})
    versions = "" if not seen else f" · version {seen[0]}" + (f"–{seen[-1]}" if len(seen) > 1 else "")
    notes = [f"label {printable(turn['label'])}"] if turn["label"] else []
    notes += ["constrained: not trained on by default"] if turn["constrained"] else []
    notes += ["imported: no policy sampled it"] if turn.get("imported") else []
    notes += [f"pinned: {', '.join(turn['overrides'])}"] if turn["overrides"] else []
    if replaced := turn.get("volatile_as_first_seen", 0):  # absent in the answers of earlier releases
        notes.append(f"volatile texts as first seen: {replaced}")
    fork = turn["forked_from"]
    if fork is not None:
        fork = fork if isinstance(fork, Mapping) else {"reason": fork.reason, "diverged_at": fork.diverged_at}
        notes.append(f"new root ({fork['reason']}, from message {fork['diverged_at']} on)")
    text = (
        f"turn {number} · {turn['id']} · {turn['sampled_tokens']} tokens · {turn['finish_reason']}{versions}"
    )
    return Text(" · ".join([text, *notes]), "cyan")


def _message(message: Mapping[str, Any], full: bool, style: str = "") -> Text:
    content = message.get("content")
    parts = (
        [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    )
    if message.get("reasoning_content"):
        parts.insert(0, f"[reasoning] {message['reasoning_content']}")
    for call in message.get("tool_calls") or ():
        parts.append(f"→ {call['function']['name']}({call['function']['arguments']})")
    return Text(f"{message['role']}: {_cut(chr(10).join(filter(None, parts)), full)}", style)


def _text(value: str | None) -> Text:
    return Text(printable(value or ""))


def _cut(text: str, full: bool) -> str:
    text = printable(text)
    if full or len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters; --full shows them)"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
