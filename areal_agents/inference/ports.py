"""Reserves ports for servers that other processes will start."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import SystemRandom

from areal_agents.errors import ConfigError
from areal_agents.sockets import family_of

_PORTS = range(20_000, 32_000)  # below the ephemeral ports: Linux begins at 32768, others at 49152
_HOLDS = sys.platform == "linux"  # elsewhere a bound socket excludes the server's socket too


@contextmanager
def reserved_ports(count: int, host: str = "127.0.0.1") -> Iterator[tuple[int, ...]]:
    """Reserve `count` different free TCP ports of `host` for the length of a with-block.

    A port that was merely found free could be taken before its server starts. Here each port is held by a
    bound socket that does not listen: no other program that looks for a free port gets it, and a server that
    sets SO_REUSEADDR, as every server here does, can listen on it, even again after a restart. Systems other
    than Linux would refuse that server, so no port is held there and a short race remains.

    Raises:
        ConfigError: fewer than `count` ports are free.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for port in SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            if (holder := _hold(host, port)) is not None:
                held.enter_context(holder)
                ports.append(port)
        if len(ports) < count:
            raise ConfigError(f"fewer than {count} ports from {_PORTS[0]} to {_PORTS[-1]} are free on {host}")
        if not _HOLDS:
            held.close()
        yield tuple(ports)


def _hold(host: str, port: int) -> socket.socket | None:
    """Return a bound socket that still lets a server listen on the port; None if the port is in use."""
    holder = socket.socket(family_of(host))
    try:
        holder.bind((host, port))  # without SO_REUSEADDR: fails beside any other socket, bound or listening
    except OSError:
        holder.close()
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
