"""A server with the part of the Hugging Face Hub's protocol that a download of a model uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_with(models: Mapping[str, Path]) -> Iterator[str]:
    """Serve model folders under their ids, and "org/gated" as one that requires permission; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *values: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            if "org/gated" in path:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            for name, folder in models.items():
                if path.startswith(f"/api/models/{name}/tree/"):
                    tree = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file)}
                        for file in sorted(folder.iterdir())
                    ]
                    return self._send(200, json.dumps(tree).encode(), {}, with_body)
                if path.startswith(f"/api/models/{name}"):
                    files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                    info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}
                    return self._send(200, json.dumps(info).encode(), {}, with_body)
                file = folder / path.rpartition("/")[2]
                if path.startswith(f"/{name}/resolve/") and file.is_file():
                    data = file.read_bytes()
                    headers = {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT}
                    return self._send(200, data, headers, with_body)
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, name="hub")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
