"""The wheels that are copied to a GPU machine without a network are those that it lacks."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "gpu_wheels.py"))
missing, read_list = TOOL["missing"], TOOL["read_list"]


def test_everything_but_torch_and_cuda_is_copied_to_a_bare_machine() -> None:
    wanted = missing({})
    assert {"pydantic", "pydantic-core", "numba", "starlette", "bm25s", "pytest-asyncio"} <= set(wanted)
    assert not {"torch", "triton", "areal-agents"} & set(wanted)
    assert not [name for name in wanted if name.startswith(("nvidia", "cuda"))]


def test_installed_packages_are_left_out_with_their_requirements_unless_too_old() -> None:
    bare = missing({})
    wanted = missing(read_list("Matplotlib==3.10.0\nnumba\npydantic==1.10.2\n"))
    assert not {"matplotlib", "kiwisolver", "cycler", "numba"} & set(wanted)
    assert wanted["pydantic"] == bare["pydantic"]  # version 1 is too old
    assert set(wanted) < set(bare)
