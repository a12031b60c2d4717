"""What `areal-agents train --launcher` does: it supervises the run here, or submits a job that does.

With Slurm, the supervisor is the batch script of a job. So the same command submits the job when it is called
outside of one, and supervises the run inside.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from areal_agents.cluster.launchers.by_name import launcher_of
from areal_agents.cluster.launchers.placing import assigned_nodes, nodes_for
from areal_agents.cluster.launchers.slurm.allocation import Allocation, is_in_job
from areal_agents.cluster.launchers.slurm.job import batch_script, requeued_when_cut_short, submit
from areal_agents.cluster.train import check_config, processes_of, train_on_cluster
from areal_agents.config import Config, load_config
from areal_agents.config.origins import annotated
from areal_agents.launch.agent_jobs import check_jobs, example_job
from areal_agents.launch.report.report import Form
from areal_agents.launch.trial import check_parts


def start_on_cluster(
    name: str,
    config: Config,
    arguments: Sequence[str],
    *,
    console: Console,
    fresh: bool = False,
    form: Form = "auto",
    dry_run: bool = False,
) -> None:
    """Supervise a run to its end, or submit the job that does.

    Args:
        name: the name of the launcher.
        arguments: those of `areal-agents train`, for the job.
        fresh: set an earlier run in the same folder aside instead of resuming it.
        form: how the run is shown, see `report_of`.
        dry_run: print the script of the job instead of submitting it.

    Raises:
        ConfigError: the configuration cannot be run on several machines, or the launcher cannot be used.
        ChildDied: a process ended too often.
        Interrupted: the user stopped the run; all processes have been ended.
    """
    launcher = launcher_of(name, config)
    if name == "slurm" and (dry_run or not is_in_job(os.environ)):
        check_config(config, launcher)
        check_jobs(config, launcher=name)  # also here, before the job waits in the queue
        script = _slurm_script(config, arguments)
        if dry_run:
            print(script, end="")
            return
        output = _slurm_output(config)
        output.parent.mkdir(parents=True, exist_ok=True)
        job = submit(script)
        shown = shlex.quote(str(output).replace("%j", job))
        console.print(f"job {job} is submitted; its output: tail -F {shown}", soft_wrap=True, highlight=False)
        console.print(f"to stop it: scancel {job}; to continue it: the same command", highlight=False)
        return
    cut_short: AbstractContextManager[None] = nullcontext()
    if name == "slurm":
        fresh = fresh and "SLURM_RESTART_COUNT" not in os.environ  # a requeued job continues its run
        cut_short = requeued_when_cut_short(
            config.cluster.slurm, Allocation.of(os.environ), lambda text: console.print(text, soft_wrap=True)
        )
    with cut_short:
        train_on_cluster(config, launcher, console=console, fresh=fresh, form=form)


def described(path: Path, overrides: Sequence[str], launcher: str) -> str:
    """Return the configuration of a run with the origin of each value, and the job of an episode, if any.

    Args:
        launcher: the name of a launcher whose processes this machine starts; "": there is none.

    Raises:
        ArealAgentsError: the run could not be started as it is configured.
    """
    config = load_config(path, overrides)
    if launcher:
        check_config(config, launcher_of(launcher, config))
    check_jobs(config, launcher=launcher, dry_run=True)
    if launcher in ("", "local"):  # otherwise they are needed on other machines
        check_parts(config)
    return annotated(path, overrides) + example_job(config)


def _slurm_script(config: Config, arguments: Sequence[str]) -> str:
    gpus_per_node = config.cluster.gpus_per_node
    processes = processes_of(config, "", nodes=max(1, config.trainer.nodes))
    nodes = config.cluster.slurm.nodes or nodes_for(processes, gpus_per_node)
    assigned_nodes(processes, gpus_per_node, nodes)  # refuses too few before the job waits in the queue
    return batch_script(
        config.cluster.slurm,
        [sys.executable, "-m", "areal_agents", "train", *arguments],
        name=Path(config.run_dir).name,
        nodes=nodes,
        gpus_per_node=gpus_per_node if any(process.gpus for process in processes) else 0,
        folder=Path.cwd(),
        output=_slurm_output(config),
    )


def _slurm_output(config: Config) -> Path:
    """Return the file for the output of the job, beside the run's folder, which --fresh sets aside."""
    folder = Path(config.run_dir).absolute()
    return folder.with_name(f"{folder.name}-slurm-%j.log")
