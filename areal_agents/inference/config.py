"""What a user may set about inference: which engine serves, and how the embedded one is laid out."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class EmbeddedEngineConfig(BaseModel):
    """The options of one embedded engine process (`areal-agents engine`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1, description="Hugging Face folder of the model to serve.")]
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 30000
    threads: Annotated[int, Field(ge=0, description="CPU threads for the model; 0 takes all cores.")] = 0
    slots: Annotated[int, Field(ge=1, le=4096, description="Sequences whose keys and values are kept.")] = 64
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
        bool, Field(description="Streamed chunks hold the new tokens only, not all so far.")
    ] = False
    prefix_cache: Annotated[bool, Field(description="Reuse keys and values of shared prefixes.")] = True
    load_format: Annotated[
        Literal["auto", "dummy"],
        Field(description="auto reads safetensors; dummy draws random weights from seed."),
    ] = "auto"
    seed: Annotated[
        int, Field(ge=0, description="Seed of requests that bring none, and of dummy weights.")
    ] = 0
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


class EngineConfig(BaseModel):
    """Which engine a run samples from: one of its own, or running servers by URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[
        Literal["embedded", "sglang"],
        Field(description="embedded starts an engine; sglang uses running servers."),
    ] = "embedded"
    urls: Annotated[tuple[str, ...], Field(description="Base URLs of running SGLang servers.")] = ()
    threads: Annotated[
        int, Field(ge=0, description="CPU threads of the embedded engine; 0 shares the cores.")
    ] = 0
    slots: Annotated[int, Field(ge=1, le=4096, description="Sequences the embedded engine holds.")] = 64
    max_context: Annotated[
        int,
        Field(
            ge=0, description="Longest prompt plus completion in tokens; 0 takes the model's, at most 4096."
        ),
    ] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16"], Field(description="Compute type of the embedded engine.")
    ] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N.")] = "cpu"

    @field_validator("urls")
    @classmethod
    def _urls_are_base_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not _is_base_url(url):
                raise ValueError(f"expected http://host:port, got {url!r}")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _urls_fit_kind(self) -> EngineConfig:
        if self.kind == "sglang" and not self.urls:
            raise ValueError("kind: sglang needs urls: [http://host:port, ...]")
        if self.kind == "embedded" and self.urls:
            raise ValueError("urls are for kind: sglang; the embedded engine starts its own server")
        return self


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False
