"""Settings of weight publication. Invalid combinations raise an error with the reason."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from areal_agents.core.settings import Settings

Transport = Literal["disk", "tensor", "broadcast", "ipc", "delta", "lora", "object_storage"]
Pause = Literal["retract", "in_place", "abort", "drain"]
Verify = Literal["first", "every", "off"]
Backend = Literal["auto", "gloo", "nccl"]

# name:password@, also where the password has a slash and urlsplit does not find it; and a signed URL
_SECRET = re.compile(r"://[^@]*:[^@]*@|[?&][^=&]*(key|sig|signature|token|password|secret)=", re.IGNORECASE)

# These send the weights bucket by bucket; an engine that does not stage them overwrites the served ones.
_PIECEWISE = ("tensor", "broadcast", "ipc", "delta")


class PublishConfig(Settings):
    """How a new policy version reaches the engines."""

    transport: Transport = Field(
        default="disk",
        description="disk: engines read the folder of the version. tensor: weights are sent in "
        "HTTP requests. "
        "broadcast: weights are sent over gloo or NCCL. ipc: engines on the trainer's GPUs read its memory, "
        "on a CPU those on its machine. delta: only weights that changed are sent, in HTTP requests, to "
        "embedded engines. lora: engines read only the adapter's folder; the "
        "default with trainer.lora. object_storage: versions (with trainer.lora, adapters) are written to "
        "`location`, and each engine's process reads them there; the trainer reaches no engine.",
    )
    location: str = Field(
        default="",
        description="With object_storage: the URL of a folder for the versions, such as s3://bucket/prefix "
        "or file:///mnt/shared, in which each run has a folder of its own. Keys come from the environment.",
    )
    whole_every: int = Field(
        default=10,
        ge=1,
        description="With object_storage: every n-th version is written whole, and of the others what "
        "changed since the version before. 1: all are whole. Adapters always are.",
    )
    pause: Pause = Field(
        default="retract",
        description="What running generations do at a swap. retract: they continue on recomputed keys and "
        "values. "
        "in_place: they continue on the old ones. abort: they end, and the proxy continues them. drain: "
        "they finish before "
        "the swap.",
    )
    folder: str = Field(
        default="",
        description="Where version folders are written, such as /dev/shm/areal; empty: in the run's folder. "
        "With object_storage, also where an engine's process keeps those that it has read.",
    )
    folder_every: int = Field(
        default=1,
        ge=1,
        description="With the transports that send the weights first (all but disk, lora and "
        "object_storage): a folder is written of every n-th version, in the background. An engine that "
        "starts late waits for it or for the next version.",
    )
    delta_check_every: int = Field(
        default=20,
        ge=1,
        description="With delta: at every n-th version all engines' checksums are compared with the whole.",
    )
    bucket_mb: int = Field(
        default=0,
        ge=0,
        description="MB (10^6 bytes) of weights that are sent at a time. 0: on a GPU an "
        "eighth of its free memory, from 64 to 1000; on a CPU 256.",
    )
    verify: Verify = Field(
        default="first",
        description="When an engine's checksum of its weights is compared with that of what was published. "
        "first: after the first version that the engine takes since the trainer started, or since it missed "
        "a version. On demand: areal-agents verify.",
    )
    backend: Backend = Field(
        default="auto",
        description="Backend of broadcast. auto: nccl if the trainer is on GPUs, else gloo. "
        "nccl needs engines on GPUs.",
    )
    address: str = Field(
        default="",
        description="Address at which engines reach the trainer for broadcast; empty: that of "
        "its route to them.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait for an engine to load a folder (with drain: once running "
        "generations finish), "
        "to receive one bucket, or to join the process group. With object_storage: for the storage to take a "
        "version, and then for the engines to have it.",
    )

    engine_wait_s: float = Field(
        default=180.0,
        ge=0,
        description="Longest time that a version waits for an engine when none answers or all were lost.",
    )

    @model_validator(mode="after")
    def _check(self) -> PublishConfig:
        if self.transport in _PIECEWISE and self.pause == "drain":
            raise ValueError(
                f"publish: pause: drain cannot be used with transport: {self.transport}, because an engine "
                "that is not paused would sample between two buckets; use transport: disk, or another pause"
            )
        if self.transport == "lora" and self.pause == "in_place":
            raise ValueError(
                "publish: pause: in_place would continue on another adapter's keys and values, which no "
                "engine supports; use retract, abort or drain with transport: lora"
            )
        if self.transport == "object_storage":
            parts = urlsplit(self.location)
            if not parts.scheme or "://" not in self.location:
                raise ValueError(
                    "publish: transport: object_storage needs a location, the URL of a folder such as "
                    f"s3://bucket/prefix or file:///mnt/shared, got {self.location!r}"
                )
            if _SECRET.search(self.location):
                raise ValueError(
                    "publish: location: a URL with a password or a key would be in logs and in the "
                    "store; leave it out, and give keys in the environment of the processes"
                )
            if parts.scheme == "memory" or (parts.scheme in ("file", "local") and parts.netloc):
                raise ValueError(
                    f"publish: location: {self.location} is another folder for each process; a folder that "
                    "all of them see is file:///path, with three slashes"
                )
        elif self.location:
            raise ValueError(
                f"publish: location applies only to transport: object_storage, got {self.transport}"
            )
        if self.transport != "broadcast" and (self.backend != "auto" or self.address):
            raise ValueError(
                f"publish: backend and address apply only to transport: broadcast, got {self.transport}"
            )
        return self


def versions_folder(folder: str, run_dir: Path) -> Path:
    """The folder of a run's versions: within the run's folder, or in `folder` under a name unique to the
    run."""
    if not folder:
        return run_dir / "weights"
    run = run_dir.resolve()
    return Path(folder) / f"{run.name}-{sha256(str(run).encode()).hexdigest()[:8]}"
