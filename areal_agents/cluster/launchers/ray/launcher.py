"""Places role processes by Ray: the command of each is a small driver that stays in the foreground."""

from __future__ import annotations

import socket
import subprocess
import sys

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.ray.config import RayConfig
from areal_agents.errors import ConfigError
from areal_agents.extras import require

_CONNECT_S, _CHECK_S = 10.0, 60.0
_CHECK = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='warning')"


class RayLauncher:
    """Runs each process on a node that Ray chooses, in a placement group of its own."""

    name = "ray"

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def check(self) -> None:
        """Raise ConfigError if Ray is not installed, or its cluster does not answer from this machine."""
        require("ray", "--launcher ray")
        address = self._config.address or "auto"
        if self._config.address:
            _connect(self._config.address)
        try:  # in a process of its own: a connection starts threads and handles signals
            checked = subprocess.run(
                [sys.executable, "-c", _CHECK, address], capture_output=True, text=True, timeout=_CHECK_S
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"cluster.ray.address: {address} does not answer within {_CHECK_S:g} s"
            ) from None
        if checked.returncode:
            said = checked.stderr.strip().splitlines() or [f"exit code {checked.returncode}"]
            raise ConfigError(
                f"cluster.ray.address: this machine is on no Ray cluster at {address} ({said[-1]}); start "
                "one with ray start --head, join it with ray start --address=HOST:PORT, and run areal-agents "
                "train on one of its nodes"
            )

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command of the driver that runs the process on a node."""
        return (
            *(sys.executable, "-m", "areal_agents.cluster.launchers.ray.driver"),
            *((f"--address={self._config.address}",) if self._config.address else ()),
            *(f"--name={process.name}", f"--gpus={process.gpus}", f"--cpus={process.cpus}"),
            *(f"--wait-s={self._config.wait_s:g}", "--"),
            *process.command,
        )


def _connect(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.ray.address: no Ray cluster answers at {address} ({error}); start one with "
            "ray start --head"
        ) from None
