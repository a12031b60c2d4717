"""Opens the listening sockets of the package's servers, and lets a process have many connections."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket

from areal_agents.errors import ConfigError

BACKLOG = 4096  # connections that wait to be accepted


def listen(host: str, port: int, *, setting: str = "") -> socket.socket:
    """Return a listening socket; port 0 chooses a free one.

    Raises ConfigError, which names `setting` if given, if the port is taken or the host is not an address of
    this machine.
    """
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{setting}: " if setting else ""
        raise ConfigError(
            f"{where}cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free "
            "one"
        ) from error
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the base URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{address_of(host, port)}"


def address_of(host: str, port: int) -> str:
    """Return host:port as it stands in a URL, where an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of the socket that can listen on a host: IPv4 if it has such an address."""
    if ":" in host:
        return socket.AF_INET6
    if not is_name(host):
        return socket.AF_INET
    try:
        families = {found[0] for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:  # the name is not known here, which an attempt to listen will report
        return socket.AF_INET
    return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET


def is_name(host: str) -> bool:
    """Whether a host is a name, and not an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != ""
    return False


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches a host. OSError if there is no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine, on which a socket of it could listen."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # the name is not known here
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return True
    return False


def allow_many_connections() -> None:
    """Raise this process's limit on open files, often 1,024, to the most that it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses to raise it to "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
