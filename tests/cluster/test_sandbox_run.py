"""A run whose agents run on sandbox hosts; one host and one rollout process are killed during the run."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_support import MANY, REPOSITORY, STOP_S, supervised

from areal_agents.store import Store
from areal_agents.store.roles import Role

QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
GROUPS, SIZE = 2, 4
RUN_S = 900.0
LOST: list[tuple[Role, int]] = [("sandbox", 1), ("rollout", 0)]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(RUN_S + 2 * STOP_S)]

# Plays one turn in its working folder, and posts its reward.
AGENT = """
import json, os, sys, time, urllib.request

task = json.load(sys.stdin)
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def post(url, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=120))

assert open("given.txt").read() == "travels"
assert not os.path.exists("kept.txt"), "nobody has worked here before"
open("kept.txt", "w").close()
messages = [{"role": "user", "content": task["question"]}]
reply = post(base + "/chat/completions", {"model": "policy", "messages": messages})
text = reply["choices"][0]["message"]["content"] or ""
time.sleep(0.3)
episode = os.environ["AREAL_AGENTS_EPISODE_ID"]
post(f"{base.partition('/e/')[0]}/episodes/{episode}/reward", {"reward": len(text) % 2})
print("ran with", sys.argv[1])
"""


@pytest.mark.parametrize("isolation", ["process", "bubblewrap"])
def test_agents_on_sandbox_hosts_survive_the_loss_of_a_host_and_of_a_rollout_process(
    isolation: str, tmp_path: Path
) -> None:
    run, log, store = tmp_path / "run", tmp_path / "supervisor.log", tmp_path / "store.db"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "given.txt").write_text("travels")
    (folder / "agent.py").write_text(AGENT)
    mark = f"mark-{time.time_ns()}"
    agent = {
        "command": shlex.join([sys.executable, "agent.py", mark]),
        "isolation": isolation,
        "workdir": str(folder),
        "limits": {"memory_mb": 512, "processes": 64, "disk_mb": 64},
        "warm": 2,
    }
    command = [
        sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", "local",
        f"run_dir={run}", f"store.url={store}", f"trainer.steps={MANY}", "eval=null",
        f"agent={json.dumps(agent)}", "ablation=null",
        f"rollout.groups={GROUPS}", f"rollout.group_size={SIZE}", "rollout.concurrency=16",
        "cluster.rollouts=2", "cluster.sandboxes=2", "cluster.sandbox_places=4",
    ]  # fmt: skip
    with supervised(command, run, log, within_s=RUN_S) as running:
        for role, index in LOST:
            running.wait_for_step(running.steps() + 1)
            running.lose(store, role, index)
        running.wait_for_step(running.steps() + 2)
        steps = running.stop()
    with Store.open(store) as opened:
        trained = [opened.groups_of_step(step) for step in range(1, steps + 1)]
        rows = opened.role_rows()
    assert [len(step) for step in trained] == [GROUPS] * steps
    assert len({group for step in trained for group in step}) == steps * GROUPS, "each is trained once"
    epochs = {(row.role, row.index): row.epoch for row in rows}
    assert epochs["sandbox", 1] == 2 and epochs["rollout", 0] == 2 and epochs["sandbox", 0] == 1
    assert not any(row.is_alive for row in rows), "every process has left its place"
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or ())]
    assert not left, "no program of an agent is left"
    logs = [path.read_text() for path in (run / "logs/episodes").glob("*.log")]
    assert f"ran with {mark}\n" in logs
