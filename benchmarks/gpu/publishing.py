"""Publishing a whole model by ipc to an embedded engine in a process of its own, on the same device."""

from __future__ import annotations

from typing import Any

import torch

from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.store import Store
from areal_agents.training.distributed import ranks
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.publisher import Publisher
from benchmarks.gpu.parts import Here
from benchmarks.trainer.data import save_model

VERSIONS = 4
LONGEST_PUBLISH_S, LONGEST_PAUSE_S = 1.0, 0.3  # of 1.7B on a GPU


def publish(here: Here) -> dict[str, Any]:
    """Publish versions, compare the first and the last bit by bit, and time those between."""
    scratch, on_gpu = here.scratch, here.device == "cuda"
    folder = save_model(scratch / "model", here.scale.shape, bfloat16=True, device=here.device)
    config = PublishConfig(transport="ipc", verify="first", folder_every=VERSIONS)
    published = []
    with (
        running_engine(
            folder, device=here.device, dtype="bfloat16", kernel="torch", slots=4, max_context=512
        ) as url,
        ranks(here.device) as joined,
        Store.open(scratch / "store.db") as store,
    ):
        store.become_trainer()
        policy = load_policy(folder, joined, options=ModelOptions(dtype=torch.bfloat16))
        # A second publisher, because with `verify: first` each one compares only its first version.
        for versions in (range(VERSIONS), range(VERSIONS, VERSIONS + 1)):
            publisher = Publisher(
                config, policy, joined,
                store=store, engines=[SGLangEngine(url, update_timeout_s=120)], run_dir=scratch,
                model_path=folder, keep=2,
            )  # fmt: skip
            try:
                for version in versions:
                    _change(policy)
                    published.append(publisher.publish(version=version, step=version))
                publisher.finish()
            finally:
                publisher.close()
    timed = [one for one in published[1:VERSIONS] if one is not None]  # the first opens the buffers
    if any(one.repaired or one.left_out for one in timed):
        raise AssertionError("the engine did not take the weights by ipc, and loaded their folder instead")
    if not all(one is not None and one.agreement == 1.0 for one in (published[0], published[-1])):
        raise AssertionError("the engine was not compared, or holds other weights than were published")
    publish_s, pause_s = min(one.publish_s for one in timed), min(one.pause_s for one in timed)
    if on_gpu and (publish_s > LONGEST_PUBLISH_S or pause_s > LONGEST_PAUSE_S):
        raise AssertionError(
            f"a version took {publish_s:.2f} s with a pause of {pause_s:.2f} s, expected at most "
            f"{LONGEST_PUBLISH_S:g} s and {LONGEST_PAUSE_S:g} s"
        )
    return {
        "gib": round(timed[-1].nbytes / 2**30, 3),
        "publish_s": round(publish_s, 3),
        "pause_s": round(pause_s, 3),
        "compared_pause_s": round(max(one.pause_s for one in published if one is not None), 3),
    }


def _change(policy: Policy) -> None:
    """Change every weight, as an optimizer step does."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
