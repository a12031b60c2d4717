"""What a process of a run knows of its supervisor: a pipe that closes with it, and how long an end may take.

The pipe is standard input, but only where the supervisor says so in the environment: srun, torchrun, Ray and
`nohup` start processes whose standard input is closed or empty from the beginning.
"""

from __future__ import annotations

import os
import signal
import threading
import time

SUPERVISED = "AREAL_AGENTS_SUPERVISED_S"  # set if standard input is the supervisor's pipe; seconds, see below
EXIT_STOPPED = 3  # the process was told to end before its work was complete
GRACE_S = 20.0  # from the supervisor's death until a process exits at once, unless it is given another time


def end_with_supervisor() -> float:
    """Send this process SIGTERM when its supervisor ends in any way, and exit if that has no effect in time.

    The variable is removed from the environment: what this process starts has another standard input.

    Returns:
        That time in seconds, which the supervisor gave.
    """
    given = os.environ.pop(SUPERVISED, None)
    grace_s = float(given) if given else GRACE_S
    if given is None:
        return grace_s

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
    return grace_s
