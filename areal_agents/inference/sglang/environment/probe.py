"""Prints the version of SGLang and the GPUs of an environment as a JSON object. Run by that environment's
Python; its arguments are names of settings of SGLang's server, such as enable_fp32_lm_head.

{"sglang": version or null, "gpus": the number that torch sees, "nccl": version of the NCCL that torch uses or
null, "settings": those of the arguments that this SGLang knows, "error": why it cannot be used, or null}
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Print the findings."""
    found: dict[str, Any] = {"sglang": None, "gpus": 0, "nccl": None, "settings": [], "error": None}
    try:
        found["sglang"] = importlib.metadata.version("sglang")
        import torch

        found["gpus"] = torch.cuda.device_count()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["settings"] = _known(sys.argv[1:])
    except importlib.metadata.PackageNotFoundError:
        found["error"] = "sglang is not installed there"
    except ImportError as error:
        found["error"] = str(error)
    print(json.dumps(found))


def _known(names: list[str]) -> list[str]:
    """Return those of `names` that are settings of the server.

    They are looked for in the source text: SGLang takes half a minute to import, and needs its GPU kernels.
    """
    words: set[str] = set()
    for file in _definitions() if names else ():
        words |= set(re.findall(r"\w+", file.read_text(errors="replace")))
    return [name for name in names if name in words]


def _definitions() -> Iterator[Path]:
    """Yield the files that define the settings of SGLang's server."""
    spec = importlib.util.find_spec("sglang")
    for package in (spec and spec.submodule_search_locations) or ():
        yield from Path(package, "srt").glob("server_args*.py")
        yield from Path(package, "srt", "arg_groups").rglob("*.py")


if __name__ == "__main__":
    main()
