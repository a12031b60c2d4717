"""`areal-agents train` on a further machine: starts the ranks of the trainer there, and ends with the run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console

from areal_agents.config import Config, save_config
from areal_agents.errors import ArealAgentsError, TrainingError
from areal_agents.launch.local_ranks import run_ranks
from areal_agents.launch.nodes import Nodes
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.launch.supervision import EXIT_STOPPED
from areal_agents.launch.train import has_ended, threads_for, without_place


def join(config: Config, nodes: Nodes, *, console: Console, fresh: bool = False) -> None:
    """Run this machine's ranks of a run that is started on node 0, to its end.

    Their output goes where that of this process goes. The ranks use the configuration of this machine; the
    trainer compares it with that of node 0.

    Raises:
        TrainingError: the trainer has failed, here or on another node; the reason is in the output.
        ArealAgentsError: the run was stopped.
    """
    config = without_place(config)
    folder = RunFolder(Path(config.run_dir))
    if not fresh and has_ended(config, folder):
        console.print(f"{folder.root} is finished", soft_wrap=True)
        return
    ranks = config.trainer.ranks
    console.print(
        f"node {nodes.rank} of {nodes.count}: {nodes.local_ranks(ranks)} of {ranks} ranks, which meet at "
        f"{nodes.host}:{nodes.port}",
        soft_wrap=True,
    )
    os.environ.update(threads_for("trainer", alone=True))
    with tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
        save_config(config, Path(own) / "config.yaml")
        arguments = ["trainer", "--folder", str(folder.root), "--config", f"{own}/config.yaml"]
        limit_s = stop_timeout_s(config)
        code = run_ranks(arguments, ranks, nodes, stop_timeout_s=limit_s, own_session=True)
    if code == EXIT_STOPPED:
        raise ArealAgentsError("the run was stopped; start the same command on every node to continue it")
    if code:
        raise TrainingError(
            f"the trainer on node {nodes.rank} ended with exit code {code}; its output says why"
        )
    console.print("the trainer has ended; the results are on node 0", soft_wrap=True)
