"""How vLLM is started: from which environment and with which flags; and which settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sglang_server import script

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.inference import EngineConfig
from areal_agents.inference.sglang.server import GpuPlacement
from areal_agents.inference.vllm.server import find_environment, server_command, vllm_environment
from areal_agents.launch.engines import plan_engines

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"
ONE_GPU = GpuPlacement((0,))
ANSWER = """echo '{"vllm": "%s", "gpus": %d, "nccl": null, "error": null}'"""


def engine(**options: Any) -> EngineConfig:
    return EngineConfig(**{"kind": "vllm", "python": "vllm/bin/python", **options})


def flags(config: EngineConfig, placement: GpuPlacement = ONE_GPU, **options: Any) -> str:
    command = server_command(config, "/models/m", placement, port=30000, **options)
    assert command[0] == "vllm/bin/python" and command[1].endswith("vllm/environment/serve.py")
    return " ".join(command[2:])


def test_the_version_and_the_gpus_of_an_environment_are_found(tmp_path: Path) -> None:
    found = find_environment(script(tmp_path / "python", ANSWER % ("0.33.1", 2)))
    assert (found.version, found.gpus) == ("0.33.1", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ANSWER % ("0.31.0", 0), "has vLLM 0.31.0, older than 0.32.0; make an environment"),
        ("""echo '{"vllm": null, "gpus": 0, "error": "vllm is not installed there"}'""", "make vllm"),
        ("echo boom >&2; exit 1", "is not a working Python: boom"),
    ],
)
def test_an_environment_that_cannot_serve_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_environment(script(tmp_path / "python", text))


def test_a_server_gets_the_flags_of_its_config() -> None:
    plain = flags(engine(dtype="bfloat16"), seed=7)
    assert plain.startswith("--end-with-stdin --model /models/m --host 127.0.0.1 --port 30000 --seed 7")
    assert "--dtype bfloat16" in plain and "--tensor-parallel-size 1" in plain
    for absent in ("lora", "gpu-memory", "max-model-len", "eager", "kv-cache"):
        assert absent not in plain
    assert "--tensor-parallel-size 2" in flags(engine(tensor_parallel=2), GpuPlacement((2, 3)))
    assert "--max-model-len 4096" in flags(engine(max_context=4096))
    assert "--gpu-memory-utilization 0.4" in flags(engine(colocate="split"))
    assert "--enable-lora --max-lora-rank 32 " in flags(engine(), lora_rank=24)
    assert flags(engine(arguments=["--max-num-seqs", 8])).endswith("--max-num-seqs 8")
    on_cpu = flags(engine(), GpuPlacement())
    assert "--dtype float32" in on_cpu and "--enforce-eager" in on_cpu and "--kv-cache-memory-bytes" in on_cpu
    assert vllm_environment(engine(), GpuPlacement())["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert vllm_environment(engine(), GpuPlacement((0,)))["CUDA_VISIBLE_DEVICES"].split(",") != [""]


def test_the_number_of_sequences_is_that_of_the_argument() -> None:
    assert engine(arguments=["--max-num-seqs", "64"], replicas=2).sequences == 128
    assert engine().sequences == 256
    assert engine(slots=9).without_effect == ("slots",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": ""}, "kind: vllm needs python"),
        ({"routed_experts": True}, "routed_experts is not supported with kind: vllm; use kind: sglang"),
        ({"deterministic": True}, "deterministic is not supported with kind: vllm; use kind: sglang"),
        ({"fp32_head": True}, "fp32_head is not supported with kind: vllm; use kind: sglang"),
        ({"colocate": "sleep"}, "colocate: sleep is not supported with kind: vllm; use split"),
        ({"python": "", "urls": ["http://a:1"], "router": "http://r:1"}, "router is not supported"),
        ({"arguments": ["--logprobs-mode=raw_logprobs"]}, "--logprobs-mode=raw_logprobs is set by this"),
        ({"arguments": ["--tensor-parallel-size", "2"]}, "is set from replicas"),
    ],
)
def test_settings_that_are_not_supported_with_vllm_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.publish.transport=ipc"], "transport: ipc is not supported .*use disk, broadcast"),
        (["trainer.publish.transport=delta"], "transport: delta is not supported"),
        (["trainer.publish.transport=tensor"], "transport: tensor is not supported"),
        (["trainer.publish.pause=in_place"], "pause: in_place is not supported .*use retract"),
        (
            ["trainer.publish.transport=broadcast", "engine.colocate=split", "trainer.device=cuda"],
            "NCCL refuses; use transport: disk",
        ),
        (
            ["trainer.publish.verify=every", "engine.arguments=[--quantization,fp8]"],
            "use verify: off",
        ),
    ],
)
def test_publish_settings_that_are_not_supported_with_vllm_are_refused(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EXAMPLE, ["engine.kind=vllm", "engine.python=p", *settings])


def test_a_plan_names_vllm_and_its_devices(tmp_path: Path) -> None:
    python = script(tmp_path / "python", ANSWER % ("0.32.0", 0))
    config = load_config(EXAMPLE, ["engine.kind=vllm", f"engine.python={python}", "engine.replicas=2"])
    plan = plan_engines(config)
    assert plan.software == "vLLM 0.32.0" and plan.placements == (GpuPlacement(),) * 2
