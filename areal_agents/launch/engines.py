"""Plans and starts the engines of a run, and checks running servers that it uses instead.

The plan is made before any process starts, so that a configuration that cannot work is refused at once.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from areal_agents.config import Config
from areal_agents.direct_http import direct_client
from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference.config import SERVERS, EmbeddedEngineConfig
from areal_agents.inference.engine import MemoryKind
from areal_agents.inference.engine_process import CommandProcess
from areal_agents.inference.sglang.server import (
    LORA_TARGETS,
    GpuPlacement,
    find_environment,
    nccl_environment,
    numerics,
    place,
    server_command,
    server_environment,
)
from areal_agents.inference.vllm import server as vllm_server
from areal_agents.inference.vllm.server import vllm_environment
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.nodes import nodes_of, ranks_beside_engines
from areal_agents.launch.ready import wait_until_any_ready, wait_until_ready
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.waiting import OnWait
from areal_agents.launch.weight_fetcher import fetching_weights
from areal_agents.secret_variables import bearer
from areal_agents.sockets import is_this_machine
from areal_agents.tls import TlsConfig

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines that a run starts.

    Attributes:
        placements: the GPUs of each engine; empty if the run uses running servers.
        software: the name of the engine's software, or the URLs of the running servers, for messages.
    """

    placements: tuple[GpuPlacement, ...]
    software: str

    def describe(self, folder: RunFolder) -> str:
        """Return one line that says which engines are started, on which devices, and where their logs are."""
        count = len(self.placements)
        if not count:
            return f"engines: {self.software}"
        first, last = (folder.log(engine_name(replica, count)) for replica in (0, count - 1))
        logs = str(first) if count == 1 else f"{first} to {last.name}"
        where = ", ".join(dict.fromkeys(_where(placement) for placement in self.placements))
        return f"engines: {count} × {self.software} on {where}; log: {logs}"


def plan_engines(config: Config) -> EnginePlan:
    """Plan how the engines of a run are started.

    Raises:
        ConfigError: engine.python has no SGLang or vLLM or one that is too old, there are too few GPUs, or
            `check_same_machine` refuses a running server.
    """
    engine = config.engine
    if engine.urls:
        if config.trainer.start:
            check_same_machine(config)
        return EnginePlan((), f"running servers at {', '.join(engine.urls)}")
    if engine.kind != "embedded":
        environment = (
            vllm_server.find_environment(engine.python)
            if engine.kind == "vllm"
            else find_environment(engine.python, numerics(engine))
        )
        trainer = config.trainer
        here = ranks_beside_engines(trainer, nodes_of(trainer, os.environ).count)
        trainer_gpus = 0 if trainer.device == "cpu" else here
        placements = place(engine, environment.gpus, trainer_gpus=trainer_gpus)
        if engine.deterministic and not placements[0].gpus:
            raise ConfigError("engine.deterministic needs SGLang on a GPU, and there is none; leave it out")
        return EnginePlan(placements, f"{SERVERS[engine.kind]} {environment.version}")
    if not engine.device.startswith("cuda"):
        return EnginePlan((GpuPlacement(),) * engine.replicas, "the embedded engine")
    first = int(engine.device.partition(":")[2] or 0)
    placements = tuple(GpuPlacement((first + replica,)) for replica in range(engine.replicas))
    return EnginePlan(placements, "the embedded engine")


def engine_name(replica: int, replicas: int) -> str:
    """Return the name of an engine's process, which is also the name of its log file."""
    return "engine" if replicas == 1 else f"engine-{replica}"


def serve_engine(config: Config, folder: RunFolder, *, replica: int, gpus: Sequence[int]) -> None:
    """Run one engine in this process until SIGTERM."""
    placement = GpuPlacement(tuple(gpus))
    endpoints = folder.read_endpoints()
    with fetching_weights(config, folder, endpoints, index=replica):
        if config.engine.kind != "embedded":
            _serve_real(config, folder, placement, replica)
            return
        from areal_agents.inference.embedded.server import serve

        options = _embedded(config, folder, placement, replica)
        serve(options, key=endpoints.engine_key, tls=_tls(config, folder))


def adapter_rank(config: Config) -> int:
    """Return the rank of the LoRA adapters that engines serve, or 0 if they serve whole weights."""
    lora = config.trainer.lora
    return lora.rank if lora is not None and config.trainer.publishes_adapters else 0


def ready_path(config: Config) -> str:
    """Return the path that an engine of a run answers with status 200 once it serves.

    SGLang's /health samples a token, so it does not answer while the server is paused. A running server that
    a dead trainer left paused answers /model_info, and resumes when the new trainer, which waits for it here,
    publishes a version. vLLM's /health computes nothing.
    """
    return "/model_info" if config.engine.urls and config.engine.kind != "vllm" else "/health"


def memory_to_release(config: Config) -> tuple[MemoryKind, ...]:
    """Return the kinds of memory that the engines release while a step is trained."""
    if config.engine.colocate != "sleep":
        return ()
    # SGLang keeps a copy of its weights in host memory; the embedded engine does not.
    return ("kv_cache", "weights") if config.engine.kind == "sglang" else ("kv_cache",)


def wait_for_engines(
    config: Config,
    urls: Sequence[str],
    *,
    check: Callable[[], object],
    wait: OnWait,
    warn: Callable[[str], None],
    key: str = "",
) -> None:
    """Return when the engines of a run serve: all engines that it starts, or at least one running server.

    The proxy takes care of a running server that does not answer yet: it brings the server to the current
    version before it sends a call to it.

    Args:
        urls: the URLs of the engines.
        check: called before each attempt; an exception from it ends the wait.
        wait: called during the wait.
        warn: called with a message about each running server that does not answer.
        key: the key of the engines; "" if they have none.

    Raises:
        ArealAgentsError: the engines do not serve in time, or `check_running` refuses one.
    """
    path, timeout_s = ready_path(config), config.engine.start_timeout_s
    if not config.engine.urls:
        for number, url in enumerate(urls, 1):
            what = "the inference engine" + (f" {number} of {len(urls)}" if len(urls) > 1 else "")
            say = partial(_say_wait, wait, what, timeout_s)
            wait_until_ready(url + path, check=check, timeout_s=timeout_s, waiting=say)
        return
    paths = [url + path for url in urls]
    say = partial(_say_wait, wait, "a running engine", timeout_s)
    answering = wait_until_any_ready(paths, check=check, timeout_s=timeout_s, key=key, waiting=say)
    ready = [url for url in urls if url + path in answering]
    check_running(config, ready, key=key)
    for url in urls:
        if url not in ready:
            warn(
                f"engine.urls: {url} does not answer; the run starts without it, and uses it once it answers"
            )


def _say_wait(wait: OnWait, what: str, limit_s: float, waited_s: float) -> None:
    wait(what, waited_s, limit_s)


def check_same_machine(config: Config) -> None:
    """Check, on the machine of the trainer's first rank, that running servers which are to open handles of
    the trainer's memory are on this machine.

    Raises:
        ConfigError: a server is on another machine.
    """
    for url in config.engine.urls if config.trainer.publish.transport == "ipc" else ():
        if not is_this_machine(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"trainer.publish.transport: ipc hands over memory of the trainer's machine, and {url} of "
                "engine.urls is on another one; use broadcast, or disk with a folder that both machines see. "
                "If the server runs on the trainer's machine, name it by an address of that machine, such as "
                "127.0.0.1"
            )


def check_running(config: Config, urls: Sequence[str] | None = None, *, key: str = "") -> None:
    """Check that running servers were started with the flags that this run needs.

    Args:
        config: the configuration of the run.
        urls: the URLs of the servers; default: all of engine.urls.
        key: the key of the servers; "" if they have none.

    Raises:
        ConfigError: a server was started without a flag; the message names it.
        EngineUnavailable: a server does not answer.
    """
    if config.engine.kind == "vllm":
        return  # the client checks how a vLLM was started when it asks for the model
    for url in config.engine.urls if urls is None else urls:
        try:
            with direct_client(timeout_s=INFO_TIMEOUT_S, headers=bearer(key)) as client:
                info = client.get(url + "/get_server_info").json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnavailable(
                f"engine.urls: {url} did not answer /get_server_info with its settings: {error}"
            ) from error
        for field, flag, why in _needs(config):
            # A server without the setting, such as the embedded engine, does not need the flag.
            if isinstance(info, dict) and info.get(field, True) in (False, None):
                raise ConfigError(f"engine.urls: {url} was started without {flag}, which {why} needs")
        if isinstance(info, dict) and (
            fault := _cannot_take_weights(config, info) or _other_type(config, info)
        ):
            raise ConfigError(f"engine.urls: {url} {fault}")


def _cannot_take_weights(config: Config, info: Mapping[str, Any]) -> str:
    """Say why a running server cannot take new weights by the run's transport; "" if nothing is known."""
    publish = config.trainer.publish
    if publish.transport == "delta" and info.get("stages_weights") is not True:
        return "takes no changes of weights, only the embedded engine does; use another publish.transport"
    if (quantization := info.get("quantization")) and not config.trainer.publishes_adapters:
        return (
            f"was started with --quantization {quantization}: it quantises weights as it starts, and cannot "
            "load new ones over them; start it without, or train an adapter (trainer.lora)"
        )
    ours = nccl_environment(config.engine)["NCCL_CUMEM_ENABLE"]
    if publish.transport == "broadcast" and info.get("enable_symm_mem") and ours != "1":
        return (
            "was started with --enable-symm-mem, which sets NCCL_CUMEM_ENABLE=1, and the trainer has "
            f"{ours}: NCCL cannot connect them; start it without, or set NCCL_CUMEM_ENABLE=1 for the run"
        )
    return ""


def _other_type(config: Config, info: Mapping[str, Any]) -> str:
    """Say that a running server computes in another type than the trainer chooses; "" if it is not known."""
    served, trainer = info.get("dtype"), config.trainer
    if (
        trainer.dtype != "auto"
        or trainer.device == "auto"
        or served not in ("float32", "bfloat16", "float16")
    ):
        return ""
    trained = "bfloat16" if trainer.device == "cuda" else "float32"
    if served == trained:
        return ""
    return (
        f"computes in {served}, and trainer.dtype: auto is {trained} on trainer.device: {trainer.device}, "
        "so their logprobs would differ; set trainer.dtype to the type in which the trainer shall compute"
    )


def check_nccl(config: Config, own: str | None) -> None:
    """Check that the trainer and the engines that it broadcasts weights to have the same NCCL.

    Args:
        own: the version of the trainer's NCCL; None if it has no GPU.

    Raises:
        ConfigError: they have not, and NCCL would refuse to connect them.
    """
    publish, engine = config.trainer.publish, config.engine
    if own is None or publish.transport != "broadcast" or publish.backend == "gloo":
        return
    if engine.kind == "embedded" or engine.urls:
        return
    find = vllm_server.find_environment if engine.kind == "vllm" else find_environment
    theirs = find(engine.python).nccl
    if theirs is not None and theirs != own:
        raise ConfigError(
            f"trainer.publish.transport: broadcast: the trainer has NCCL {own}, and {engine.python} has "
            f"{theirs}, and NCCL does not connect different versions; install the same nvidia-nccl in both, "
            "or use transport: disk, or ipc with engine.colocate"
        )


def _needs(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting of the server, flag that sets it, setting of the run that needs it)."""
    if config.engine.colocate == "sleep":
        yield "enable_memory_saver", "--enable-memory-saver", "engine.colocate: sleep"
        yield "enable_weights_cpu_backup", "--enable-weights-cpu-backup", "engine.colocate: sleep"
    if adapter_rank(config):
        yield "enable_lora", "--enable-lora", "trainer.publish.transport: lora"
    for setting in numerics(config.engine):
        yield setting.field, setting.flag, setting.key
    if config.engine.routed_experts:
        yield "enable_return_routed_experts", "--enable-return-routed-experts", "engine.routed_experts"
    if config.trainer.publish.pause == "in_place":
        why = "trainer.publish.pause: in_place"
        yield "disable_overlap_schedule", "--disable-overlap-schedule", why
        yield "disable_radix_cache", "--disable-radix-cache", why
    if _swaps_under_load(config):
        yield "disable_radix_cache", "--disable-radix-cache", "trainer.publish.pause: drain"


def _swaps_under_load(config: Config) -> bool:
    """Whether whole weights are swapped without a pause. SGLang cannot always flush a prefix cache then."""
    return config.trainer.publish.pause == "drain" and not config.trainer.publishes_adapters


def _serve_real(config: Config, folder: RunFolder, placement: GpuPlacement, replica: int) -> None:
    """Start the server, end it on SIGTERM, and exit when it exits.

    If the server exits after it has served, this process kills itself, so that the supervisor restarts both.
    """
    signal.signal(signal.SIGTERM, _exit)
    made = _vllm if config.engine.kind == "vllm" else _sglang
    server = made(config, folder, placement, replica)
    try:
        server.start()
        server.wait_ready()
        status = server.wait()
    except EngineUnavailable as error:
        logger.error("%s", error)
        raise SystemExit(EXIT_REFUSED) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.stop()
    logger.error("%s ended with status %d", SERVERS[config.engine.kind], status)
    os.kill(os.getpid(), signal.SIGKILL)


def _sglang(config: Config, folder: RunFolder, placement: GpuPlacement, replica: int) -> CommandProcess:
    lora = config.trainer.lora
    targets = lora.targets if lora is not None and not isinstance(lora.targets, str) else LORA_TARGETS
    host, port = _address(folder, replica)
    command = server_command(
        config.engine,
        config.model,
        placement,
        host=host,
        port=port,
        seed=config.seed + replica,
        tls=_tls(config, folder),
        lora_rank=adapter_rank(config),
        lora_targets=targets,
        routed_experts=config.engine.routed_experts,
        exact_in_place=config.trainer.publish.pause == "in_place",
        prefix_cache=not _swaps_under_load(config),
    )
    return CommandProcess(
        "SGLang",
        command,
        server_environment(config.engine, placement, host, folder.read_endpoints().engine_key),
        host=host,
        port=port,
        scheme="http" if _tls(config, folder) is None else "https",
        log_path=folder.log(engine_name(replica, config.engine.replicas)),
        start_timeout_s=config.engine.start_timeout_s,
    )


def _vllm(config: Config, folder: RunFolder, placement: GpuPlacement, replica: int) -> CommandProcess:
    host, port = _address(folder, replica)
    command = vllm_server.server_command(
        config.engine,
        config.model,
        placement,
        host=host,
        port=port,
        seed=config.seed + replica,
        tls=_tls(config, folder),
        lora_rank=adapter_rank(config),
    )
    return CommandProcess(
        "vLLM",
        command,
        vllm_environment(config.engine, placement, host, folder.read_endpoints().engine_key),
        host=host,
        port=port,
        scheme="http" if _tls(config, folder) is None else "https",
        log_path=folder.log(engine_name(replica, config.engine.replicas)),
        start_timeout_s=config.engine.start_timeout_s,
    )


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _embedded(
    config: Config, folder: RunFolder, placement: GpuPlacement, replica: int
) -> EmbeddedEngineConfig:
    engine = config.engine
    host, port = _address(folder, replica)
    return EmbeddedEngineConfig(
        incremental_streaming=True,
        model=config.model,
        host=host,
        port=port,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0")),
        slots=engine.slots,
        max_context=engine.max_context,
        dtype=("bfloat16" if placement.gpus else "float32") if engine.dtype == "auto" else engine.dtype,
        device=f"cuda:{placement.gpus[0]}" if placement.gpus else "cpu",
        seed=config.seed + replica,
    )


def _tls(config: Config, folder: RunFolder) -> TlsConfig | None:
    """Return the files to serve HTTPS with, as engines of a cluster may; None on one machine."""
    return None if folder.read_endpoints().place is None else config.cluster.tls


def _address(folder: RunFolder, replica: int) -> tuple[str, int]:
    url = urlsplit(folder.read_endpoints().engine_urls[replica])
    return str(url.hostname), int(url.port or 80)


def _where(placement: GpuPlacement) -> str:
    return "GPU " + "+".join(map(str, placement.gpus)) if placement.gpus else "the CPU"
