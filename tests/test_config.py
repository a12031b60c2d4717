"""The configuration: every error names the setting and says what to write instead."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from areal_agents.algorithms.presets import PRESETS
from areal_agents.config import load_config, proxy_config, save_config
from areal_agents.errors import ConfigError, DataError
from areal_agents.rollout.config import CommandAgentConfig
from areal_agents.rollout.data import load_tasks

EXAMPLE = Path(__file__).parent.parent / "examples" / "search_agent" / "config.yaml"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "agent.py").write_text("def agent(task, ep): ...\n")
    tree = {"model": "model", "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "mine.yaml"


def test_the_example_is_short_and_valid() -> None:
    config = load_config(EXAMPLE)
    assert config.name == "search_agent"
    assert Path(config.model).is_dir()
    assert len(EXAMPLE.read_text().splitlines()) < 20


def test_paths_are_relative_to_the_file(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir("/")
    config = load_config(minimal)
    assert config.model == str(minimal.parent / "model")
    assert config.agent == f"{minimal.parent / 'agent.py'}:agent"
    assert config.data.path == str(minimal.parent / "tasks.jsonl")
    assert config.name == "mine"


def test_paths_of_overrides_are_relative_to_the_working_directory(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "other").mkdir(parents=True)
    (elsewhere / "other" / "config.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    config = load_config(minimal, ["model=other"])
    assert config.model == str(elsewhere / "other")
    assert config.run_dir == str(elsewhere / "runs" / "mine-seed0")


def test_missing_files_are_looked_for_in_the_folder_of_the_config(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of the same names in the working directory are not those of the configuration."""
    monkeypatch.chdir(tmp_path / "model")
    for name in ("tsks.jsonl", "agnt.py", "held.csv"):
        (tmp_path / "model" / name).touch()
    tree = yaml.safe_load(minimal.read_text())
    tree |= {"agent": "agnt.py:agent", "data": {"path": "tsks.jsonl"}, "eval": {"data": {"path": "held.csv"}}}
    minimal.write_text(yaml.safe_dump(tree))
    config = load_config(minimal)
    assert config.agent == f"{tmp_path / 'agnt.py'}:agent"
    assert config.eval is not None and config.eval.data.path == str(tmp_path / "held.csv")
    with pytest.raises(DataError) as raised:
        load_tasks(config.data)
    assert str(raised.value) == (
        f"there is no data file {tmp_path / 'tsks.jsonl'}; a relative path in a configuration file is "
        "relative to the file's folder, and one in an override to the working directory"
    )
    with pytest.raises(ConfigError, match=f"there is no store {tmp_path / 'demos.db'};"):
        minimal.write_text(yaml.safe_dump({**tree, "data": {"episodes": "demos.db"}, "eval": None}))
        load_config(minimal, ["algorithm=sft"])


def test_a_name_that_is_not_a_file_is_unchanged(minimal: Path) -> None:
    assert load_config(minimal, ["data.path=org/data-set"]).data.path == "org/data-set"
    assert load_config(minimal, ["agent=package.module:agent"]).agent == "package.module:agent"


def test_files_of_a_command_resolve_against_the_folder_of_the_config(minimal: Path) -> None:
    (minimal.parent / "my agent.py").write_text("")
    (minimal.parent / "python").write_text("")
    command = "python -u 'my agent.py' --flag absent.py"
    given = minimal.read_text().splitlines()
    text = "\n".join(line for line in given if not line.startswith("agent:"))
    minimal.write_text(f'{text}\nagent: {{command: "{command}"}}\n')
    loaded = load_config(minimal).agent
    assert isinstance(loaded, CommandAgentConfig)
    assert shlex.split(loaded.command) == [
        "python", "-u", str(minimal.parent / "my agent.py"), "--flag", "absent.py",
    ]  # fmt: skip


def test_paths_of_a_command_line_agent_resolve_against_the_folder_of_the_config(minimal: Path) -> None:
    given = minimal.read_text().splitlines()
    text = "\n".join(line for line in given if not line.startswith("agent:"))
    agent = '{cli: my.toml, executable: bin/tiny, workdir: "tasks/{task.id}", max_turns: 3}'
    minimal.write_text(f"{text}\nagent: {agent}\n")
    base = minimal.parent
    assert load_config(minimal).agent == {
        "cli": str(base / "my.toml"),
        "executable": str(base / "bin/tiny"),
        "workdir": f"{base}/tasks/{{task.id}}",
        "max_turns": 3,
    }
    assert load_config(minimal, ["agent={cli: codex, executable: codex}"]).agent == {
        "cli": "codex",
        "executable": "codex",
    }


def test_overrides_set_nested_keys(minimal: Path) -> None:
    config = load_config(minimal, ["trainer.steps=7", "trainer.lr=1e-3", "seed=2", "eval.data.path=x"])
    assert (config.trainer.steps, config.trainer.lr, config.seed) == (7, 1e-3, 2)
    assert config.eval is not None and config.eval.data.path == "x"
    assert config.run_dir.endswith("mine-seed2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stpes=7", "unknown key 'trainer.stpes'; did you mean 'trainer.steps'?"),
        ("lr=1e-4", "unknown key 'lr'; did you mean 'trainer.lr'?"),
        ("group_size=4", "unknown key 'group_size'; did you mean 'rollout.group_size' or"),
        ("agent=python my_agent.py", 'if it is a command, write agent: {command: "python my_agent.py"}'),
        ("agent={comand: x}", "agent: must be module:function, file.py:function, {command: …} or {cli: …}"),
        ("agent={cli: codex, max_turn: 3}", "agent: max_turn: Extra inputs are not permitted"),
        ("agent=5", "agent: must be module:function, file.py:function, {command: …} or {cli: …}, got 5"),
        ("agent={command: 5}", '{cli: …}, got {"command": 5}'),
        ("agent={command: a, isolatoin: process}", "unknown key 'agent.isolatoin'"),
        ("agent={command: a, isolation: jail}", "agent.isolation: Input should be 'none', 'process'"),
        (
            "agent={command: a, isolation: process, limits: {disk_mb: 0}}",
            "agent.limits.disk_mb: Input should",
        ),
        ("agent={command: a, warm: 2}", "agent: warm has no effect without isolation"),
        (
            "agent={command: a, pass_environment: [PGPASSWORD, HF_TOKEN]}",
            "agent: pass_environment has no effect without isolation",
        ),
        ("agent={command: a, isolation: docker}", "agent: isolation: docker needs image"),
        ("agent={command: ' '}", "or {cli: …}, got no command"),
        ("name=../elsewhere", "name: must be the name of a folder in runs/, got '../elsewhere'"),
        ("data=tasks.jsonl", "data: must be a mapping of settings, such as data: {path: ...}"),
        ("eval=tasks.jsonl", "such as eval: {data: {path: ...}} (got 'tasks.jsonl')"),
        ("rollout=5", "rollout: must be a mapping of settings (got 5)"),
        ("rolout.groups=3", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("eval.data.pth=3", "unknown key 'eval.data.pth'; did you mean 'eval.data.path'?"),
        ("trainer.steps=zero", "trainer.steps"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.steps=null", "trainer.steps: Input should be a valid integer (got null)"),
        ("rollout.max_staleness={a: [true]}", "(got {a: [true]})"),
        ("trainer.steps", "expected key=value"),
        ("trainer.steps=[", "not valid YAML"),
        ("model=nowhere", "not a Hugging Face model folder"),
        ("engine.kind=sglang", "urls"),
        ("data.path=null", "data.path"),
        (
            "data={seed: 1}",
            "data: path (of tasks), sources (several), episodes (a store of recorded ones) or traffic",
        ),
        ("agent=''", "'agent' is required"),
        ("algorithm=grop", "did you mean 'grpo'?"),
        ("algorithm=null", "algorithm: must be the name of a preset or a mapping of settings, got null"),
        (
            "algorithm={policy_loss: dpo, estimator: group}",
            "estimator: group cannot be combined with policy_loss: dpo",
        ),
        ("rollout.group_size=100000", "rollout.group_size: Input should be less than or equal to 65536"),
        ("rollout.limits.time_s=.inf", "rollout.limits.time_s: Input should be a finite number"),
        ("trainer.lr=.inf", "trainer.lr: Input should be a finite number"),
        ("proxy.generate_timeout_s=.inf", "proxy.generate_timeout_s: Input should be a finite number"),
        ("proxy.max_body_mb=.nan", "proxy.max_body_mb: Input should be a finite number"),
        ("seed=99999999999999999999", "seed: Input should be less than or equal to"),
        ("algorithm={1: 2}", "a key must be a string, got 1"),
        ("algorithm.rewards={true: 2}", "a key must be a string, got true"),
        ("rollout.group_size=1", "rollout.group_size: 1 leaves an episode without others"),
        ("trainer.critic_model=model", "trainer.critic_model: the algorithm decoupled_ppo trains no critic"),
        ("trainer.reference_model=model", "the algorithm decoupled_ppo has no reference policy"),
        ("data.episodes=nowhere.db", f"data.episodes: there is no store {Path.cwd() / 'nowhere.db'};"),
        ("trainer.replicas=2", "ranks must be a multiple of replicas × context_parallel, got 1 and 2 × 1"),
        (
            "trainer.activation_checkpointing=0",
            "activation_checkpointing must be auto, off, full or a number",
        ),
        ("trainer.lora.rank=0", "trainer.lora.rank"),
        ("trainer.lora.dropout=0.1", "trainer.lora.dropout"),
        ("trainer.best_metric=heldout", "heldout needs evaluations during training; give eval.every"),
        ("trainer.trackers=[tensorbord]", "trainer.trackers.0"),
        ("rollout.context_stages=[{max_token: 9}]", "did you mean 'rollout.context_stages.0.max_tokens'?"),
    ],
)
def test_faults_are_named(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [override])
    assert message in str(caught.value)


def test_a_missing_file_and_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(tmp_path / "list.yaml")


def test_a_key_that_is_given_twice_is_refused(minimal: Path) -> None:
    with open(minimal, "a") as file:
        file.write("trainer: {steps: 3}\ntrainer: {lr: 1.0e-4}\n")
    with pytest.raises(ConfigError, match="the key 'trainer' is given twice"):
        load_config(minimal)


def test_a_tilde_is_the_home_folder(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(minimal.parent))
    config = load_config(minimal, ["model=~/model", "data.path=~/tasks.jsonl"])
    assert config.model == str(minimal.parent / "model")
    assert config.data.path == str(minimal.parent / "tasks.jsonl")


def test_a_saved_config_is_loaded_unchanged(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["trainer.steps=7"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("setting", ["admin_key=ep-mine", "project_keys=[good, '']", "project_keys=[ep-x]"])
def test_a_key_that_could_never_work_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="does not begin with ep-"):
        proxy_config([setting])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{pattern: '[0-9]+'}", "proxy.volatile.time.*must begin with at least 4 literal characters"),
        ("{pattern: 'time: (a+)+$'}", "proxy.volatile.time.*in too many ways"),
        ("{pattern: 'time: ['}", "proxy.volatile.time.*not a regular expression"),
        ("{pattern: 'time: x', roles: [assistant]}", "proxy.volatile.time.*roles"),
        ("never", "proxy.volatile.time"),
    ],
)
def test_a_rule_of_volatile_text_that_cannot_be_applied_is_refused(
    minimal: Path, rule: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        load_config(minimal, [f"proxy.volatile.time={rule}"])


def test_a_known_rule_of_volatile_text_is_switched_off(minimal: Path) -> None:
    config = load_config(minimal, ["proxy.volatile.claude-code-billing=off"])
    assert config.proxy.volatile == {"claude-code-billing": "off"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=ppo", "trainer.critic_lr=0"], "trainer.critic_lr: ppo needs a critic that learns"),
        (["algorithm=ppo", "trainer.critic_model=nowhere"], "nowhere is not a Hugging Face model folder"),
        (["algorithm=grpo", "trainer.reference_model=nowhere"], "trainer.reference_model"),
        (["algorithm=gspo", "trainer.ranks=2", "trainer.context_parallel=2"],
         "trainer.context_parallel: 2 spreads a sequence over ranks, and algorithm.policy_loss: gspo"),
        (["algorithm.veto=1e-4", "trainer.ranks=2", "trainer.context_parallel=2"], "algorithm.veto: 0.0001"),
        (["algorithm=dpo", "rollout.group_size=1"], "dpo needs pairs"),
        (["trainer.lora={}", "trainer.optimizer=muon"], "use optimizer: adamw"),
        (["data.episodes=store.db", "eval.data.path=x"], "eval: training on data.episodes starts no engine"),
        (["eval={data: {episodes: store.db}}"], "eval.data: evaluation runs tasks and not recorded episodes"),
        (["data.episodes=store.db", "data.epochs=2"], "data.epochs: training on data.episodes lasts"),
        (["data.episodes=empty"], "is a folder without a store.db"),
        (["loop=sync", "rollout.max_staleness=2"],
         "loop: sync means rollout.max_staleness: 0, got 2; leave one of them out"),
        (["loop=one_step_off", "rollout.max_staleness=inf"], "rollout.max_staleness: 1, got inf"),
        (["rollout.lag=4", "rollout.max_staleness=2"], "rollout.lag: 4 means max_staleness: 4; set it so"),
        (["rollout.lag=0", "loop=sync"], "loop: with rollout.lag"),
        (["rollout.lag=1", "data.epochs=2"], "data.epochs: with rollout.lag"),
        (["rollout.lag=1", "rollout.on_stale=wait"], "rollout.on_stale: with rollout.lag"),
        (["rollout.max_staleness=inf", "rollout.on_stale=wait"], "rollout.on_stale: wait does nothing"),
        (["rollout.max_staleness=null", "rollout.on_stale=drop"], "rollout.on_stale: drop does nothing"),
        (["loop=sync", "rollout.on_stale=downweight"], "downweight does nothing at max_staleness: 0"),
        (["rollout.on_stale=downweight", "algorithm=sft"], "downweight has no meaning for sft"),
        (["rollout.on_stale=wait", "trainer.batch_timeout_s=600"],
         "trainer.batch_timeout_s: rollout.on_stale: wait may hold the trainer"),
        (["loop=one_step_off", "rollout.limits.time_s=3600"],
         "trainer.batch_timeout_s: loop: one_step_off may hold the trainer"),
        (["data.episodes=store.db", "loop=sync"], "loop: training on data.episodes has no rollouts"),
        (["data.episodes=store.db", "rollout.on_stale=drop"], "rollout.on_stale: training on data.episodes"),
    ],
)  # fmt: skip
def test_combinations_across_sections_are_refused_with_the_reason(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.chdir(minimal.parent)
    (minimal.parent / "store.db").touch()
    (minimal.parent / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 1),
        (["loop=sync"], 0),
        (["loop=sync", "rollout.groups=3"], 0),
        (["loop=sync", "rollout.max_staleness=0"], 0),
        (["loop=one_step_off"], 1),
        (["loop=async", "rollout.max_staleness=4"], 4),
        (["rollout.lag=8"], 8),
        (["rollout.max_staleness=inf"], None),
        (["rollout.max_staleness=.inf"], None),
    ],
)
def test_the_loop_sets_the_largest_staleness(
    minimal: Path, tmp_path: Path, overrides: list[str], bound: int | None
) -> None:
    config = load_config(minimal, overrides)
    assert config.rollout.max_staleness == bound
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_an_algorithm_is_named_by_a_plain_string(minimal: Path, tmp_path: Path, name: str) -> None:
    needed = [f"trainer.teacher_model={minimal.parent / 'model'}"] if name == "distillation" else []
    config = load_config(minimal, [f"algorithm={name}", *needed])
    assert config.algorithm.preset == name
    save_config(config, tmp_path / "saved.yaml")  # what every process of the run reads
    assert load_config(tmp_path / "saved.yaml") == config
    changed = load_config(minimal, [f"algorithm={name}", "algorithm.minibatches=3", *needed]).algorithm
    assert (changed.preset, changed.minibatches) == (name, 3)


def test_a_teacher_of_another_vocabulary_is_refused(minimal: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    settings = ["algorithm=distillation", f"trainer.teacher_model={teacher}"]
    load_config(minimal, settings)  # without a tokenizer.json there is nothing to compare
    for folder, vocab in ((minimal.parent / "model", '{"a": 0, "b": 1}'), (teacher, '{"b": 0, "a": 1}')):
        (folder / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    with pytest.raises(ConfigError, match="has another vocabulary than"):
        load_config(minimal, settings)


def test_recorded_episodes_need_no_agent(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(minimal.parent)
    (minimal.parent / "store.db").touch()
    config = load_config(minimal, ["data={episodes: store.db}", "agent=''", "algorithm=sft"])
    assert config.data.episodes == str(minimal.parent / "store.db")
    again = load_config(minimal, ["data.episodes=postgresql://host/db", "rollout.group_size=1"])
    assert again.data.episodes == "postgresql://host/db"


@pytest.mark.parametrize("recorded", ["run", "run/store.db"])
def test_a_run_does_not_train_on_its_own_store(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    monkeypatch.chdir(minimal.parent)
    (minimal.parent / "run").mkdir()
    (minimal.parent / "run" / "store.db").touch()
    settings = [f"data.episodes={recorded}", "algorithm=sft"]
    with pytest.raises(ConfigError, match="is this run's own store; .* choose another folder with run_dir="):
        load_config(minimal, [*settings, "run_dir=run"])
    assert load_config(minimal, [*settings, "run_dir=other"]).data.episodes.endswith(recorded)


def test_models_of_critic_and_reference_are_paths(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(minimal.parent)
    ppo = load_config(minimal, ["algorithm=ppo", "trainer.critic_model=model"])
    assert ppo.trainer.critic_model == str(minimal.parent / "model")
    grpo = load_config(minimal, ["algorithm=grpo", "trainer.reference_model=model"])
    assert grpo.trainer.reference_model == str(minimal.parent / "model")


@pytest.mark.parametrize("kind", ["command", "cli"])
def test_an_image_is_a_folder_in_bubblewrap_and_a_name_in_docker(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(minimal.parent)
    Path("work").mkdir()
    for isolation, expected in (("docker", "work"), ("bubblewrap", str(minimal.parent / "work"))):
        agent = f"agent={{{kind}: codex, isolation: {isolation}, image: work}}"
        found = load_config(minimal, [agent]).model_dump()["agent"]
        assert found["image"] == expected


def test_the_sandbox_of_a_command_is_read_saved_and_read_again(minimal: Path, tmp_path: Path) -> None:
    (minimal.parent / "work").mkdir()
    (minimal.parent / "work.py").touch()
    agent = "agent={command: python work.py, isolation: process, workdir: work, limits: {memory_mb: null}}"
    config = load_config(minimal, [agent])
    assert isinstance(config.agent, CommandAgentConfig)
    # Paths in an override are relative to the working directory, and those in a command to its sandbox.
    assert config.agent.command == "python work.py" and Path(config.agent.workdir).is_absolute()
    assert config.agent.limits.memory_mb is None and config.agent.limits.processes == 512
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []).agent == config.agent
    plain = load_config(minimal, ["agent={command: python -m work}"])
    save_config(plain, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []).agent == plain.agent


ONLINE = [
    "agent=''", "data={traffic: true}", "rollout.group_size=1", "rollout.max_staleness=inf",
    "algorithm.advantage_mean=batch", "algorithm.advantage_std=batch", "engine.replicas=2",
    "trainer.lora={rank: 4}", "rollout.canary={steps: 3}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent=agent.py:agent", "agent: with data.traffic, users call the model"),
        ("data.traffic=false", "traffic (the conversations of users) is required"),
        ("data={path: x.jsonl, traffic: true}", "traffic takes the place of tasks"),
        ("rollout.group_size=2", "a group is one conversation; got 2, use 1"),
        ("rollout.on_stale=wait", "users do not wait for training"),
        ("rollout.max_staleness=6", "up to 7 versions old"),
        ("rollout.canary.scores=[1, 0]", "the lowest score must be below the highest"),
        ("engine.replicas=1", "set engine.replicas to at least 2"),
        ("trainer.publish={transport: disk}", "rollout.canary needs lora"),
        ("trainer.keep_checkpoints=1", "rollout.canary needs those of both versions"),
    ],
)
def test_faults_of_a_run_that_trains_on_its_traffic_are_named(
    minimal: Path, override: str, message: str
) -> None:
    assert load_config(minimal, ONLINE).rollout.canary is not None
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [*ONLINE, override])
    assert message in str(caught.value)


def test_a_canary_needs_traffic(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.canary: it compares users' conversations"):
        load_config(minimal, ["rollout.canary={}"])
