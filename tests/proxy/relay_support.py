"""An HTTP relay, between a client and a proxy, that drops responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit


@dataclass
class Relay:
    """Forwards requests to `upstream`, and closes the connection instead of forwarding the first responses.

    Attributes:
        upstream: URL of the proxy; `on_cut` may change it.
        cuts: how many of the next responses are dropped, each after it was read completely.
        on_cut: called for each dropped response, before the connection to the client is closed.
        later: URL of the requests after a dropped response; "" for `upstream`.
        lost: the bodies of the dropped responses.
        retry_counts: the `x-stainless-retry-count` of every request, or "" if it had none.
    """

    upstream: str
    cuts: int = 1
    on_cut: Callable[[], None] = lambda: None
    later: str = ""
    url: str = ""
    lost: list[bytes] = field(default_factory=list)
    retry_counts: list[str] = field(default_factory=list)


@contextmanager
def relay_to(upstream: str, *, cuts: int = 1, on_cut: Callable[[], None] = lambda: None) -> Iterator[Relay]:
    """Run a relay in its own threads."""
    relay = Relay(upstream, cuts, on_cut)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            relay.retry_counts.append(self.headers.get("x-stainless-retry-count", ""))
            body = self.rfile.read(int(self.headers["content-length"]))
            connection = HTTPConnection(urlsplit(relay.upstream).netloc, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            try:
                connection.request("POST", self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            self.close_connection = True
            if relay.cuts:
                relay.cuts -= 1
                relay.lost.append(content)
                relay.on_cut()
                relay.upstream = relay.later or relay.upstream
                return
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        relay.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown()
            thread.join()
