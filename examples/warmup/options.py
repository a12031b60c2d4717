"""The command-line options that the scripts which make a model have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def option_parser(description: str, folder: Path) -> argparse.ArgumentParser:
    """Return a parser with `--out` (by default `model` in `folder`), `--seed`, `--threads` and `--stages`.

    A script adds an option for the batches of each of its stages.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=folder / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--stages", type=Path, help="keep the weights after each stage but the last here, and go on from them"
    )
    return parser
