"""The machine's shared memory, /dev/shm: what is free in it, and which errors of NCCL mean that it is full.

Containers often have 64 MB of it, and NCCL makes segments there at the first collectives of a group.
"""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
REMEDY = "enlarge it (docker: --shm-size) or remove what fills it"

_FULL = "No space left on device"
_UNEXPLAINED = "unhandled system error"  # the name of NCCL for any failed system call
_LITTLE = 32_000_000  # bytes; a segment of NCCL has about 10 MB
_ENOUGH = 1_000_000_000  # bytes; what NVIDIA's manual of NCCL recommends for a container


def free_bytes() -> int:
    """Return the number of free bytes. Raise OSError if there is no shared memory."""
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def shortage(processes: int) -> str | None:
    """Return a warning if NCCL may lack room for this number of processes on the machine, else None.

    Between GPUs without a direct connection, each process takes several segments.
    """
    if processes < 2:
        return None
    try:
        free = free_bytes()
    except OSError:
        return f"there is no {SHARED_MEMORY}, in which NCCL makes segments for {processes} processes"
    if free >= min(_ENOUGH, _LITTLE * processes):
        return None
    return (
        f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and NCCL may need more for {processes} processes; "
        f"{REMEDY}; 1 GB is enough"
    )


def explained(error: BaseException) -> str:
    """Return the message of an error of torch; if shared memory that is full explains it, with what to do."""
    message = str(error)
    try:
        free = free_bytes()
    except OSError:
        return message
    is_full = _FULL in message or (_UNEXPLAINED in message and free < _LITTLE)
    if "NCCL" not in message or not is_full:
        return message
    return f"NCCL has no room in {SHARED_MEMORY}, where {free / 1e6:.0f} MB are free; {REMEDY}: {message}"
