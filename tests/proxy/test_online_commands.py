"""`areal-agents online`: what an operator can see, order and delete, whether or not the run is active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proxy_support import MODEL, running_proxy
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.config import load_config, save_config
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError
from areal_agents.inference.pool import is_of_canary
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.rendering import ChatRenderer
from areal_agents.store import NewEpisode, Store

CONFIG = f"""
model: {MODEL}
data: {{traffic: true}}
rollout: {{group_size: 1, max_staleness: inf, canary: {{share: 0.5, alpha: 0.1}}}}
algorithm: {{advantage_mean: batch, advantage_std: batch}}
trainer: {{lora: {{rank: 2}}}}
engine: {{replicas: 2}}
"""


@pytest.fixture
def new_folder(tmp_path: Path) -> RunFolder:
    """The folder of a run that has begun, and has recorded nothing."""
    file = tmp_path / "online.yaml"
    file.write_text(CONFIG)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    save_config(load_config(file, [f"run_dir={folder.root}"]), folder.config)
    Store.open(folder.store).close()
    return folder


@pytest.fixture
def folder(new_folder: RunFolder) -> RunFolder:
    """A run whose candidate is better: of 60 conversations on each side, 90% and 10% got a thumbs-up."""
    with Store.open(new_folder.store) as store:
        store.publish_version(0, step=0, path="v0")
        store.publish_candidate(4, step=4, path="v4", share=0.5)
        store.begin_comparison(4)
        writes: list[Any] = []
        counts = {True: 0, False: 0}
        for number in range(1000):
            name = f"implicit-{number}"
            side = is_of_canary(name, 0.5)
            if counts[side] < 60:
                converse(store, name, version=4 * side, is_up=(counts[side] % 10 == 0) != side, writes=writes)
                counts[side] += 1
        for write in writes:
            write.result()
    return new_folder


def converse(store: Store, name: str, *, version: int, is_up: bool, writes: list[Any]) -> None:
    new = NewEpisode(
        name, name, group_id=name, group_size=1, implicit_key=f"u/{name}", metadata={"user": name}
    )
    turn = Turn(
        id=f"{name}-0", parent=None, new_messages=(Message("user", f"hello from {name}"),),
        new_prompt_ids=[5], completion=Completion([7], [-0.5], [version], "stop"),
        reply=Message("assistant", "hi"),
        sampling=SamplingParams(max_new_tokens=1),
    )  # fmt: skip
    writes.append(store.add_turn(name, turn, opening=new))
    writes.append(store.seal(name, "finished", given=[Reward("episode", "", "thumb", float(is_up))]))


def online(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["online", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_status_shows_what_the_trainer_sees(folder: RunFolder) -> None:
    text = online("status", str(folder.root))
    assert "stable: version 0" in text
    assert "candidate: version 4, for 50% of the conversations" in text
    assert "mean score 0.900 of 60 conversations; stable: 0.100 of 60" in text
    assert "its mean score is higher by more than 0" in text
    found = json.loads(online("status", str(folder.root), "--json"))
    assert found["comparison"]["verdict"] == "promote" and found["comparison"]["difference"][0] > 0
    assert found["conversations"]["complete"] == 120 and found["frozen"] is False


def test_orders_reach_the_store(folder: RunFolder) -> None:
    online("freeze", str(folder.root))
    assert "the operator has frozen the run" in online("status", str(folder.root))
    online("rollback", str(folder.root))
    assert "the operator ordered it" in online("status", str(folder.root))
    online("unfreeze", str(folder.root))
    with Store.open(folder.store) as store:
        assert store.order_for(4) == "roll_back" and not store.is_frozen()
        store.roll_back_candidate(4, {"reason": "the operator ordered it"}, restored=5, step=5, path="v5")
    with pytest.raises(ConfigError, match="no version is a candidate now"):
        online("promote", str(folder.root))
    assert "version 4 was rolled back: the operator ordered it" in online("status", str(folder.root))


def test_other_folders_are_refused(new_folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        online("status", str(tmp_path))
    config = new_folder.config.read_text()
    new_folder.config.write_text(config.replace("traffic: true", "path: x.jsonl"))
    with pytest.raises(ConfigError):
        online("freeze", str(new_folder.root))


def test_conversations_are_deleted_while_nothing_runs(folder: RunFolder) -> None:
    assert "deleted 2 conversations" in online(
        "delete", str(folder.root), "--user", "implicit-0", "--episode", "implicit-1"
    )
    with Store.open(folder.store) as store:
        assert store.group_counts()["complete"] == 118
    assert b"hello from implicit-0" not in folder.store.read_bytes()
    assert b"hello from implicit-2" in folder.store.read_bytes()


def test_conversations_are_deleted_while_the_proxy_serves(folder: RunFolder, renderer: ChatRenderer) -> None:
    with (
        folder.locked(),
        running_proxy(
            folder.store, ScriptedSampler(renderer), admin_key="admin", project_keys=("u",)
        ) as proxy,
    ):
        _, _, port = proxy.url.rpartition(":")
        folder.write_endpoints(Endpoints((), "127.0.0.1", int(port), "admin"))
        client = proxy.openai(api_key="u", default_headers={"X-Episode-User": "implicit-0"})
        client.chat.completions.create(model="p", messages=[{"role": "user", "content": "still talking"}])
        assert "deleted 2 conversations" in online("delete", str(folder.root), "--user", "implicit-0")
        assert not proxy.store.episodes(metadata={"user": "implicit-0"})
