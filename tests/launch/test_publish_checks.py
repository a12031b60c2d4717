"""Whether the engines can receive weights by the transport of the run is checked before the run begins."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from test_engine_plan import config, server_that_says

from areal_agents.errors import ConfigError
from areal_agents.launch.engines import check_nccl, check_running, check_same_machine, plan_engines

TRANSPORT = "trainer.publish.transport="
SGLANG = "engine.kind=sglang"
PYTHON = ["engine.python=python3"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([SGLANG, TRANSPORT + "delta"], "delta needs the embedded engine, because SGLang 0.5.21"),
        (
            [SGLANG, TRANSPORT + "broadcast", "engine.colocate=sleep"],
            "one GPU, which NCCL refuses; use transport: ipc",
        ),
        ([SGLANG, TRANSPORT + "ipc"], "set engine.colocate"),
        (
            [SGLANG, TRANSPORT + "ipc", "engine.colocate=sleep", "engine.replicas=2"],
            "the engines use GPUs up to 1, and the trainer has 1 on this machine",
        ),
        (
            [SGLANG, TRANSPORT + "ipc", "engine.device=cpu", "trainer.device=cuda"],
            "cannot read a GPU's memory",
        ),
        ([SGLANG, "engine.arguments=[--quantization,fp8]"], "--quantization fp8: .* cannot load new ones"),
        ([SGLANG, "engine.arguments=[--quantization=fp8]", TRANSPORT + "broadcast"], "--quantization fp8"),
        (
            [SGLANG, "engine.arguments=[--quantization,fp8]", "trainer.lora.rank=4"],
            "cannot be compared with the model's; use verify: off",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*settings, *(PYTHON if SGLANG in settings else []))


@pytest.mark.parametrize(
    "settings",
    [
        [TRANSPORT + "delta"],
        [TRANSPORT + "ipc"],
        [SGLANG, TRANSPORT + "ipc", "engine.colocate=split"],
        [SGLANG, TRANSPORT + "ipc", "engine.colocate=split", "engine.replicas=2", "trainer.ranks=2"],
        [SGLANG, TRANSPORT + "ipc", "engine.device=cpu", "trainer.device=cpu"],
        [SGLANG, TRANSPORT + "broadcast"],
        [
            SGLANG,
            "engine.arguments=[--quantization,fp8]",
            "trainer.lora.rank=4",
            "trainer.publish.verify=off",
        ],
    ],
)
def test_settings_that_can_work_are_accepted(settings: list[str]) -> None:
    config(*settings, *(PYTHON if SGLANG in settings else []))


@pytest.mark.parametrize(
    ("info", "setting", "says"),
    [
        ({"quantization": "fp8"}, TRANSPORT + "broadcast", "was started with --quantization fp8"),
        ({"quantization": None}, TRANSPORT + "delta", "takes no changes of weights"),
        ({"enable_symm_mem": True}, TRANSPORT + "broadcast", "NCCL_CUMEM_ENABLE=1, and the trainer has 0"),
    ],
)
def test_a_running_server_that_cannot_take_the_weights_is_refused(
    info: dict[str, object], setting: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    with server_that_says(info) as url:
        with pytest.raises(ConfigError, match=f"{url} .*{says}"):
            check_running(config(SGLANG, f"engine.urls=[{url}]", setting))
        check_running(config(SGLANG, f"engine.urls=[{url}]", "trainer.lora.rank=4"))


IPC = [SGLANG, TRANSPORT + "ipc", "engine.device=cpu", "trainer.device=cpu"]


def test_a_server_on_another_machine_cannot_open_the_trainers_memory() -> None:
    for host in ("127.0.0.1", "localhost"):
        plan_engines(config(*IPC, f"engine.urls=['http://{host}:30000']"))
    urls = "engine.urls=['http://127.0.0.1:30000','http://192.0.2.1:30000']"
    says = r"ipc hands over memory .* http://192\.0\.2\.1:30000 of engine\.urls .*; use broadcast"
    with pytest.raises(ConfigError, match=says):
        plan_engines(config(*IPC, urls))
    started_elsewhere = config(*IPC, urls, "trainer.start=false")
    plan_engines(started_elsewhere)
    with pytest.raises(ConfigError, match=says):
        check_same_machine(started_elsewhere)  # as the trainer does on its machine
    plan_engines(config(SGLANG, urls, TRANSPORT + "broadcast"))


def test_different_nccl_versions_of_trainer_and_engines_are_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        """echo '{"sglang": "0.5.21", "gpus": 8, "nccl": "2.27.5", "settings": [], "error": null}'\n"""
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run = config(SGLANG, f"engine.python={python}", TRANSPORT + "broadcast")
    check_nccl(run, "2.27.5")
    check_nccl(run, None)
    with pytest.raises(ConfigError, match=r"NCCL 2\.28\.9, and .*python has 2\.27\.5"):
        check_nccl(run, "2.28.9")
    check_nccl(config(SGLANG, f"engine.python={python}"), "2.28.9")  # the transport disk does not use NCCL
