"""Starts a vLLM server. Run by the Python that has vLLM; imports nothing of this package.

    VLLM_PYTHON areal_agents/inference/vllm/environment/serve.py --model DIR --port 30000

Its arguments are vLLM's own. It adds those without which this package cannot use a server: the endpoints that
take and return token ids, those of updates of weights (vLLM's development mode), logprobs of the distribution
that tokens are sampled from, the workers' methods of `weight_updates`, and, if the variable
AREAL_AGENTS_ENGINE_KEY has a key, the check of `key_guard`.

If the first argument is --end-with-stdin, the server ends, with every process that it spawned, when standard
input closes, which it does when its parent process dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

END_WITH_STDIN = "--end-with-stdin"
NEEDED = (
    "--enable-scale-out",
    "--logprobs-mode=processed_logprobs",
    "--max-logprobs=-1",
    "--worker-extension-cls=weight_updates.WeightUpdates",
)
KEY_VARIABLE = "AREAL_AGENTS_ENGINE_KEY"
WITH_KEY = ("--middleware=key_guard.KeyGuard",)


def main() -> None:
    """Serve until SIGTERM."""
    arguments = sys.argv[1:]
    if arguments[:1] == [END_WITH_STDIN]:
        arguments = arguments[1:]
        _end_with_starter()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's processes import the worker extension and the middleware by their names.
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    guards = WITH_KEY if os.environ.get(KEY_VARIABLE) else ()
    sys.argv = [sys.argv[0], *NEEDED, *guards, *arguments]
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _end_with_starter() -> None:
    """End all processes of the server once standard input closes; they are in this process's group."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="starter-watch", daemon=True).start()


if __name__ == "__main__":
    main()
