"""The engine process: builds its parts, listens, and shuts down cleanly.

areal-agents engine --model PATH --port N
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from areal_agents.errors import ConfigError, EngineError
from areal_agents.inference.config import DEFAULT_MAX_CONTEXT, EmbeddedEngineConfig
from areal_agents.inference.embedded.http.app import create_app
from areal_agents.inference.embedded.model.architecture import (
    Architecture,
    read_architecture,
)
from areal_agents.inference.embedded.model.model_set import BASE
from areal_agents.inference.embedded.model.runner import ModelRunner, warm_up
from areal_agents.inference.embedded.model.torch_runner import TorchRunner
from areal_agents.inference.embedded.model.weights import load_weights, random_weights
from areal_agents.inference.embedded.scheduling.scheduler import Scheduler
from areal_agents.inference.embedded.scheduling.service import EngineService
from areal_agents.inference.embedded.scheduling.text import Detokenizer
from areal_agents.inference.embedded.updates.joined_groups import WeightGroups
from areal_agents.sockets import allow_many_connections, listen
from areal_agents.tls import TlsConfig

logger = logging.getLogger(__name__)

STARTED_VERSION = "default"
SHUTDOWN_TIMEOUT_S = 5
KEEP_ALIVE_S = 75
# The engine's thread wants the interpreter back quickly after each kernel; 5 ms would be a whole step.
SWITCH_INTERVAL_S = 0.0005


def serve(config: EmbeddedEngineConfig, *, key: str = "", tls: TlsConfig | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: the options of the engine.
        key: the key that requests must have; "": everyone who reaches the engine may use it.
        tls: the files to serve HTTPS with; None: HTTP is served.

    Raises:
        ConfigError: the model cannot be loaded, or the port is taken.
        EngineError: the engine's thread fails.
    """
    started = time.perf_counter()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if config.exit_with_parent:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_many_connections()
    listener = _listen(config)
    service = build_service(config)
    server = _EngineServer(
        uvicorn.Config(
            create_app(
                service, host=config.host, incremental_streaming=config.incremental_streaming, key=key
            ),
            loop="uvloop",
            http="httptools",
            lifespan="on",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        ),
        service,
    )
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    logger.info("engine ready on %s://%s:%d after %.1f s", scheme, host, port, time.perf_counter() - started)
    # uvicorn raises a signal again when it has shut down for it; that must not end the process a second way.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.ask_to_exit)
    server.run(sockets=[listener])
    if service.failure is not None:
        raise EngineError(f"the engine has failed: {service.failure!r}")


def build_service(config: EmbeddedEngineConfig) -> EngineService:
    """Load the model and build the engine, compiled and ready to start."""
    folder = Path(config.model)
    if not folder.is_dir():
        raise ConfigError(f"engine.model: {config.model} is not a folder")
    threads = config.threads or len(os.sched_getaffinity(0))
    arch = read_architecture(folder)
    max_context = config.max_context or min(arch.max_positions, DEFAULT_MAX_CONTEXT)
    if max_context > arch.max_positions:
        raise ConfigError(
            f"engine.max_context: {max_context} exceeds the model's {arch.max_positions} positions"
        )
    weights = (
        random_weights(arch, config.seed) if config.load_format == "dummy" else load_weights(folder, arch)
    )
    runner = make_runner(config, arch, max_context=max_context, threads=threads)
    # The kernel has threads of its own; torch's would spin beside them between the few operations left to it.
    torch.set_num_threads(1 if runner.kind == "numba" else threads)
    weights = runner.place(weights)
    runner.load(weights)
    warm_up(runner)
    detokenizer = Detokenizer(folder)
    scheduler = Scheduler(
        runner,
        slots=config.slots,
        max_context=max_context,
        prefill_tokens=config.prefill_tokens,
        prefix_cache=config.prefix_cache,
        eos_ids=arch.eos_ids,
        vocab_size=arch.vocab_size,
        find_stop=detokenizer.find_stop,
        version=STARTED_VERSION,
    )
    scheduler.replace_models({BASE: weights})
    groups = WeightGroups(device=torch.device(config.device), timeout_s=config.broadcast_timeout_s)
    info: dict[str, Any] = {
        "engine": "areal-agents",
        "kernel": runner.kind,
        "device": config.device,
        "dtype": config.dtype,
        "threads": threads,
        "slots": config.slots,
        "cache_gib": round(_cache_bytes(config, arch, max_context) / 2**30, 3),
    }
    logger.info("%s with %d layers: %s", arch.model_type, arch.layers, info)
    return EngineService(
        scheduler,
        runner,
        arch,
        detokenizer,
        weights,
        groups,
        model_path=config.model,
        max_context=max_context,
        seed=config.seed,
        info=info,
    )


def _cache_bytes(config: EmbeddedEngineConfig, arch: Architecture, max_context: int) -> int:
    """Return the maximum memory for keys and values in bytes."""
    width = 4 if config.dtype == "float32" else 2
    return 2 * width * arch.layers * config.slots * max_context * arch.kv_heads * arch.head_dim


def make_runner(
    config: EmbeddedEngineConfig, arch: Architecture, *, max_context: int, threads: int
) -> ModelRunner:
    """Choose and log the runner: numba for float32 on a CPU if it is installed, otherwise torch."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"engine.device: {config.device} was requested, but torch sees no CUDA device")
    if _use_numba(config):
        try:
            from areal_agents.inference.embedded.model.numba_runner import NumbaRunner
        except RuntimeError as error:  # numba finds no folder for its compiled code
            raise ConfigError(
                f"engine.kernel: {error}; set NUMBA_CACHE_DIR to a writable folder, or use kernel=torch"
            ) from error
        return NumbaRunner(
            arch,
            slots=config.slots,
            max_context=max_context,
            max_rows=config.slots + config.prefill_tokens,
            threads=threads,
        )
    return TorchRunner(
        arch,
        slots=config.slots,
        max_context=max_context,
        device=torch.device(config.device),
        dtype=torch.float32 if config.dtype == "float32" else torch.bfloat16,
    )


def _use_numba(config: EmbeddedEngineConfig) -> bool:
    if config.kernel == "torch" or config.device != "cpu" or config.dtype != "float32":
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:
        if config.kernel == "numba":
            raise ConfigError(
                "engine.kernel: numba is not installed; install it or use kernel=torch"
            ) from error
        logger.warning(
            "numba is not installed: decoding with torch, which is several times slower for small models"
        )
        return False
    return True


def _listen(config: EmbeddedEngineConfig) -> socket.socket:
    if config.listen_fd is not None:
        return socket.socket(fileno=config.listen_fd)
    return listen(config.host, config.port, setting="engine.port")


def _end_with_parent() -> None:
    """End the process when standard input closes: it is a pipe that only the parent holds."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class _EngineServer(uvicorn.Server):
    """uvicorn, with running generations aborted at the first signal, so that their connections can end."""

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config)
        self._service = service

    def ask_to_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal handler for the moments before and after uvicorn has its own."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.abort_soon()
        super().handle_exit(sig, frame)
