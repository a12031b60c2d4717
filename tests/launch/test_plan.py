"""`areal-agents plan`, and the refusal of runs that do not fit; the models consist of config.json only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import Qwen3Config, Qwen3MoeConfig

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch import gpus, memory_check
from areal_agents.launch.context_length import POSITIONS, Longest, longest_sequence
from areal_agents.launch.engine_memory import engine_bytes_in_training
from areal_agents.launch.gpus import Machine, this_machine
from areal_agents.launch.memory_check import check_memory
from areal_agents.launch.nodes import Nodes
from areal_agents.launch.plan import check_gpus
from areal_agents.launch.suggestions import suggestions, with_changes
from areal_agents.launch.train import train

GIB = 2**30
SGLANG = {"kind": "sglang", "python": "/nowhere/bin/python"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 634 million weights in eight layers."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=32_000, tie_word_embeddings=False,
        max_position_embeddings=16_384, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    assert not [*folder.glob("*.safetensors")]
    return folder


def config_file(folder: Path, model: Path, **settings: object) -> Path:
    (folder / "tasks.jsonl").write_text('{"question": "?"}\n')
    tree = {"model": str(model), "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}, **settings}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def load(folder: Path, model: Path, **settings: object) -> Config:
    return load_config(config_file(folder, model, **settings))


_PLANNER = """
import contextlib, io, json, sys
from areal_agents.cli import main
from areal_agents.config import load_config
from areal_agents.launch.gpus import Machine
from areal_agents.launch.plan import plan_memory

def plan(path, overrides, machine):
    found = plan_memory(load_config(path, overrides), Machine(*machine))
    rows = {share.title: {name: values[0] / 2**30 for name, values in share.rows} for share in found.shares}
    return {"fits": found.fits, "verdict": found.verdict(), "remarks": found.remarks, "rows": rows,
            "notes": [share.note for share in found.shares],
            "headings": [share.heading for share in found.shares]}

def command(*arguments):
    said, sys.argv, status = io.StringIO(), ["areal-agents", *arguments], 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    return status, said.getvalue()

for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps({"plan": plan, "command": command}[name](*arguments)), flush=True)
"""


class Planner:
    """Makes plans in a separate process: a plan creates a process group, and the imports take seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def command(self, path: Path, *overrides: str, gpus: int, gib: float) -> tuple[int, str]:
        """The exit status and the output of `areal-agents plan`."""
        options = ["--gpus", str(gpus), "--gpu-memory", str(gib)]
        status, output = self._call("command", "plan", str(path), *overrides, *options)
        return status, output

    def command_here(self, path: Path, *overrides: str) -> tuple[int, str]:
        """The same for this machine; the process sees none of its GPUs."""
        status, output = self._call("command", "plan", str(path), *overrides)
        return status, output

    def plans(self, *cases: tuple[Path, list[str], Machine]) -> list[dict[str, Any]]:
        """Return plans; their rows have only the values of the first column."""
        return [self._call("plan", str(path), given, astuple(machine)) for path, given, machine in cases]

    def _call(self, name: str, *arguments: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the planner ended with status {self._process.wait(10)}"
        return json.loads(answer)


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    command, environment = (
        [sys.executable, "-c", _PLANNER],
        {**os.environ, "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""},
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Planner(process)
        assert process.stdin is not None
        process.stdin.close()  # the planner ends at the end of its input
        assert process.wait(60) == 0


def numbers(output: str, row: str, *, title: str = "") -> list[float]:
    """The numbers in a row of the first table after a title."""
    lines = output[output.index(title) :].splitlines()
    line = next(line for line in lines if row in line)
    return [float(cell) for cell in re.findall(r"[\d.]+", line.replace(row, ""))]


def test_the_command_prints_the_memory_budget_and_whether_the_run_fits(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    path = config_file(tmp_path, model, engine={**SGLANG, "colocate": "sleep"})
    status, output = planner.command(path, gpus=1, gib=80)
    assert status == 0 and "The run fits." in output and "activation_checkpointing: off" in output
    assert numbers(output, "trained weights, float32") == [2.4] * 2  # 634 million; none while sampling
    assert numbers(output, "optimizer ") == [4.7] * 2
    assert numbers(output, "gradients") == [2.4] * 2
    assert numbers(output, "capacity") == [80.0] * 3
    parts = [
        "trained weights, float32", "optimizer ", "gradients", "gathered", "gradient of a block, whole",
        "activations", "temporary, in a block or the head", "CUDA, NCCL, fragmentation",
    ]  # fmt: skip
    total = sum(numbers(output, part)[0] for part in parts)
    assert numbers(output, "total")[0] == pytest.approx(total, abs=0.5)

    status, output = planner.command(path, gpus=1, gib=12)
    assert status == 1
    assert re.search(r"does not fit: GPU 0: the trainer and the engines \(\d+\.\d of 12\.0 GiB\)", output)


def test_the_suggested_settings_fit(tmp_path: Path, model: Path, planner: Planner) -> None:
    path = config_file(tmp_path, model, engine={**SGLANG, "colocate": "sleep", "memory_fraction": 0.3})
    status, output = planner.command(path, gpus=4, gib=12)
    suggestions = output.rpartition("It would fit with: ")[2].strip().removesuffix(".").split("; or ")
    assert status == 1 and len(suggestions) >= 2
    for suggestion in (suggestions[0], suggestions[-1]):
        overrides = [part.replace(": ", "=", 1) for part in suggestion.split(", ")]
        assert planner.command(path, *overrides, gpus=4, gib=12)[0] == 0, suggestion


def test_nf4_is_suggested_last_and_only_for_adapters_of_dense_models(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    pytest.importorskip("bitsandbytes")
    experts = tmp_path / "experts"
    Qwen3MoeConfig(
        hidden_size=1024, moe_intermediate_size=2048, num_experts=32, num_experts_per_tok=2,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=128, vocab_size=4096,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(experts)  # fmt: skip
    path = config_file(
        tmp_path, model, engine={"kind": "sglang", "urls": ["http://gpu:1"]},
        trainer={"lora": {"rank": 4, "targets": ["q_proj"]}},
    )  # fmt: skip
    machine = Machine(1, 3 * GIB)
    dense, four_bits, sparse = planner.plans(
        (path, [], machine), (path, ["trainer.lora.base=nf4"], machine), (path, [f"model={experts}"], machine)
    )
    assert dense["verdict"].endswith("It would fit with: trainer.offload: all; or trainer.lora.base: nf4.")
    assert four_bits["fits"]
    assert "trainer.offload: all" in sparse["verdict"] and "nf4" not in sparse["verdict"]


@pytest.mark.parametrize(
    ("trainer", "tried"), [({}, False), ({"lora": {}}, True), ({"lora": {"base": "nf4"}}, False)]
)
def test_nf4_is_tried_only_for_adapters_that_do_not_use_it_yet(
    trainer: dict[str, Any], tried: bool, tmp_path: Path, model: Path
) -> None:
    config = load(tmp_path, model, trainer=trainer)
    found: list[Config] = []

    def nothing_fits(changed: Config) -> bool:
        found.append(changed)
        return False

    assert [*suggestions(config, Machine(1, GIB), nothing_fits)] == []
    four_bits = load(tmp_path, model, trainer={"lora": {"base": "nf4"}})
    assert len(found) > 5 and (four_bits in found) == tried


def test_engines_on_separate_gpus_have_the_rest_of_their_share_for_keys_and_values(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    engine = {**SGLANG, "tensor_parallel": 2, "memory_fraction": 0.5}
    status, output = planner.command(config_file(tmp_path, model, engine=engine), gpus=3, gib=80)
    assert status == 0 and "GPU 0: the trainer\n" in output.replace(" \n", "\n").replace("  ", "")
    title = "GPU 1-2: the engines"
    (weights,), (room,) = (numbers(output, row, title=title) for row in ("weights", "keys and values"))
    assert weights == 0.6 and weights + room == 40.0
    tokens = int(re.search(r"values of\s+([\d,]+)", output)[1].replace(",", ""))  # type: ignore[index]
    # 8 layers of keys and values in bfloat16, of half of the 8 heads
    assert tokens == pytest.approx(room * GIB / (8 * 2 * 4 * 128 * 2), rel=0.002)


def test_memory_of_colocated_engines_during_a_step(tmp_path: Path, model: Path) -> None:
    def held(**engine: object) -> int:
        return engine_bytes_in_training(load(tmp_path, model, engine=engine), 80 * GIB)

    assert held(**SGLANG, colocate="split") == 32 * GIB
    assert held(**SGLANG, colocate="sleep") == 0
    cache = 2 * 8 * 8 * 128 * 3 * 2048  # layers, heads, and 3 sequences of 2048 tokens
    both = held(device="cuda", colocate="split", slots=3, max_context=2048)
    assert both == 2 * (634_425_344 + cache)  # all that the embedded engine takes, not a share as with SGLang
    assert held(device="cuda", colocate="sleep") == 2 * 634_425_344  # only keys and values are released
    assert held() == 0


def test_missing_gpus_and_unintentionally_shared_gpus_are_refused(tmp_path: Path, model: Path) -> None:
    def check(gpus: int, **settings: object) -> None:
        check_gpus(load(tmp_path, model, **settings), Machine(gpus, 80 * GIB))

    with pytest.raises(ConfigError, match="trainer.ranks: 4 ranks need as many GPUs .* there are 2"):
        check(2, trainer={"ranks": 4, "device": "cuda"})
    with pytest.raises(ConfigError, match=r"puts an engine on GPU 0, which the trainer uses.*cuda:1"):
        check(2, engine={"device": "cuda"})
    with pytest.raises(ConfigError, match="puts an engine on GPU 1, which the trainer uses"):
        check(2, engine={**SGLANG, "device": "cuda:1"}, trainer={"ranks": 2})
    check(2, engine={"device": "cuda:1"})
    check(1, engine={"device": "cuda", "colocate": "split"})
    check(1, engine={"device": "cuda"}, trainer={"device": "cpu"})


def test_train_refuses_a_run_that_does_not_fit_before_it_starts_anything(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "this_machine", lambda: Machine(1, 12 * GIB))
    config = load(tmp_path, model, run_dir=str(tmp_path / "run"), trainer={"trackers": []})
    refusal = r"does not fit: GPU 0: the trainer .*trainer\.lora: {}.*set trainer\.memory_check: warn"
    with pytest.raises(ConfigError, match=refusal):
        train(config, console=Console(quiet=True))
    assert not [*(tmp_path / "run" / "logs").glob("*.log")]


def checked(config: Config, monkeypatch: pytest.MonkeyPatch, *, gib: float = 12) -> str:
    """Return what `train` reports about the memory of a run on one GPU before it starts anything."""
    monkeypatch.setattr(memory_check, "this_machine", lambda: Machine(1, round(gib * GIB)))
    said: list[str] = []
    check_memory(config, Nodes(), said.append)
    return " ".join(" ".join(said).split())


def test_with_memory_check_warn_a_run_that_does_not_fit_is_started_with_a_warning(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = checked(load(tmp_path, model, trainer={"memory_check": "warn"}), monkeypatch)
    assert "The run does not fit: GPU 0: the trainer" in said
    assert "warning: the run is started although it does not fit" in said


def test_little_shared_memory_is_reported_before_the_plan(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=1_000_000))
    monkeypatch.setattr(memory_check, "this_machine", lambda: Machine(4, 80 * GIB))
    monkeypatch.setattr(memory_check, "PLAN_TIMEOUT_S", 0.0)
    said: list[str] = []
    check_memory(load(tmp_path, model, engine=SGLANG, trainer={"ranks": 2}), Nodes(), said.append)
    assert "warning: /dev/shm has 64 MB free, and NCCL may need more for 3 processes" in " ".join(said)


@pytest.mark.parametrize(
    ("config", "reason"),
    [('{"model_type": "unheard_of"}', "unheard_of"), ('{"model_type": ', "is not a valid JSON")],
)
def test_a_model_whose_memory_is_unknown_is_accepted_with_a_warning(
    config: str, reason: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path, model)
    loaded = load_config(path)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(config)
    loaded = loaded.model_copy(update={"model": str(unknown)})
    said = checked(loaded, monkeypatch)
    assert said.startswith("warning: ") and reason in said
    assert said.endswith("the memory of the run is not checked") and "Traceback" not in said


def test_a_wrong_adapter_is_refused_and_not_reported_as_unknown_memory(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    path = config_file(tmp_path, model)
    status, said = planner.command(path, "trainer.lora.targets=[typo]", gpus=1, gib=80)
    assert status == 1 and "ConfigError: trainer.lora.targets" in said and "typo" in said


def test_a_micro_batch_should_hold_the_longest_sample(tmp_path: Path, model: Path, planner: Planner) -> None:
    def longest(**settings: object) -> Longest | None:
        return longest_sequence(load(tmp_path, model, **settings))

    sglang = {"engine": SGLANG}
    assert longest() == Longest(4096, "engine.max_context")  # the embedded engine's default
    assert longest(**sglang) == Longest(16_384, POSITIONS) and Longest(16_384, POSITIONS).wanted == 0
    assert longest(engine={**SGLANG, "max_context": 16_384}) == Longest(16_384, "engine.max_context")
    limited = {"limits": {"context_tokens": 3000}}
    assert longest(rollout=limited) == Longest(3000, "rollout.limits.context_tokens")
    stages = {"context_stages": [{"until_step": 1, "max_tokens": 512}, {"max_tokens": 2048}]}
    assert longest(rollout=stages) == Longest(2048, "rollout.context_stages")
    ended = {"context_stages": [{"until_step": 1, "max_tokens": 512}]}
    assert longest(rollout=ended) == Longest(4096, "engine.max_context")

    path = config_file(tmp_path, model, engine={**SGLANG, "max_context": 12_000, "colocate": "sleep"})
    chosen, given = planner.plans(
        (path, [], Machine(1, 80 * GIB)), (path, ["trainer.microbatch_tokens=8192"], Machine(1, 80 * GIB))
    )
    assert chosen["fits"] and "microbatch_tokens: 16384" in chosen["notes"][0] and not chosen["remarks"]
    (remark,) = given["remarks"]
    assert given["fits"]
    assert "up to 12,000 tokens (engine.max_context), and a micro-batch holds 8,192" in remark


def test_host_memory_includes_what_is_offloaded_and_what_is_parked_during_sampling(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    path = config_file(tmp_path, model, engine=SGLANG)
    machine = Machine(2, 80 * GIB)
    ways = [("none", "sleep"), ("optimizer", "none"), ("optimizer", "sleep"), ("all", "sleep")]
    found = planner.plans(
        *((path, [f"trainer.offload={how}", f"engine.colocate={where}"], machine) for how, where in ways)
    )
    said = [re.search(r"in host memory: at least ([\d.]+) GiB per rank", each["notes"][0]) for each in found]
    # 634,425,344 weights take 2.36 GiB in float32, their gradients as much, and the moments 4.73 GiB
    assert [float(one[1]) if one else 0.0 for one in said] == [7.1, 4.7, 7.1, 9.5]


@pytest.mark.slow
def test_sglang_fits_on_a_small_gpu_but_not_on_one_that_is_too_small(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    path = config_file(tmp_path, model, engine=SGLANG, trainer={"device": "cpu"})
    sizes = (8, 12, 24, 4)
    *fitting, too_small = planner.plans(*((path, [], Machine(1, gib * GIB)) for gib in sizes))
    for found, gib in zip(fitting, sizes[:3], strict=True):
        assert found["fits"] and sum(found["rows"]["GPU 0: the engines"].values()) <= gib, found
    assert not too_small["fits"]
    assert "one sequence needs 0.1 GiB for keys and values, and 0.0 GiB are left" in too_small["verdict"]


def test_on_a_cpu_the_host_holds_trainer_and_engine(tmp_path: Path, model: Path, planner: Planner) -> None:
    """634 million weights take 2.4 GiB in float32, in the trainer and in the engine."""
    path = config_file(tmp_path, model, engine={"slots": 2}, trainer={"device": "cpu"})
    host, small, unknown, on_gpu = planner.plans(
        (path, [], Machine(0, 0, 64 * GIB)), (path, [], Machine(0, 0, 12 * GIB)), (path, [], Machine(1, GIB)),
        (path, ["trainer.device=cuda"], Machine(1, 80 * GIB)),
    )  # fmt: skip
    rows = host["rows"]["Host memory: the trainer and the engine"]
    assert host["headings"] == ["GiB of the host"] and host["fits"]
    assert rows["trained weights, float32"] == rows["engines: weights"] == pytest.approx(2.36, abs=0.01)
    # 8 layers with 8 heads of 128 keys and as many values, for 2 sequences of 4096 tokens
    assert rows["engines: keys and values, at most"] == 0.5
    assert "Host memory: the trainer and the engine (" in small["verdict"] and not small["fits"]
    assert unknown["fits"]  # the host memory is unknown with --gpus
    assert "Not counted: engines on the CPU, with up to 2.9 GiB of host memory." in on_gpu["remarks"]


def test_without_a_gpu_a_plan_says_how_to_plan_for_another_machine(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    says = "areal-agents plan CONFIG profile=24gb --gpus 1 --gpu-memory 24"
    status, output = planner.command_here(config_file(tmp_path, model), "engine.slots=2")
    assert status == 0 and f"This machine has no GPU. For GPUs that are not here: {says}" in output
    status, output = planner.command_here(config_file(tmp_path, model), "trainer.device=cuda")
    assert status == 1 and "trainer.device: cuda needs a GPU, and this machine has none" in output
    assert says in output
    status, output = planner.command(config_file(tmp_path, model), gpus=1, gib=80)
    assert "This machine has no GPU" not in output


def test_the_memory_limit_of_a_container_counts_as_the_memory_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(gpus, "_CONTAINER_LIMIT", limit)
    monkeypatch.setattr(gpus, "_has_driver", lambda: False)
    whole = this_machine()
    assert (whole.gpus, whole.memory) == (0, 0) and whole.host > 0
    for text, host in (("max\n", whole.host), (f"{10 * whole.host}\n", whole.host), ("1048576\n", 2**20)):
        limit.write_text(text)
        assert this_machine().host == host


def test_changed_settings_are_validated_and_dependent_settings_are_updated(
    tmp_path: Path, model: Path
) -> None:
    config = load(tmp_path, model, loop="one_step_off", trainer={"lr": 1e-3})
    changed = with_changes(config, {"trainer.lora": {}})
    assert changed.trainer.publish.transport == "lora" and changed.trainer.lr == 1e-3
    assert changed.model_copy(update={"trainer": config.trainer}) == config
    with pytest.raises(ConfigError, match="ranks must be a multiple of nodes"):
        with_changes(config, {"trainer.ranks": 3, "trainer.nodes": 2})
    adapter = load(tmp_path, model, engine={"device": "cuda", "colocate": "split"})
    with pytest.raises(ConfigError, match=r"broadcast: engine\.colocate: split"):  # of different sections
        with_changes(adapter, {"trainer.publish": {"transport": "broadcast"}})


def test_more_nodes_are_suggested_when_nothing_else_helps(
    tmp_path: Path, model: Path, planner: Planner
) -> None:
    path = config_file(
        tmp_path, model, engine={"kind": "sglang", "urls": ["http://gpu:1"]},
        trainer={"optimizer": "muon", "offload": "optimizer"},  # neither adapters nor more offloading help
    )  # fmt: skip
    (found,) = planner.plans((path, [], Machine(1, 7 * GIB)))
    assert found["verdict"].endswith("It would fit with: trainer.nodes: 2, trainer.ranks: 2.")
