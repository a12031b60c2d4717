"""Starts real SGLang servers: chooses their environment, arguments and GPUs.

SGLang has an environment of its own, which nothing here imports. On a machine without a GPU the same
servers start on the CPU, which is slow and meant for tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.direct_http import bypassing_proxies
from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.secret_variables import ENGINE_KEY
from areal_agents.tls import TlsConfig

SCRIPTS = Path(__file__).parent / "environment"
OLDEST, TRIED = (0, 5, 21), "0.5.21"
PROBE_TIMEOUT_S = 120.0  # the first import of torch from a cold disk is slow
CPU_TOKENS = 32768  # size of the key-value cache; by default SGLang would use most of the machine's memory
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_SLOTS, LORA_LOADED = 4, 8  # adapters on the device, including the base model; and in total
HOW_TO = (
    f"make an environment for it (python3 -m venv sglang; sglang/bin/pip install sglang=={TRIED}; "
    "on a machine without a GPU: make sglang) and give engine.python: sglang/bin/python, or give engine.urls"
)


@dataclass(frozen=True, slots=True)
class SGLangEnvironment:
    """An environment with SGLang.

    Attributes:
        python: the path of its Python.
        version: the version of SGLang.
        gpus: the number of visible GPUs.
        nccl: the version of NCCL that its torch uses; None with a build for the CPU.
    """

    python: str
    version: str
    gpus: int
    nccl: str | None = None


@dataclass(frozen=True, slots=True)
class ServerSetting:
    """A setting of SGLang's server: the flag that sets it, and the key of ours that switches it on."""

    key: str
    flag: str

    @property
    def field(self) -> str:
        """The name in SGLang's ServerArgs and in /get_server_info."""
        return self.flag.removeprefix("--").replace("-", "_")


DETERMINISTIC = ServerSetting("engine.deterministic", "--enable-deterministic-inference")
FP32_HEAD = ServerSetting("engine.fp32_head", "--enable-fp32-lm-head")


def numerics(config: EngineConfig) -> tuple[ServerSetting, ...]:
    """Return the settings of SGLang's numerics that `config` asks for."""
    wanted = ((config.deterministic, DETERMINISTIC), (config.fp32_head, FP32_HEAD))
    return tuple(setting for is_wanted, setting in wanted if is_wanted)


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The indices of the GPUs of one replica; if empty, it computes on the CPU."""

    gpus: tuple[int, ...] = ()


def find_environment(python: str, wanted: Iterable[ServerSetting] = ()) -> SGLangEnvironment:
    """Find out which SGLang the environment of `python` has.

    Args:
        wanted: settings that its server must know.

    Raises:
        ConfigError: `python` cannot be run, or its environment has no SGLang or one that is too old.
    """
    wanted = tuple(wanted)
    command = [python, str(SCRIPTS / "probe.py"), *(setting.field for setting in wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(f"engine.python: {python} cannot be run ({error.strerror}); {HOW_TO}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"engine.python: {python} did not answer within {PROBE_TIMEOUT_S:g} s") from None
    try:
        found = json.loads(done.stdout)
        version, gpus, fault = found["sglang"], int(found["gpus"]), found["error"]
    except (ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout).strip()[-300:]
        raise ConfigError(f"engine.python: {python} is not a working Python: {said}; {HOW_TO}") from None
    if fault:
        raise ConfigError(f"engine.python: {python}: {fault}; {HOW_TO}")
    if release_of(version) < OLDEST:
        raise ConfigError(f"engine.python: {python} has SGLang {version}, older than {TRIED}; {HOW_TO}")
    for setting in wanted:
        if setting.field not in found.get("settings", ()):
            raise ConfigError(
                f"{setting.key}: SGLang {version} of {python} has no {setting.flag}; set it to false, or use "
                f"SGLang {TRIED}"
            )
    return SGLangEnvironment(python, version, gpus, found.get("nccl"))


def place(config: EngineConfig, gpus: int, *, trainer_gpus: int) -> tuple[GpuPlacement, ...]:
    """Assign the GPUs of a machine to the replicas; the trainer uses the first ones.

    Raises ConfigError if there are too few.
    """
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        return (GpuPlacement(),) * config.replicas
    width = config.tensor_parallel
    if config.device.startswith("cuda:"):
        first = int(config.device.removeprefix("cuda:"))
    else:
        first = 0 if config.colocate != "none" else trainer_gpus
    needed = first + config.replicas * width
    if needed > gpus:
        share = "" if config.colocate != "none" else f", besides the trainer's {trainer_gpus}"
        raise ConfigError(
            f"engine: replicas {config.replicas} × tensor_parallel {width}, from GPU {first} on, need "
            f"{needed} GPUs{share}, and there are {gpus}; use fewer, device: cuda:N, or colocate: split or "
            "sleep to share the trainer's"
        )
    return tuple(
        GpuPlacement(tuple(range(first + i * width, first + (i + 1) * width))) for i in range(config.replicas)
    )


def server_command(
    config: EngineConfig,
    model: str | Path,
    placement: GpuPlacement,
    *,
    port: int,
    host: str = "127.0.0.1",
    seed: int = 0,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = LORA_TARGETS,
    routed_experts: bool = False,
    exact_in_place: bool = False,
    prefix_cache: bool = True,
    cumulative: bool = False,
    tls: TlsConfig | None = None,
) -> list[str]:
    """Return the command that starts one server with the Python of `config`.

    Args:
        lora_rank: largest rank of the adapters that it may load; 0 disables adapters.
        lora_targets: the layers with adapters.
        routed_experts: whether it returns the experts that each token was routed to.
        exact_in_place: whether weights may be swapped while requests are paused in place. It disables
            SGLang's overlap schedule, which would give one token per request that the old weights sampled the
            new version, and its prefix cache, which cannot be flushed then and would keep keys and values of
            the old weights. Serving is slower without them.
        prefix_cache: whether requests reuse the keys and values of a common prefix. Without it, weights may
            be swapped under load without a pause (see SGLangControl.update_weights_from_disk).
        cumulative: whether each streamed chunk repeats the earlier ones, as is SGLang's default; the client
            reads both forms.
        tls: the files to serve HTTPS with; None: HTTP is served.
    """
    command = [config.python, str(SCRIPTS / "serve.py"), "--model-path", str(model)]
    command += ["--host", host, "--port", str(port), "--random-seed", str(seed)]
    command += ["--dtype", serving_dtype(config, Path(model), placement)]
    command += ["--tp-size", str(max(1, len(placement.gpus)))]
    if not cumulative:
        command += ["--incremental-streaming-output"]
    if config.max_context:
        command += ["--context-length", str(config.max_context)]
    if lora_rank:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank)]
        command += ["--max-loras-per-batch", str(LORA_SLOTS), "--max-loaded-loras", str(LORA_LOADED)]
        command += ["--lora-target-modules", *lora_targets]
    command += [setting.flag for setting in numerics(config)]
    if routed_experts:
        command += ["--enable-return-routed-experts"]
    if exact_in_place:
        command += ["--disable-overlap-schedule"]
    if exact_in_place or not prefix_cache:
        command += ["--disable-radix-cache"]
    command += _device_arguments(config, placement, lora=bool(lora_rank))
    if tls is not None:
        command += ["--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key]
        command += ["--ssl-ca-certs", tls.authority]  # for the requests that it sends itself
    return [*command, *config.arguments]


def serving_dtype(config: EngineConfig, model: Path, placement: GpuPlacement) -> str:
    """Return the compute type of a server; `auto` if config.json cannot be read.

    SGLang's own `auto` would compute with a float32 model in float16.
    """
    if config.dtype != "auto":
        return config.dtype
    if not placement.gpus:
        return "float32"
    try:
        tree = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):  # SGLang reports what is wrong with the model
        return "auto"
    saved = str(tree.get("dtype") or tree.get("torch_dtype") or "").removeprefix("torch.")
    return saved if saved in ("bfloat16", "float16") else "bfloat16"


def server_environment(
    config: EngineConfig, placement: GpuPlacement, host: str = "127.0.0.1", key: str = ""
) -> dict[str, str]:
    """Return the environment variables of a server process on `host`.

    They are those of this process, plus its GPUs, the compilation cache, its own programs on PATH, NCCL's
    settings, the key that its requests must have, and NO_PROXY for its own address: SGLang sends itself a
    warm-up request over HTTP, and exits if an HTTP proxy intercepts it.
    """
    dropped = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    # SGLang compiles some kernels when it needs them, with the ninja of its environment.
    programs = Path(shutil.which(config.python) or config.python).absolute().parent
    environment["PATH"] = os.pathsep.join([str(programs), environment.get("PATH", os.defpath)])
    if (programs.parent / "pyvenv.cfg").exists():
        environment["VIRTUAL_ENV"] = str(programs.parent)
    environment |= {**nccl_environment(config), ENGINE_KEY: key}
    if placement.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(placement.gpus, environment))
    return bypassing_proxies(environment, "http://127.0.0.1", "http://localhost", hosts=(host,))


def nccl_environment(config: EngineConfig) -> dict[str, str]:
    """Return NCCL's settings for SGLang servers, and for a trainer that forms a process group with them.

    A group whose processes differ in them can fail or hang. SGLang sets both to 0 in its own processes if
    they are not set, and to 1 with --enable-symm-mem.
    """
    if "--enable-symm-mem" in config.arguments:
        return {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}
    nvls = "1" if "--enable-nccl-nvls" in config.arguments else os.environ.get("NCCL_NVLS_ENABLE", "0")
    return {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0"), "NCCL_NVLS_ENABLE": nvls}


def _device_arguments(config: EngineConfig, placement: GpuPlacement, *, lora: bool) -> list[str]:
    if not placement.gpus:
        arguments = [
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
        ]
        arguments += ["--max-total-tokens", str(CPU_TOKENS), "--sleep-on-idle", "--skip-server-warmup"]
        return arguments + (["--lora-backend", "torch_native"] if lora else [])
    arguments = []
    if config.static_memory:
        arguments += ["--mem-fraction-static", f"{config.static_memory:g}"]
    # restores the weights after a sleep, also if the next publication does not send all of them
    if config.colocate == "sleep":
        arguments += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return arguments


def _visible(gpus: Sequence[int], environment: Mapping[str, str]) -> list[str]:
    """Return the CUDA names of `gpus`, which are indices among the GPUs visible to this process."""
    given = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    return [names[gpu] if names else str(gpu) for gpu in gpus]


def release_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.5.21.post1 → (0, 5, 21)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
