"""A judge: it reads conversations that have ended and that nobody has rated, and rates them.

    python judge.py runs/online-seed0

It calls the control API of the run, and knows the answers to all questions of users.py. For an assistant
whose answers nobody knows beforehand, let `grade` ask a model (docs/rewards.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "search_agent"))

from questions import ask, question_bank  # noqa: E402

from areal_agents.rewards import exact_match  # noqa: E402

ANSWERS = {
    ask(question.path, question.field, wording).text: question.answer
    for question in (*question_bank("train").all_questions(), *question_bank("heldout").all_questions())
    for wording in (0, 1)
}


def grade(turns: list[dict[str, Any]]) -> float | None:
    """Return the reward of a conversation; None if the question is none that the judge knows."""
    messages = [message for turn in turns for message in turn["new_messages"]]
    asked = next((message.get("content") for message in messages if message["role"] == "user"), None)
    if not isinstance(asked, str) or asked not in ANSWERS:  # content may also be a list of parts
        return None
    last = turns[-1]["reply"]
    return exact_match(None if last.get("tool_calls") else last.get("content"), ANSWERS[asked])


def judge_once(run: Path, grace_s: float) -> int:
    """Rate what has ended at least `grace_s` seconds ago and has no reward; return how many that were."""
    endpoints: Mapping[str, Any] = json.loads((run / "endpoints.json").read_text())
    url = f"http://127.0.0.1:{endpoints['proxy_port']}"
    count, after = 0, None
    with httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {endpoints['admin_key']}"},
        timeout=60,
        trust_env=False,
    ) as http:
        while True:
            query = {"status": "finished", **({} if after is None else {"after": after})}
            page = http.get("/episodes", params=query).raise_for_status().json()
            for episode in page["episodes"]:
                if episode["score"] is not None or episode["ended_at"] > time.time() - grace_s:
                    continue
                shown = http.get(f"/episodes/{episode['id']}")
                if shown.status_code == 404:  # it was deleted meanwhile
                    continue
                if (reward := grade(shown.raise_for_status().json()["turns"])) is None:
                    continue
                given = {"reward": reward, "name": "judge"}
                answer = http.post(f"/episodes/{episode['id']}/reward", json=given)
                if answer.status_code in (404, 409):  # deleted, or the trainer has taken it meanwhile
                    continue
                answer.raise_for_status()
                count += 1
            if (after := page["next"]) is None:
                return count


def main() -> None:
    """Judge again and again until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--grace-s", type=float, default=10.0, help="time for the users' own thumbs")
    options = parser.parse_args()
    while True:
        if count := judge_once(options.run, options.grace_s):
            print(f"rated {count} conversations", flush=True)
        time.sleep(options.every_s)


if __name__ == "__main__":
    main()
