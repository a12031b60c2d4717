"""Prints the path of a gradient on a terminal: each term with its value, its formula and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_agents.inspection.show import printable

_TOKENS = 200  # rows of the table of tokens, unless all are wanted


def draw_why(found: Mapping[str, Any], console: Console, *, full: bool = False) -> None:
    """Print what `why` returned. Without `full`, a long turn shows its first tokens only."""
    episode = found["episode"]
    where = "" if episode["group"] is None else f", group {printable(episode['group'])}"
    console.print(
        Text(f"episode {printable(episode['id'])} of task {printable(episode['task'])}{where}", "bold")
    )
    console.print(Text(printable(found["verdict"]), "yellow"))
    for reward in found["rewards"]:
        target = f" of {reward['target']}" if reward["target"] else ""
        console.print(
            Text(
                f"reward {printable(reward['name'])} ({reward['scope']}{target}): {number(reward['value'])}",
                "green",
            )
        )
    if not found["rewards"]:
        console.print(Text("it has no reward", "dim"))
    turn = found["turn"]
    for step in found["steps"]:
        again = f", use {step['use'] + 1} of its group" if step["use"] else ""
        version = "" if step["version"] is None else f", at version {step['version']}"
        console.print(Text(f"\nstep {step['step']}{version}{again}", "bold cyan"))
        if not step["recorded"]:
            console.print(
                Text(
                    "this step left no record of its tokens (trainer.record_tokens, or an earlier release); "
                    "only what follows from the store is shown",
                    "yellow",
                )
            )
        if step["fault"]:
            console.print(Text(printable(step["fault"]), "red"))
        if turn is None:
            console.print(_terms(step["credit"]))
            console.print(_turns(step["turns"]))
            continue
        row = step["turns"][turn["number"] - 1]
        if row["reason"]:
            console.print(Text(f"turn {turn['number']} was not trained: {row['reason']}", "yellow"))
        else:
            token = turn["token"]
            what = f"turn {turn['number']} ({turn['id']})"
            if token is not None:
                what = f"token {token} of {what}: id {turn['token_ids'][token]} {_text(turn, token)}"
            console.print(Text(printable(what), "bold"))
        console.print(_terms(step["path"]))
        if turn["token"] is None and step["tokens"] is not None and step["tokens"]["untrained"] is None:
            shown = len(turn["token_ids"]) if full else min(_TOKENS, len(turn["token_ids"]))
            console.print(_tokens(turn, step["tokens"], shown))
            if shown < len(turn["token_ids"]):
                console.print(f"the first {shown} of {len(turn['token_ids'])} tokens; --full shows all")
    if found.get("versions"):
        console.print(_versions(found["versions"], turn))


def number(value: Any) -> str:
    """Return a number with four significant digits, other values as they are, and – for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"


def _text(turn: Mapping[str, Any], index: int) -> str:
    """The text of a token in quotes; "" if the run's model has no tokenizer here."""
    return "" if turn["texts"] is None else printable(json.dumps(turn["texts"][index], ensure_ascii=False))


def _terms(terms: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("", "value", "how", "", "page", box=None, pad_edge=False)
    for term in terms:
        style = "red" if term.get("agrees") is False else ""
        table.add_row(
            Text(term["name"], "bold"), Text(number(term["value"]), style), Text(term["formula"]),
            Text(term["text"], style or "dim"), Text(term["doc"], "dim"),
        )  # fmt: skip
    return table


def _turns(turns: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("turn", "id", "label", "tokens", "advantage", "computed again", "clipped", "loss share", "")
    for row in turns:
        advantage = row["advantage"]
        said = row["reason"] or ", ".join(f"{n} {state}" for state, n in row.get("states", {}).items())
        again = number(advantage["recomputed"])
        agrees = {True: "the same", False: f"DIFFERS: {again}", None: again}
        table.add_row(
            str(row["number"]), Text(row["id"]), Text(printable(row["label"])), str(row["tokens"]),
            number(advantage["recorded"]), agrees[advantage["agrees"]], number(row.get("clipped")),
            number(row.get("loss")), Text(said),
        )  # fmt: skip
    return table


def _tokens(turn: Mapping[str, Any], recorded: Mapping[str, Any], shown: int) -> Table:
    columns = [name for name in ("advantage", "proximal", "current", "ratio", "weight", "loss")
               if any(value is not None for value in recorded[name])]  # fmt: skip
    table = Table("token", "id", "text", "version", "behavior", *columns, "clip", "")
    for index in range(shown):
        state = recorded["states"][index]
        table.add_row(
            str(index), str(turn["token_ids"][index]), Text(_text(turn, index)),
            number(turn["versions"][index]),
            number(turn["logprobs"][index]), *(number(recorded[name][index]) for name in columns),
            "" if recorded["clipped"][index] in ("no", None) else recorded["clipped"][index],
            "" if state == "trained" else state or "",
        )  # fmt: skip
    return table


def _versions(rows: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]) -> Table:
    """The logprobs under each version whose weights remain: of the token, or the mean over the turn."""
    what = "logprob of the token" if turn["token"] is not None else "mean logprob of the turn"
    table = Table("weights", what)
    for row in rows:
        values = row["logprobs"]
        value = values[turn["token"]] if turn["token"] is not None else sum(values) / len(values)
        table.add_row(Text(row["name"]), number(value))
    return table
