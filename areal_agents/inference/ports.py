"""Ports for servers that other processes open: chosen here, and kept from everybody else until then."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import SystemRandom

from areal_agents.errors import ConfigError

_PORTS = range(20_000, 32_000)  # Linux takes outgoing connections' ports from 32768 on, others from 49152 on
_HOLDS = sys.platform == "linux"  # elsewhere a bound socket excludes the server's socket too


@contextmanager
def reserved_ports(count: int, host: str = "127.0.0.1") -> Iterator[tuple[int, ...]]:
    """That many different free TCP ports of `host`, for the length of a with-block.

    A port that was merely found free could be gone by the time its server has started. Here each is held by a
    bound socket that does not listen: nobody else who looks for a free port gets it, and a server that sets
    SO_REUSEADDR, as every server here does, can listen on it, again after a restart too. Systems other than
    Linux refuse the server in that case, so that nothing is held there and a short race remains.

    Raises:
        ConfigError: there are not so many free ports.
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
            raise ConfigError(f"no {count} ports from {_PORTS[0]} to {_PORTS[-1]} are free on {host}")
        if not _HOLDS:
            held.close()
        yield tuple(ports)


def _hold(host: str, port: int) -> socket.socket | None:
    """A socket bound to the port that lets a server listen there; None if somebody has the port."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.bind((host, port))  # without SO_REUSEADDR: fails beside any other socket, bound or listening
    except OSError:
        holder.close()
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
