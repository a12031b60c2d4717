"""An S3-compatible server for tests: that of moto, on a port of this machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from areal_agents.inference.ports import reserved_ports

_START_S = 120.0


class S3Server:
    """A server with one bucket, `weights`, which runs within a with-block.

    Args:
        refuses: whether the server refuses every access key.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self._held = ExitStack()
        (self._port,) = self._held.enter_context(reserved_ports(1))
        self._log = tempfile.NamedTemporaryFile(prefix="moto-", suffix=".log")  # noqa: SIM115
        self._held.enter_context(self._log)

    @staticmethod
    def missing() -> str | None:
        """Return what is missing for a server and a client; None if nothing is."""
        lacking = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
        return f"{' and '.join(lacking)} not installed: make test-cluster" if lacking else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process reaches the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> S3Server:
        refusing = {"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if self._refuses else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)],
            stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **refusing},
        )  # fmt: skip
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _begin(self) -> None:
        """Wait until the server answers, and create the bucket."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(Path(self._log.name).read_text()) from None
                time.sleep(0.1)
        import boto3

        client = boto3.client(
            "s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], region_name="us-east-1",
            aws_access_key_id="test-key", aws_secret_access_key="test-secret",
        )  # fmt: skip
        client.create_bucket(Bucket="weights")  # the first action needs no permission
        client.close()

    def _end(self) -> None:
        with self._held:
            self._process.kill()
            self._process.wait(60)
