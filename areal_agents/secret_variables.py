"""The environment variables that hold secrets of a run, and what is sent with them.

The processes of a run have these variables. Its agents, which handle untrusted input, do not get them: no
agent gets the keys and the token, and one that is a command gets the password of the store only if its
configuration names the variable, because its own programs may read it too.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Collection, Mapping

from areal_agents.errors import ConfigError

ENGINE_KEY = "AREAL_AGENTS_ENGINE_KEY"  # the key that requests to the engines must have
TEACHER_KEY = "AREAL_AGENTS_TEACHER_KEY"  # the same for the engine of a teacher
RUN_TOKEN = "AREAL_AGENTS_RUN_TOKEN"  # from which the processes of a cluster compute the keys of their run
ADMIN_KEY = "AREAL_AGENTS_ADMIN_KEY"  # the key of the proxy's control API
STORE_PASSWORD = "PGPASSWORD"  # the password of the store, which libpq reads
_ALL = (ENGINE_KEY, TEACHER_KEY, RUN_TOKEN, ADMIN_KEY)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the secrets of a run, for a process that runs an agent."""
    return {name: value for name, value in environment.items() if name not in _ALL}


def without_password(environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """Return `environment` without the password of the store, for a command without isolation.

    Args:
        passed: what the configuration of the command names; with PGPASSWORD in it, nothing is removed.
    """
    hidden = {STORE_PASSWORD}.difference(passed)
    return {name: value for name, value in environment.items() if name not in hidden}


def take_token() -> str:
    """Remove the token of the run from the environment of this process, and return it; "" if it has none.

    What /proc shows is the memory with which this process was started, so the token is overwritten there too:
    agents of the same user can read it.
    """
    if RUN_TOKEN not in os.environ:
        return ""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    if address := library.getenv(RUN_TOKEN.encode()):
        ctypes.memset(address, 0, len(os.environb[RUN_TOKEN.encode()]))
    return os.environ.pop(RUN_TOKEN)


def hide_token() -> None:
    """Keep the token of the run for processes that this one starts, but not where /proc shows it."""
    if token := take_token():
        os.environ[RUN_TOKEN] = token


def given_engine_key() -> str:
    """Return the key of running engines that this process's environment has, or "".

    Raises:
        ConfigError: a header cannot have it.
    """
    return _key_in(ENGINE_KEY)


def given_teacher_key() -> str:
    """Return the key of the teacher's engine that this process's environment has, or "".

    Raises:
        ConfigError: a header cannot have it.
    """
    return _key_in(TEACHER_KEY)


def _key_in(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key.isascii() or not (key.isprintable() and key == key.strip()):
        raise ConfigError(f"{variable} must be printable ASCII without spaces around it, as a header has it")
    return key


def new_engine_key() -> str:
    """Return a new random key for the engines that a run starts."""
    return secrets.token_urlsafe(24)


def bearer(key: str) -> dict[str, str]:
    """Return the header of a request to a server that wants this key; without a key there is none."""
    return {"Authorization": f"Bearer {key}"} if key else {}
