"""The real SGLang on a CPU for the length of a with-block, from the environment that `make sglang` makes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAUNCHER = Path(__file__).parent.parent / "tools" / "sglang_cpu" / "serve.py"
START_S, STOP_S, POLL_S = 240.0, 20.0, 0.5


@contextmanager
def running_sglang(python: str, model: Path, *options: str) -> Iterator[str]:
    """A server on `model` in float32; yields its URL. `options` are more of SGLang's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(python, str(LAUNCHER), "--model-path", str(model), "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--sleep-on-idle"),
        *("--max-total-tokens", "16384", "--skip-server-warmup", "--port", str(port), *options),
    ]
    # It compiles what it imports, and spawns processes that are ended as its group.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(url, process)
            yield url
        except AssertionError:
            log.seek(0)
            print(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            _end(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(url + "/health"):
        assert process.poll() is None, f"SGLang ended with status {process.returncode} before it served"
        assert time.monotonic() < deadline, f"SGLang did not serve within {START_S:g} s"
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):  # the whole group is gone, as it should be
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
