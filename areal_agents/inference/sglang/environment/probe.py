"""Prints the version of SGLang and the GPUs of an environment as a JSON object. Run by that environment's
Python.

{"sglang": version or null, "gpus": the number that torch sees, "error": why it cannot be used, or null}
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any


def main() -> None:
    """Print the findings."""
    found: dict[str, Any] = {"sglang": None, "gpus": 0, "error": None}
    try:
        found["sglang"] = importlib.metadata.version("sglang")
        import torch

        found["gpus"] = torch.cuda.device_count()
    except importlib.metadata.PackageNotFoundError:
        found["error"] = "sglang is not installed there"
    except ImportError as error:
        found["error"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
