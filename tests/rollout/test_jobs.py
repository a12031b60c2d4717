"""Templates of jobs, and how the jobs of one agent are followed and cancelled."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from mode_support import SLURM_TEMPLATE, until_ended
from polling import until
from stand_in_slurm import StandInSlurm
from time_limits import TimeLimits

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, AgentLost, AgentNotStarted
from areal_agents.rollout.agents import episode_logs
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.jobs import agent as job_agent
from areal_agents.rollout.agents.jobs import commands, followed
from areal_agents.rollout.agents.jobs.agent import JobAgent
from areal_agents.rollout.agents.jobs.commands import QueueFull, SchedulerCommands, SchedulerError
from areal_agents.rollout.agents.jobs.config import JobConfig
from areal_agents.rollout.agents.jobs.followed import FollowedJobs
from areal_agents.rollout.agents.jobs.queue import JobState, NewJob
from areal_agents.rollout.agents.jobs.slurm import SlurmJobs, filled_script, read_script

SCRIPT = SLURM_TEMPLATE.read_text()
WAITING = JobState("waiting", "Resources", queue="the partition debug of Slurm")
RUNNING, DONE = JobState("running"), JobState("succeeded")


def new_job(name: str = "own-1", command: str = "true") -> NewJob:
    return NewJob(name, "episode-1", command, {"OPENAI_BASE_URL": "http://10.0.0.1/e/key/v1"}, 60.0, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (SCRIPT.replace("{{command}}", "python agent.py"), r"has no \{\{command\}\}; it needs the places"),
        (SCRIPT.replace("{{minutes}}", "60"), r"has no \{\{minutes\}\}"),
        (SCRIPT.replace("{{command}}", "# {{command}}\ntrue"), r"has no \{\{command\}\}"),
        (SCRIPT.replace("{{command}}", "echo 'a' \"b\" #{{command}}"), r"has no \{\{command\}\}"),
        (SCRIPT.replace("--time=", "--time=60 # "), r"has no \{\{minutes\}\}"),
        (SCRIPT.replace("#SBATCH --time=", "# SBATCH --time="), r"has no \{\{minutes\}\}"),
        (
            SCRIPT.replace("--time={{minutes}}", "") + "#SBATCH --time={{minutes}}\n",
            r"has no \{\{minutes\}\}",
        ),
        (SCRIPT + "echo {{task}}\n", r"has the unknown place \{\{task\}\}; there are \{\{name\}\}, "),
        (SCRIPT.removeprefix("#!/bin/bash\n"), "must begin with a line such as #!/bin/bash"),
        (SCRIPT.replace("--nodes=1", "--export=NONE"), "has the option --export; leave it out"),
        (SCRIPT.replace("--nodes=1", "--nodes=1 --array=0-3"), "has the option --array; leave it out"),
        (SCRIPT.replace("--nodes=1", "-a0-3"), "has the option -a; leave it out"),
        (SCRIPT.replace("--nodes=1", "--arr=0-3"), "has the option --array; leave it out"),
        (SCRIPT.replace("--nodes=1", "--cluster=other"), "has the option --clusters; leave it out"),
        (SCRIPT.replace("--nodes=1", "-Mother"), "has the option -M; leave it out"),
        (SCRIPT.replace("--nodes=1", "hetjob"), "has the option hetjob; leave it out"),
        (None, "cannot be read"),
    ],
)
def test_a_batch_script_that_cannot_be_used_is_refused(
    tmp_path: Path, changed: str | None, message: str
) -> None:
    template = tmp_path / "agent.sbatch"
    if changed is not None:
        template.write_text(changed)
    with pytest.raises(AgentError, match=rf"^agent\.job\.template: .*agent\.sbatch.*{message}"):
        read_script(str(template))


def test_the_documentation_shows_the_template_of_the_example() -> None:
    page = Path(__file__).parents[2] / "docs/clusters.md"
    assert f"```text\n{SCRIPT}```\n" in page.read_text()


def test_braces_of_the_shell_and_of_other_programs_are_not_placeholders(tmp_path: Path) -> None:
    template = tmp_path / "agent.sbatch"
    script = SCRIPT.replace("--nodes=1", "--wait-all-nodes=1 --no-requeue")
    template.write_text(script + "docker ps --format '{{.ID}}'; echo ${HOME} {a,b}\n")
    assert read_script(str(template)) == template.read_text()


@pytest.mark.parametrize(
    "line", ['echo "# {{command}}"', "echo '#'{{command}}", "echo ${#x} a#{{command}} \\# 1"]
)
def test_a_hash_sign_that_does_not_begin_a_comment_hides_no_placeholder(tmp_path: Path, line: str) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(SCRIPT.replace("{{command}}", f"{line} # don't {{{{ask}}}}"))
    read_script(str(template))


def test_placeholders_in_comments_are_not_filled_in(slurm_programs: StandInSlurm, tmp_path: Path) -> None:
    """A command of several lines would end the comment after its first line."""
    template = tmp_path / "agent.sbatch"
    template.write_text(
        SCRIPT.replace("{{command}}", "# {{command}} {{more}}\n{{command}} # it's {{command}}")
    )
    id = SlurmJobs(str(template), owner="own").submit(new_job(command="echo 'a\nb'"))
    submitted = (slurm_programs.folder / "jobs" / id / "script").read_text()
    assert submitted.endswith("\n# {{command}} {{more}}\necho 'a\nb' # it's {{command}}\n")


def test_slurm_jobs_are_refused_if_slurm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentError, match=r"agent\.job: sbatch is not installed on this machine"):
        SlurmJobs(str(SLURM_TEMPLATE), owner="own")


HIDDEN = ("AREAL_AGENTS_ADMIN_KEY", "AREAL_AGENTS_PROCESS", "SLURM_NTASKS", "SBATCH_EXPORT")


@pytest.mark.parametrize("passed", [[], ["PGPASSWORD"]])
def test_a_job_gets_the_variables_of_the_run_that_are_meant_for_agents(
    passed: list[str], slurm_programs: StandInSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It gets neither the run's secrets nor the variables of the job in which the run executes."""
    for name in (*HIDDEN, "PGPASSWORD", "MINE"):
        monkeypatch.setenv(name, "given")
    monkeypatch.setenv("SSL_CERT_FILE", f"{tempfile.gettempdir()}/areal-agents-x/authorities.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/authority.pem")
    queue = SlurmJobs(str(SLURM_TEMPLATE), owner="own", passed=passed)
    log = tmp_path / "job.log"
    variables = {"OPENAI_API_KEY": "key", "OPENAI_BASE_URL": "http://10.0.0.1/e/key/v1"}
    id = queue.submit(NewJob("own-1", "1", "printenv", variables, 3600.5, log))
    until_ended(queue, id)
    assert queue.states()[id] == DONE
    found = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
    assert {
        "MINE": "given",
        "NO_PROXY": "10.0.0.1",
        "REQUESTS_CA_BUNDLE": "/etc/authority.pem",
        **variables,
    }.items() <= found.items()
    assert not {*HIDDEN, "SSL_CERT_FILE"} & {*found}
    assert [name for name in found if name == "PGPASSWORD"] == passed
    assert (slurm_programs.folder / "jobs" / id / "minutes").read_text() == "66"  # including the margin
    assert not [line for line in slurm_programs.calls() if "key" in line]


@pytest.mark.parametrize(("passed", "printed"), [([], "none"), (["PGPASSWORD"], "secret")])
def test_a_job_has_the_password_of_the_store_only_if_it_is_passed(
    slurm_programs: StandInSlurm,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    passed: list[str],
    printed: str,
) -> None:
    monkeypatch.setenv("PGPASSWORD", "secret")
    job = {"kind": "slurm", "template": str(SLURM_TEMPLATE), "poll_s": 0.1}
    command = shlex.join(["sh", "-c", "echo ${PGPASSWORD:-none}"])
    spec = {"command": command, "job": job, "pass_environment": passed}
    playing = load_agent(spec, logs=tmp_path, job_owner="own")
    assert isinstance(playing, JobAgent)
    await_job(playing)
    assert (tmp_path / f"{EP.id}.log").read_text() == f"{printed}\n"


def test_a_log_in_a_folder_with_spaces_and_percent_signs_is_written(
    slurm_programs: StandInSlurm, tmp_path: Path
) -> None:
    """Slurm would end the option at the space, and put the number of the job in place of %j."""
    job = JobConfig(kind="slurm", template=str(SLURM_TEMPLATE), poll_s=0.1)
    folder = tmp_path / "my runs 100%j"
    await_job(JobAgent(["echo", "said"], job, logs=folder))
    assert (folder / f"{EP.id}.log").read_text() == "said\n"


async def test_the_logs_of_all_running_jobs_are_kept(
    slurm_programs: StandInSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_logs, "KEPT_LOGS", 1)
    job = JobConfig(kind="slurm", template=str(SLURM_TEMPLATE), poll_s=0.1)
    playing = JobAgent(["true"], job, owner="own", logs=tmp_path / "logs")
    episodes = [Episode(f"episode-{n}", EP.base_url, EP.api_key) for n in range(3)]
    await asyncio.gather(*(playing.prepare({}, ep, 60.0) for ep in episodes))
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {ep.id for ep in episodes}
    for ep in episodes:
        await playing.run({}, ep)
        await playing.release(ep.id)
    assert [path.stem for path in (tmp_path / "logs").iterdir()] == ["episode-2"]
    await playing.close()


@pytest.mark.parametrize("special", ['"', "\\", "\n"])
def test_a_log_path_that_slurm_would_misread_is_refused(tmp_path: Path, special: str) -> None:
    job = NewJob("own-1", "1", "true", {}, 60.0, tmp_path / f"my {special}run" / "1.log")
    with pytest.raises(AgentError, match=r"^agent\.job: Slurm cannot write the log .*another folder"):
        filled_script(SCRIPT, job)


def test_poll_s_must_be_less_than_wait_s() -> None:
    with pytest.raises(ValueError, match=r"poll_s \(60\) must be less than wait_s \(60\)"):
        agent(poll_s=60.0, wait_s=60.0)


def test_jobs_are_found_even_if_the_template_names_them_differently(
    slurm_programs: StandInSlurm, tmp_path: Path
) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(SCRIPT.replace("--job-name={{name}}", "--job-name=mine --comment={{name}}"))
    (slurm_programs.folder / "notice").write_text("Welcome to the cluster!\n\n")
    queue = SlurmJobs(str(template), owner="own")
    (slurm_programs.folder / "held").touch()
    id = queue.submit(new_job())
    assert queue.states() == {id: WAITING}
    queue.cancel([id])


def test_an_answer_of_sbatch_without_a_job_number_is_an_error(slurm_programs: StandInSlurm) -> None:
    (slurm_programs.folder / "notice").write_text("Submitted batch job ")
    with pytest.raises(SchedulerError, match=r"wrote no number of a job, but 'Submitted batch job 1\\n'"):
        SlurmJobs(str(SLURM_TEMPLATE), owner="own").submit(new_job())


@pytest.mark.parametrize(("code", "status"), [(3 << 8, "3"), (9, "-9"), (127, "-127")])
def test_every_wait_status_of_a_failed_job_is_accepted(
    slurm_programs: StandInSlurm, monkeypatch: pytest.MonkeyPatch, code: int, status: str
) -> None:
    """127 is the wait status of a stopped process, which has not ended."""
    listed = f"1|FAILED|{code}|NonZeroExitCode|own-1|\n"
    queue = SlurmJobs(str(SLURM_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", lambda *_, **__: listed)
    assert queue.states() == {"1": JobState("failed", f"exited with status {status}")}


def test_only_jobs_of_the_owner_are_seen(slurm_programs: StandInSlurm) -> None:
    (slurm_programs.folder / "held").touch()
    mine, other = (SlurmJobs(str(SLURM_TEMPLATE), owner=owner) for owner in ("own", "ow"))
    id = mine.submit(new_job())
    assert mine.states() == {id: WAITING} and other.states() == {}
    for state, phase in [("NODE_FAIL", "lost"), ("PREEMPTED", "lost"), ("TIMEOUT", "failed")]:
        slurm_programs.end_as("own-1", state)
        assert mine.states()[id].phase == phase and state in mine.states()[id].detail


def agent(poll_s: float = 0.1, **settings: Any) -> JobAgent:
    config = JobConfig(kind="slurm", template=str(SLURM_TEMPLATE), poll_s=poll_s, **settings)
    return JobAgent(["true"], config, owner="own")


EP = Episode("episode-1", "http://10.0.0.1/e/key/v1", "key")


def await_job(playing: JobAgent) -> None:
    """Play one episode to its end."""

    async def play() -> None:
        await playing.prepare({}, EP, 60.0)
        await playing.run({}, EP)
        await playing.close()

    asyncio.run(play())


async def test_a_job_that_does_not_start_in_time_is_cancelled(
    slurm_programs: StandInSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm_programs.folder / "held").touch()
    # The first query is for earlier jobs; the third one follows the answer of the second.
    TimeLimits(monkeypatch, lambda: len(slurm_programs.calls()) >= 3, module=job_agent)
    waiting = agent(wait_s=60.0)
    message = r"^job 1 did not start within 60 s \(.*\) in the partition debug of Slurm \(Resources\), and is"
    with pytest.raises(AgentNotStarted, match=message):
        await waiting.prepare({}, EP, 60.0)
    await waiting.release(EP.id)
    await waiting.close()
    assert [*slurm_programs.states().values()] == ["CANCELLED"]


async def test_a_job_that_is_cancelled_while_it_waits_has_not_begun(slurm_programs: StandInSlurm) -> None:
    """Whoever cancels a waiting job, this says nothing about the agent."""
    (slurm_programs.folder / "held").touch()
    waiting = agent()
    preparing = asyncio.create_task(waiting.prepare({}, EP, 60.0))
    while len(slurm_programs.calls()) < 2:  # until the job is listed
        await asyncio.sleep(0.01)
    slurm_programs.end_as(*slurm_programs.states(), "CANCELLED")
    with pytest.raises(AgentNotStarted, match="^before it had started, job 1 ended as CANCELLED$"):
        await preparing
    await waiting.release(EP.id)
    await waiting.close()


async def test_a_job_that_is_cancelled_while_it_runs_is_lost(slurm_programs: StandInSlurm) -> None:
    config = JobConfig(kind="slurm", template=str(SLURM_TEMPLATE), poll_s=0.1)
    playing = JobAgent(["sleep", "600"], config, owner="own")
    await playing.prepare({}, EP, 60.0)
    slurm_programs.end_as(*slurm_programs.states(), "CANCELLED")
    with pytest.raises(AgentLost, match="^job 1 ended as CANCELLED$"):
        await playing.run({}, EP)
    await playing.close()


async def test_an_agent_is_not_started_if_the_queue_stays_full(
    slurm_programs: StandInSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (slurm_programs.folder / "full").touch()
    TimeLimits(monkeypatch, lambda: "Slurm takes no further job" in caplog.text, module=job_agent)
    refused = agent(wait_s=60.0)
    with pytest.raises(
        AgentNotStarted, match=r"^no job was taken within 60 s .*: Slurm takes no further job"
    ):
        await refused.prepare({}, EP, 60.0)
    await refused.close()
    assert "may run" not in caplog.text and not slurm_programs.states()


@pytest.mark.parametrize("why", ["QOSMaxSubmitJobPerUserLimit", "Unable to contact slurm controller"])
async def test_a_job_is_submitted_again_after_a_full_queue(
    slurm_programs: StandInSlurm, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    full = slurm_programs.folder / "full"
    full.write_text(f"sbatch: error: {why}")
    waiting = agent(wait_s=600.0)
    preparing = asyncio.create_task(waiting.prepare({}, EP, 60.0))
    while why not in caplog.text:
        await asyncio.sleep(0.01)
    full.unlink()
    await preparing
    await waiting.run({}, EP)
    await waiting.close()
    assert [*slurm_programs.states().values()] == ["COMPLETED"]


@pytest.mark.parametrize(
    "limit",
    [
        "AssocGrpSubmitJobsLimit",
        "AssocMaxSubmitJobLimit",
        "MaxSubmitJobsPerAccount",
        "QOSGrpSubmitJobsLimit",
        "QOSMaxSubmitJobPerUserLimit",
    ],
)
def test_every_limit_on_submitted_jobs_counts_as_a_full_queue(
    slurm_programs: StandInSlurm, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise SchedulerError(f"sbatch failed: sbatch: error: {limit}")

    queue = SlurmJobs(str(SLURM_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", refuse)
    with pytest.raises(QueueFull, match=f"^Slurm takes no further job for now: .*{limit}$"):
        queue.submit(new_job())


async def test_a_job_that_may_have_been_taken_plays_no_episode(slurm_programs: StandInSlurm) -> None:
    """The job is cancelled and its episode aborted; otherwise two jobs might play the same episode."""
    for name in ("held", "unanswered"):
        (slurm_programs.folder / name).touch()
    waiting = agent()
    message = "^Slurm did not answer whether it takes the job: sbatch failed: .* Socket timed out"
    with pytest.raises(AgentNotStarted, match=message):
        await waiting.prepare({}, EP, 60.0)
    await waiting.close()
    assert [*slurm_programs.states().values()] == ["CANCELLED"]


async def test_a_job_whose_submission_is_cancelled_is_cancelled(slurm_programs: StandInSlurm) -> None:
    (slurm_programs.folder / "held").touch()
    waiting = agent()
    preparing = asyncio.create_task(waiting.prepare({}, EP, 60.0))
    while not (slurm_programs.folder / "jobs").exists():  # until sbatch runs
        await asyncio.sleep(0.001)
    preparing.cancel()
    await asyncio.wait({preparing})
    await waiting.release(EP.id)
    await waiting.close()
    assert [*slurm_programs.states().values()] == ["CANCELLED"]


@pytest.mark.parametrize(
    ("hangs", "left"),
    [
        ("sbatch", "did not answer whether it takes these jobs, and they may run: own-episode-1-"),
        ("scancel", "did not cancel these jobs within 2 s, and they may run on: 1"),
        ("squeue", ""),
    ],
)
async def test_a_command_that_hangs_does_not_delay_the_end(
    slurm_programs: StandInSlurm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    hangs: str,
    left: str,
) -> None:
    """Neither does its helper process, which holds its pipes. Jobs that may be left are logged."""
    monkeypatch.setattr(commands, "COMMAND_S", 600.0)
    monkeypatch.setattr(followed, "CLOSE_S", 2.0)
    (slurm_programs.folder / "held").touch()
    helpers, program = tmp_path / "helpers", slurm_programs.programs / hangs
    program.write_text(f"#!/bin/sh\nsleep 600 & echo $! >> {helpers}; wait\n")
    waiting = agent()
    preparing = asyncio.create_task(waiting.prepare({}, EP, 60.0))
    await until(lambda: helpers.exists() or slurm_programs.calls()[1:])  # it hangs, or the job is listed
    preparing.cancel()
    await asyncio.wait({preparing})
    await waiting.release(EP.id)
    await until(lambda: helpers.exists() and helpers.read_text())
    await waiting.close()
    for thread in threading.enumerate():
        if thread.name.startswith("jobs"):
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [left in error for error in errors if "may run" in error] == ([True] if left else [])
    for helper in helpers.read_text().splitlines():
        os.kill(int(helper), signal.SIGKILL)
    for name in slurm_programs.states():
        slurm_programs.end_as(name, "CANCELLED")


async def test_a_task_that_is_too_long_for_a_variable_is_refused(slurm_programs: StandInSlurm) -> None:
    longest = agent()
    with pytest.raises(AgentError, match="the task has 120012 bytes, and a job gets at most 120000"):
        await longest.prepare({"text": "x" * 120_000}, EP, 60.0)
    await longest.close()


async def test_the_error_of_a_submission_that_slurm_refuses_is_reported(
    slurm_programs: StandInSlurm, tmp_path: Path
) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(SCRIPT.replace("--nodes=1", "--partition=full"))
    refused = JobAgent(["true"], JobConfig(kind="slurm", template=str(template)))
    with pytest.raises(AgentError, match="sbatch failed: sbatch: error: .* Invalid partition"):
        await refused.prepare({}, EP, 60.0)
    await refused.close()


class Queue:
    """A scheduler whose answers the test gives one by one."""

    def __init__(self, answers: list[Mapping[str, JobState] | None]) -> None:
        self.answers = answers
        self.queries = 0
        self.submitted: list[str] = []
        self.cancelled: list[set[str]] = []
        self.refusals = 0
        self.may_look = threading.Event()
        self.may_look.set()
        self.commands = SchedulerCommands()

    def submit(self, job: NewJob) -> str:
        if job.name == "fails":
            raise SchedulerError("sbatch did not end within 60 s")
        self.submitted.append(job.name)
        return job.name

    def states(self) -> Mapping[str, JobState]:
        self.queries += 1
        if self.queries > 1:  # after the query for the jobs of earlier processes
            self.may_look.wait()
        answer = self.answers.pop(0)
        if answer is None:
            raise SchedulerError("squeue failed: Unable to contact slurm controller")
        return answer

    def cancel(self, ids: Collection[str]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SchedulerError("scancel failed: Unable to contact slurm controller")
        self.cancelled.append(set(ids))

    def output(self, id: str, log: Path | None) -> str:
        return ""


async def test_one_query_covers_all_jobs_and_may_fail() -> None:
    names = [f"own-{number}" for number in range(40)]
    running, done = dict.fromkeys(names, RUNNING), dict.fromkeys(names, DONE)
    queue = Queue([{}, running, None, None, {**done, "own-7": RUNNING}, {}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.1)
    followed = await asyncio.gather(*(jobs.submit(new_job(name)) for name in names))
    queue.may_look.set()
    ends = await asyncio.gather(*(job.ended() for job in followed))
    assert [end.phase for end in ends] == ["lost" if name == "own-7" else "succeeded" for name in names]
    assert ends[7].detail == "vanished: the scheduler does not know it any more"
    assert queue.queries == 6 and not queue.answers
    await jobs.close()
    assert queue.cancelled == [{"own-7"}]  # it would run on if that answer was wrong


async def test_a_listed_job_that_vanishes_while_it_waits_has_not_begun() -> None:
    """A Kubernetes Job disappears at once when it is deleted."""
    queue = Queue([{}, {"own-1": WAITING}, {}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.1)
    job = await jobs.submit(new_job())
    queue.may_look.set()
    assert (await job.ended()).phase == "unstarted"
    await jobs.close()
    assert queue.cancelled == [{"own-1"}]


@pytest.mark.parametrize(("longest_s", "phase"), [(600.0, "succeeded"), (0.0, "lost")])
async def test_a_new_job_may_be_listed_late(
    monkeypatch: pytest.MonkeyPatch, longest_s: float, phase: str
) -> None:
    """Some sites answer squeue from a copy that is renewed every half minute or so."""
    monkeypatch.setattr(followed, "_UNLISTED_S", longest_s)
    queue = Queue([{}, {}, {}, {"own-1": DONE}, {}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.1)
    job = await jobs.submit(new_job())
    queue.may_look.set()
    assert (await job.ended()).phase == phase
    await jobs.close()


async def test_a_job_that_is_put_back_into_the_queue_is_lost() -> None:
    """Kueue does this with a preempted Job; its next pod would play the episode again."""
    queue = Queue([{}, {"own-1": RUNNING}, {"own-1": WAITING}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.1)
    job = await jobs.submit(new_job())
    queue.may_look.set()
    assert await job.ended() == JobState("lost", "waits again after it had begun")
    await jobs.close()
    assert queue.cancelled == [{"own-1"}]


async def test_jobs_whose_submission_failed_are_cancelled() -> None:
    """For example, sbatch is killed at its time limit, but the controller accepts the job nevertheless."""
    queue = Queue([{}, {"own-1": RUNNING, "taken": RUNNING}, {"own-1": DONE, "taken": RUNNING}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.1)
    first = await jobs.submit(new_job("own-1"))
    with pytest.raises(SchedulerError, match="did not end within"):
        await jobs.submit(new_job("fails"))
    queue.may_look.set()
    assert (await first.ended()).phase == "succeeded"
    queue.answers.append({"own-1": DONE, "taken": RUNNING, "taken later": RUNNING})
    await jobs.close()
    assert queue.cancelled == [{"taken"}, {"taken later"}]


async def test_a_job_whose_submission_failed_is_found_although_no_other_job_is_followed() -> None:
    """Otherwise jobs would accumulate at a controller that accepts them but answers too late."""
    queue = Queue([{}, None, {"taken": RUNNING}, {"taken": RUNNING}, {}])
    jobs = FollowedJobs(queue, poll_s=0.1)
    with pytest.raises(SchedulerError, match="did not end within"):
        await jobs.submit(new_job("fails"))
    async with asyncio.timeout(60):
        while not queue.cancelled:
            await asyncio.sleep(0.01)
    assert queue.cancelled == [{"taken"}]
    await jobs.close()


async def test_a_job_that_was_taken_although_the_queue_seemed_full_is_cancelled() -> None:
    """This holds even if the scheduler lists it late and no other job is followed."""

    class Full(Queue):
        def submit(self, job: NewJob) -> str:
            raise QueueFull("i/o timeout")

        def states(self) -> Mapping[str, JobState]:
            if len(self.answers) == 1:
                self.answers *= 2
            return super().states()

    queue = Full([{}, {}, {"taken": RUNNING}, {}])
    jobs = FollowedJobs(queue, poll_s=0.05)
    with pytest.raises(QueueFull):
        await jobs.submit(new_job())
    async with asyncio.timeout(60):
        while not queue.cancelled:
            await asyncio.sleep(0.01)
    assert queue.cancelled == [{"taken"}]
    await jobs.close()


async def test_a_job_whose_submission_failed_is_logged_if_it_is_unknown_whether_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Queue([{}, None, None])
    jobs = FollowedJobs(queue, poll_s=60.0)
    with pytest.raises(SchedulerError, match="did not end within"):
        await jobs.submit(new_job("fails"))
    while queue.queries < 2:
        await asyncio.sleep(0.01)
    await jobs.close()
    assert not queue.answers
    assert caplog.messages[-1].endswith("did not answer whether it takes these jobs, and they may run: fails")


async def test_submissions_that_hang_do_not_delay_queries_and_cancellations() -> None:
    class Hangs(Queue):
        hangs = threading.Event()

        def submit(self, job: NewJob) -> str:
            if job.name != "own-0":
                self.hangs.wait()
            return super().submit(job)

    queue = Hangs([{}, {"own-0": RUNNING}, {"own-0": DONE}, {}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.05)
    first = await jobs.submit(new_job("own-0"))
    waiting = [asyncio.create_task(jobs.submit(new_job(f"own-{number}"))) for number in range(1, 9)]
    await asyncio.sleep(0)
    queue.may_look.set()
    async with asyncio.timeout(60):
        assert (await first.ended()).phase == "succeeded"
    for one in waiting:
        one.cancel()
    queue.hangs.set()
    await asyncio.wait(waiting)
    await jobs.close()


async def test_a_job_that_is_listed_before_its_submission_has_returned_is_not_cancelled() -> None:
    class Slow(Queue):
        returns = threading.Event()

        def submit(self, job: NewJob) -> str:
            if job.name == "own-2":
                self.returns.wait()
            return super().submit(job)

    both = {"own-1": RUNNING, "own-2": RUNNING}
    queue = Slow([{}, both, both, {"own-1": DONE, "own-2": RUNNING}, {"own-2": DONE}])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=0.05)
    first = await jobs.submit(new_job("own-1"))
    submitting = asyncio.create_task(jobs.submit(new_job("own-2")))
    await asyncio.sleep(0)
    queue.may_look.set()
    await first.ended()
    queue.returns.set()
    assert (await (await submitting).ended()).phase == "succeeded"
    await jobs.close()
    assert queue.cancelled == []


async def test_jobs_that_wait_for_their_submission_are_not_submitted_after_the_end() -> None:
    class Hangs(Queue):
        hangs = threading.Event()

        def submit(self, job: NewJob) -> str:
            self.hangs.wait()
            return super().submit(job)

    queue = Hangs([{}, {}])
    jobs = FollowedJobs(queue, poll_s=60.0)
    submitting = [asyncio.create_task(jobs.submit(new_job(f"own-{number}"))) for number in range(12)]
    while not queue.queries or len(jobs._submitting) < 12:
        await asyncio.sleep(0.01)
    for one in submitting:
        one.cancel()
    await asyncio.wait(submitting)
    closing = asyncio.create_task(jobs.close())
    await asyncio.sleep(0)
    queue.hangs.set()
    await closing
    assert len(queue.submitted) <= 4  # those that had already begun
    assert set[str]().union(*queue.cancelled) == {*queue.submitted}


async def test_cancellations_are_repeated_until_they_are_accepted() -> None:
    queue = Queue([{"own-old": RUNNING, "own-ended": DONE}, {"own-1": RUNNING}])
    queue.refusals = 2
    jobs = FollowedJobs(queue, poll_s=60.0)
    first = await jobs.submit(new_job("own-1"))
    first.cancel()
    await jobs.close()
    assert set[str]().union(*queue.cancelled) == {"own-old", "own-1"}


async def test_a_refused_cancellation_is_repeated_after_a_pause_or_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(followed, "_FIRST_PAUSE_S", 30.0)
    asked: list[list[str]] = []

    class Refuses(Queue):
        def cancel(self, ids: Collection[str]) -> None:
            asked.append(sorted(ids))
            super().cancel(ids)

    queue = Refuses([{}, *[{}] * 1000])
    queue.refusals = 2
    jobs = FollowedJobs(queue, poll_s=0.05)
    first, second = await jobs.submit(new_job("own-1")), await jobs.submit(new_job("own-2"))
    first.cancel()
    await until(lambda: len(asked) == 1)
    seen = queue.queries
    await until(lambda: queue.queries > seen + 2)  # the other job is followed meanwhile
    assert asked == [["own-1"]]
    second.cancel()
    await until(lambda: len(asked) == 2)
    assert asked[1] == ["own-1", "own-2"]
    assert caplog.text.count("jobs are not cancelled yet") == 1
    await jobs.close()
    assert queue.cancelled == [{"own-1", "own-2"}]


async def test_each_command_cancels_only_a_few_jobs() -> None:
    """A single command for hundreds of Kubernetes Jobs would time out, and its repetition would too."""
    names = {f"own-{number}" for number in range(500)}
    queue = Queue([dict.fromkeys(names, RUNNING), {}, {}])
    queue.refusals = 20
    jobs = FollowedJobs(queue, poll_s=0.1)
    with pytest.raises(SchedulerError):  # jobs of an earlier process are cancelled nevertheless
        await jobs.submit(new_job("fails"))
    await jobs.close()
    assert set[str]().union(*queue.cancelled) == names
    assert max(map(len, queue.cancelled)) == 10


async def test_jobs_are_lost_if_following_them_fails_with_an_internal_error() -> None:
    class Faulty(Queue):
        def states(self) -> Mapping[str, JobState]:
            if self.queries:
                raise ZeroDivisionError
            return super().states()

    queue = Faulty([{}])
    jobs = FollowedJobs(queue, poll_s=0.1)
    job = await jobs.submit(new_job())
    assert (await job.ended()).detail == "is not followed any more: ZeroDivisionError()"
    await jobs.close()
    assert queue.cancelled == [{"own-1"}]


async def test_at_most_three_submissions_run_at_the_same_time() -> None:
    free, running, most = threading.Semaphore(0), 0, 0
    lock = threading.Lock()

    class Slow(Queue):
        def submit(self, job: NewJob) -> str:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            free.acquire()
            with lock:
                running -= 1
            return super().submit(job)

    names = [f"own-{number}" for number in range(12)]
    queue = Slow([{}, dict.fromkeys(names, RUNNING)])
    queue.may_look.clear()
    jobs = FollowedJobs(queue, poll_s=60.0)
    submitting = [asyncio.create_task(jobs.submit(new_job(name))) for name in names]
    async with asyncio.timeout(60):
        while running < 3:
            await asyncio.sleep(0.01)
        free.release(12)
        await asyncio.gather(*submitting)
    queue.may_look.set()
    assert most == 3
    await jobs.close()
