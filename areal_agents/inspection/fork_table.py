"""Prints the continuations of a fork as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_agents.inspection.forks import Continuation, Forks, Leaving
from areal_agents.inspection.show import printable

_REPLY = 60  # characters of a reply in the table


def print_forks(found: Forks, console: Console) -> None:
    """Print a table of continuations below the recorded one, and their mean score."""
    console.print(
        f"turn {found.turn} of {found.episode}, sampled again by {found.policy} at temperature "
        f"{found.temperature:g}",
        markup=False,
    )
    table = Table("", "turns", "tokens", "score", "logprob", "first difference", "reply")
    table.add_row(*_row(found.recorded, found.turn))
    for continuation in found.continuations:
        table.add_row(*_row(continuation, found.turn))
    console.print(table)
    console.print(
        f"each logprob is that of the weights that sampled the continuation: the recorded one's then, "
        f"{found.policy} now",
        style="dim",
        markup=False,
    )
    for continuation in found.continuations:
        if continuation.logprobs:
            console.print(_tokens(continuation))
    failed = [c for c in found.continuations if c.error is not None]
    for error in dict.fromkeys(c.error for c in failed):
        numbers = ", ".join(str(c.number) for c in failed if c.error == error)
        console.print(Text(f"continuation {numbers}: {printable(error or '')}", "red"))
    if found.mean_score is not None:
        console.print(
            f"mean score {found.mean_score:.3f} of {len(found.continuations) - len(failed)}, recorded "
            f"{_number(found.recorded.score)}"
        )
    console.print(f"in {found.store}", markup=False, soft_wrap=True)


def _row(continuation: Continuation, turn: int) -> list[Text]:
    leaves = "" if continuation.number == 0 else _leaves(continuation.leaves, turn)
    reply = printable(continuation.reply).replace("\n", " ")
    if continuation.error is not None and continuation.number:
        leaves = "failed"
    return [
        Text(str(continuation.number or "recorded")),
        Text(str(continuation.turns)),
        Text(str(continuation.tokens)),
        Text(_number(continuation.score)),
        Text("–" if continuation.logprob is None else f"{continuation.logprob:.2f}"),
        Text(leaves),
        Text(reply[:_REPLY] + ("…" if len(reply) > _REPLY else "")),
    ]


def _leaves(leaves: Leaving | None, turn: int) -> str:
    if leaves is None:
        return "none"
    if leaves.token is None:
        return f"turn {leaves.turn}"
    return f"token {leaves.token}" if leaves.turn == turn else f"turn {leaves.turn}, token {leaves.token}"


def _tokens(continuation: Continuation) -> Text:
    """Return the tokens of the turn, each with its logprob."""
    out = Text(f"{continuation.number}: ", "cyan")
    for text, logprob in continuation.logprobs:
        out.append(printable(text).replace("\n", "↵")).append(f" {logprob:.2f}  ", "dim")
    return out


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
