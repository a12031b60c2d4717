"""Versions reach an engine through an object storage and the store; the trainer calls no engine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from publish_support import assert_serves, disturb, sample
from storage_support import Site, until

from areal_agents.config import load_config
from areal_agents.errors import EngineUnavailable, TrainingError
from areal_agents.launch.run_folder import ClusterPlace, Endpoints, RunFolder
from areal_agents.launch.weight_fetcher import fetching_weights
from areal_agents.store import Store
from areal_agents.store.engine_weights import EngineWeights
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"


@pytest.fixture
def site(tmp_path: Path, store: Store, model_folder: Path) -> Site:
    return Site(tmp_path, store, model_folder)


def test_the_engine_serves_what_was_published(
    site: Site, policy: Policy, group: Ranks, engine_url: str
) -> None:
    out = site.publisher(policy, group)
    with site.fetcher(engine_url):
        for version in range(1, 4):
            if version < 3:
                disturb(policy, version)
            else:
                with torch.no_grad():  # few weights change, so the changes are smaller than the weights
                    next(iter(policy.parameters())).to_local().view(-1)[:5] += 0.01
            published = out.publish(version=version, step=version)
            assert published is not None and published.left_out == 0
            assert published.agreement == (1.0 if version == 1 else None)
            assert_serves(engine_url, policy, version)
    assert published.sent_bytes < published.nbytes / 10
    assert sorted(path.name for path in (site.trainer_folder / "weights").iterdir()) == ["v2", "v3"]
    assert sorted(path.name for path in site.engine_folder.glob("v?")) == ["v2", "v3"]
    # version 4 is stored whole, so the versions before it are not needed
    with site.fetcher(engine_url):
        out.publish(version=4, step=4)
        out.publish(version=5, step=5)
    assert site.stored_versions() == ["v4", "v5"]


def test_adapters_are_published_through_the_storage(
    tmp_path: Path, store: Store, model_folder: Path, group: Ranks, engine_url: str
) -> None:
    site = Site(tmp_path, store, model_folder, adapters=True)
    policy = load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(rank=3, alpha=5)))
    out = site.publisher(policy, group)
    with site.fetcher(engine_url):
        for version in range(1, 4):
            disturb(policy, version, scale=0.2)
            published = out.publish(version=version, step=version)
            assert published is not None and published.nbytes < published.sent_bytes < 2 * published.nbytes
            assert_serves(engine_url, policy, version, adapters=True)
    assert site.stored_versions() == ["v2", "v3"]
    assert store.latest_version().path == str(site.trainer_folder / "weights" / "v3")  # type: ignore[union-attr]


def test_a_damaged_version_is_not_served_and_is_read_again(
    site: Site, policy: Policy, group: Ranks, engine_url: str
) -> None:
    disturb(policy, 1)
    out = site.publisher(policy, group, engine_wait_s=0.0)
    with pytest.raises(EngineUnavailable, match="no engine has written to the store"):
        out.publish(version=1, step=1)
    file = site.stored(1) / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with site.fetcher(engine_url):
        problem = site.wait(lambda weights: weights.problem is not None).problem
        assert problem is not None and f"{file} is not what was published: its SHA-256" in problem
        assert set(sample(engine_url).versions.tolist()) == {0}
        file.write_bytes(good)
        assert site.wait(lambda weights: weights.version == 1).problem is None
        assert_serves(engine_url, policy, 1)


def test_an_engine_continues_if_its_store_cannot_be_opened_at_first(
    tmp_path: Path, engine_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    options = [f"run_dir={tmp_path}", "trainer.publish.transport=object_storage"]
    config = load_config(EXAMPLE, [*options, f"trainer.publish.location=file://{tmp_path}/bucket"])
    endpoints = Endpoints((engine_url,), "127.0.0.1", 0, "", place=ClusterPlace(0, 1, 7, ""))
    folder.store.write_text("not a database yet")
    with fetching_weights(config, folder, endpoints, index=0):
        until(lambda: "file is not a database" in caplog.text)
        folder.store.unlink()
        with Store.open(folder.store) as store:
            until(lambda: [row.weights.epoch for row in store.engine_weights()] == [7])


def test_the_time_limit_of_a_version_begins_when_an_engine_is_running(
    site: Site, policy: Policy, group: Ranks
) -> None:
    limit_s = 0.5

    def appear() -> None:
        until(lambda: site.store.max_version() == 1)
        time.sleep(2 * limit_s)  # the limit would have passed if it began with the row
        site.store.show_engine_weights(EngineWeights(0, "late", 1))

    with ThreadPoolExecutor(1) as engine:
        appearing = engine.submit(appear)
        published = site.publisher(policy, group, timeout_s=limit_s).publish(version=1, step=1)
        appearing.result()
    assert published is not None and published.left_out == 0


def test_a_version_that_the_storage_refuses_is_not_recorded(site: Site, policy: Policy, group: Ranks) -> None:
    site.bucket.write_text("not a folder")
    with pytest.raises(TrainingError, match=r"version 1 cannot be written to file://.*NotADirectory"):
        site.publisher(policy, group, timeout_s=0.5).publish(version=1, step=1)
    assert site.store.max_version() == -1


def test_a_version_whose_trainer_died_before_recording_it_is_not_served(
    site: Site, policy: Policy, group: Ranks, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(Exception):
        pass

    def die(*args: object, **options: object) -> None:
        raise Died

    with ExitStack() as dying:
        patch = dying.enter_context(monkeypatch.context())
        patch.setattr(Store, "publish_version", die)
        with pytest.raises(Died):
            site.publisher(policy, group).publish(version=1, step=1)
    assert (site.stored(1) / "manifest.json").is_file()
    disturb(policy, 1)  # the resumed run trains the step again
    with site.fetcher(engine_url):
        site.publisher(policy, group).publish(version=1, step=1)
        assert_serves(engine_url, policy, 1)
