"""`python -m benchmarks.gpu PART DEVICE`: runs one part, and prints its outcome as JSON on the last line."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.parts import Device, Here, Skipped, measure
from benchmarks.gpu.scale import FULL, MINIATURE


def main(name: str, device: Device) -> None:
    """Run a part in this process; what fails ends it."""
    scale = FULL if device == "cuda" else MINIATURE
    with tempfile.TemporaryDirectory(prefix="areal-agents-gpu-") as scratch:
        try:
            outcome = {"status": "passed", "figures": measure(name, Here(device, scale, Path(scratch)))}
        except Skipped as reason:
            outcome = {"status": "skipped", "reason": str(reason)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], "cuda" if sys.argv[2] == "cuda" else "cpu")
