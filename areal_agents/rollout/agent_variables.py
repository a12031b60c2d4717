"""The environment variables of processes that run agents, environments and rewards."""

from __future__ import annotations

import os


def agent_variables() -> dict[str, str]:
    """Return what is added to the environment of such a process.

    Hashes have a fixed seed, because some packages generate tasks in the order of a set, which otherwise
    differs in every process. JAX, which some packages import wherever it is installed, allocates memory of a
    GPU only when it needs it; by default it allocates three quarters at once, which the engine and the
    trainer then lack.
    """
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {"PYTHONHASHSEED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": preallocates}
