"""Starts an SGLang server. Run by the Python that has SGLang; imports nothing of this package.

    SGLANG_PYTHON areal_agents/inference/sglang/environment/serve.py --model-path DIR --port 30000

Its arguments are SGLang's own. The server ends, with every process that it spawned, when standard input
closes, which it does when its parent process dies.

If the variable AREAL_AGENTS_ENGINE_KEY has a key, SGLang refuses requests without it, except those for health
and metrics. The key is on no command line, which every user of the machine can read, and SGLang's log, which
has all settings of the server, shows asterisks in its place.

With a CPU build of torch some calls of SGLang fail although a CPU server does not need them: the schemas of
torchvision's compiled operators; `sgl_kernel`, which has no CPU wheel; synchronisation with a GPU; and pinned
memory. This file replaces them at run time and changes no installed file. The processes that SGLang spawns
import this file, and so get the replacements as well.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch


class _Kernels(types.ModuleType):
    """A module whose functions all raise NotImplementedError when they are called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_args: Any, **_options: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} needs a GPU build of sgl_kernel")

        return absent


def _write_slots(requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int) -> None:
    """Record the cache slots of each request's new tokens; the only kernel that a CPU server calls."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[request, start:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return made


class _NoRuntime:
    """A stand-in for the CUDA runtime, in which every call succeeds and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_arguments: 0


def _unpinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor


def _declare_vision_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _stand_in() -> torch.library.Library:
    """Install the replacements for a CPU build; the operators stay declared while the returned object
    exists."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    kernels = _Kernels("sgl_kernel")
    kernels.assign_req_to_token_pool_cpu = _write_slots  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = kernels
    sys.modules["sgl_kernel.mamba"] = _Kernels("sgl_kernel.mamba")
    torch.cuda.synchronize = lambda device=None: None  # nothing to wait for on a CPU
    for make in ("tensor", "empty", "zeros"):
        setattr(torch, make, _without_pinning(getattr(torch, make)))
    torch.cuda.cudart = lambda: _NoRuntime()
    torch.Tensor.pin_memory = _unpinned  # type: ignore[method-assign, assignment]
    return _declare_vision_operators()


def _end_with_starter(kill_process_tree: Callable[..., None]) -> None:
    """End all processes of the server once standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        kill_process_tree(os.getpid(), include_parent=True)

    threading.Thread(target=watch, name="starter-watch", daemon=True).start()


def _without_key(make: Callable[..., logging.LogRecord], key: str) -> Callable[..., logging.LogRecord]:
    """Return a factory of log records that replaces the key in their messages and tracebacks."""

    def made(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        try:
            message = record.getMessage()
        except Exception:  # its arguments do not fit its format; the handler reports that
            return record
        if key in message:
            record.msg, record.args = message.replace(key, "***"), ()
        if record.exc_info and key in (trace := "".join(traceback.format_exception(*record.exc_info))):
            record.exc_text = trace.rstrip("\n").replace(
                key, "***"
            )  # formatters write it instead of their own
        return record

    return made


def main() -> None:
    """Serve until SIGTERM, then end all child processes."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    _end_with_starter(kill_process_tree)
    arguments = [*sys.argv[1:], *([f"--api-key={KEY}"] if KEY else [])]
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


KEY = os.environ.get("AREAL_AGENTS_ENGINE_KEY", "")
if KEY:
    logging.setLogRecordFactory(_without_key(logging.getLogRecordFactory(), KEY))
VISION = None if torch.version.cuda or torch.version.hip else _stand_in()

if __name__ == "__main__":
    main()
