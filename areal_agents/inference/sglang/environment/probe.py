"""Prints, as one JSON object, what an environment has for serving SGLang. Run by its own Python.

{"sglang": version or null, "gpus": those that its torch sees, "error": why it is not usable, or null}
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any


def main() -> None:
    """Look, and say what is there."""
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
