"""A weights folder that is half written is refused with the reason, and the old weights stay in use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import EngineError
from areal_agents.inference import SGLangEngine


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_anything(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [cut_short, without_weights, without_anything])
async def test_a_half_written_folder_is_refused_and_the_old_weights_stay_in_use(
    damage: Callable[[Path], None], engine_url: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "v1"
    shutil.copytree(model_folder, folder)
    damage(folder)
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    async with SGLangEngine(engine_url) as engine:
        before = await engine.generate("before", np.array([2, 3, 4], np.int32), greedy)
        with pytest.raises(EngineError, match="v1"):
            await engine.update_weights_from_disk(str(folder), 1)
        after = await engine.generate("after", np.array([2, 3, 4], np.int32), greedy)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.versions.tolist() == before.versions.tolist() == [0] * 4
