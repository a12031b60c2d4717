"""Settings of inference: which engine serves the model, and how the embedded engine is set up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from areal_agents.core.settings import Settings

DEFAULT_MAX_CONTEXT = 4096  # of an embedded engine whose model takes more


class EmbeddedEngineConfig(Settings):
    """The options of one embedded engine process (`areal-agents engine`)."""

    model: Annotated[str, Field(min_length=1, description="Hugging Face folder of the model to serve.")]
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 30000
    threads: Annotated[int, Field(ge=0, description="CPU threads for the model; 0 takes all cores.")] = 0
    slots: Annotated[
        int, Field(ge=1, le=4096, description="Sequences whose keys and values the engine holds.")
    ] = 64
    max_context: Annotated[
        int,
        Field(
            ge=0, description="Longest prompt plus completion in tokens; 0 takes the model's, at most 4096."
        ),
    ] = 0
    prefill_tokens: Annotated[
        int, Field(ge=8, description="Prompt tokens computed per step beside the running decodes.")
    ] = 256
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="Compute type.")] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N.")] = "cpu"
    kernel: Annotated[
        Literal["auto", "numba", "torch"],
        Field(description="auto takes numba for float32 on a CPU and torch for everything else."),
    ] = "auto"
    incremental_streaming: Annotated[
        bool, Field(description="Streamed chunks contain only the new tokens instead of all tokens so far.")
    ] = False
    prefix_cache: Annotated[bool, Field(description="Reuse keys and values of shared prefixes.")] = True
    load_format: Annotated[
        Literal["auto", "dummy"],
        Field(description="auto reads safetensors; dummy initialises random weights from seed."),
    ] = "auto"
    seed: Annotated[
        int, Field(ge=0, description="Seed of requests without a seed, and of dummy weights.")
    ] = 0
    broadcast_timeout_s: Annotated[
        float, Field(gt=0, description="Longest wait for a trainer to join a group or to broadcast weights.")
    ] = 60.0
    listen_fd: Annotated[
        int | None, Field(ge=0, description="An inherited listening socket, instead of host and port.")
    ] = None
    exit_with_parent: Annotated[
        bool, Field(description="End when standard input closes, which it does when the parent dies.")
    ] = False

    @model_validator(mode="after")
    def _kernel_fits(self) -> EmbeddedEngineConfig:
        if self.kernel == "numba" and (self.device != "cpu" or self.dtype != "float32"):
            raise ValueError(
                "kernel=numba computes float32 on a CPU; use kernel=torch for other types and devices"
            )
        return self


SGLANG_SEQUENCES = 256
Colocate = Literal["none", "split", "sleep"]
MEMORY_FRACTION = {"none": 0.0, "split": 0.4, "sleep": 0.6}
SERVERS: Mapping[str, str] = {"sglang": "SGLang", "vllm": "vLLM"}  # kinds with a Python of their own
# The flag with the number of sequences, and an assumption: a server derives its limit from the memory that
# it finds.
_SEQUENCES = {"sglang": ("--max-running-requests", SGLANG_SEQUENCES), "vllm": ("--max-num-seqs", 256)}
STARTED_WITH = ("threads", "slots", "max_context", "dtype", "device")  # a running server has its own
EMBEDDED_ONLY = ("slots",)
OF_EVERY_SERVER = ("python", "arguments", "tensor_parallel", "memory_fraction")
OWN_ARGUMENTS = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--base-gpu-id",
    "--tp-size",
    "--tensor-parallel-size",
    "--tp",
)
# Flags that give a server other keys than the run's, and those with which SGLang checks no key.
_OF_KEYS = ("--api-key", "--admin-api-key", "--grpc-port", "--tokenizer-worker-num")
# vLLM's flags that this package sets, because it needs them.
VLLM_OWN_ARGUMENTS = (
    "--logprobs-mode",
    "--max-logprobs",
    "--worker-extension-cls",
    "--pipeline-parallel-size",
    "-pp",
    "-tp",
    "--data-parallel-size",
    "-dp",
    "--served-model-name",
)


class EngineConfig(Settings):
    """Which engines a run samples from: its own, embedded, SGLang or vLLM, or running servers by URL."""

    kind: Annotated[
        Literal["embedded", "sglang", "vllm"],
        Field(
            description="embedded: this package's own engine; sglang: SGLang, vllm: vLLM, each started or by "
            "URL."
        ),
    ] = "embedded"
    urls: Annotated[
        tuple[str, ...],
        Field(description="sglang, vllm: base URLs of running servers; empty: the run starts servers."),
    ] = ()
    router: Annotated[
        str,
        Field(
            description="sglang: base URL of a router in front of urls, which generation goes through; "
            "weights still go to each of urls."
        ),
    ] = ""
    python: Annotated[
        str, Field(description="sglang, vllm: the Python of the environment that has it, to start it with.")
    ] = ""
    arguments: Annotated[
        tuple[str, ...],
        Field(description="sglang, vllm: additional server arguments; they come last and override others."),
    ] = ()
    replicas: Annotated[int, Field(ge=1, le=256, description="Number of engines to start.")] = 1
    tensor_parallel: Annotated[int, Field(ge=1, description="sglang, vllm: GPUs that share one replica.")] = 1
    colocate: Annotated[
        Colocate,
        Field(
            description="Engine and trainer on the same GPUs: none, split (each has its part of the memory) "
            "or sleep (the engine gives its memory back while a step is trained)."
        ),
    ] = "none"
    memory_fraction: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="sglang, vllm: share of a GPU for weights and keys and values; 0 takes the server's "
            "choice, with colocate: split 0.4, with sleep 0.6.",
        ),
    ] = 0.0
    start_timeout_s: Annotated[
        float, Field(gt=0, description="Longest wait until a started engine serves.")
    ] = 600.0
    routed_experts: Annotated[
        bool,
        Field(
            description="sglang: record which experts of a mixture-of-experts model each token went "
            "through; the trainer then sends it through the same."
        ),
    ] = False
    deterministic: Annotated[
        bool,
        Field(
            description="sglang: results do not depend on the other requests of a batch "
            "(--enable-deterministic-inference); slower, needs a GPU."
        ),
    ] = False
    fp32_head: Annotated[
        bool,
        Field(
            description="sglang: logits are computed in float32, as in the trainer (--enable-fp32-lm-head)."
        ),
    ] = False
    threads: Annotated[
        int,
        Field(ge=0, description="CPU threads of the engines together; 0 shares the cores with the trainer."),
    ] = 0
    slots: Annotated[int, Field(ge=1, le=4096, description="Sequences that an embedded engine holds.")] = 64
    max_context: Annotated[
        int,
        Field(
            ge=0,
            description="Longest prompt plus completion in tokens; 0 takes the model's, "
            "in an embedded engine at most 4096.",
        ),
    ] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(
            description="Compute type. auto: float32 on a CPU; on a GPU the 16-bit type of the model's files "
            "in SGLang and vLLM (bfloat16 if they are float32), and bfloat16 in the embedded engine."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="auto, cpu, cuda or cuda:N, N the first replica's first GPU. auto: a CPU for "
            "the embedded engine; for SGLang and vLLM a GPU where there is one.",
        ),
    ] = "auto"

    @field_validator("urls")
    @classmethod
    def _urls_are_base_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not is_base_url(url):
                raise ValueError(f"expected http://host:port, got {url!r}")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("router")
    @classmethod
    def _router_is_base_url(cls, url: str) -> str:
        if url and not is_base_url(url):
            raise ValueError(f"expected http://host:port, got {url!r}")
        return url.rstrip("/")

    @field_validator("arguments", mode="before")
    @classmethod
    def _arguments_are_strings(cls, arguments: object) -> object:
        """Converts numbers, which YAML may yield for arguments, to strings."""
        if isinstance(arguments, list | tuple):
            return tuple(str(a) if isinstance(a, int | float) else a for a in arguments)
        return arguments

    @model_validator(mode="after")
    def _parts_fit(self) -> EngineConfig:
        faults = [*self._start_faults(), *self._argument_faults()]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def sequences(self) -> int:
        """The number of sequences that all engines together sample at the same time."""
        each = self.slots
        if self.kind != "embedded":
            flag, assumed = _SEQUENCES[self.kind]
            given = _value_of(self.arguments, flag)
            each = int(given) if given.isdecimal() and int(given) else assumed
        return each * (len(self.urls) or self.replicas)

    @property
    def static_memory(self) -> float:
        """The share of a GPU that a server is started with; 0 leaves it to the server."""
        return self.memory_fraction or MEMORY_FRACTION[self.colocate]

    @property
    def quantization(self) -> str:
        """How a started server quantises the weights, or "" if it does not."""
        return _value_of(self.arguments, "--quantization")

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The given settings that have no effect on these engines, for example on servers already running."""
        unread = STARTED_WITH if self.urls else EMBEDDED_ONLY if self.kind != "embedded" else ()
        return tuple(name for name in unread if name in self.model_fields_set)

    def _start_faults(self) -> Iterator[str]:
        if self.kind != "embedded" and not self.urls and not self.python:
            yield (
                f"kind: {self.kind} needs python: path/to/environment/bin/python to start it, "
                "or urls: [http://host:port, ...] of running servers"
            )
        if self.kind == "embedded" and self.urls:
            yield "urls are for kind: sglang or vllm; the embedded engine starts its own server"
        if self.router and not self.urls:
            yield "a router works in front of running servers: name them in urls"
        if self.urls:
            starts = {
                "python": bool(self.python),
                "arguments": bool(self.arguments),
                "replicas": self.replicas != 1,
                "tensor_parallel": self.tensor_parallel != 1,
                "memory_fraction": self.memory_fraction != 0,
                "colocate: split": self.colocate == "split",
            }
            for name in (name for name, given in starts.items() if given):
                yield f"{name} is for engines that the run starts; engines of urls are already running"

    def _vllm_faults(self) -> Iterator[str]:
        """Name each setting that vLLM is not used with, and what to use instead."""
        instead = {
            "router": "the proxy distributes calls itself: leave it out",
            "routed_experts": "use kind: sglang",
            "deterministic": "use kind: sglang",
            "fp32_head": "use kind: sglang",
        }
        for name, use in instead.items():
            if getattr(self, name):
                yield f"{name} is not supported with kind: vllm; {use}"
        if self.colocate == "sleep":
            yield "colocate: sleep is not supported with kind: vllm; use split, none, or kind: sglang"
        for argument in self.arguments:
            if argument.partition("=")[0] in VLLM_OWN_ARGUMENTS:
                yield f"arguments: {argument} is set by this package, or not supported with kind: vllm"

    def _argument_faults(self) -> Iterator[str]:
        if self.kind == "embedded":
            given = {
                "python": self.python,
                "arguments": self.arguments,
                "tensor_parallel": self.tensor_parallel > 1,
                "memory_fraction": self.memory_fraction,
                "routed_experts": self.routed_experts,
                "deterministic": self.deterministic,
                "fp32_head": self.fp32_head,
            }
            for name in (name for name, value in given.items() if value):
                yield f"{name} is for kind: sglang" + (" or vllm" if name in OF_EVERY_SERVER else "")
        if self.kind == "vllm":
            yield from self._vllm_faults()
        if self.deterministic and self.device == "cpu":
            yield "deterministic needs SGLang on a GPU, got device: cpu"
        for argument in self.arguments:
            if argument.partition("=")[0] in OWN_ARGUMENTS:
                yield f"arguments: {argument} is set from replicas, tensor_parallel, device and model"
            if argument.partition("=")[0] in _OF_KEYS:
                yield f"arguments: {argument} is not supported with the key that engines of a run have"


def _value_of(arguments: Sequence[str], flag: str) -> str:
    """Return the last value of a flag, given as `flag value` or `flag=value`; "" if there is none."""
    value = ""
    for argument, following in pairwise((*arguments, "")):
        name, is_joined, joined = argument.partition("=")
        if name == flag:
            value = joined if is_joined else following
    return value


def is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False
