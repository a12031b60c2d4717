"""Hosts of a network on one machine: network namespaces behind a bridge, with links that can be cut."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from postgres_server import PostgresServer

_numbers = itertools.count()


class Host:
    """A network namespace with an address of its own. All hosts share the file system."""

    def __init__(self, namespace: str, link: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self._link = link  # the end of the link at the bridge

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host, as the same process."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Cut the link: no packet reaches the host or leaves it, and no connection is closed."""
        _ip("link", "set", self._link, "down")

    def heal(self) -> None:
        """Restore the link."""
        _ip("link", "set", self._link, "up")

    def slow(self, rate: str) -> None:
        """Limit the rate at which the host receives data, for example to 10mbit."""
        subprocess.run(
            ["tc", "qdisc", "replace", "dev", self._link, "root", "tbf", "rate", rate, "burst", "64kb",
             "latency", "200ms"], check=True, timeout=30,
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Return the ids of the processes that run on this host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True, timeout=30
        )
        return [int(pid) for pid in found.stdout.split()]

    def lose(self) -> None:
        """Lose the host: cut its link and kill all its processes."""
        self.cut()
        self.kill_processes()

    def kill_processes(self) -> None:
        """Kill the processes that run on this host, some of which may end meanwhile."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class HostServer(PostgresServer):
    """A PostgreSQL server on a host, which every other host reaches at the host's address."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with open(self._folder / "data/pg_hba.conf", "a") as file:
            file.write("host all all 0.0.0.0/0 trust\n")
        super().start()

    def new_store(self) -> str:
        """Return the URL of a store that does not exist yet."""
        return f"postgresql://areal@{self._host.address}/postgres?schema=s{os.getpid()}_{next(self._stores)}"

    def _command(self, program: str, *arguments: str) -> list[str]:
        given = [
            f"listen_addresses={self._host.address}" if one == "listen_addresses=" else one
            for one in arguments
        ]
        return self._host.command(*super()._command(program, *given))


def missing() -> str | None:
    """Return why network namespaces cannot be created here; None if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"areal-test-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        return f"this machine allows no network namespaces: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Yield hosts by name, which reach each other and this process. They are removed after the block."""
    mark = f"{os.getpid() % 100_000}x{next(_numbers)}"
    subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    bridge = f"br{mark}"
    hosts: dict[str, Host] = {}
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            namespace, link, inner = f"aa{mark}-{name}", f"l{mark}-{number}", f"i{mark}-{number}"
            address = f"{subnet}.{number + 2}"
            _ip("netns", "add", namespace)
            hosts[name] = Host(namespace, link, address)
            _ip("link", "add", link, "type", "veth", "peer", "name", inner, "netns", namespace)
            _ip("link", "set", link, "master", bridge, "up")
            for command in (
                ("link", "set", "lo", "up"),
                ("address", "add", f"{address}/24", "dev", inner),
                ("link", "set", inner, "up"),
                ("route", "add", "default", "via", f"{subnet}.1"),
            ):
                _ip("-n", namespace, *command)
        yield hosts
    finally:
        with ExitStack() as removing:  # each is removed, even if another cannot be removed
            removing.callback(subprocess.run, ["ip", "link", "delete", bridge], timeout=30, check=False)
            for host in hosts.values():
                removing.callback(_ip, "netns", "delete", host.namespace)  # this also deletes its links
                removing.callback(host.kill_processes)


def write_placing_program(path: Path, hosts: Sequence[Host]) -> Path:
    """Write a program that runs its arguments on the first of the hosts that is not marked as lost."""
    lines = "\n".join(
        f'[ -e "{mark_of(path, host)}" ] || exec ip netns exec {host.namespace} "$@"' for host in hosts
    )
    path.write_text(f"#!/bin/sh\n{lines}\necho no host is left >&2\nexit 1\n")
    path.chmod(0o755)
    return path


def mark_of(program: Path, host: Host) -> Path:
    """Return the file whose existence marks a host as lost for the program of `write_placing_program`."""
    return program.with_name(f"{host.namespace}.lost")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)
