"""Engines that send invalid responses to the calls of one agent, and valid ones to those of a neighbour."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from attack_support import ADMIN_KEY, Neighbour, Row, open_episode, post, proxy, send

from areal_agents.testing import LIES, ScriptedApp, ScriptedCall, ScriptedReply, running

TRUTH = "one two three four"
P99_MS = 500.0  # of calls that share the engine with repeated requests


def lying(model: Path, folder: Path, *, one_whole_of: int = 1) -> Iterator[Row]:
    """Yield one row per invalid response, streamed and not streamed, and one for the effect on a neighbour.

    Before the proxy refuses an invalid response that is not streamed, it repeats the request for 1.6 s. So
    only one of every `one_whole_of` of them is sent; tests/inference/test_lies.py tests the client with all.
    """
    for incremental in (True, False):
        app = ScriptedApp.from_folder(model, _answer, incremental=incremental, keep=0)
        with (
            running(app) as engine,
            proxy(model, engine, folder / f"lies-{incremental}.db") as server,
            Neighbour(server.url, open_episode(server.url)["key"]) as neighbour,
        ):
            began = time.monotonic()
            for number, (name, lie) in enumerate(LIES.items()):
                forms = {"incremental", "whole"} if incremental else {"cumulative"}
                if number % one_whole_of:
                    forms.discard("whole")
                for form in sorted(forms & lie.forms):
                    yield _told(server.url, name, form)
            p99, longest, failed = neighbour.during(began, time.monotonic())
            yield Row(
                "lying",
                "an honest caller beside all of these",
                f"every call is answered, p99 ≤ {P99_MS:g} ms",
                f"{failed} calls failed; p99 {p99:.0f} ms, longest {longest:.0f} ms",
                not failed and p99 <= P99_MS,
            )


def _answer(call: ScriptedCall) -> ScriptedReply:
    """Return the invalid response that the prompt names, and a valid response to every other prompt."""
    lie = next((name for name in LIES if f"Tell me: {name}." in call.prompt_text), "")
    return ScriptedReply(text=TRUTH, lie=lie)


def _told(url: str, name: str, form: str) -> Row:
    episode = open_episode(url)
    messages = [{"role": "user", "content": f"Tell me: {name}."}]
    body = {"messages": messages, "max_tokens": 64, "stream": form != "whole"}
    answer = post(url, "/v1/chat/completions", body, key=episode["key"])
    taken = answer.status == 200 and (form == "whole" or b'"error"' not in answer.body)
    recorded = len(send(url, "GET", f"/episodes/{episode['id']}?tokens=1", key=ADMIN_KEY).json["turns"])
    message = _message(answer.body)
    return Row(
        "lying",
        f"{name} ({form})",
        "an error, and nothing is recorded",
        f"{answer.status} after {answer.seconds:.1f} s, {recorded} recorded: {message}",
        not taken and not recorded,
    )


def _message(body: bytes) -> str:
    for line in body.decode(errors="replace").splitlines():
        try:
            found = json.loads(line.removeprefix("data: "))
        except ValueError:
            continue
        if isinstance(found, dict) and "error" in found:
            return str(found["error"]["message"])[:160]
    return "no error"
