"""Starts the real SGLang server on a machine without a GPU; its arguments are SGLang's own.

    .venv-sglang/bin/python tools/sglang_cpu/serve.py --model-path DIR --device cpu --port 30000

Two imports of SGLang fail beside a CPU build of torch: torchvision's compiled operators, of which only the
schemas are asked for, and `sgl_kernel`, which has no CPU wheel. Both are given a stand-in here; no installed
file is changed. SGLang spawns processes that import this file again, and get the stand-ins that way.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def _declare_vision_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _Kernels(types.ModuleType):
    """A module whose functions exist and say, when they are called, that this machine does not have them."""

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
    """Note which cache slots the new tokens of each request got: the one kernel that a CPU server calls."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[request, start:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


VISION = _declare_vision_operators()  # the declaration lives as long as this object
KERNELS = _Kernels("sgl_kernel")
KERNELS.assign_req_to_token_pool_cpu = _write_slots  # type: ignore[attr-defined]
sys.modules["sgl_kernel"] = KERNELS
sys.modules["sgl_kernel.mamba"] = _Kernels("sgl_kernel.mamba")


def main() -> None:
    """Serve until SIGTERM; no process stays behind."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
