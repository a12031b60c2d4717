"""A port for a server that starts later, or starts again."""

from __future__ import annotations

import socket
from random import SystemRandom


def free_port() -> int:
    """One that nobody listens on, below those that a system gives to whoever asks for any."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
        return port
