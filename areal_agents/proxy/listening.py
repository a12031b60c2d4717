"""Opens the proxy's listening socket, refuses unsafe addresses, and turns SIGTERM into a clean exit."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Iterator
from typing import NoReturn

from areal_agents.errors import ConfigError
from areal_agents.proxy.config import ProxyConfig

BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ConfigError if the port is taken or the host is not local."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def refuse_open_access(config: ProxyConfig) -> None:
    """Raise ConfigError if other machines could reach a proxy that has no admin key."""
    if config.admin_key is None and not _is_loopback(config.host):
        raise ConfigError(
            f"{config.host} can be reached from other machines: set an admin key (--admin-key), or listen on "
            "127.0.0.1"
        )


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(0), so that context managers are closed before the process exits."""
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
