"""Grades what an agent left in a sandbox: tests run on the same files after the agent, outside its reach.

When the tests start, every process of the agent is dead. The tests and the folder of the reward are mounted
for them alone, so that the agent could neither read the tests nor write a reward. The tests get no key and no
network.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import SandboxError
from areal_agents.sandbox.sandbox import Finished, Mount, Sandbox

TESTS, VERIFIER = "/tests", "/logs/verifier"
_REWARDS = ("reward.json", "reward.txt")
_MOST_BYTES = 1 << 20  # of a file of rewards


@dataclass(frozen=True, slots=True)
class Grade:
    """What the tests found: rewards by name, and how their command ended."""

    rewards: Mapping[str, float]
    finished: Finished


async def grade(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    tests: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Grade:
    """Run tests in a sandbox and return the rewards that they write.

    They see `tests` as /tests and write /logs/verifier/reward.json, an object of numbers or one number, or
    reward.txt, one number, which is named "reward".

    Args:
        argv: the command, such as ["bash", "/tests/test.sh"].
        tests: a folder of this machine.
        timeout_s: time limit in seconds.
        environment: variables of the tests; they get none of the agent's.

    Raises:
        SandboxError: the tests wrote no valid reward; the message has the end of their output.
    """
    with tempfile.TemporaryDirectory(prefix="areal-agents-verifier-") as folder:
        rewards = Path(folder) / "verifier"
        rewards.mkdir()
        finished = await sandbox.run(
            argv,
            timeout_s=timeout_s,
            environment=environment,
            mounts=[Mount(TESTS, tests), Mount(VERIFIER, rewards, is_writable=True)],
        )
        try:
            return Grade(_read_rewards(rewards), finished)
        except (OSError, ValueError) as error:
            how = "were killed at their time limit" if finished.timed_out else f"ended with {finished.status}"
            end = finished.stderr.text().strip()[-500:] or finished.stdout.text().strip()[-500:]
            raise SandboxError(f"the tests wrote no valid reward ({error}) and {how}: {end}") from error


def _read_rewards(folder: Path) -> dict[str, float]:
    """Read the rewards. Raises OSError or ValueError if there are none."""
    for name in _REWARDS:
        if os.path.lexists(folder / name):
            text = _read(folder / name)
            value = json.loads(text) if name.endswith(".json") else float(text)
            named = value if isinstance(value, dict) else {"reward": value}
            return {str(key): _number(key, one) for key, one in named.items()}
    raise ValueError(f"there is no {VERIFIER}/{_REWARDS[0]} or {_REWARDS[1]}")


def _read(path: Path) -> str:
    # The agent's files may have made the tests write a link to a file of this machine, or a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not os.path.isfile(f"/proc/self/fd/{fd}"):
            raise ValueError(f"{path.name} is not a file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path.name} is longer than {_MOST_BYTES} bytes")
    return data.decode()


def _number(name: object, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the reward {name!r} is {value!r}, and must be a finite number")
    return float(value)
