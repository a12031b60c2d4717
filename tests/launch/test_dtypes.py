"""Engine and trainer compute in the same dtype; otherwise the run is refused with the names of both keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import EXAMPLE

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.inference.sglang.server import GpuPlacement
from areal_agents.launch.dtypes import check_dtypes, with_trainer_dtype

SGLANG = ["engine.kind=sglang", "engine.python=/nowhere/python"]
CPU, GPU = (GpuPlacement(),), (GpuPlacement((0,)),)
DIFFER = r"engine\.dtype: .* is {}.*trainer\.dtype: .* is {}"


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ([], "float32"),  # the embedded engine on a CPU, whatever the device of the trainer
        (["trainer.device=cuda"], "float32"),
        (["engine.device=cuda"], "auto"),
        (["engine.dtype=bfloat16"], "bfloat16"),
        (["trainer.dtype=bfloat16"], "bfloat16"),
        (SGLANG, "auto"),
        ([*SGLANG, "engine.dtype=float32"], "float32"),
        (["engine.kind=sglang", "engine.urls=[http://gpu:1]", "engine.dtype=float32"], "auto"),
    ],
)
def test_the_trainer_uses_the_dtype_of_the_engines_that_the_run_starts(
    settings: list[str], dtype: str
) -> None:
    assert with_trainer_dtype(load_config(EXAMPLE, settings)).trainer.dtype == dtype


def test_different_dtypes_are_refused_unless_both_are_given() -> None:
    def check(placements: tuple[GpuPlacement, ...], *settings: str) -> None:
        check_dtypes(load_config(EXAMPLE, settings), placements)

    for placements in (CPU, GPU):
        check(placements, *SGLANG)
    check(CPU)
    check(GPU, "engine.device=cuda")
    check((), *SGLANG, "trainer.dtype=float32")
    with pytest.raises(ConfigError, match=DIFFER.format("bfloat16", "float32")):
        check(GPU, *SGLANG, "trainer.dtype=float32")
    with pytest.raises(ConfigError, match=DIFFER.format("bfloat16", "float32")):
        check(GPU, *SGLANG, "trainer.device=cpu")
    with pytest.raises(ConfigError, match=DIFFER.format("float32", "bfloat16")):
        check(CPU, "trainer.dtype=bfloat16")
    check(GPU, *SGLANG, "trainer.dtype=float32", "engine.dtype=bfloat16")  # both are given


def test_a_float16_model_that_would_be_served_and_trained_in_different_dtypes_is_refused(
    tmp_path: Path,
) -> None:
    config = load_config(EXAMPLE, SGLANG)
    text = (
        (Path(config.model) / "config.json").read_text().replace('"dtype": "float32"', '"dtype": "float16"')
    )
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=DIFFER.format("float16", "bfloat16")):
        check_dtypes(config.model_copy(update={"model": str(tmp_path)}), GPU)
