"""Ports that are reserved for servers: the server can listen on its port, and no other process gets it."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lets a server listen beside the holder"
)


def listening(port: int) -> socket.socket:
    """Return a socket opened as by the servers: asyncio, uvicorn and torch's TCPStore set SO_REUSEADDR."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_port_in_use_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(3) as ports:
        assert len(set(ports)) == 3
    monkeypatch.setattr("areal_agents.inference.ports._PORTS", ports[:2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        for _ in range(20):
            with reserved_ports(1) as found:
                assert found == (ports[1],)
        with pytest.raises(ConfigError, match="fewer than 2 ports"), reserved_ports(2):
            pass


@LINUX
def test_only_its_server_can_use_a_reserved_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(2) as ports:
        monkeypatch.setattr("areal_agents.inference.ports._PORTS", ports)
        with pytest.raises(ConfigError, match="fewer than 1 ports"), reserved_ports(1):
            pass
        for _ in range(2):  # a restarted server finds its port free too
            with listening(ports[0]), socket.create_connection(("127.0.0.1", ports[0]), timeout=5):
                pass
    with reserved_ports(1) as found:
        assert found[0] in ports


@LINUX
def test_another_program_cannot_bind_a_reserved_port() -> None:
    with reserved_ports(1) as (port,), socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))


def test_a_server_may_have_as_many_connections_as_the_machine_allows() -> None:
    """Runs in a separate process, whose limit is as low as that of a login shell."""
    program = (
        "import resource; from areal_agents.sockets import allow_many_connections\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "allow_many_connections()\n"
        "now, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "assert now == most != 256, (now, most)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
