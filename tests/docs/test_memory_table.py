"""The memory table of docs/gpus.md agrees with the current estimate."""

from __future__ import annotations

import subprocess
import sys

import pytest
from docs_support import ROOT

MODELS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")


@pytest.mark.slow
def test_the_table_of_memory_is_current() -> None:
    script = ROOT / "tools" / "memory_table.py"
    done = subprocess.run(
        [sys.executable, str(script), *MODELS], capture_output=True, text=True, timeout=1800
    )
    assert not done.returncode, done.stderr
    page = (ROOT / "docs" / "gpus.md").read_text().splitlines()
    header, line, *rows = done.stdout.splitlines()
    assert len(rows) == len(MODELS)
    start = page.index(header)
    table = page[start : page.index("", start)]
    assert table[1] == line and len(table) == 2 + 7
    assert not set(rows) - set(table), "write the output of tools/memory_table.py into the page"
