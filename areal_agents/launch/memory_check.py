"""Refuses a run that does not fit in the memory of this machine's GPUs, before anything is loaded.

Shared memory that may be too small for NCCL is only warned of: how much it takes depends on the machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_agents.config import Config, save_config
from areal_agents.errors import ConfigError
from areal_agents.launch.engine_memory import engine_gpus, trainer_gpus
from areal_agents.launch.gpus import this_machine
from areal_agents.launch.nodes import Nodes
from areal_agents.launch.plan import EXIT_UNKNOWN
from areal_agents.training.shared_memory import shortage

PLAN_TIMEOUT_S = 600.0
_REFUSED = re.compile(r"^ConfigError: (.*)", re.DOTALL | re.MULTILINE)  # how the command refuses


def check_memory(config: Config, nodes: Nodes, say: Callable[[str], None]) -> None:
    """Show the plan of a run on this machine's GPUs, and refuse it if it does not fit.

    With `trainer.memory_check: warn`, and if the plan cannot be made, it prints a warning instead. A trainer
    that something else starts checks its own memory.

    Args:
        say: called with the plan and with warnings.

    Raises:
        ConfigError: it does not fit, or there are too few GPUs.
    """
    if config.trainer.device == "cpu" or not config.trainer.start:
        return
    machine = this_machine()
    if not machine.gpus:
        return

    def warn(text: str) -> None:
        say(f"warning: {text}")

    processes = trainer_gpus(config, machine) + sum(map(len, engine_gpus(config, machine)))
    if (short := shortage(processes)) is not None:
        warn(short)
    options = ["--gpus", str(machine.gpus), "--gpu-memory", str(machine.memory / 2**30)]
    with TemporaryDirectory(prefix="areal-agents-plan-") as temporary:
        file = Path(temporary) / "config.yaml"
        save_config(config, file)
        # in a process of its own: the supervisor needs no torch
        command = [sys.executable, "-m", "areal_agents", "plan", str(file), f"trainer.nodes={nodes.count}"]
        try:
            done = subprocess.run(
                [*command, *options], capture_output=True, text=True, timeout=PLAN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            warn(f"the memory of the run was not known within {PLAN_TIMEOUT_S:g} s; it is not checked")
            return
    shown, said = done.stdout.strip(), done.stderr.strip()
    last = (shown or said or "it said nothing").splitlines()[-1]
    if done.returncode == 0:
        say(shown)
    elif done.returncode == EXIT_UNKNOWN:
        warn(f"{last}; the memory of the run is not checked")
    elif done.returncode == 1 and (refusal := _REFUSED.search(said)):
        raise ConfigError(refusal[1])
    elif done.returncode != 1 or not shown:
        warn(f"the plan ended with status {done.returncode} ({last}); the memory of the run is not checked")
    elif config.trainer.memory_check == "refuse":
        raise ConfigError(f"{last} To start it nevertheless, set trainer.memory_check: warn.")
    else:
        say(shown)
        warn("the run is started although it does not fit, because trainer.memory_check is warn")
