"""The logprobs of a recorded turn under each version of a run whose weights remain."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.inspection.sources import config_of_run, store_of_run
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Weights that remain of a run.

    Attributes:
        path: a model folder, a folder with an adapter, or a checkpoint, as `kind` says.
        version: the version; None for a checkpoint of a step that no version in the store has.
    """

    name: str
    path: Path
    kind: str
    step: int | None
    version: int | None


def kept_weights(run: Path, store: Store) -> list[KeptWeights]:
    """Return the weights that remain of a run, the oldest first: its initial model, published folders,
    checkpoints and final model. A step is named once, by the first of these that has it."""
    from areal_agents.training.checkpoint.files import complete_steps

    folder, tree = RunFolder(run), config_of_run(RunFolder(run))
    published = store.published_versions()
    by_step = {row.step: row.version for row in published}  # the last one of a step that was taken again
    found: dict[int, KeptWeights] = {}
    model = Path(str(tree.get("model") or ""))
    if (model / "config.json").is_file():
        found[0] = KeptWeights("initial model", model, "model", 0, by_step.get(0, 0))
    for row in reversed(published):  # of a step that was taken again, the weights of the last time
        path = Path(row.path)
        if row.step in found or not row.path or row.folder_pending:
            continue
        for kind, file in (("adapter", "adapter_config.json"), ("model", "config.json")):
            if (path / file).is_file():
                found[row.step] = KeptWeights(f"version {row.version}", path, kind, row.step, row.version)
                break
    for step in complete_steps(folder.root / "checkpoints"):
        path = folder.root / "checkpoints" / f"step-{step}"
        if step not in found:
            found[step] = KeptWeights(
                f"checkpoint of step {step}", path, "checkpoint", step, by_step.get(step)
            )
    last = int(tree["trainer"]["steps"])
    if folder.final_model.is_dir() and last not in found:
        found[last] = KeptWeights("final model", folder.final_model, "model", last, by_step.get(last))
    return [found[step] for step in sorted(found)]


def logprobs_by_version(
    run: Path, episode_id: str, turn_id: str, *, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """Return for each of `kept_weights` the logprobs of a turn's sampled tokens, at the turn's temperature.

    One model at a time is loaded, on the GPU if there is one; `say` gets a line for each.

    Raises:
        ConfigError: no weights remain.
        TrainingError: weights cannot be loaded.
    """
    from areal_agents.training.records.rescoring import rescored

    with ExitStack() as opened:
        store = opened.enter_context(_store(run))
        episode = store.load_episode(episode_id)
        kept = kept_weights(run, store)
    if not kept:
        raise ConfigError(f"no weights of {run} remain (trainer.keep_weights, trainer.keep_checkpoints)")
    tree = config_of_run(RunFolder(run))
    base, dtype = Path(str(tree.get("model") or "")), tree["trainer"].get("dtype", "auto")
    rows = []
    for number, weights in enumerate(kept, start=1):
        say(f"{number}/{len(kept)}: {weights.name}")
        with _as_model(weights, base) as (model, adapter):
            logprobs = rescored(model, episode, turn_id, adapter=adapter, dtype=dtype)
        rows.append(
            {
                "name": weights.name, "step": weights.step, "version": weights.version,
                "path": str(weights.path), "logprobs": logprobs,
            }
        )  # fmt: skip
    return rows


def _store(run: Path) -> Store:
    """Open the store that has the episodes of a run."""
    tree = config_of_run(RunFolder(run))
    episodes = (tree.get("data") or {}).get("episodes")
    if not episodes:
        return store_of_run(RunFolder(run))
    from areal_agents.training.batches.recorded import recorded_store

    return Store.open(recorded_store(episodes))


@contextmanager
def _as_model(weights: KeptWeights, base: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield a model folder with the weights, and a folder with an adapter for it or None.

    The weights of a checkpoint are exported to a temporary folder.
    """
    if weights.kind == "adapter":
        yield base, weights.path
        return
    if weights.kind == "model":
        yield weights.path, None
        return
    from areal_agents.training.checkpoint.export import export

    with tempfile.TemporaryDirectory() as folder:
        export(weights.path, Path(folder) / "model")
        yield Path(folder) / "model", None
