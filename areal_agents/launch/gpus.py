"""Finds the GPUs of this machine without taking memory on them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError

PROBE_TIMEOUT_S = 120.0  # the first import of torch from a cold disk is slow
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a number, or max
_PROBE = (
    "import torch\n"
    "for index in range(torch.cuda.device_count()):\n"
    "    print(torch.cuda.get_device_properties(index).total_memory)\n"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with `gpus` equal GPUs of `memory` bytes each, and `host` bytes of its own; 0: not known."""

    gpus: int
    memory: int
    host: int = 0


def this_machine() -> Machine:
    """The GPUs that torch sees here; of GPUs of several sizes the smallest counts.

    Raises:
        ConfigError: there is a driver for GPUs, but torch cannot use it.
    """
    host = _host_memory()
    if not _has_driver():
        return Machine(0, 0, host)
    # in a process of its own, because CUDA keeps memory of each GPU that a process has looked at
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"torch did not list the GPUs within {PROBE_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"torch cannot list the GPUs: {done.stderr.strip()[-300:]}")
    sizes = [int(line) for line in done.stdout.split()]
    return Machine(len(sizes), min(sizes, default=0), host)


def _host_memory() -> int:
    """The memory of this machine, or the limit of the container (cgroup v2) if that is smaller."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CONTAINER_LIMIT.read_text().strip()
    except FileNotFoundError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
