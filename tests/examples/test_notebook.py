"""The example notebook runs from its first cell to its last."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
import pyarrow.parquet
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "train_in_a_notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    panel, run = cells[2].outputs  # one panel, which is updated until the end
    assert "held-out reward after" in panel["data"]["text/html"] and "finished, step 8" in _plain(run)
    state, before, after = cells[3].outputs[0]["text"].split()
    assert state == "finished" and float(before) < 0.5 < float(after)
    assert pyarrow.parquet.read_table(tmp_path / "episodes.parquet").num_rows >= 16
    (messages,) = cells[4].outputs
    called = ast.literal_eval(_plain(messages))[2]["tool_calls"][0]
    assert called["type"] == "function" and called["function"]["name"] == "search"


def _plain(output: dict[str, Any]) -> str:
    return str(output["data"]["text/plain"])


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
