"""`areal-agents why` on a run of two steps, with groups of every possible outcome."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_inspection import call
from typer.testing import CliRunner

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.cli import app
from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inspection.why import trained_turns, why
from areal_agents.store import NewEpisode, Store
from areal_agents.training import run as trainer
from areal_agents.training.config import TrainerConfig
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.records.files import step_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from training_support import VOCAB, build_model, record_groups  # noqa: E402

SETTINGS = {"credit": "reward_to_go", "turn_discount": 0.5, "minibatches": 2, "exclude_labels": ["judge"]}


@dataclass(frozen=True)
class Trained:
    """The folder of a run that has ended, and its initial model."""

    run: Path
    model: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run with these groups, oldest first. Step 1 takes "a", which the engine sampled, and "rewards", which
    has rewards of turns. Step 2 takes "equal", drops "old", which exceeds the bound on staleness, and takes
    "mixed", with turns that are not trained and a token that is too old. No step takes "queued". Other
    episodes failed, are held out, or are still running."""
    run = tmp_path_factory.mktemp("why") / "run"
    model = build_model(tmp_path_factory.mktemp("model") / "model")
    with (
        running_engine(model, kernel="torch", threads=1, slots=16, max_context=256) as url,
        Store.open(run / "store.db") as store,
    ):
        record_groups(store, url, ["a"], size=2)
        put(store, "rewards", [[turn(), turn()], [turn()]], rewards=[{0: 0.25, 1: 1.0}, {0: 0.5}])
        put(store, "equal", [[turn(1)], [turn(1)]], rewards=[{0: 1.0}, {0: 1.0}])
        put(store, "old", [[turn()], [turn()]], rewards=[{0: 1.0}, {0: 0.0}])
        mixed = [turn(1), turn(1, constrained=True), turn(1, label="judge"), turn(1, discarded="it left")]
        mixed[0] = replace(mixed[0], completion=completion([0, 1, 1, 1]))
        put(store, "mixed", [mixed, [turn(1)]], rewards=[{0: 1.0}, {0: 0.0}])
        put(store, "queued", [[turn(1)], [turn(1)]], rewards=[{0: 1.0}, {0: 0.0}])
        put_alone(store, "failed", "train", error="no such tool")
        put_alone(store, "held-out", "eval")
        put_alone(store, "running", "train")
        store.open_episode(new("pending", "unfinished", 0, 2)).result()
        store.seal("pending", "finished").result()
        trainer.run(
            TrainerConfig(
                steps=2,
                lr=1e-2,
                threads=1,
                trackers=(),
                publish=PublishConfig(verify="off"),
                batch_timeout_s=30,
                keep_weights=3,
            ),
            AlgorithmConfig.model_validate(SETTINGS),
            store=store,
            engines=[SGLangEngine(url, control_timeout_s=30)],
            model_path=model,
            run_dir=run,
            groups=2,
            max_staleness=0,
            stop=threading.Event(),
        )
    config = {
        "model": str(model), "trainer": {"steps": 2}, "algorithm": SETTINGS, "rollout": {"max_staleness": 0}
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    yield Trained(run, model)


def completion(versions: list[int]) -> Completion:
    count = len(versions)
    ids = np.random.default_rng(count).integers(2, VOCAB, count)
    return Completion(
        as_token_ids(ids), np.full(count, -4.5, np.float32), np.array(versions, np.int32), "stop"
    )


def turn(version: int = 0, **fields: Any) -> Turn:
    """A root turn of four sampled tokens. `put` gives it an id."""
    return Turn(
        id="?",
        parent=None,
        new_messages=(Message("user", "?"),),
        new_prompt_ids=as_token_ids([5, 6, 7]),
        completion=completion([version] * 4),
        reply=Message("assistant", "!"),
        sampling=SamplingParams(max_new_tokens=4),
        **fields,
    )


def new(episode: str, group: str | None, index: int, size: int, split: Any = "train") -> NewEpisode:
    task = Task(group or episode, {})
    if group is None:
        return NewEpisode(id=episode, key_hash=episode, task=task, split=split)
    return NewEpisode(
        id=episode, key_hash=episode, task=task, group_id=group, group_size=size, index=index, split=split
    )


def put(store: Store, group: str, episodes: list[list[Turn]], *, rewards: list[dict[int, float]]) -> None:
    """Store a complete group, whose episodes have these rewards of turns, by the indices of the turns."""
    for index, (turns, of_turns) in enumerate(zip(episodes, rewards, strict=True)):
        episode = f"{group}-{index}"
        store.open_episode(new(episode, group, index, len(episodes))).result()
        for place, one in enumerate(turns):
            store.add_turn(episode, replace(one, id=f"{episode}-{place}", recorded_before=place)).result()
        given = [Reward("turn", f"{episode}-{place}", "step", value) for place, value in of_turns.items()]
        store.set_rewards(episode, given).result()
        store.seal(episode, "finished").result()


def put_alone(store: Store, episode: str, split: Any, *, error: str | None = None) -> None:
    """Store an episode without a group, which failed, is still running, or is held out."""
    store.open_episode(new(episode, None, 0, 1, split)).result()
    if error is not None:
        store.seal(episode, "failed", error=error).result()


def test_the_path_of_a_turn_shows_its_return_baseline_and_advantage(trained: Trained) -> None:
    """The returns by hand: the second turn of the first episode has 1.0; the first has 0.25 + 0.5 · 1.0."""
    found = why(trained.run, "rewards-0", 1)
    assert found["verdict"] == "trained in step 1"
    (step,) = found["steps"]
    assert (step["step"], step["version"], step["use"], step["fault"]) == (1, 0, 0, None)
    terms = {term["name"]: term for term in step["path"]}
    scores = np.array([1.25, 0.5])
    assert terms["score"]["value"] == 1.25
    assert terms["group"]["scores"] == {"rewards-0": 1.25, "rewards-1": 0.5}
    assert terms["group"]["group"]["std"] == pytest.approx(scores.std(ddof=1))
    assert (terms["return"]["value"], terms["baseline"]["value"]) == (0.75, 0.625)
    assert terms["advantage"]["value"] == pytest.approx(0.125 / (scores.std(ddof=1) + 1e-5))
    assert terms["advantage"]["agrees"] is True
    second = {term["name"]: term for term in why(trained.run, "rewards-0", "rewards-0-1")["steps"][0]["path"]}
    # The other episode has ended by then, which counts as 0.
    assert (second["return"]["value"], second["baseline"]["value"]) == (1.0, 0.5)
    assert all(row["advantage"]["agrees"] for row in step["turns"])


def test_the_terms_of_a_token_are_those_that_the_step_recorded(trained: Trained) -> None:
    found = why(trained.run, "a-1", 2, 3)
    (record,) = trained_turns(trained.run, ["a-1-1"])["a-1-1"]
    terms = {term["name"]: term["value"] for term in found["steps"][0]["path"]}
    values = {name: float(array[3]) for name, array in record.values.items()}
    assert terms["proximal logprob"] == values["proximal"] and terms["current logprob"] == values["current"]
    assert terms["behavior logprob"] == found["turn"]["logprobs"][3]
    weight = min(np.exp(values["proximal"] - found["turn"]["logprobs"][3]), 5)
    assert terms["correction"] == values["weight"] == pytest.approx(weight, rel=1e-4)
    assert terms["ratio"] == pytest.approx(np.exp(values["current"] - values["proximal"]), rel=1e-5)
    assert terms["loss share"] == values["loss"]
    slope = values["loss_weight"] * values["weight"] * values["ratio"] * values["advantage"]
    assert terms["gradient"] == pytest.approx(slope if terms["clip"] == "no" else 0, rel=1e-5)
    assert json.loads(call("why", "a-1", "2", "3", trained.run, "--json")) == found


def test_tokens_of_a_turn_that_are_too_old_are_shown_as_stale(trained: Trained) -> None:
    found = why(trained.run, "mixed-0", 1)
    (step,) = found["steps"]
    assert (step["step"], step["version"]) == (2, 1)
    assert step["tokens"]["states"] == ["stale", "trained", "trained", "trained"]
    assert step["tokens"]["advantage"][0] is None and step["turns"][0]["states"] == {"stale": 1, "trained": 3}
    assert [row["untrained"] for row in step["turns"]] == [None, "constrained", "label", "discarded"]
    shown = call("why", "mixed-0", "1", "0", trained.run)
    assert "it is older than rollout.max_staleness allows" in shown


@pytest.mark.parametrize(
    ("episode", "says"),
    [
        ("equal-0", "all scores or advantages of its group are equal"),
        ("old-0", "dropped in step 2: more than 0 versions old at version 1"),
        ("queued-1", "its group is complete and waits for the trainer"),
        ("pending", "its group is not complete: 0 of 2 episodes"),
        ("failed", "it failed (no such tool)"),
        ("held-out", "a held-out evaluation"),
        ("running", "it is still running"),
    ],
)
def test_the_verdict_on_an_episode_that_was_not_trained_gives_the_reason(
    episode: str, says: str, trained: Trained
) -> None:
    assert says in why(trained.run, episode)["verdict"]
    assert says in call("why", episode, trained.run)


def test_logprobs_are_computed_under_each_version_that_remains(trained: Trained) -> None:
    """Under the version that sampled the turn, they equal the recorded behavior and proximal logprobs."""
    result = CliRunner().invoke(app, ["why", "a-0", "1", str(trained.run), "--versions", "--json"])
    assert "1/3: initial model" in result.stderr
    found = json.loads(result.stdout)
    by_version = {row["version"]: row["logprobs"] for row in found["versions"]}
    assert list(by_version) == [0, 1, 2]
    assert by_version[0] == pytest.approx(found["turn"]["logprobs"], abs=1e-3)
    assert by_version[0] == pytest.approx(found["steps"][0]["tokens"]["proximal"], abs=1e-4)
    assert by_version[1] != pytest.approx(by_version[0], abs=1e-3)


def test_a_difference_from_the_recorded_advantage_is_shown(trained: Trained, tmp_path: Path) -> None:
    """The settings are changed after the run."""
    run = copy_of(trained.run, tmp_path)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["algorithm"]["turn_discount"] = 1.0
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "DIFFERS" in call("why", "rewards-0", run)
    assert why(run, "rewards-0")["steps"][0]["turns"][0]["advantage"]["agrees"] is False


def test_without_records_of_steps_the_data_of_the_store_is_shown(trained: Trained, tmp_path: Path) -> None:
    run = copy_of(trained.run, tmp_path)
    for step in (1, 2):
        (step_folder(run, step) / "rank-0.parquet").unlink()
    shown = call("why", "rewards-0", "1", run)
    assert "trained in step 1" in shown and "left no record of its tokens" in shown
    (step,) = why(run, "rewards-0", 1)["steps"]
    assert step["version"] == 0 and step["turns"][0]["advantage"]["recomputed"] == pytest.approx(
        0.2357, rel=1e-3
    )


def test_episodes_turns_and_tokens_that_do_not_exist_are_refused(trained: Trained, tmp_path: Path) -> None:
    for arguments, says in (
        (["a-0", "9"], "has no turn 9"),
        (["a-0", "1", "99"], "expected an index from 0 to 7"),
        (["nobody"], f"no episode nobody in {trained.run.resolve()}; name another run as the last argument"),
        (["nobody", "1", "24"], "`areal-agents why nobody 1 24 RUN`"),
        (["a-0", "1", "x"], "expected the index of a token"),
    ):
        result = CliRunner().invoke(app, ["why", *arguments, str(trained.run)])
        assert result.exit_code != 0 and says in str(result.exception), result.output


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))
