"""Episodes whose agents are batch jobs of a real Slurm, through the whole rollout path.

`test_modes.py` and `test_mode_failures.py` run the same agents with a stand-in for Slurm.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mode_support import SLURM_TEMPLATE
from polling import until

from areal_agents.client import AsyncClient
from areal_agents.rollout.agents.jobs.queue import JobState, NewJob
from areal_agents.rollout.agents.jobs.slurm import SlurmJobs
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.whole_files import write_whole
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
ADMIN_KEY = "admin-key-of-the-tests"
LIMIT_S = 500.0
OWNER = "areal-test"
# How the first attempt of each group misbehaves, its status, and what its error contains.
ENDS = {
    "exits": ("failed", "exited with status 3"),
    "lost": ("failed", "ended as NODE_FAIL"),
    "cancelled": ("failed", "ended as CANCELLED"),
    "dropped": ("aborted", "its group no longer needs it"),
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    missing = SlurmCluster.missing()
    if missing:
        pytest.skip(missing)
    with SlurmCluster() as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


def jobs(cluster: SlurmCluster) -> dict[str, tuple[str, ...]]:
    """The number, the state and the node of each job, by the id of its episode."""
    listed = cluster.command("squeue", "--noheader", "--states=all", "--format=%i|%T|%N|%j").stdout
    lines = [line.split("|") for line in listed.splitlines()]
    return {"-".join(name.split("-")[3:5]): (*found,) for *found, name in lines}


async def test_attempts_are_repeated_if_their_jobs_fail_are_lost_or_are_cancelled(
    scripted: Any, cluster: SlurmCluster
) -> None:
    decisions, tasks = scripted.folder / "decisions", scripted.folder / "tasks.jsonl"
    decisions.mkdir()
    tasks.write_text(
        "\n".join(json.dumps({"id": how, "decisions": str(decisions), "nap": "0"}) for how in ENDS)
    )
    left = cluster.command(  # the job of an earlier process with the same owner
        "sbatch",
        "--parsable",
        f"--job-name={OWNER}-train-episode-0",
        "--output=/dev/null",
        "--wrap=sleep 600",
    ).stdout.strip()
    first: dict[str, str] = {}  # the episode that misbehaves, by group

    async def decide() -> None:
        decided: set[str] = set()
        while True:
            for episode in scripted.store.episodes(status="open"):
                if episode.id not in decided:
                    decided.add(episode.id)
                    does = ""
                    if episode.group_id.endswith("@0") and episode.group_id not in first:
                        does = "exits" if episode.group_id == "exits@0" else "hangs"
                        first[episode.group_id] = episode.id
                    write_whole(decisions / episode.id, does)
            await asyncio.sleep(0.1)

    def hangs(how: str) -> bool:
        episode = first.get(f"{how}@0")
        return episode is not None and bool(scripted.store.load_episode(episode).turns)

    async def interfere() -> None:
        await until(lambda: hangs("dropped") and hangs("cancelled") and hangs("lost"))
        async with AsyncClient(scripted.url, ADMIN_KEY) as client:
            await client.drop_group("dropped@0", "by hand")
        number, _, _ = jobs(cluster)[first["cancelled@0"]]
        cluster.command("scancel", number)
        await until(lambda: jobs(cluster)[first["dropped@0"]][1] == "CANCELLED")
        await until(lambda: scripted.store.episode_row(first["cancelled@0"]).status == "failed")
        _, _, node = jobs(cluster)[first["lost@0"]]
        cluster.kill_node(node, noticed=True)
        await until(lambda: scripted.store.episode_row(first["lost@0"]).status == "failed")
        cluster.start_node(node)

    groups = len(ENDS)
    agent = {
        "command": shlex.join([sys.executable, str(HERE / "failing_agents.py")]),
        "job": {"kind": "slurm", "template": str(SLURM_TEMPLATE), "poll_s": 0.5},
    }
    async with (
        asyncio.timeout(LIMIT_S),
        scripted.trainer(groups=groups, steps=1),
        asyncio.TaskGroup() as beside,
    ):
        deciding = beside.create_task(decide())
        interfering = beside.create_task(interfere())
        await run(
            store=scripted.store,
            proxy_url=scripted.url,
            admin_key=ADMIN_KEY,
            agent=agent,
            data=DataConfig(path=str(tasks)),
            rollout=RolloutConfig(groups=groups, group_size=2, concurrency=8, retries=5, max_staleness=0),
            evaluation=None,
            steps=1,
            logs=scripted.folder / "logs",
            job_owner=OWNER,
        )
        await interfering
        deciding.cancel()

    for how, (status, error) in ENDS.items():
        episode = scripted.store.episode_row(first[f"{how}@0"])
        assert episode.status == status and error in (episode.error or ""), (how, episode)
        if how != "dropped":
            live = [one for one in scripted.store.episodes(group_id=f"{how}@0") if one.status == "finished"]
            assert [one.score for one in live] == [1.0, 1.0]
    assert scripted.store.group_counts()["trained"] == groups
    assert cluster.job(left)["JobState"] == "CANCELLED"
    await until(lambda: not [one for one in jobs(cluster).values() if one[1] in ("PENDING", "RUNNING")])


def test_a_job_that_is_cancelled_before_it_begins_is_unstarted(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Such a job has no node, unlike one that is cancelled while it runs."""
    template = tmp_path / "agent.sbatch"
    template.write_text(SLURM_TEMPLATE.read_text().replace("#SBATCH --nodes=1", "#SBATCH --nodes=1 --hold"))
    queue = SlurmJobs(str(template), owner=OWNER)
    variables = {"OPENAI_BASE_URL": "http://127.0.0.1:1/e/key/v1"}
    id = queue.submit(NewJob(f"{OWNER}-1", "1", "sleep 600", variables, 60.0, tmp_path / "job.log"))
    assert queue.states()[id].phase == "waiting"
    cluster.command("scancel", id)
    cluster.until(lambda: queue.states()[id].has_ended, "the job to be cancelled")
    assert queue.states()[id] == JobState("unstarted", "ended as CANCELLED")


def test_no_listing_and_no_command_line_contains_the_key_of_an_episode(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """This covers what Slurm shows of a job, and the command lines of this machine while the job runs."""
    key, log = "key-of-an-episode", tmp_path / "job.log"
    queue = SlurmJobs(str(SLURM_TEMPLATE), owner=OWNER)
    base_url = f"http://127.0.0.1:1/e/{key}/v1"
    variables = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": base_url}
    id = queue.submit(NewJob(f"{OWNER}-1", "1", "printenv OPENAI_API_KEY; sleep 600", variables, 60.0, log))
    cluster.until(lambda: log.exists() and log.read_text() == f"{key}\n", "the job to have its key")
    shown = cluster.command("scontrol", "show", "job", "--details", id).stdout
    shown += cluster.command("squeue", "--Format=all").stdout
    shown += cluster.command("scontrol", "write", "batch_script", id, "-").stdout
    shown += subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
    assert f"{OWNER}-1" in shown and key not in shown
    assert queue.states()[id].phase == "running"
    queue.cancel([id])
    cluster.until(lambda: queue.states()[id].phase == "lost", "the job to end")
