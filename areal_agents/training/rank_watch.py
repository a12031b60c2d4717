"""Notices when a rank of the trainer ends, wherever the others are, and ends them too.

Each rank holds a connection to the first rank. A process that dies closes it, and one whose machine is gone
stops answering the kernel's keep-alive messages. Without this, a rank that waits for rollouts, or in a
collective on a GPU, would wait for the time limit of that collective. All ranks log which rank ended, and on
which node.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
from types import TracebackType
from typing import Any

import torch.distributed as dist

from areal_agents.errors import TrainingError
from areal_agents.training.rendezvous import Member, name_of

logger = logging.getLogger(__name__)

END_S = 15.0  # from the loss of a rank until a process that does not end by itself exits
_CONNECT_S, _READ_S = 30.0, 5.0
# With these, a machine that does not answer is noticed after 60 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class RankWatch:
    """Watches the other ranks within a with-block. Every rank enters and leaves it.

    A rank that leaves the block with an error, or ends without leaving it, is lost; every other rank then has
    to leave the block too, and its process exits if it has not done so after `END_S`. The first rank enters
    the block when all others are connected; one that ends before it connects is lost as well.

    Attributes:
        lost: a message about the rank that ended first, once one has.
    """

    def __init__(self, member: Member, store: dist.Store) -> None:
        self._member, self._store = member, store
        self._missing = set(range(1, member.count))  # not connected yet; used by the first rank
        self._is_complete = threading.Event()
        if not self._missing:
            self._is_complete.set()
        self._has_news, self._left = threading.Event(), threading.Event()
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._secret = ""
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self.lost: str | None = None

    def __enter__(self) -> RankWatch:
        self._selector.register(self._woken, selectors.EVENT_READ)
        if self._member.rank == 0:
            listener = _listen(self._member.address)
            self._secret = secrets.token_hex(16)
            port = listener.getsockname()[1]
            self._store.set("watch", json.dumps([self._member.address, port, self._secret]))
            self._selector.register(listener, selectors.EVENT_READ)
        else:
            address, port, secret = json.loads(self._store.get("watch"))
            connection = socket.create_connection((address, port), timeout=_CONNECT_S)
            self._add(connection, name=f"rank 0 on node 0 ({address})")
            _send(connection, {"secret": secret, "rank": self._member.rank, "name": self._member.name})
        self._thread.start()
        if self._member.rank == 0:
            self._wait_for_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._wake.close()
        self._thread.join(_READ_S)
        farewell = {"end": "" if error is None else f"{type(error).__name__}: {error}"}
        for connection in [*self._peers]:
            _send(connection, farewell)
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def news(self, timeout_s: float) -> str | None:
        """Return which rank was lost; wait for that news for at most `timeout_s`."""
        self._has_news.wait(timeout_s)
        return self.lost

    def _wait_for_all(self) -> None:
        """Return once every other rank is connected. Raise TrainingError if one is lost before."""
        if not self._is_complete.wait(_CONNECT_S):
            who = "; ".join(name_of(self._store, rank) for rank in sorted([*self._missing]))
            self._lose(f"{who} is lost: it registered, and then ended or did not reach the first rank")
        if self.lost is not None:
            error = TrainingError(f"{self.lost}. The run can be resumed from its last checkpoint")
            self.__exit__(TrainingError, error, None)
            raise error

    def _watch(self) -> None:
        while not self._left.is_set():
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if (connection := key.fileobj) in self._peers:
                    assert isinstance(connection, socket.socket)
                    self._read(connection)
                else:
                    self._accept(key.fileobj)

    def _accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):  # the other end has closed the connection already
            self._add(listener.accept()[0])

    def _add(self, connection: socket.socket, name: str = "") -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # macOS names one of them otherwise
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.settimeout(_READ_S)
        self._peers[connection] = _Peer(name)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read a peer's messages, or notice that its process has ended."""
        peer = self._peers[connection]
        try:
            data = connection.recv(65536)
            why = "its process ended"
        except OSError as error:
            data, why = b"", f"its machine does not answer ({error})"
        peer.unread += data
        *lines, peer.unread = peer.unread.split(b"\n")
        for line in lines:
            if not self._heed(peer, line):
                data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            del self._peers[connection]
            if peer.name and not peer.has_left:
                self._lose(f"{peer.name} is lost: {why}")

    def _heed(self, peer: _Peer, line: bytes) -> bool:
        """Take note of a message; return whether to keep the connection."""
        if not peer.name and self._secret.encode() not in line:  # a stranger, such as a port scanner
            return False
        said: dict[str, Any] = json.loads(line)
        if not peer.name:
            peer.name = said["name"]
            self._missing.discard(said["rank"])
            if not self._missing:
                self._is_complete.set()
        elif "lost" in said:
            self._lose(said["lost"])
        elif said.get("end"):
            peer.has_left = True
            self._lose(f"{peer.name} failed: {said['end']}")
        else:
            peer.has_left = True
        return True

    def _lose(self, message: str) -> None:
        """Record the loss of a rank, tell the other ranks, and see that this process ends."""
        if self.lost is not None:
            return
        self.lost = message
        self._is_complete.set()  # there is no use in waiting for the others
        logger.error("%s; the run ends, and can be resumed from its last checkpoint", message)
        self._has_news.set()
        for connection in [*self._peers]:
            _send(connection, {"lost": message})
        threading.Thread(target=self._end, name="rank-watch-end", daemon=True).start()

    def _end(self) -> None:
        if not self._left.wait(END_S):
            logger.error("this process waits for a rank that is lost, and exits: %s", self.lost)
            os._exit(1)


class _Peer:
    """The other end of a connection: its name, empty until it is known, and bytes that are not a line yet."""

    def __init__(self, name: str) -> None:
        self.name, self.unread, self.has_left = name, b"", False


def _listen(address: str) -> socket.socket:
    """Listen where the other ranks look for the first one: on loopback only if they are on this machine."""
    family, *_, (host, *_) = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    if host in ("127.0.0.1", "::1"):
        return socket.create_server((host, 0), family=family)
    return socket.create_server(("::" if family == socket.AF_INET6 else "", 0), family=family)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the connection is closed; reading from it reports that
        connection.sendall(json.dumps(message).encode() + b"\n")
