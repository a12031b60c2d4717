"""The plan of the engines that a run starts, and the checks of running servers, before the run starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_train import EXAMPLE

from areal_agents.config import Config, load_config
from areal_agents.errors import ArealAgentsError, ConfigError, EngineUnavailable
from areal_agents.launch.engines import (
    adapter_rank,
    check_running,
    engine_name,
    memory_to_release,
    plan_engines,
    wait_for_engines,
)
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.train import EngineBusy, chosen_endpoints, threads_for


def config(*overrides: str) -> Config:
    return load_config(EXAMPLE, list(overrides))


@contextmanager
def server_that_says(info: Any) -> Iterator[str]:
    """Run a server that reports these settings; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(info).encode())

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_embedded_replicas_are_planned_and_described(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    one, two = plan_engines(config()), plan_engines(config("engine.replicas=2"))
    assert [p.gpus for p in one.placements] == [()]
    assert [p.gpus for p in plan_engines(config("engine.device=cuda:1", "engine.replicas=2")).placements] == [
        (1,),
        (2,),
    ]
    assert one.describe(folder).endswith(f"the embedded engine on the CPU; log: {folder.log('engine')}")
    assert two.describe(folder) == (
        f"engines: 2 × the embedded engine on the CPU; log: {folder.log('engine-0')} to engine-1.log"
    )
    assert [engine_name(i, 2) for i in range(2)] == ["engine-0", "engine-1"]


def test_running_servers_are_used_as_they_are(tmp_path: Path) -> None:
    settings = ("engine.kind=sglang", "engine.urls=[http://gpu:1,http://gpu:2]")
    plan = plan_engines(config(*settings))
    assert plan.placements == ()
    assert plan.describe(RunFolder(tmp_path)) == "engines: running servers at http://gpu:1, http://gpu:2"
    with chosen_endpoints(config(*settings)) as endpoints:
        assert endpoints.engine_urls == ("http://gpu:1", "http://gpu:2")


def test_every_engine_and_the_proxy_get_a_port_of_their_own() -> None:
    with chosen_endpoints(config("engine.replicas=8")) as endpoints:
        pass
    ports = {*endpoints.engine_urls, f"http://127.0.0.1:{endpoints.proxy_port}"}
    assert len(ports) == 9


def test_engines_share_their_threads() -> None:
    assert threads_for("engine", engines=2, given=6)["OMP_NUM_THREADS"] == "3"
    assert threads_for("engine", engines=4, given=2)["NUMBA_NUM_THREADS"] == "1"
    half = int(threads_for("engine")["OMP_NUM_THREADS"])
    assert int(threads_for("engine", engines=2)["OMP_NUM_THREADS"]) == max(1, half // 2)


def test_a_missing_sglang_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine.python: .*/no/python cannot be run"):
        plan_engines(config("engine.kind=sglang", f"engine.python={tmp_path}/no/python"))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ([], lambda c: (adapter_rank(c), memory_to_release(c)) == (0, ())),
        (["trainer.lora.rank=8"], lambda c: adapter_rank(c) == 8),
        (["trainer.lora.rank=8", "trainer.publish.transport=disk"], lambda c: adapter_rank(c) == 0),
        (["engine.colocate=sleep"], lambda c: memory_to_release(c) == ("kv_cache",)),
        (
            ["engine.colocate=sleep", "engine.kind=sglang", "engine.python=p"],
            lambda c: memory_to_release(c) == ("kv_cache", "weights"),
        ),
    ],
)
def test_the_adapter_rank_and_the_memory_to_release_follow_from_the_settings(
    settings: list[str], what: Callable[[Config], bool]
) -> None:
    assert what(config(*settings))


@pytest.mark.parametrize(
    ("setting", "field", "flag"),
    [
        ("trainer.publish.pause=in_place", "disable_overlap_schedule", "--disable-overlap-schedule"),
        ("trainer.publish.pause=in_place", "disable_radix_cache", "--disable-radix-cache"),
        ("trainer.publish.pause=drain", "disable_radix_cache", "--disable-radix-cache"),
        ("engine.colocate=sleep", "enable_memory_saver", "--enable-memory-saver"),
        ("engine.colocate=sleep", "enable_weights_cpu_backup", "--enable-weights-cpu-backup"),
        ("trainer.lora.rank=4", "enable_lora", "--enable-lora"),
        ("engine.fp32_head=true", "enable_fp32_lm_head", "--enable-fp32-lm-head"),
        ("engine.deterministic=true", "enable_deterministic_inference", "--enable-deterministic-inference"),
    ],
)
def test_a_running_server_without_a_flag_that_the_run_needs_is_refused(
    setting: str, field: str, flag: str
) -> None:
    with server_that_says({field: False}) as url:
        attached = ("engine.kind=sglang", f"engine.urls=[{url}]")
        check_running(config(*attached))
        with pytest.raises(ConfigError, match=f"{url} was started without {flag}, which .* needs"):
            check_running(config(*attached, setting))
    with server_that_says({field: True}) as url:
        check_running(config("engine.kind=sglang", f"engine.urls=[{url}]", setting))


def test_a_server_that_does_not_report_its_settings_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match="did not answer /get_server_info with its settings"):
        check_running(config("engine.kind=sglang", "engine.urls=[http://127.0.0.1:9]"))


def waited_for(*urls: str, timeout_s: float = 20.0) -> list[str]:
    """Return the warnings at the start of a run that uses running servers."""
    warned: list[str] = []
    attached = config(
        "engine.kind=sglang",
        f"engine.urls=[{','.join(urls)}]",
        f"engine.start_timeout_s={timeout_s}",
        "trainer.lora.rank=4",
    )
    wait_for_engines(attached, urls, check=lambda: None, wait=lambda *_: None, warn=warned.append)
    return warned


def test_a_start_waits_for_one_running_server_and_names_the_missing_ones() -> None:
    dead = "http://127.0.0.1:9"
    with server_that_says({"enable_lora": True}) as url, server_that_says({"enable_lora": True}) as other:
        assert waited_for(url, other) == []
        (warning,) = waited_for(dead, url)
        assert warning.startswith(f"engine.urls: {dead} does not answer; the run starts without it")
    with (
        server_that_says({"enable_lora": False}) as url,
        pytest.raises(ConfigError, match=f"{url} was started without --enable-lora"),
    ):
        waited_for(dead, url)


def test_a_start_without_any_running_server_fails_after_its_timeout() -> None:
    with pytest.raises(
        ArealAgentsError, match=r"none of .*:9/model_info, .*:10/model_info answered within 1 s"
    ):
        waited_for("http://127.0.0.1:9", "http://127.0.0.1:10", timeout_s=1)


def test_idle_time_is_averaged_over_all_engines_and_survives_the_restart_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("areal_agents.launch.train.time.monotonic", lambda: now)
    first: dict[str, float] = {"busy_s": 40.0}
    second: dict[str, float] = {"busy_s": 7.0}
    with server_that_says(first) as a, server_that_says(second) as b:
        busy = EngineBusy((a, b), timeout_s=60)  # enough on a busy machine
        busy.follow(0, 9)  # nothing counts before the first step
        assert busy.idle_share() is None
        busy.follow(1, 9)
        now, first["busy_s"], second["busy_s"] = 110.0, 46.0, 2.0  # 6 s more, and 2 s since a restart
        busy.follow(2, 9)
        assert busy.idle_share() == pytest.approx(1 - (6 + 2) / 10 / 2)
    now = 120.0
    busy.follow(3, 9)  # no engine answers
    assert busy.idle_share() == pytest.approx(1 - (6 + 2) / 20 / 2)


def test_idle_time_is_unknown_if_an_engine_does_not_report_its_busy_time() -> None:
    with server_that_says({}) as url:
        busy = EngineBusy((url,))
        busy.follow(1, 9)
        busy.follow(2, 9)
        assert busy.idle_share() is None


def test_a_running_server_with_another_dtype_is_refused_unless_the_dtype_is_given() -> None:
    def check(dtype: str, *overrides: str) -> None:
        with server_that_says({"dtype": dtype}) as url:
            check_running(config("engine.kind=sglang", f"engine.urls=[{url}]", *overrides))

    with pytest.raises(ConfigError, match="computes in bfloat16, and trainer.dtype: auto is float32"):
        check("bfloat16", "trainer.device=cpu")
    with pytest.raises(ConfigError, match="computes in float16, and trainer.dtype: auto is bfloat16"):
        check("float16", "trainer.device=cuda")
    check("float32", "trainer.device=cpu")
    check("bfloat16", "trainer.device=cuda")
    check("auto", "trainer.device=cpu")
    check("bfloat16", "trainer.device=cpu", "trainer.dtype=float32")  # the dtype is given
